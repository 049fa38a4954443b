//! A sandbox in which nothing happens costs its host next to nothing.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use thaw_tests::{on_each_containerd, thaw};

/// For how long nothing is to happen.
const QUIET: Duration = Duration::from_secs(10);

/// How long a shim may take to come to rest.
const SETTLING: Duration = Duration::from_secs(120);

/// Most private memory of a shim, in KiB.
const MEMORY: u64 = 2048;

/// How often the threads of a process have been given the CPU up to now, by thread.
fn switches(pid: i32) -> BTreeMap<String, u64> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it lives");
    let threads = threads.flatten().filter_map(|thread| {
        // One that has just ended has none.
        let status = fs::read_to_string(thread.path().join("status")).ok()?;
        let counts = status
            .lines()
            .filter(|line| line.contains("voluntary_ctxt_switches:"));
        let count = counts
            .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
            .sum();
        Some((thread.file_name().to_string_lossy().into_owned(), count))
    });
    threads.collect()
}

on_each_containerd! {
    /// The shim of an idle container does not wake up, and has little memory of its own.
    fn shim(bed: &Testbed) {
        // Two: what only one maps of the program's file counts as its own.
        let (container, _other) = (bed.sleeper(), bed.sleeper());
        container.exec(["true"]).succeeded();
        let pid = thaw::processes(&container.id).shim;
        let begun = Instant::now();
        // What was begun before comes to its end first.
        loop {
            let before = switches(pid);
            std::thread::sleep(QUIET);
            let after = switches(pid);
            if before == after {
                break;
            }
            assert!(begun.elapsed() < SETTLING, "it keeps waking up: {before:?}, then {after:?}");
        }
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("it lives");
        let private = rollup.lines().filter(|line| line.starts_with("Private_"));
        let private: u64 = private.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum();
        assert!(private < MEMORY, "{private} KiB:\n{rollup}");
        container.remove();
    }
}
