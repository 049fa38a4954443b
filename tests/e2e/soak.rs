//! Containers come and go for a long time: `make soak`.

use std::time::{Duration, Instant};

use thaw_tests::{Testbed, Version, on_containerd};

/// Starts and ends containers, four at once, each with an exec and some output, and looks for leftovers
/// after each round. $THAW_SOAK_MINUTES says for how long.
#[test]
#[ignore = "takes an hour: make soak"]
fn soak() {
    let minutes = std::env::var("THAW_SOAK_MINUTES")
        .ok()
        .and_then(|minutes| minutes.parse().ok())
        .unwrap_or(60);
    let end = Instant::now() + Duration::from_secs(60 * minutes);
    on_containerd(Version::V2_1, "soak", |bed: &Testbed| {
        let mut rounds = 0;
        while Instant::now() < end {
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        let container = bed.sleeper();
                        let exec = container.exec(["seq", "1", "10000"]).succeeded();
                        assert_eq!(exec.stdout().lines().count(), 10_000);
                        container.remove();
                        bed.run()
                            .shell("dd if=/dev/zero of=/tmp/x bs=1M count=20 && exit 7")
                            .output()
                            .ended_with(7);
                    });
                }
            });
            rounds += 1;
            bed.assert_clean(&format!("after round {rounds}"));
        }
        println!("{} containers in {minutes} minutes", rounds * 8);
    });
}
