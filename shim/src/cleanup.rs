//! Removing what a sandbox has on the host when its shim does not do it: from the facts that were
//! written before each thing was made, whoever was killed, and when. Everything here may be done
//! again, and at the same time by somebody else.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{FlockOperation, flock};
use thaw_fault_points::point;

use crate::cgroup;
use crate::consoles;
use crate::facts::{self, ContainerFacts, Exit, Facts, FactsFile, KILLED};
use crate::hooks;
use crate::process_identity::ProcessIdentity;

/// How long a killed process may take to be gone. Together less than `delete` may take.
const KILL_LIMIT: Duration = Duration::from_secs(1);

/// How long hooks may take together that a shim which is gone has not run. What takes longer goes on by
/// itself: containerd waits for five seconds.
const HOOKS_LIMIT: Duration = Duration::from_secs(3);

/// Age at which a directory without facts is no longer one that is just being made.
const UNFINISHED_AGE: Duration = Duration::from_secs(60);

/// What is told about a deleted container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deleted {
    /// Its pid, zero when nothing is known of it.
    pub pid: u32,
    /// How it ended: as recorded, else killed just now.
    pub exit: Exit,
}

/// Delete the container `id`, whose bundle is `bundle`, of the sandbox in `directory`. The sandbox
/// goes with it, unless it goes on for others: containerd asks for this after every container, also
/// while the others live. One of another containerd stays too.
pub fn delete(directory: &Path, id: &str, bundle: &Path) -> io::Result<Deleted> {
    point("delete-begun");
    // When a shim is killed containerd asks at once for all its containers.
    let lock = File::open(directory);
    if let Ok(lock) = &lock {
        flock(lock, FlockOperation::LockExclusive)?;
    }
    let facts = FactsFile::read(directory);
    if let Ok(Some(facts)) = &facts
        && facts.are_of_another(id, bundle)
    {
        return Ok(Deleted {
            pid: 0,
            exit: Exit::now(KILLED),
        });
    }
    let container = facts
        .as_ref()
        .ok()
        .and_then(|facts| facts.as_ref()?.container(id).cloned());
    let anchor = container.as_ref().and_then(|container| container.anchor);
    let deleted = Deleted {
        pid: anchor.map_or(0, |anchor| anchor.pid),
        exit: container
            .and_then(|c| c.exit)
            .unwrap_or_else(|| Exit::now(KILLED)),
    };
    match facts {
        // Its shim ends a container whose anchor is killed.
        Ok(Some(facts)) if facts.goes_on_without(id) => {
            if let Some(anchor) = anchor {
                kill("anchor", anchor, &facts)?;
            }
        }
        Ok(Some(facts)) => remove_container(directory, facts, id)?,
        // Never written, or damaged by a crash of the host: nothing of it is left but this.
        Ok(None) | Err(_) => facts::remove_directory(directory)?,
    }
    Ok(deleted)
}

/// Remove container `id` and all of its sandbox but what containerd will still ask for: how other
/// containers have ended whose bundles it has.
fn remove_container(directory: &Path, mut facts: Facts, id: &str) -> io::Result<()> {
    let is_asked_for = |other: &str, container: &ContainerFacts| {
        other != id && fs::metadata(&container.bundle).is_ok()
    };
    let others = facts.containers.iter();
    if !others
        .into_iter()
        .any(|(id, container)| is_asked_for(id, container))
    {
        return remove(directory, &facts);
    }
    end(&facts)?;
    let (kept, gone) = std::mem::take(&mut facts.containers)
        .into_iter()
        .partition(|(id, container)| is_asked_for(id, container));
    facts.containers = kept;
    run_hooks(&gone);
    let file = FactsFile::adopt(directory, facts);
    file.update(|facts| (facts.shim, facts.vmm, facts.cgroup) = (None, None, None))
}

/// Run the poststop hooks that `containers` still are to have. Whoever is killed during that leaves them
/// to the next.
fn run_hooks(containers: &BTreeMap<String, ContainerFacts>) {
    let deadline = Instant::now() + HOOKS_LIMIT;
    for poststop in containers.values().filter_map(|one| one.poststop.as_ref()) {
        hooks::run_poststop_until(&poststop.hooks, &poststop.subject, deadline);
    }
}

/// Remove everything that `facts`, those in `directory`, tell of. What can be removed is, also when
/// something else cannot; the first reason is returned.
pub fn remove(directory: &Path, facts: &Facts) -> io::Result<()> {
    let ended = end(facts);
    let kept = consoles::keep(directory, facts);
    ended?;
    run_hooks(&facts.containers);
    kept?;
    facts::remove_directory(directory)
}

/// End all processes of a sandbox, and remove what it has outside of its directory.
fn end(facts: &Facts) -> io::Result<()> {
    let mut result = Ok(());
    let mut attempt = |done: io::Result<()>| {
        if result.is_ok() {
            result = done;
        }
    };
    // The shim first: VMM and anchor end with it, and it must not make anything new.
    let anchors = facts
        .containers
        .values()
        .map(|container| ("anchor", container.anchor));
    let processes = [("shim", facts.shim), ("VMM", facts.vmm)]
        .into_iter()
        .chain(anchors);
    for (what, process) in processes {
        let Some(process) = process.filter(|process| process.pid != std::process::id()) else {
            continue;
        };
        attempt(kill(what, process, facts));
    }
    point("cleanup-killed");
    if let Some(path) = &facts.cgroup {
        attempt(cgroup::remove(path));
    }
    point("cleanup-cgroup");
    attempt(match fs::remove_file(&facts.socket) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    });
    point("cleanup-socket");
    result
}

/// Kill a process and see that it is gone.
fn kill(what: &str, process: ProcessIdentity, facts: &Facts) -> io::Result<()> {
    if process.kill(KILL_LIMIT)? {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "the {what} of sandbox {} (pid {}) was killed and is still there after {KILL_LIMIT:?}",
        facts.sandbox, process.pid
    )))
}

/// A sandbox that was found without its shim, and what came of removing it.
#[derive(Debug)]
pub struct Abandoned {
    /// Its directory.
    pub directory: PathBuf,
    /// Whether everything of it is gone now.
    pub removed: io::Result<()>,
}

/// Remove all sandboxes below `root` whose shim is gone.
pub fn collect_garbage(root: &Path) -> io::Result<Vec<Abandoned>> {
    collect(root, |_| true)
}

/// Remove the sandboxes below `root` whose shim is gone and that containerd has forgotten, which
/// shows in that it has removed the bundle. Of the others it will ask for the exit status. Done by
/// one process at a time, and nobody waits for it.
pub fn sweep(root: &Path) {
    let Ok(lock) = File::open(root) else { return };
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        return;
    }
    // Nobody is there to be told; `thaw gc` tells.
    let _ = collect(root, |facts| {
        let containers = facts.containers.values();
        let mut bundles = containers
            .map(|container| &container.bundle)
            .chain([&facts.bundle]);
        bundles.all(|bundle| !bundle.as_os_str().is_empty() && fs::metadata(bundle).is_err())
    });
}

/// Wait until no start looks for its sandbox below `root` and makes it. Until the lock is dropped, no
/// directory below `root` becomes another sandbox's.
pub fn lock_starts(root: &Path) -> io::Result<File> {
    fs::create_dir_all(root)?;
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(root.join(".starts"))?;
    flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}

/// The directories of all sandboxes below `root`. What is not a sandbox has no name of one:
/// `.templates`, and `traces` holds files only.
pub fn sandboxes(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for namespace in directories(root)? {
        found.extend(directories(&namespace)?);
    }
    Ok(found)
}

/// The directories of the sandboxes below `root` whose shim is gone.
pub fn find_garbage(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = sandboxes(root)?;
    found.retain(|directory| is_garbage(directory, |_| true));
    Ok(found)
}

/// Remove the sandboxes below `root` whose shim is gone and whose facts are `meant`.
fn collect(root: &Path, meant: impl Fn(&Facts) -> bool) -> io::Result<Vec<Abandoned>> {
    let mut abandoned = Vec::new();
    for directory in sandboxes(root)? {
        if !is_garbage(&directory, &meant) {
            continue;
        }
        // Looked at again under the lock: a start may just have taken the place.
        let removed = lock_starts(root).and_then(|_lock| {
            if is_garbage(&directory, &meant) {
                remove_found(&directory).map(Some)
            } else {
                Ok(None)
            }
        });
        if let Some(removed) = removed.transpose() {
            abandoned.push(Abandoned { directory, removed });
        }
    }
    Ok(abandoned)
}

/// Whether the sandbox in `directory` has no shim and is `meant`.
fn is_garbage(directory: &Path, meant: impl Fn(&Facts) -> bool) -> bool {
    match FactsFile::read(directory) {
        Ok(Some(facts)) => !facts.is_alive() && meant(&facts),
        Ok(None) => is_old(directory),
        Err(_) => true,
    }
}

/// Remove the sandbox in `directory`, whatever is known of it.
fn remove_found(directory: &Path) -> io::Result<()> {
    match FactsFile::read(directory) {
        Ok(Some(facts)) => remove(directory, &facts),
        // Never written, or damaged by a crash of the host: nothing of it is left but this.
        Ok(None) | Err(_) => facts::remove_directory(directory),
    }
}

/// The directories in `directory` whose names can be those of namespaces or sandboxes.
fn directories(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if !hidden && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

fn is_old(directory: &Path) -> bool {
    let modified = fs::metadata(directory).and_then(|metadata| metadata.modified());
    let age = modified.map(|modified| SystemTime::now().duration_since(modified).ok());
    age.is_ok_and(|age| age.is_some_and(|age| age > UNFINISHED_AGE))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;
    use crate::facts::ContainerFacts;
    use crate::process_identity::ProcessIdentity;

    fn process() -> (Child, ProcessIdentity) {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let identity = ProcessIdentity::of(child.id()).unwrap();
        (child, identity)
    }

    fn facts(root: &Path, sandbox: &str) -> Facts {
        Facts {
            namespace: "default".into(),
            sandbox: sandbox.into(),
            socket: root.join(format!("{sandbox}.sock")),
            ..Facts::default()
        }
    }

    fn container(anchor: Option<ProcessIdentity>, exit: Option<Exit>) -> ContainerFacts {
        ContainerFacts {
            bundle: "/b".into(),
            anchor,
            exit,
            poststop: None,
        }
    }

    #[test]
    fn test_delete_kills_what_is_left_and_removes_all_of_it() {
        let root = tempfile::tempdir().unwrap();
        let ((mut shim, shim_id), (mut vmm, vmm_id), (mut anchor, anchor_id)) =
            (process(), process(), process());
        let mut facts = facts(root.path(), "web");
        (facts.shim, facts.vmm) = (Some(shim_id), Some(vmm_id));
        facts
            .containers
            .insert("web".into(), container(Some(anchor_id), None));
        fs::write(&facts.socket, "").unwrap();
        let file = FactsFile::create(root.path(), facts).unwrap();
        fs::create_dir(file.export()).unwrap();

        let deleted = delete(file.directory(), "web", Path::new("/b")).unwrap();
        assert_eq!((deleted.pid, deleted.exit.status), (anchor_id.pid, KILLED));
        for child in [&mut shim, &mut vmm, &mut anchor] {
            assert!(!child.wait().unwrap().success());
        }
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
        // Again, when nothing is known any more.
        let deleted = delete(file.directory(), "web", Path::new("/b")).unwrap();
        assert_eq!((deleted.pid, deleted.exit.status), (0, KILLED));
    }

    #[test]
    fn test_delete_tells_the_recorded_status() {
        let root = tempfile::tempdir().unwrap();
        let mut facts = facts(root.path(), "web");
        let exit = Exit {
            status: 7,
            at_ns: 11,
        };
        facts
            .containers
            .insert("web".into(), container(None, Some(exit)));
        let file = FactsFile::create(root.path(), facts).unwrap();
        assert_eq!(
            delete(file.directory(), "web", Path::new("/b")).unwrap(),
            Deleted { pid: 0, exit }
        );
    }

    #[test]
    fn test_delete_tells_the_status_of_what_was_just_deleted() {
        let root = tempfile::tempdir().unwrap();
        let mut facts = facts(root.path(), "web");
        let exit = Exit {
            status: 7,
            at_ns: 11,
        };
        facts
            .containers
            .insert("web".into(), container(None, Some(exit)));
        facts.forget("web");
        assert!(facts.containers.is_empty());
        let file = FactsFile::create(root.path(), facts).unwrap();
        let deleted = delete(file.directory(), "web", Path::new("/b")).unwrap();
        assert_eq!(deleted, Deleted { pid: 0, exit });
        assert!(!file.directory().exists());
    }

    #[test]
    fn test_delete_runs_the_hooks_that_a_killed_shim_has_not() {
        let root = tempfile::tempdir().unwrap();
        let bundles = [root.path().join(".one"), root.path().join(".two")];
        let mut facts = facts(root.path(), "pod");
        facts.group = true;
        let script = format!(
            "cd {}; echo x >> .ran; cat >> .states",
            root.path().display()
        );
        for (id, bundle) in ["one", "two"].into_iter().zip(&bundles) {
            fs::create_dir(bundle).unwrap();
            let hook = crate::spec::Hook {
                path: "/bin/sh".into(),
                args: ["sh", "-c", &script].map(str::to_owned).into(),
                ..Default::default()
            };
            let poststop = crate::facts::Poststop {
                hooks: vec![hook],
                subject: crate::hooks::Subject {
                    id: id.into(),
                    bundle: bundle.clone(),
                    ..Default::default()
                },
            };
            let container = ContainerFacts {
                bundle: bundle.clone(),
                poststop: Some(poststop),
                ..ContainerFacts::default()
            };
            facts.containers.insert(id.into(), container);
        }
        let file = FactsFile::create(root.path(), facts).unwrap();
        let ran = || fs::read_to_string(root.path().join(".ran")).unwrap();
        delete(file.directory(), "one", &bundles[0]).unwrap();
        assert_eq!(ran(), "x\n");
        // Not again.
        delete(file.directory(), "one", &bundles[0]).unwrap();
        assert_eq!(ran(), "x\n");
        // By whoever removes what is left; the bundle is gone.
        fs::remove_dir(&bundles[1]).unwrap();
        let found = collect_garbage(root.path()).unwrap();
        assert!(found[0].removed.is_ok());
        assert_eq!(ran(), "x\nx\n");
        let states = fs::read_to_string(root.path().join(".states")).unwrap();
        assert!(
            states.contains(r#""id":"one","status":"stopped""#),
            "{states}"
        );
        assert!(
            states.contains(r#""id":"two","status":"stopped""#),
            "{states}"
        );
        assert!(!file.directory().exists());
    }

    #[test]
    fn test_delete_leaves_a_sandbox_with_another_container_alone() {
        let root = tempfile::tempdir().unwrap();
        let (mut shim, shim_id) = process();
        let mut facts = facts(root.path(), "pod");
        facts.shim = Some(shim_id);
        facts.containers.insert("pod".into(), container(None, None));
        let file = FactsFile::create(root.path(), facts).unwrap();
        delete(file.directory(), "other", Path::new("/b")).unwrap();
        assert!(shim_id.is_alive());
        assert!(file.directory().exists());
        shim.kill().unwrap();
        shim.wait().unwrap();
    }

    /// A group without a shim: each of its containers is asked for, all at once even.
    #[test]
    fn test_the_exits_of_a_dead_group_are_told_one_by_one() {
        for at_once in [false, true] {
            let root = tempfile::tempdir().unwrap();
            let (mut vmm, vmm_id) = process();
            let mut facts = facts(root.path(), "pod");
            (facts.group, facts.vmm) = (true, Some(vmm_id));
            let exit = |status| Some(Exit { status, at_ns: 1 });
            for status in 1..=4 {
                let bundle = root.path().join(format!(".{status}"));
                fs::create_dir(&bundle).unwrap();
                let container = ContainerFacts {
                    bundle,
                    exit: exit(status),
                    ..ContainerFacts::default()
                };
                facts.containers.insert(status.to_string(), container);
            }
            let file = FactsFile::create(root.path(), facts).unwrap();
            let told = |status: u32| {
                let bundle = root.path().join(format!(".{status}"));
                let deleted = delete(file.directory(), &status.to_string(), &bundle);
                assert_eq!(deleted.unwrap().exit.status, status);
            };
            if at_once {
                std::thread::scope(|scope| {
                    (1..=4).for_each(|status| drop(scope.spawn(move || told(status))));
                });
            } else {
                told(1);
                assert!(!vmm.wait().unwrap().success());
                // Nobody will ask for one whose bundle is gone.
                fs::remove_dir(root.path().join(".2")).unwrap();
                told(3);
                assert!(file.directory().exists());
                sweep(root.path());
                assert!(file.directory().exists());
                told(4);
            }
            assert!(!file.directory().exists());
            let _ = vmm.wait();
        }
    }

    #[test]
    fn test_a_group_s_shim_ends_when_it_is_told_to() {
        let root = tempfile::tempdir().unwrap();
        let (mut shim, shim_id) = process();
        let (mut anchor, anchor_id) = process();
        let mut facts = facts(root.path(), "pod");
        (facts.group, facts.shim) = (true, Some(shim_id));
        let file = FactsFile::create(root.path(), facts).unwrap();
        // Its last container has been deleted, and another may be on its way.
        delete(file.directory(), "last", Path::new("/b")).unwrap();
        assert!(shim_id.is_alive() && file.directory().exists());
        // One of two is ended by the end of its anchor.
        file.update(|facts| {
            for (id, anchor) in [("one", None), ("two", Some(anchor_id))] {
                facts.containers.insert(id.into(), container(anchor, None));
            }
        })
        .unwrap();
        delete(file.directory(), "two", Path::new("/b")).unwrap();
        assert!(!anchor.wait().unwrap().success());
        assert!(shim_id.is_alive() && file.directory().exists());

        file.update(|facts| {
            facts.containers.clear();
            facts.ending = true;
        })
        .unwrap();
        delete(file.directory(), "last", Path::new("/b")).unwrap();
        assert!(!shim.wait().unwrap().success());
        assert!(!file.directory().exists());
    }

    #[test]
    fn test_delete_leaves_another_containerd_s_sandbox_of_that_name_alone() {
        let root = tempfile::tempdir().unwrap();
        let (mut shim, shim_id) = process();
        let (ours, theirs) = (root.path().join(".ours"), root.path().join(".theirs"));
        fs::create_dir(&ours).unwrap();
        fs::create_dir(&theirs).unwrap();
        let mut facts = facts(root.path(), "web");
        (facts.shim, facts.bundle) = (Some(shim_id), theirs.clone());
        let file = FactsFile::create(root.path(), facts).unwrap();

        let deleted = delete(file.directory(), "web", &ours).unwrap();
        assert_eq!(deleted.pid, 0);
        assert!(shim_id.is_alive() && file.directory().exists());
        // Its own may also be named by another path.
        let link = root.path().join(".link");
        std::os::unix::fs::symlink(&theirs, &link).unwrap();
        delete(file.directory(), "web", &link).unwrap();
        assert!(!shim.wait().unwrap().success());
        assert!(!file.directory().exists());
    }

    #[test]
    fn test_garbage_is_what_has_no_shim() {
        let root = tempfile::tempdir().unwrap();
        let (mut shim, shim_id) = process();
        let mut live = facts(root.path(), "live");
        live.shim = Some(shim_id);
        let live = FactsFile::create(root.path(), live).unwrap();
        let mut dead = facts(root.path(), "dead");
        dead.shim = Some(ProcessIdentity {
            start_time: shim_id.start_time + 1,
            ..shim_id
        });
        let dead = FactsFile::create(root.path(), dead).unwrap();
        // One that is being made, others' files.
        fs::create_dir_all(root.path().join("default/new")).unwrap();
        fs::create_dir_all(root.path().join(".templates/key")).unwrap();
        fs::create_dir_all(root.path().join("traces")).unwrap();
        fs::write(root.path().join("traces/x.json"), "").unwrap();

        let found = collect_garbage(root.path()).unwrap();
        let [only] = &found[..] else {
            panic!("{found:?}")
        };
        assert_eq!(only.directory, dead.directory());
        assert!(only.removed.is_ok());
        assert!(live.directory().exists() && !dead.directory().exists());
        assert!(root.path().join("default/new").exists());
        assert!(root.path().join("traces/x.json").exists());
        assert!(
            collect_garbage(&root.path().join("none"))
                .unwrap()
                .is_empty()
        );
        shim.kill().unwrap();
        shim.wait().unwrap();
    }

    #[test]
    fn test_a_sweep_leaves_what_containerd_will_ask_for() {
        let root = tempfile::tempdir().unwrap();
        let bundle = root.path().join(".bundle");
        fs::create_dir(&bundle).unwrap();
        let make = |sandbox: &str, bundle: &Path| {
            let mut facts = facts(root.path(), sandbox);
            facts.bundle = bundle.to_owned();
            FactsFile::create(root.path(), facts).unwrap()
        };
        let asked_for = make("asked-for", &bundle);
        let forgotten = make("forgotten", Path::new("/does/not/exist"));
        let unknown = make("unknown", Path::new(""));
        sweep(root.path());
        assert!(asked_for.directory().exists() && unknown.directory().exists());
        assert!(!forgotten.directory().exists());
    }
}
