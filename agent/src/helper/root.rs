//! The root of a container: from a directory of the guest to the `/` of the container's processes.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;
use nix::unistd::{fchdir, pivot_root};
use pathrs::Root;

use super::description::Description;
use super::devices;
use super::mount_options::{MountOptions, propagation};
use super::mounts::{self, Surroundings, io_error, said};
use crate::status::Refusal;

const NONE: Option<&str> = None;

/// Mounts everything below the root, and leaves the guest's files for it.
pub fn enter(
    description: &Description,
    mapped: &BTreeMap<usize, OwnedFd>,
    surroundings: &Surroundings<'_>,
) -> Result<(), Refusal> {
    let path = &description.root.path;
    let of_root = |what: &str, error: io::Error| {
        Refusal::failed(format!(
            "{what} the root {}: {}",
            path.display(),
            said(&error)
        ))
    };
    let passed_on = root_propagation(description)?;
    // What is mounted here stays here, and what the guest unmounts goes here too.
    let at_first = passed_on.unwrap_or(MsFlags::MS_SLAVE | MsFlags::MS_REC);
    mount(NONE, "/", NONE, at_first, NONE).map_err(|error| of_root("set apart", error.into()))?;
    make_parent_private(path).map_err(|error| of_root("set apart", error))?;
    mount(
        Some(path),
        path,
        NONE,
        MsFlags::MS_BIND | MsFlags::MS_REC,
        NONE,
    )
    .map_err(|error| of_root("bind", error.into()))?;
    let root = Root::open(path).map_err(|error| of_root("open", io_error(error)))?;
    for (index, request) in description.mounts.iter().enumerate() {
        mounts::make(&root, request, mapped.get(&index), surroundings)?;
    }
    if has_own_dev(description) {
        devices::make_all(
            &root,
            &description.linux.devices,
            surroundings.user_namespace,
        )?;
        devices::make_links(&root)?;
    }
    drop(root);
    pivot(path).map_err(|error| of_root("change to", error))?;
    if let Some(flags) = passed_on.filter(|flags| !flags.contains(MsFlags::MS_PRIVATE)) {
        mount(NONE, "/", NONE, flags, NONE)
            .map_err(|error| of_root("pass on mounts of", error.into()))?;
    }
    Ok(())
}

/// How mounts below the root are passed on, if the spec says.
fn root_propagation(description: &Description) -> Result<Option<MsFlags>, Refusal> {
    match description.linux.rootfs_propagation.as_str() {
        "" => Ok(None),
        name => match propagation(name) {
            Some(flags) => Ok(Some(flags)),
            None => Err(Refusal::invalid(format!(
                "linux.rootfsPropagation: {name:?} is none of the kernel's"
            ))),
        },
    }
}

/// Unless the whole `/dev` is bound from elsewhere, which is then as it is there.
fn has_own_dev(description: &Description) -> bool {
    !description.mounts.iter().any(|request| {
        request.destination == Path::new("/dev") && MountOptions::parse(&request.options).is_bind()
    })
}

/// A shared mount cannot be the parent of a root (pivot_root(2)).
fn make_parent_private(root: &Path) -> io::Result<()> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let lines = table
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    let parent = lines
        .filter(|fields| fields.get(4).is_some_and(|point| root.starts_with(point)))
        .max_by_key(|fields| fields[4].len());
    if let Some(fields) = parent
        && fields.iter().any(|field| field.starts_with("shared:"))
    {
        mount(NONE, fields[4], NONE, MsFlags::MS_PRIVATE, NONE)?;
    }
    Ok(())
}

/// Makes `root` the `/` of this mount namespace, and unmounts everything else.
fn pivot(root: &Path) -> io::Result<()> {
    let directory = OFlag::O_DIRECTORY | OFlag::O_RDONLY | OFlag::O_CLOEXEC;
    let old = open("/", directory, Mode::empty())?;
    let new = open(root, directory, Mode::empty())?;
    fchdir(&new)?;
    // The old root comes to lie over the new one, from where it is unmounted: no directory is needed for it.
    pivot_root(".", ".")?;
    fchdir(&old)?;
    // So that nothing is unmounted in the guest.
    mount(NONE, ".", NONE, MsFlags::MS_SLAVE | MsFlags::MS_REC, NONE)?;
    umount2(".", MntFlags::MNT_DETACH)?;
    std::env::set_current_dir("/")
}

/// What is left to do in the root: mounts and paths that become read-only, and paths that are hidden.
pub fn finish(description: &Description) -> Result<(), Refusal> {
    for request in &description.mounts {
        let flags = MountOptions::parse(&request.options).flags.0;
        if flags.contains(MsFlags::MS_RDONLY)
            && mounts::is_late(request)
            && !flags.contains(MsFlags::MS_BIND)
        {
            make_read_only(&request.destination, flags)?;
        }
    }
    if description.root.readonly {
        let flags = locked(Path::new("/"))
            .map_err(|error| failed("make read-only", Path::new("/"), &error))?;
        make_read_only(Path::new("/"), flags)?;
    }
    for path in &description.linux.readonly_paths {
        protect(path).map_err(|error| failed("linux.readonlyPaths:", path, &error))?;
    }
    for path in &description.linux.masked_paths {
        mask(path).map_err(|error| failed("linux.maskedPaths:", path, &error))?;
    }
    Ok(())
}

fn make_read_only(path: &Path, flags: MsFlags) -> Result<(), Refusal> {
    let flags = flags | MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(NONE, path, NONE, flags, NONE)
        .map_err(|error| failed("make read-only", path, &error.into()))
}

fn failed(what: &str, path: &Path, error: &io::Error) -> Refusal {
    Refusal::failed(format!("{what} {}: {}", path.display(), said(error)))
}

fn locked(path: &Path) -> io::Result<MsFlags> {
    let opened = open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    mounts::locked_flags(&opened)
}

/// Makes a path read-only, if it is there.
fn protect(path: &Path) -> io::Result<()> {
    match mount(
        Some(path),
        path,
        NONE,
        MsFlags::MS_BIND | MsFlags::MS_REC,
        NONE,
    ) {
        Err(Errno::ENOENT) => return Ok(()),
        result => result?,
    }
    let restrictions = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let flags = locked(path)? & restrictions;
    let flags = flags | MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(NONE, path, NONE, flags, NONE)?;
    Ok(())
}

/// Hides a path, if it is there: a file by an empty device, a directory by an empty file system.
fn mask(path: &Path) -> io::Result<()> {
    match mount(Some("/dev/null"), path, NONE, MsFlags::MS_BIND, NONE) {
        Err(Errno::ENOENT) => Ok(()),
        Err(Errno::ENOTDIR) => {
            mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::MS_RDONLY, NONE)?;
            Ok(())
        }
        result => Ok(result?),
    }
}
