//! When each step of a start was done: recorded for every start, kept for the last
//! [`KEPT`] of them below `/run/thaw/traces`, printed by `thaw trace`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
pub use thaw_vmm_control::Phase;

use crate::paths::RUNTIME_DIRECTORY;

/// How many traces are kept.
pub const KEPT: usize = 64;

/// The directory of the traces.
pub fn directory() -> PathBuf {
    Path::new(RUNTIME_DIRECTORY).join("traces")
}

/// CLOCK_MONOTONIC in nanoseconds.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// One start, from the execution of the shim on. All times are CLOCK_MONOTONIC in nanoseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartTrace {
    /// containerd's namespace.
    pub namespace: String,
    /// Id of the container.
    pub id: String,
    /// Shape of its VM, as [`thaw_vmm_control::Shape`] prints it.
    pub shape: String,
    /// Wall time of the start in nanoseconds since 1970.
    pub wall_time_ns: u64,
    /// When the shim was executed.
    pub origin_ns: u64,
    /// When each step of the shim was done, in order of time.
    pub phases: Vec<Phase>,
    /// When each step of the VMM was done; empty until the VMM was asked.
    pub vmm: Vec<Phase>,
    /// Requests that the file server had answered when the VMM was asked.
    pub file_requests: u64,
    /// KVM's counters at that time.
    pub kvm: Vec<(String, u64)>,
}

/// How long the parts of a start took, in nanoseconds; `None` for what was not reached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// From the execution of the shim until the restored guest runs.
    pub restore_ns: Option<u64>,
    /// Until the guest has become itself.
    pub configure_ns: Option<u64>,
    /// Until the container is created.
    pub create_ns: Option<u64>,
    /// From the request to start it until its program runs.
    pub start_ns: Option<u64>,
}

impl Summary {
    /// The parts, by name.
    pub fn phases(&self) -> [(&'static str, Option<u64>); 4] {
        [
            ("restore", self.restore_ns),
            ("configure", self.configure_ns),
            ("create", self.create_ns),
            ("start", self.start_ns),
        ]
    }
}

impl StartTrace {
    /// How long its parts took.
    pub fn summary(&self) -> Summary {
        let at = |name: &str| {
            let mut phases = self.phases.iter();
            let phase = phases.find(|phase| phase.name == name)?;
            Some(phase.monotonic_ns)
        };
        let between = |from: Option<u64>, to: Option<u64>| Some(to?.saturating_sub(from?));
        let (runs, configured, created) =
            (at(step::VCPUS_RUN), at(step::CONFIGURED), at(step::CREATED));
        Summary {
            restore_ns: between(Some(self.origin_ns), runs),
            configure_ns: between(runs, configured),
            create_ns: between(configured, created),
            start_ns: between(at(step::START_RECEIVED), at(step::STARTED)),
        }
    }
}

/// Names of steps that are looked for, as [`Recorder::mark`] gets them.
pub mod step {
    /// The restored guest runs.
    pub const VCPUS_RUN: &str = "vCPUs run";
    /// The guest has become itself.
    pub const CONFIGURED: &str = "guest configured";
    /// The container is created, up to the execution of its program.
    pub const CREATED: &str = "container created";
    /// containerd has asked for the start of the program.
    pub const START_RECEIVED: &str = "Start received";
    /// The program runs.
    pub const STARTED: &str = "container started";
}

/// Collects one [`StartTrace`].
#[derive(Debug)]
pub struct Recorder(Mutex<StartTrace>);

impl Recorder {
    /// A recorder of a start that began at `origin_ns`.
    pub fn new(namespace: &str, id: &str, origin_ns: u64) -> Self {
        let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self(Mutex::new(StartTrace {
            namespace: namespace.to_owned(),
            id: id.to_owned(),
            wall_time_ns: wall.map_or(0, |wall| wall.as_nanos() as u64),
            origin_ns,
            ..StartTrace::default()
        }))
    }

    /// Step `name` is done now.
    pub fn mark(&self, name: &str) {
        let phase = Phase {
            name: name.to_owned(),
            monotonic_ns: monotonic_ns(),
        };
        self.change(|trace| trace.phases.push(phase));
    }

    /// How long the parts of the start took so far.
    pub fn summary(&self) -> Summary {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .summary()
    }

    /// The last step that was done; empty before the first.
    pub fn last_step(&self) -> String {
        let trace = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        trace
            .phases
            .last()
            .map(|phase| phase.name.clone())
            .unwrap_or_default()
    }

    /// Change the trace.
    pub fn change(&self, change: impl FnOnce(&mut StartTrace)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Write the trace into `directory`, and remove the oldest traces there.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        let (name, text) = {
            let trace = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let name = format!("{}-{}.json", trace.namespace, trace.id);
            (name, serde_json::to_vec(&*trace).map_err(io::Error::other)?)
        };
        fs::create_dir_all(directory)?;
        // The process id keeps two writers apart; a reader skips what does not end in .json.
        let unfinished = directory.join(format!(".{name}.{}", std::process::id()));
        let written = fs::write(&unfinished, text)
            .and_then(|()| fs::rename(&unfinished, directory.join(name)));
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        written?;
        prune(directory, KEPT)
    }
}

/// The traces in `directory`, oldest first. Files that are no traces are left out.
pub fn read_all(directory: &Path) -> io::Result<Vec<StartTrace>> {
    let mut traces: Vec<StartTrace> = files(directory)?
        .into_iter()
        .filter_map(|(_, path)| serde_json::from_slice(&fs::read(path).ok()?).ok())
        .collect();
    traces.sort_by_key(|trace| trace.origin_ns);
    Ok(traces)
}

/// The trace files in `directory`, oldest first.
fn files(directory: &Path) -> io::Result<Vec<(std::time::SystemTime, PathBuf)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with('.') || !name.ends_with(".json") {
            continue;
        }
        // It may have been removed since it was listed.
        if let Ok(modified) = entry.metadata().and_then(|metadata| metadata.modified()) {
            files.push((modified, entry.path()));
        }
    }
    files.sort();
    Ok(files)
}

fn prune(directory: &Path, kept: usize) -> io::Result<()> {
    let files = files(directory)?;
    for (_, path) in &files[..files.len().saturating_sub(kept)] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_where_nothing_can_be_written_nothing_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let unfinished = format!(".default-web.json.{}", std::process::id());
        std::os::unix::fs::symlink("/dev/full", directory.path().join(unfinished)).unwrap();
        let recorder = Recorder::new("default", "web", 0);
        recorder.write(directory.path()).unwrap_err();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn test_trace_is_read_as_it_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let recorder = Recorder::new("default", "web", 5);
        recorder.mark("spec read");
        recorder.mark("restored");
        recorder.change(|trace| trace.shape = "2x2048M".into());
        recorder.write(directory.path()).unwrap();
        let traces = read_all(directory.path()).unwrap();
        assert_eq!(traces.len(), 1);
        assert_eq!(traces[0].shape, "2x2048M");
        let [first, second] = &traces[0].phases[..] else {
            panic!("{traces:?}")
        };
        assert_eq!(
            (first.name.as_str(), second.name.as_str()),
            ("spec read", "restored")
        );
        assert!(first.monotonic_ns <= second.monotonic_ns);
    }

    #[test]
    fn test_summary_has_what_was_reached() {
        let recorder = Recorder::new("default", "web", 0);
        assert_eq!(recorder.summary(), Summary::default());
        assert_eq!(recorder.last_step(), "");
        for name in [
            step::VCPUS_RUN,
            step::CONFIGURED,
            step::CREATED,
            step::START_RECEIVED,
        ] {
            recorder.mark(name);
        }
        let reached = recorder.summary();
        let of_phases = reached.phases().map(|(_, ns)| ns.is_some());
        assert_eq!(of_phases, [true, true, true, false]);
        recorder.mark(step::STARTED);
        assert!(recorder.summary().start_ns.is_some());
        assert_eq!(recorder.last_step(), step::STARTED);
    }

    #[test]
    fn test_only_the_newest_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..5 {
            let path = directory.path().join(format!("{number}.json"));
            fs::write(&path, "{}").unwrap();
            let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1000 - number);
            fs::File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_modified(time)
                .unwrap();
        }
        fs::write(directory.path().join("other"), "").unwrap();
        prune(directory.path(), 2).unwrap();
        let mut left: Vec<_> = fs::read_dir(directory.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["0.json", "1.json", "other"]);
    }
}
