//! A guest's memory: it grows when a container wants more, goes back to the host when nobody wants it, and
//! has an end that is told (field cases 26 d and 56).

use std::fs;
use std::time::{Duration, Instant};

use thaw_tests::{Container, Testbed, Version, on_containerd, thaw};

/// How long memory may take to be the host's again, on a host that has a lot to do besides.
const PATIENCE: Duration = Duration::from_secs(120);

/// What may be left of it: pages in blocks of 512 KiB that are in use otherwise, page tables, caches.
const SLACK: u64 = 32;

/// MiB of its own that a sandbox' VMM has, with its guest's memory.
fn own_memory(container: &Container<'_>) -> u64 {
    let pid = thaw::processes(&container.id).vmm;
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("it lives");
    let line = rollup
        .lines()
        .find_map(|line| line.strip_prefix("Anonymous:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.expect("the kernel tells it") / 1024
}

/// Waits until the sandbox has no more than `most` MiB. How long that took.
#[track_caller]
fn wait_for_at_most(container: &Container<'_>, most: u64) -> Duration {
    let begun = Instant::now();
    loop {
        let now = own_memory(container);
        if now <= most {
            return begun.elapsed();
        }
        assert!(begun.elapsed() < PATIENCE, "{now} MiB instead of {most}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// A container with a file system in memory at `/t`, in a guest that has 128 MiB at first and may have
/// `most`.
fn sleeper<'a>(bed: &'a Testbed, most: u32) -> Container<'a> {
    bed.run()
        .options([
            "--annotation",
            "io.thaw.default_memory_mib=128",
            "--annotation",
            &format!("io.thaw.max_memory_mib={most}"),
            "--mount",
            "type=tmpfs,src=tmpfs,dst=/t,options=size=16g",
        ])
        .command(["sleep", "3600"])
        .detach()
}

/// Takes `mib` MiB in the container, and sees that they are there.
#[track_caller]
fn take(container: &Container<'_>, mib: u64) {
    let line = format!("dd if=/dev/zero of=/t/x bs=1M count={mib} 2>/dev/null && stat -c %s /t/x");
    let size = container.exec_shell(&line).succeeded().stdout();
    assert_eq!(size.trim().parse(), Ok(mib << 20));
}

/// A container without a limit gets more than its guest had, what it frees is the host's again, and when
/// there is no more a program is killed, and nothing else.
#[test]
fn growth_and_its_end() {
    on_containerd(Version::V2_1, "growth", |bed| {
        let _shapes = thaw::OtherShapes::allow();
        let container = sleeper(bed, 384);
        container.exec(["true"]).succeeded();
        let before = own_memory(&container);
        take(&container, 200);
        assert!(own_memory(&container) >= 200, "what it has is nowhere");
        container.exec(["rm", "/t/x"]).succeeded();
        let waited = wait_for_at_most(&container, before + SLACK);
        println!("given back after {waited:?}");
        let killed = container
            .exec_shell("tail /dev/zero; echo status $?")
            .succeeded();
        assert_eq!(killed.stdout(), "status 137\n");
        assert_eq!(
            container.exec(["echo", "alive"]).succeeded().stdout(),
            "alive\n"
        );
        assert_eq!(container.status().as_deref(), Some("RUNNING"));
        wait_for_at_most(&container, before + SLACK);
        container.remove();
    });
}

/// Ten times 1 GiB, of a guest of the usual class.
#[test]
#[ignore = "takes minutes: make test-long"]
fn ten_times_a_gibibyte() {
    on_containerd(Version::V2_1, "gibibyte", |bed| {
        let container = bed
            .run()
            .options(["--mount", "type=tmpfs,src=tmpfs,dst=/t,options=size=16g"])
            .command(["sleep", "3600"])
            .detach();
        container.exec(["true"]).succeeded();
        let before = own_memory(&container);
        for round in 1..=10 {
            take(&container, 1024);
            container.exec(["rm", "/t/x"]).succeeded();
            let waited = wait_for_at_most(&container, before + SLACK);
            println!("round {round}: given back after {waited:?}");
        }
        container.remove();
    });
}

/// What the host has, less what it and the guest's kernel need, is a container's without a limit.
#[test]
#[ignore = "takes minutes: make test-long"]
fn all_of_the_host() {
    on_containerd(Version::V2_1, "all-of-the-host", |bed| {
        let available = || {
            let text = fs::read_to_string("/proc/meminfo").expect("it is there");
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix("MemAvailable:"));
            let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
            kib.expect("the kernel tells it") / 1024
        };
        let container = bed
            .run()
            .options(["--mount", "type=tmpfs,src=tmpfs,dst=/t,options=size=64g"])
            .command(["sleep", "3600"])
            .detach();
        take(&container, available() - 512);
        container.exec(["rm", "/t/x"]).succeeded();
        container.remove();
    });
}
