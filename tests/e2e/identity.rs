//! Clones of one template are not alike, and their time is the host's.

use std::io::{BufRead, BufReader};
use std::time::{SystemTime, UNIX_EPOCH};

use thaw_tests::{Run, Testbed, Version, on_containerd, on_each_containerd};

/// What a clone says of itself, and how far its clock was from the host's when it said so.
#[derive(Debug)]
struct Clone {
    random: String,
    uuid: String,
    boot: String,
    uptime: f64,
    clock_off_by: f64,
}

/// The clock is the first thing that is looked at, and printed at once.
const INTERVIEW: &str = "adjtimex > /tmp/clock; cat /tmp/clock | awk '/time.tv_sec/ { s = $2 } /time.tv_usec/ { u = $2 } \
     END { printf \"%d.%06d\\n\", s, u }'; cut -d' ' -f1 /proc/uptime; head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '; \
     cat /proc/sys/kernel/random/uuid /proc/sys/kernel/random/boot_id";

fn host_time() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

/// Starts a container and reads what it says, each line as it comes.
fn interview(run: &Run<'_>) -> Clone {
    let mut child = run.spawn();
    let stdout = child.stdout.take().expect("it is piped");
    let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
    let clock = lines.next();
    let now = host_time();
    let mut rest: Vec<String> = lines.collect();
    let output = child
        .wait_with_output()
        .expect("ctr is a child of this process");
    assert!(output.status.success(), "{output:?}");
    let clock: f64 = clock
        .and_then(|line| line.trim().parse().ok())
        .expect("the first line is the time");
    assert_eq!(rest.len(), 4, "{rest:?}");
    let uptime = rest
        .remove(0)
        .trim()
        .parse()
        .expect("the second line is the uptime");
    let [random, uuid, boot] = [rest.remove(0), rest.remove(0), rest.remove(0)];
    Clone {
        random,
        uuid,
        boot,
        uptime,
        clock_off_by: (clock - now).abs(),
    }
}

on_each_containerd! {
    /// Two that start together differ in random bytes, UUID and boot id; the clocks of both are
    /// within a second of the host's, though the template is older.
    fn two_clones(bed: &Testbed) {
        let runs = [bed.run().shell(INTERVIEW), bed.run().shell(INTERVIEW)];
        let [first, second] = std::thread::scope(|scope| {
            let [first, second] = runs.each_ref().map(|run| scope.spawn(|| interview(run)));
            [first, second].map(|clone| clone.join().expect("the interview ends"))
        });
        assert_ne!(first.random, second.random);
        assert_ne!(first.uuid, second.uuid);
        assert_ne!(first.boot, second.boot);
        for clone in [&first, &second] {
            assert!(clone.clock_off_by < 1.0, "{clone:?}");
            assert_eq!(clone.random.len(), 32);
        }
        let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("procfs is there");
        assert_ne!(first.boot, host.trim());
    }
}

/// The monotonic clock goes on from the template's: it does not jump by the template's age.
#[test]
fn monotonic_clock_continues() {
    on_containerd(Version::V2_1, "monotonic", |bed: &Testbed| {
        let first = interview(&bed.run().shell(INTERVIEW));
        // Not to wait for something, but for the template to be older.
        std::thread::sleep(std::time::Duration::from_secs(5));
        let second = interview(&bed.run().shell(INTERVIEW));
        let between = (second.uptime - first.uptime).abs();
        assert!(
            between < 2.0,
            "uptimes {} and {}",
            first.uptime,
            second.uptime
        );
    });
}
