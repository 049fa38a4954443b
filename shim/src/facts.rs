//! What exists on the host because of a sandbox, written down before it is made, so that any later
//! process can remove it: `/run/thaw/<namespace>/<sandbox>/facts.json`.
//!
//! The file is replaced as a whole (`rename(2)`), so it is always one complete state. What ends by
//! itself with the shim is not listed: mounts live in the shim's mount namespace, and VMM and anchor
//! end when their sockets to the shim close. Their ids are noted so that `delete` need not wait for
//! that.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use thaw_vmm_control::Shape;

use crate::hooks::Subject;
use crate::paths::RUNTIME_DIRECTORY;
use crate::process_identity::{ProcessIdentity, boot_id};
use crate::spec::{Hook, Siblings};

/// Counts up when the meaning of a field changes.
const FORMAT: u32 = 1;

/// Everything of one sandbox that outlives a killed shim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// Format of the writer; counts up when the meaning of a field changes.
    pub format: u32,
    /// containerd's namespace.
    pub namespace: String,
    /// Name of the sandbox.
    pub sandbox: String,
    /// Bundle of the container that the sandbox was started for.
    #[serde(default)]
    pub bundle: PathBuf,
    /// Path of the socket on which the shim serves.
    pub socket: PathBuf,
    /// The shim; while it starts, the process that starts it.
    pub shim: Option<ProcessIdentity>,
    /// The VMM.
    #[serde(default)]
    pub vmm: Option<ProcessIdentity>,
    /// The cgroup that the VMM is moved to.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
    /// Whether it was started for a group of containers, of which any may be the last.
    #[serde(default)]
    pub group: bool,
    /// The shim was told to end.
    #[serde(default)]
    pub ending: bool,
    /// The containers, by id.
    #[serde(default)]
    pub containers: BTreeMap<String, ContainerFacts>,
    /// The container that was deleted last: when the shim is killed before containerd has heard of that,
    /// `delete` is asked how it ended.
    #[serde(default)]
    pub deleted: Option<(String, ContainerFacts)>,
    /// The boot of the host in which this was written; processes of another boot are nobody's.
    #[serde(default)]
    pub boot: String,
    /// When the sandbox was started, in nanoseconds since 1970.
    #[serde(default)]
    pub started_ns: u64,
    /// vCPUs and memory of its VM, as soon as they are chosen.
    #[serde(default)]
    pub shape: Option<Shape>,
    /// Whether what the guest's console has said stays when the sandbox is removed.
    #[serde(default)]
    pub keep_console: bool,
    /// Whether the shim ran when the facts were read by [`FactsFile::read`]; not written down.
    #[serde(skip)]
    pub alive: bool,
}

impl Facts {
    /// Whether the shim runs and the bundle of container `id` is another than `bundle`: then both
    /// belong to another containerd, which has a container of that name too. Unknown bundles are
    /// not another's.
    pub fn are_of_another(&self, id: &str, bundle: &Path) -> bool {
        let container = self.containers.get(id).map(|container| &container.bundle);
        let own = (id == self.sandbox).then_some(&self.bundle);
        let (Some(noted), true) = (container.or(own), self.is_alive()) else {
            return false;
        };
        // By identity: one of the two paths may go through a symbolic link.
        let identity = |path: &Path| {
            let metadata = fs::metadata(path).ok()?;
            Some((metadata.dev(), metadata.ino()))
        };
        match (identity(noted), identity(bundle)) {
            (Some(noted), Some(given)) => noted != given,
            _ => false,
        }
    }

    /// The container `id` is deleted.
    pub fn forget(&mut self, id: &str) {
        self.deleted = self.containers.remove_entry(id);
    }

    /// What is known of the container `id`, deleted or not.
    pub fn container(&self, id: &str) -> Option<&ContainerFacts> {
        let deleted = self.deleted.as_ref().filter(|(deleted, _)| deleted == id);
        self.containers
            .get(id)
            .or(deleted.map(|(_, container)| container))
    }

    /// Whether the sandbox goes on without container `id`: its shim runs, and there are other
    /// containers or, in a group, there may be more.
    pub fn goes_on_without(&self, id: &str) -> bool {
        let others = self.containers.keys().any(|other| other != id);
        let unknown = self.group && !self.containers.contains_key(id);
        self.is_alive() && !self.ending && (others || unknown)
    }

    /// The containers, by the pids that are reported for them.
    pub fn siblings(&self) -> Siblings {
        let containers = self.containers.iter();
        containers
            .filter_map(|(id, container)| Some((container.anchor?.pid, id.clone())))
            .collect()
    }

    /// Whether the shim ran when these facts were read.
    pub fn is_alive(&self) -> bool {
        self.alive
    }

    /// Forget the processes where they are of another boot: by now the same ids and start times may be
    /// anybody's.
    fn forget_another_boot(&mut self) {
        let same = self.boot.is_empty() || boot_id().is_ok_and(|now| now == self.boot);
        if !same {
            (self.shim, self.vmm) = (None, None);
            for container in self.containers.values_mut() {
                container.anchor = None;
            }
        }
    }

    fn names_a_living_shim(&self) -> bool {
        self.shim.is_some_and(ProcessIdentity::is_alive)
    }
}

/// One container of a sandbox, from before its creation until its deletion.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerFacts {
    /// Its bundle.
    pub bundle: PathBuf,
    /// Its anchor, whose pid is the container's.
    pub anchor: Option<ProcessIdentity>,
    /// How it ended.
    #[serde(default)]
    pub exit: Option<Exit>,
    /// Hooks that are to run when it is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poststop: Option<Poststop>,
}

/// Poststop hooks that are due: somebody may rely on what they take back.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Poststop {
    /// The hooks, in their order.
    pub hooks: Vec<Hook>,
    /// What they are told of the container.
    pub subject: Subject,
}

/// How and when a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Exit status, 128 and the signal's number for one that was killed.
    pub status: u32,
    /// Nanoseconds since 1970.
    pub at_ns: u64,
}

impl Exit {
    /// `status`, now.
    pub fn now(status: u32) -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self {
            status,
            at_ns: now.map_or(0, |now| now.as_nanos() as u64),
        }
    }
}

/// The status of a process that was killed: 128 and SIGKILL.
pub const KILLED: u32 = 137;

/// The directory of a sandbox and the facts in it.
#[derive(Debug)]
pub struct FactsFile {
    directory: PathBuf,
    facts: Mutex<Facts>,
}

impl FactsFile {
    /// Make the directory of a sandbox (mode 0700) below `root` and write down `facts`. What an
    /// earlier sandbox of that name left must have been removed.
    pub fn create(root: &Path, mut facts: Facts) -> io::Result<Self> {
        let directory = sandbox_directory(root, &facts.namespace, &facts.sandbox)?;
        make_directory(&directory).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("making {}: {error}", directory.display()),
            )
        })?;
        facts.format = FORMAT;
        let file = Self {
            directory,
            facts: Mutex::new(facts),
        };
        thaw_fault_points::point("start-noting");
        if let Err(error) = file.update(|_| {}) {
            // containerd asks for no deletion of what was not started.
            let _ = remove_directory(&file.directory);
            return Err(io::Error::new(
                error.kind(),
                format!("writing in {}: {error}", file.directory.display()),
            ));
        }
        Ok(file)
    }

    /// The facts in `directory`, of a sandbox without a shim, to be changed.
    pub fn adopt(directory: &Path, facts: Facts) -> Self {
        Self {
            directory: directory.to_owned(),
            facts: Mutex::new(facts),
        }
    }

    /// The facts in `directory`, with whether their shim runs; `None` where there are none.
    ///
    /// A start names itself first and then the process that it leaves behind, and ends. Facts that
    /// name a process that has ended are therefore read again: only when they still name it is there
    /// no shim.
    pub fn read(directory: &Path) -> io::Result<Option<Facts>> {
        let mut before = None;
        loop {
            let Some(mut facts) = Self::read_once(directory)? else {
                return Ok(None);
            };
            facts.forget_another_boot();
            facts.alive = facts.names_a_living_shim();
            if facts.alive || before == Some(facts.shim) {
                return Ok(Some(facts));
            }
            before = Some(facts.shim);
        }
    }

    fn read_once(directory: &Path) -> io::Result<Option<Facts>> {
        let path = directory.join(FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        serde_json::from_slice(&text).map(Some).map_err(|error| {
            io::Error::new(
                ErrorKind::InvalidData,
                format!("{}: {error}", path.display()),
            )
        })
    }

    /// Change the facts and write them down. On an error the file is as it was.
    pub fn update(&self, change: impl FnOnce(&mut Facts)) -> io::Result<()> {
        let mut facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut facts);
        let text = serde_json::to_vec(&*facts).map_err(io::Error::other)?;
        let unfinished = self.directory.join(UNFINISHED);
        fs::write(&unfinished, text)?;
        fs::rename(&unfinished, self.directory.join(FILE))
    }

    /// The facts as they are now.
    pub fn get(&self) -> Facts {
        self.facts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The sandbox's directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where the file tree for the guest is mounted, in the shim's mount namespace.
    pub fn export(&self) -> PathBuf {
        self.directory.join(EXPORT)
    }

    /// Where the output of the guest's console goes.
    pub fn console(&self) -> PathBuf {
        self.directory.join(CONSOLE)
    }
}

/// Make a sandbox's directory and its namespace's. The latter goes with the last sandbox in it, which
/// may be just before the new one is there.
fn make_directory(directory: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    for _ in 0..MOST_ATTEMPTS {
        match builder.create(directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists && directory.is_dir() => {
                return Ok(());
            }
            // Both were there, and are being removed.
            Err(error) if error.kind() == ErrorKind::AlreadyExists && is_absent(directory) => {}
            other => return other,
        }
        // Whatever is wrong with it, the next attempt finds out.
        if let Some(namespace) = directory.parent() {
            let _ = DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(namespace);
        }
    }
    builder.create(directory)
}

fn is_absent(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// How often another sandbox's end may come in between.
const MOST_ATTEMPTS: usize = 1000;

/// The file of the facts, in a sandbox's directory.
pub const FILE: &str = "facts.json";
const UNFINISHED: &str = "facts.json.new";
const EXPORT: &str = "export";
/// The file of the guest's console, in a sandbox's directory.
pub const CONSOLE: &str = "console.log";

/// The directory of all sandboxes.
pub fn root() -> &'static Path {
    Path::new(RUNTIME_DIRECTORY)
}

/// The directory of one sandbox. Names that are no names of one directory are refused: everything
/// below is removed by such a path.
pub fn sandbox_directory(root: &Path, namespace: &str, sandbox: &str) -> io::Result<PathBuf> {
    for (what, name) in [("namespace", namespace), ("id", sandbox)] {
        check_name(name).map_err(|why| {
            io::Error::new(ErrorKind::InvalidInput, format!("{what} {name:?} {why}"))
        })?;
    }
    Ok(root.join(namespace).join(sandbox))
}

/// containerd's own rule for namespaces and ids, without its bound on the length of the parts.
fn check_name(name: &str) -> Result<(), &'static str> {
    let first = name.bytes().next().ok_or("is empty")?;
    if !first.is_ascii_alphanumeric() {
        return Err("does not begin with a letter or digit");
    }
    if name.len() > 255 {
        return Err("is longer than 255 characters");
    }
    if !name
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte))
    {
        return Err("has other characters than letters, digits, '_', '.' and '-'");
    }
    Ok(())
}

/// Remove the directory of a sandbox: exactly the files that belong there, and nothing through a
/// mount. An error names what is in the way.
pub fn remove_directory(directory: &Path) -> io::Result<()> {
    let absent = |result: io::Result<()>, path: &Path| match result {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io::Error::new(
            error.kind(),
            format!("removing {}: {error}", path.display()),
        )),
        _ => Ok(()),
    };
    // The facts go last but one: while they are there, another attempt can be made.
    let export = directory.join(EXPORT);
    absent(fs::remove_dir(&export), &export)?;
    for name in [CONSOLE, UNFINISHED, FILE] {
        let path = directory.join(name);
        absent(fs::remove_file(&path), &path)?;
    }
    absent(fs::remove_dir(directory), directory)?;
    // The namespace's directory, when it was the last sandbox of it.
    if let Some(namespace) = directory.parent() {
        let _ = fs::remove_dir(namespace);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            namespace: "default".into(),
            sandbox: "web".into(),
            socket: "/run/containerd/s/0".into(),
            shim: Some(ProcessIdentity {
                pid: 7,
                start_time: 8,
            }),
            ..Facts::default()
        }
    }

    #[test]
    fn test_sandboxes_of_one_namespace_come_and_go_at_once() {
        let root = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for sandbox in ["one", "two", "three"] {
                let root = root.path();
                scope.spawn(move || {
                    for _ in 0..2000 {
                        let facts = Facts {
                            namespace: "default".into(),
                            sandbox: sandbox.into(),
                            ..Facts::default()
                        };
                        let file = FactsFile::create(root, facts).unwrap();
                        remove_directory(file.directory()).unwrap();
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn test_a_shim_that_takes_over_while_its_facts_are_read_is_alive() {
        let root = tempfile::tempdir().unwrap();
        let file = FactsFile::create(root.path(), facts()).unwrap();
        let own = ProcessIdentity::current().unwrap();
        let begun = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                begun.wait();
                for _ in 0..300 {
                    // A start that ends when it has left this process behind.
                    let mut starter = std::process::Command::new("sleep")
                        .arg("1000")
                        .spawn()
                        .unwrap();
                    let identity = ProcessIdentity::of(starter.id()).unwrap();
                    file.update(|facts| facts.shim = Some(identity)).unwrap();
                    file.update(|facts| facts.shim = Some(own)).unwrap();
                    starter.kill().unwrap();
                    starter.wait().unwrap();
                }
                file.update(|facts| facts.namespace = "done".into())
                    .unwrap();
            });
            begun.wait();
            let mut seen = FactsFile::read(file.directory()).unwrap().unwrap();
            while seen.namespace != "done" {
                seen = FactsFile::read(file.directory()).unwrap().unwrap();
                assert!(seen.is_alive() || seen.shim == facts().shim, "{seen:?}");
            }
            assert!(seen.is_alive());
        });
        // One that has ended without a successor.
        file.update(|now| now.shim = facts().shim).unwrap();
        let read = FactsFile::read(file.directory()).unwrap().unwrap();
        assert!(!read.is_alive());
    }

    #[test]
    fn test_facts_are_read_as_they_were_last_written() {
        let root = tempfile::tempdir().unwrap();
        let file = FactsFile::create(root.path(), facts()).unwrap();
        let directory = root.path().join("default/web");
        assert_eq!(file.directory(), directory);
        file.update(|facts| {
            facts.cgroup = Some("/sys/fs/cgroup/x".into());
            let container = ContainerFacts {
                bundle: "/b".into(),
                ..Default::default()
            };
            facts.containers.insert("web".into(), container);
        })
        .unwrap();
        let read = FactsFile::read(&directory).unwrap().unwrap();
        assert_eq!(read, file.get());
        assert_eq!(read.containers["web"].bundle, Path::new("/b"));
        assert_eq!(read.format, FORMAT);
    }

    #[test]
    fn test_only_what_belongs_there_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let file = FactsFile::create(root.path(), facts()).unwrap();
        fs::create_dir(file.export()).unwrap();
        fs::write(file.console(), "panic").unwrap();
        fs::write(file.directory().join("precious"), "").unwrap();
        let error = remove_directory(file.directory()).unwrap_err().to_string();
        assert!(error.contains("default/web"), "{error}");
        assert!(file.directory().join("precious").exists());

        fs::remove_file(file.directory().join("precious")).unwrap();
        remove_directory(file.directory()).unwrap();
        assert!(!root.path().join("default").exists());
        remove_directory(file.directory()).unwrap();
    }

    #[test]
    fn test_processes_of_another_boot_are_nobody_s() {
        let root = tempfile::tempdir().unwrap();
        let own = ProcessIdentity::current().unwrap();
        let container = ContainerFacts {
            anchor: Some(own),
            ..ContainerFacts::default()
        };
        let mut now = facts();
        (now.shim, now.vmm, now.boot) = (Some(own), Some(own), boot_id().unwrap());
        now.containers.insert("web".into(), container);
        let file = FactsFile::create(root.path(), now).unwrap();
        let read = || FactsFile::read(file.directory()).unwrap().unwrap();
        assert!(read().is_alive());
        file.update(|facts| facts.boot = "another".into()).unwrap();
        assert!(!read().is_alive());
        assert_eq!((read().shim, read().vmm), (None, None));
        assert_eq!(read().containers["web"].anchor, None);
    }

    #[test]
    fn test_a_full_export_is_left_alone() {
        let root = tempfile::tempdir().unwrap();
        let file = FactsFile::create(root.path(), facts()).unwrap();
        fs::create_dir_all(file.export().join("containers")).unwrap();
        assert!(remove_directory(file.directory()).is_err());
        assert!(file.export().join("containers").exists());
        assert!(FactsFile::read(file.directory()).unwrap().is_some());
    }

    #[test]
    fn test_names_that_lead_elsewhere_are_refused() {
        for bad in ["", ".", "..", "a/b", ".templates", "a b", "-x"] {
            assert!(
                sandbox_directory(Path::new("/r"), "default", bad).is_err(),
                "{bad:?}"
            );
            assert!(
                sandbox_directory(Path::new("/r"), bad, "web").is_err(),
                "{bad:?}"
            );
        }
        let good = sandbox_directory(Path::new("/r"), "k8s.io", "0a_b-C.d").unwrap();
        assert_eq!(good, Path::new("/r/k8s.io/0a_b-C.d"));
    }

    #[test]
    fn test_where_nothing_can_be_written_nothing_is_left() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("default/web");
        fs::create_dir_all(&directory).unwrap();
        std::os::unix::fs::symlink("/dev/full", directory.join(UNFINISHED)).unwrap();
        let error = FactsFile::create(root.path(), facts()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        assert!(error.to_string().contains("default/web"), "{error}");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn test_damaged_facts_are_an_error_with_the_path() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join(FILE), "{").unwrap();
        let error = FactsFile::read(root.path()).unwrap_err().to_string();
        assert!(error.contains("facts.json"), "{error}");
        assert!(
            FactsFile::read(&root.path().join("none"))
                .unwrap()
                .is_none()
        );
    }
}
