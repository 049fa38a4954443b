//! The VMM's cgroup on the host: where the container's would be, so that whoever accounts for or
//! limits the container finds it there. cgroup v2 only; on other hosts the VMM stays where it is.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{XattrFlags, getxattr, setxattr, statfs};

/// Where the hierarchy is mounted.
const MOUNT_POINT: &str = "/sys/fs/cgroup";

/// `CGROUP2_SUPER_MAGIC` (linux/magic.h).
const CGROUP2_MAGIC: i64 = 0x6367_7270;

/// Marks the cgroups that thaw made, so that it removes no other.
const MARK: &str = "trusted.thaw";

/// How long processes that were killed may take to leave their cgroup.
const EMPTY_LIMIT: Duration = Duration::from_secs(1);

/// The cgroup for the sandbox `sandbox` whose container asks for `cgroups_path`; `None` where the
/// host has no cgroup v2 or nothing is asked for.
pub fn choose(cgroups_path: &str, sandbox: &str) -> Option<PathBuf> {
    let root = Path::new(MOUNT_POINT);
    if statfs(root).ok()?.f_type as i64 != CGROUP2_MAGIC {
        return None;
    }
    let path = root.join(relative_path(cgroups_path)?);
    // Where somebody else's cgroup is already, ours goes into it: removing it must not concern them.
    Some(if path.exists() {
        path.join(format!("thaw-{sandbox}"))
    } else {
        path
    })
}

/// Make the cgroup `path` and all above it that are missing.
pub fn make(path: &Path) -> io::Result<()> {
    let mut missing: Vec<&Path> = Vec::new();
    for ancestor in path
        .ancestors()
        .take_while(|path| *path != Path::new(MOUNT_POINT))
    {
        if ancestor.exists() {
            break;
        }
        missing.push(ancestor);
    }
    for path in missing.into_iter().rev() {
        match fs::create_dir(path) {
            // Best effort: without the mark it is left behind, as runc leaves parents behind.
            Ok(()) => drop(setxattr(path, MARK, b"1", XattrFlags::empty())),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(with_path("making cgroup", path, &error)),
        }
    }
    Ok(())
}

/// Move the process `pid`, with all its threads, to the cgroup `path`.
pub fn join(path: &Path, pid: u32) -> io::Result<()> {
    fs::write(path.join("cgroup.procs"), pid.to_string())
        .map_err(|error| with_path("moving the VMM to cgroup", path, &error))
}

/// How many processes the kernel has killed for want of memory, by whichever limit, where those of the
/// cgroup `path` are counted: in itself, or in the nearest one above that has the memory controller.
pub fn memory_kills(path: &Path) -> u64 {
    let mut counted = path
        .ancestors()
        .take_while(|path| path.starts_with(MOUNT_POINT))
        .filter_map(|path| fs::read_to_string(path.join("memory.events")).ok());
    let events = counted.next().unwrap_or_default();
    let mut lines = events.lines();
    lines
        .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
        .unwrap_or(0)
}

/// Remove the cgroup `path`, and those above it that thaw made and that are empty. Its processes must
/// have ended.
pub fn remove(path: &Path) -> io::Result<()> {
    if !path.starts_with(MOUNT_POINT) || path == Path::new(MOUNT_POINT) {
        return Err(io::Error::new(
            ErrorKind::InvalidInput,
            format!("{path:?} is no cgroup"),
        ));
    }
    let mut removed = fs::remove_dir(path);
    if matches!(&removed, Err(error) if error.kind() == ErrorKind::ResourceBusy) {
        wait_until_empty(path)?;
        removed = fs::remove_dir(path);
    }
    match removed {
        // A file is no cgroup of ours either, whatever the spec has called it.
        Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Err(with_path("removing cgroup", path, &error));
        }
        _ => {}
    }
    let above = path
        .ancestors()
        .skip(1)
        .take_while(|path| *path != Path::new(MOUNT_POINT));
    for ancestor in above {
        let mut value = [0; 1];
        let marked = matches!(getxattr(ancestor, MARK, &mut value[..]), Ok(1));
        if ancestor.exists() && !(marked && fs::remove_dir(ancestor).is_ok()) {
            break;
        }
    }
    Ok(())
}

/// Wait until no process is in the cgroup `path` any more, but not for ever. The first thread of a
/// process that was killed may have ended while others are still on their way out, and belong to it.
fn wait_until_empty(path: &Path) -> io::Result<()> {
    let mut events = match File::open(path.join("cgroup.events")) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let end = Instant::now() + EMPTY_LIMIT;
    loop {
        let mut text = String::new();
        events.rewind()?;
        events.read_to_string(&mut text)?;
        let left = end.saturating_duration_since(Instant::now());
        if !text.contains("populated 1") || left.is_zero() {
            return Ok(());
        }
        // The kernel tells of a change since it was last read (cgroup-v2.rst, "cgroup.events").
        let limit = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        poll(&mut [PollFd::new(&events, PollFlags::PRI)], Some(&limit))?;
    }
}

fn with_path(doing: &str, path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{doing} {}: {error}", path.display()))
}

/// The path below the hierarchy's root that a spec's `cgroupsPath` means: a path as cgroupfs has it,
/// or `slice:prefix:name` as systemd has it (runc's docs/systemd.md).
fn relative_path(cgroups_path: &str) -> Option<PathBuf> {
    let path = match cgroups_path.split(':').collect::<Vec<_>>()[..] {
        [_, prefix, name] if prefix.contains('/') || name.contains('/') => return None,
        [slice, prefix, name] => {
            let unit = match (prefix, name.ends_with(".slice")) {
                (_, true) => name.to_owned(),
                ("", false) => format!("{name}.scope"),
                (_, false) => format!("{prefix}-{name}.scope"),
            };
            slice_path(if slice.is_empty() {
                "system.slice"
            } else {
                slice
            })?
            .join(unit)
        }
        _ => PathBuf::from(cgroups_path.trim_start_matches('/')),
    };
    let normal = path
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    (normal && !path.as_os_str().as_bytes().is_empty()).then_some(path)
}

/// `a-b.slice` lies in `a.slice`, and `-.slice` is the root.
fn slice_path(slice: &str) -> Option<PathBuf> {
    let name = slice.strip_suffix(".slice")?;
    let mut path = PathBuf::new();
    if name == "-" {
        return Some(path);
    }
    let mut prefix = String::new();
    for part in name.split('-') {
        if part.is_empty() {
            return None;
        }
        if !prefix.is_empty() {
            prefix.push('-');
        }
        prefix.push_str(part);
        path.push(format!("{prefix}.slice"));
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_paths_of_cgroupfs_and_of_systemd() {
        let path = |text| relative_path(text).map(|path| path.to_str().unwrap().to_owned());
        assert_eq!(path("/default/web").as_deref(), Some("default/web"));
        assert_eq!(path("docker/web").as_deref(), Some("docker/web"));
        assert_eq!(
            path("system.slice:docker:0a").as_deref(),
            Some("system.slice/docker-0a.scope")
        );
        assert_eq!(
            path("kubepods-besteffort-pod1.slice:cri-containerd:0a").as_deref(),
            Some(
                "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1.slice/\
                 cri-containerd-0a.scope"
            )
        );
        assert_eq!(path(":x:y").as_deref(), Some("system.slice/x-y.scope"));
        assert_eq!(path("-.slice:x:y").as_deref(), Some("x-y.scope"));
    }

    /// A process in it ends only after the removal was asked for.
    #[test]
    fn test_a_cgroup_is_removed_once_its_last_process_has_left_it() {
        let name = format!("thaw-unit-{}", std::process::id());
        // None without cgroup v2, which the end-to-end tests have.
        let Some(path) = choose(&name, "x") else {
            return;
        };
        fs::create_dir(&path).unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        fs::write(path.join("cgroup.procs"), child.id().to_string()).unwrap();
        let killer = std::thread::spawn(move || {
            // Only once somebody waits: a removal that comes later finds nothing to wait for.
            std::thread::sleep(Duration::from_millis(100));
            child.kill().unwrap();
            child.wait().unwrap();
        });
        remove(&path).unwrap();
        killer.join().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn test_what_is_no_cgroup_is_removed_without_an_error() {
        for name in ["cgroup.procs", "cgroup.procs/x", "thaw-test-none/x"] {
            remove(&Path::new(MOUNT_POINT).join(name)).unwrap();
        }
        assert!(remove(Path::new("/tmp")).is_err());
    }

    #[test]
    fn test_paths_that_lead_elsewhere_are_no_cgroup() {
        for bad in [
            "",
            "/",
            "../x",
            "/a/../../x",
            "a--b.slice:x:y",
            "a:x:y",
            "a.slice:x:../y",
        ] {
            assert_eq!(relative_path(bad), None, "{bad:?}");
        }
        assert!(remove(Path::new("/tmp/x")).is_err());
        assert!(remove(Path::new(MOUNT_POINT)).is_err());
    }
}
