//! Nothing is left, whatever is killed and whenever.
//!
//! That nothing is left is shown after every test (see `thaw_tests::on_containerd`); here it has to
//! be true although a process of the sandbox was killed.

use std::fs::{self, File};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use thaw_tests::{Testbed, Version, on_containerd, on_each_containerd, thaw};

use super::volumes::mount;

/// How many files a [`Source`] has.
const FILES: usize = 1000;

/// A directory of the user's that is to be mounted, with one of its files open.
struct Source {
    directory: TempDir,
    _open: File,
}

impl Source {
    fn new(bed: &Testbed) -> Self {
        let directory = bed.directory();
        for number in 0..FILES {
            fs::write(
                directory.path().join(number.to_string()),
                format!("{number}"),
            )
            .expect("it can be written");
        }
        let open = File::open(directory.path().join("7")).expect("it is there");
        Self {
            directory,
            _open: open,
        }
    }

    fn options(&self) -> [String; 2] {
        mount(self.directory.path(), "/source", "rw")
    }

    #[track_caller]
    fn assert_whole(&self) {
        let entries = fs::read_dir(self.directory.path()).expect("it is there");
        assert_eq!(entries.count(), FILES);
        for number in 0..FILES {
            let content = fs::read_to_string(self.directory.path().join(number.to_string()));
            assert_eq!(content.ok(), Some(format!("{number}")));
        }
    }
}

fn kill_process(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL)
        .unwrap_or_else(|error| panic!("killing {pid}: {error}"));
}

/// Kills a process of a running container's sandbox: the container has then ended, and can be
/// removed as any other.
fn ends_with(bed: &Testbed, process: impl FnOnce(thaw::Processes) -> i32) {
    let container = bed.sleeper();
    kill_process(process(thaw::processes(&container.id)));
    // Where the shim is gone, containerd removes the task itself.
    if container.status().is_some() {
        assert_eq!(container.ended(), 137);
    }
    container.remove();
}

on_each_containerd! {
    /// The shim.
    fn shim_killed(bed: &Testbed) {
        ends_with(bed, |sandbox| sandbox.shim);
    }

    /// The VMM.
    fn vmm_killed(bed: &Testbed) {
        ends_with(bed, |sandbox| sandbox.vmm);
    }

    /// The process whose id the container has on the host.
    fn anchor_killed(bed: &Testbed) {
        ends_with(bed, |sandbox| sandbox.anchor);
    }
}

/// Processes that speak of `id` on their command lines, and those that its sandbox has noted.
fn processes_of(id: &str) -> Vec<i32> {
    let mut found = thaw::noted_processes(id);
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return found;
    };
    for entry in entries.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let program = line.split(' ').next().unwrap_or_default();
        if program.contains("thaw") && line.contains(id) && !found.contains(&pid) {
            found.push(pid);
        }
    }
    found
}

/// A process is killed at some moment of a start, `times` times: each time another one, later.
fn killed_while_starting(bed: &Testbed, times: u32) {
    let whole = bed.run().command(["true"]).output().succeeded().took;
    let source = Source::new(bed);
    for turn in 0..times {
        let run = bed.run().options(source.options()).command(["sleep", "5"]);
        let ctr = run.spawn();
        let moment = whole * (turn + 1) / times;
        // The moment is arbitrary: nothing is waited for.
        std::thread::sleep(moment);
        let processes = processes_of(run.id());
        if let Some(pid) = processes.get(turn as usize % processes.len().max(1)) {
            // It may have ended by itself.
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        let alarm = thaw_tests::Alarm::set(&ctr, Duration::from_secs(60));
        let output = ctr
            .wait_with_output()
            .expect("ctr is a child of this process");
        assert!(
            !alarm.stop(),
            "ctr hangs after {processes:?} at {moment:?}: {output:?}"
        );
        bed.remove_containers();
        bed.assert_clean(&format!(
            "one of {processes:?} was killed {moment:?} after the start"
        ));
    }
    source.assert_whole();
}

/// A start that fails leaves what it was to mount as it was, and nothing mounted.
#[test]
fn failed_starts_leave_their_volumes() {
    on_containerd(Version::V2_1, "failed_starts_leave_their_volumes", |bed| {
        let source = Source::new(bed);
        for _ in 0..12 {
            let run = bed.run().options(source.options()).command(["/missing"]);
            let output = run.output();
            assert!(output.stderr().contains("/missing"), "{output}");
            bed.remove_containers();
            bed.assert_clean("its program is missing");
        }
        source.assert_whole();
    });
}

/// At any moment of a start.
#[test]
fn killed_at_any_moment() {
    on_containerd(Version::V2_1, "any-moment", |bed| {
        killed_while_starting(bed, 8)
    });
}

/// The same, more often.
#[test]
#[ignore = "takes several minutes"]
fn killed_at_any_moment_often() {
    for version in [Version::V1_6, Version::V2_1] {
        on_containerd(version, "any-moment-often", |bed| {
            killed_while_starting(bed, 40)
        });
    }
}
