//! The mounts of a container: done in its mount namespace, below its root, before that is its `/`.
//!
//! Destinations are resolved within the root by pathrs, whatever links are in it, and mounted on by
//! descriptor.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::statvfs::{FsFlags, statvfs};
use pathrs::Root;
use pathrs::flags::OpenFlags;

use super::description::{IdMapping, Mount};
use super::mount_options::{IdMap, MountOptions};
use super::user_namespace;
use crate::cgroup;
use crate::status::Refusal;
use crate::sys;

/// What no mount could be made with.
const NONE: Option<&str> = None;

/// What is known of the container beside the mount.
#[derive(Debug, Clone, Copy)]
pub struct Surroundings<'a> {
    /// Whether the container has a user namespace.
    pub user_namespace: bool,
    /// The directory of its cgroup.
    pub cgroup: &'a Path,
    /// Whether it has a cgroup namespace.
    pub cgroup_namespace: bool,
}

/// Carries out one mount of the container whose root is `root`. `mapped` is what it binds, where its ids
/// are mapped.
pub fn make(
    root: &Root,
    request: &Mount,
    mapped: Option<&OwnedFd>,
    surroundings: &Surroundings<'_>,
) -> Result<(), Refusal> {
    let options = MountOptions::parse(&request.options);
    let one = One {
        root,
        request,
        options,
        mapped,
        surroundings,
    };
    one.make().map_err(|error| {
        let Mount {
            destination,
            kind,
            source,
            ..
        } = request;
        let kind = if one.options.is_bind() { "bind" } else { kind };
        Refusal::failed(format!(
            "mount {} ({kind} {}): {}",
            destination.display(),
            source.display(),
            said(&error)
        ))
    })
}

/// What the id-mapped mounts of a spec bind, by the mounts' indexes: made where user namespaces can be made
/// and mapped, before the container is. `mappings` are those of the container.
pub fn make_mapped(
    mounts: &[Mount],
    mappings: [&[IdMapping]; 2],
) -> Result<BTreeMap<usize, OwnedFd>, Refusal> {
    let mut made = BTreeMap::new();
    for (index, request) in mounts.iter().enumerate() {
        let options = MountOptions::parse(&request.options);
        let own = [&request.uid_mappings[..], &request.gid_mappings[..]];
        let has_own = own.iter().any(|list| !list.is_empty());
        let Some(map) = options.id_map.or(has_own.then_some(IdMap::Single)) else {
            continue;
        };
        let field = format!(
            "mounts[{index}].{}",
            if has_own {
                "uidMappings"
            } else {
                "options: idmap"
            }
        );
        if !options.is_bind() {
            return Err(Refusal::invalid(format!(
                "{field}: only a bind mount can have its ids mapped"
            )));
        }
        let mappings = if has_own { own } else { mappings };
        if mappings.iter().any(|list| list.is_empty()) {
            return Err(Refusal::invalid(format!(
                "{field}: users and groups must both be mapped"
            )));
        }
        let recursive = options.flags.0.contains(MsFlags::MS_REC);
        let mount = map_ids(&request.source, mappings, recursive, map)
            .map_err(|error| Refusal::invalid(format!("{field}: {}", said(&error))))?;
        made.insert(index, mount);
    }
    Ok(made)
}

fn map_ids(
    source: &Path,
    mappings: [&[IdMapping]; 2],
    recursive: bool,
    map: IdMap,
) -> io::Result<OwnedFd> {
    let namespace = user_namespace::make(mappings)?;
    let path = CString::new(source.as_os_str().as_bytes())?;
    let copy = sys::copy_mount(&path, recursive)?;
    let nothing = sys::MountAttributes::default();
    let mapped = sys::change_mount(
        &copy,
        nothing,
        Some(namespace.as_fd()),
        map == IdMap::Recursive,
    );
    mapped.map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => io::Error::other("its file system cannot map ids in the guest"),
        _ => error,
    })?;
    Ok(copy)
}

/// The kernel's error in lower case and without its number, as other runtimes print it.
pub fn said(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(number) => Errno::from_raw(number).desc().to_lowercase(),
        None => error.to_string(),
    }
}

/// A path by which a descriptor's file is found whatever its name has become.
pub fn by_descriptor(descriptor: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", descriptor.as_raw_fd()).into()
}

/// Something in the root, links followed within it.
pub fn find(root: &Root, path: &Path) -> io::Result<OwnedFd> {
    Ok(root.resolve(path).map_err(io_error)?.into())
}

/// A directory in the root, which is made where it is missing.
pub fn find_directory(root: &Root, path: &Path) -> io::Result<OwnedFd> {
    match find(root, path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let made = root
                .mkdir_all(path, &Permissions::from_mode(0o755))
                .map_err(io_error)?;
            Ok(made.into())
        }
        found => found,
    }
}

/// A file in the root, which is made where it is missing.
pub fn find_file(root: &Root, path: &Path) -> io::Result<OwnedFd> {
    match find(root, path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if let Some(parent) = path.parent() {
                find_directory(root, parent)?;
            }
            let flags = OpenFlags::O_CREAT
                | OpenFlags::O_CLOEXEC
                | OpenFlags::O_NOFOLLOW
                | OpenFlags::O_WRONLY;
            root.create_file(path, flags, &Permissions::from_mode(0o755))
                .map_err(io_error)?;
            find(root, path)
        }
        found => found,
    }
}

/// pathrs' errors as the kernel's that they come from.
pub fn io_error(error: pathrs::error::Error) -> io::Error {
    match error.kind() {
        pathrs::error::ErrorKind::OsError(Some(number)) => io::Error::from_raw_os_error(number),
        _ => io::Error::other(error.to_string()),
    }
}

struct One<'a> {
    root: &'a Root,
    request: &'a Mount,
    options: MountOptions,
    mapped: Option<&'a OwnedFd>,
    surroundings: &'a Surroundings<'a>,
}

impl One<'_> {
    fn make(&self) -> io::Result<()> {
        if self.options.is_bind() {
            self.bind()?;
        } else {
            match self.request.kind.as_str() {
                kind @ ("proc" | "sysfs") => self.of_the_kernel(kind)?,
                "tmpfs" => self.tmpfs()?,
                "cgroup" | "cgroup2" => self.cgroup()?,
                kind => {
                    let target = find_directory(self.root, &self.request.destination)?;
                    self.mount_on(&target, kind, self.flags())?;
                }
            }
        }
        self.finish()
    }

    /// The flags at first: what is mounted on `/dev` and tmpfs are written to before they are read-only.
    fn flags(&self) -> MsFlags {
        let mut flags = self.options.flags.0;
        if is_late(self.request) {
            flags.remove(MsFlags::MS_RDONLY);
        }
        flags
    }

    fn mount_on(&self, target: &OwnedFd, kind: &str, flags: MsFlags) -> io::Result<()> {
        let data = Some(self.options.data.as_str()).filter(|data| !data.is_empty());
        mount(
            Some(&self.request.source),
            &by_descriptor(target),
            Some(kind),
            flags,
            data,
        )?;
        Ok(())
    }

    fn mounted(&self) -> io::Result<OwnedFd> {
        find(self.root, &self.request.destination)
    }

    /// What is said of a mount and can only be done once it is there.
    fn finish(&self) -> io::Result<()> {
        let target = self.mounted()?;
        for flags in &self.options.propagation {
            mount(NONE, &by_descriptor(&target), NONE, *flags, NONE)?;
        }
        if self.options.recursive != sys::MountAttributes::default() {
            sys::change_mount(&target, self.options.recursive, None, true)?;
        }
        Ok(())
    }

    /// procfs and sysfs: only onto a directory, so that they are not mounted through a link.
    fn of_the_kernel(&self, kind: &str) -> io::Result<()> {
        let destination = &self.request.destination;
        let there = self.root.resolve_nofollow(destination).map_err(io_error);
        let there = there.and_then(|there| File::from(OwnedFd::from(there)).metadata());
        match there {
            Ok(there) if !there.is_dir() => {
                let text = format!("file system {kind:?} must be mounted on an ordinary directory");
                return Err(io::Error::other(text));
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let target = find_directory(self.root, destination)?;
        match self.mount_on(&target, kind, self.flags()) {
            // A sysfs shows a network namespace, which is the guest's and not the user namespace's.
            Err(error)
                if kind == "sysfs" && self.surroundings.user_namespace && is_refused(&error) =>
            {
                self.bind_instead(&target, Path::new("/sys"), MsFlags::MS_REC)
            }
            result => result,
        }
    }

    /// A bind mount for a file system that a user namespace may not mount.
    fn bind_instead(&self, target: &OwnedFd, source: &Path, more: MsFlags) -> io::Result<()> {
        mount(
            Some(source),
            &by_descriptor(target),
            NONE,
            MsFlags::MS_BIND | more,
            NONE,
        )?;
        let target = self.mounted()?;
        remount(&target, self.flags() | locked_flags(&target)?)
    }

    fn tmpfs(&self) -> io::Result<()> {
        let destination = &self.request.destination;
        let (target, mode) = match find(self.root, destination) {
            Ok(target) => {
                let mode = File::from(target.try_clone()?).metadata()?.mode() & 0o7777;
                (target, Some(mode))
            }
            Err(_) => (find_directory(self.root, destination)?, None),
        };
        // The mode of the directory that it covers, unless an option says otherwise.
        let mode = mode.map(|mode| format!("mode={mode:04o}"));
        let given = Some(self.options.data.clone()).filter(|data| !data.is_empty());
        let data: Vec<String> = mode.into_iter().chain(given).collect();
        let data = data.join(",");
        mount(
            Some(&self.request.source),
            &by_descriptor(&target),
            Some("tmpfs"),
            self.flags(),
            Some(data.as_str()),
        )?;
        if self.options.copy_up {
            // The descriptor is still the directory's that is covered now.
            copy_tree(&by_descriptor(&target), &by_descriptor(&self.mounted()?))?;
        }
        Ok(())
    }

    fn cgroup(&self) -> io::Result<()> {
        let target = find_directory(self.root, &self.request.destination)?;
        let flags = self.options.flags.0;
        match mount(
            Some("cgroup"),
            &by_descriptor(&target),
            Some("cgroup2"),
            flags,
            NONE,
        ) {
            Err(Errno::EPERM | Errno::EBUSY) => {
                let source = match self.surroundings.cgroup_namespace {
                    true => self.surroundings.cgroup,
                    false => Path::new(cgroup::ROOT),
                };
                self.bind_instead(&target, source, MsFlags::empty())
            }
            result => Ok(result?),
        }
    }

    fn bind(&self) -> io::Result<()> {
        let source = fs::canonicalize(&self.request.source)?;
        let destination = &self.request.destination;
        let target = match fs::metadata(&source)?.is_dir() {
            true => find_directory(self.root, destination)?,
            false => find_file(self.root, destination)?,
        };
        let flags = self.options.flags.0;
        match self.mapped {
            Some(mapped) => sys::place_mount(mapped, &target)?,
            None => mount(
                Some(&source),
                &by_descriptor(&target),
                NONE,
                flags & (MsFlags::MS_BIND | MsFlags::MS_REC),
                NONE,
            )?,
        }
        if !self.options.says_flags {
            return Ok(());
        }
        let target = self.mounted()?;
        let wanted = flags - MsFlags::MS_REC;
        match remount(&target, wanted) {
            // What a user namespace did not mount keeps its restrictions.
            Err(error) if is_refused(&error) => remount(&target, wanted | locked_flags(&target)?),
            result => result,
        }
    }
}

fn is_refused(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EPERM)
}

/// Whether a mount becomes read-only last.
pub fn is_late(request: &Mount) -> bool {
    request.kind == "tmpfs" || request.destination == Path::new("/dev")
}

/// Changes the flags of a mount.
pub fn remount(target: &OwnedFd, flags: MsFlags) -> io::Result<()> {
    let flags = flags | MsFlags::MS_BIND | MsFlags::MS_REMOUNT;
    mount(NONE, &by_descriptor(target), NONE, flags, NONE)?;
    Ok(())
}

/// The restrictions that a mount has, of those that may be locked.
pub fn locked_flags(target: &OwnedFd) -> io::Result<MsFlags> {
    let found = statvfs(&by_descriptor(target))?.flags();
    let table = [
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_RDONLY, MsFlags::MS_RDONLY),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ];
    let flags = table.into_iter().filter(|(have, _)| found.contains(*have));
    Ok(flags.fold(MsFlags::empty(), |all, (_, flag)| all | flag))
}

/// Copies what is in one directory to another: directories, files and links, with owners and modes.
fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if metadata.is_dir() {
            fs::create_dir(&target)?;
            copy_tree(&source, &target)?;
        } else if metadata.is_symlink() {
            symlink(fs::read_link(&source)?, &target)?;
            std::os::unix::fs::lchown(&target, Some(metadata.uid()), Some(metadata.gid()))?;
            continue;
        } else if metadata.is_file() {
            fs::copy(&source, &target)?;
        } else {
            continue;
        }
        chown(&target, Some(metadata.uid()), Some(metadata.gid()))?;
        fs::set_permissions(&target, Permissions::from_mode(metadata.mode() & 0o7777))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_copied_tree_has_modes_and_links() {
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        fs::create_dir_all(from.join("below")).unwrap();
        fs::create_dir(&to).unwrap();
        fs::write(from.join("below/file"), "text").unwrap();
        fs::set_permissions(from.join("below"), Permissions::from_mode(0o751)).unwrap();
        symlink("below/file", from.join("link")).unwrap();
        copy_tree(&from, &to).unwrap();
        assert_eq!(fs::read_to_string(to.join("link")).unwrap(), "text");
        assert_eq!(
            fs::metadata(to.join("below")).unwrap().mode() & 0o7777,
            0o751
        );
    }

    #[test]
    fn test_destinations_stay_in_the_root() {
        let directory = tempfile::tempdir().unwrap();
        let inside = directory.path().join("root");
        fs::create_dir(&inside).unwrap();
        symlink("/outside", inside.join("link")).unwrap();
        let root = Root::open(&inside).unwrap();
        let _ = find_directory(&root, Path::new("/link/../../made"));
        find_file(&root, Path::new("/a/b/file")).unwrap();
        assert!(inside.join("a/b/file").is_file());
        assert!(!directory.path().join("made").exists());
        assert!(!Path::new("/outside").exists());
    }
}
