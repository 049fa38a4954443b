//! The device nodes and links of a container's `/dev`.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, SFlag, makedev, mknod, umask};
use pathrs::Root;

use super::description::Device;
use super::mounts::{by_descriptor, find_directory, find_file, said};
use crate::status::Refusal;

/// Devices that are in every container: name and minor number, all of memory's major number but the
/// terminal.
const DEFAULTS: [(&str, i64, i64); 6] = [
    ("/dev/null", 1, 3),
    ("/dev/random", 1, 8),
    ("/dev/full", 1, 7),
    ("/dev/tty", 5, 0),
    ("/dev/zero", 1, 5),
    ("/dev/urandom", 1, 9),
];

/// Links that are in every container.
const LINKS: [(&str, &str); 4] = [
    ("/proc/self/fd", "fd"),
    ("/proc/self/fd/0", "stdin"),
    ("/proc/self/fd/1", "stdout"),
    ("/proc/self/fd/2", "stderr"),
];

/// A directory of the guest's, which the container does not see.
const SCRATCH: &str = "/tmp";

/// Makes the nodes of a spec and those of the defaults that it does not name. In a user namespace, which
/// can make none, the guest's are bound.
pub fn make_all(root: &Root, devices: &[Device], binds: bool) -> Result<(), Refusal> {
    let named = |path: &str| devices.iter().any(|device| device.path == Path::new(path));
    let defaults = DEFAULTS
        .iter()
        .filter(|(path, ..)| !named(path))
        .map(|(path, major, minor)| Device {
            path: PathBuf::from(path),
            kind: "c".to_owned(),
            major: *major,
            minor: *minor,
            file_mode: Some(0o666),
            ..Device::default()
        });
    let before = umask(Mode::empty());
    let made = devices
        .iter()
        .cloned()
        .chain(defaults)
        .try_for_each(|device| {
            // Made as a link further down.
            if device.path == Path::new("/dev/ptmx") {
                return Ok(());
            }
            make(root, &device, binds).map_err(|error| {
                let path = device.path.display();
                Refusal::failed(format!("linux.devices: {path}: {}", said(&error)))
            })
        });
    umask(before);
    made
}

fn make(root: &Root, device: &Device, binds: bool) -> io::Result<()> {
    let parent = device.path.parent().unwrap_or(Path::new("/"));
    let name = device.path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let directory = find_directory(root, parent)?;
    if binds {
        return bind(root, &device.path, &device.path);
    }
    let kind = match device.kind.as_str() {
        "b" => SFlag::S_IFBLK,
        "c" | "u" => SFlag::S_IFCHR,
        "p" => SFlag::S_IFIFO,
        other => {
            return Err(io::Error::other(format!(
                "type: {other:?} is no type of device"
            )));
        }
    };
    match make_node(&by_descriptor(&directory).join(name), kind, device) {
        // The root has one, which stays.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        // On the host's file system, where a guest makes none.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            bind_new_node(root, kind, device)
        }
        made => made,
    }
}

fn make_node(path: &Path, kind: SFlag, device: &Device) -> io::Result<()> {
    let number = makedev(device.major.unsigned_abs(), device.minor.unsigned_abs());
    mknod(path, kind, Mode::empty(), number)?;
    chown(path, Some(device.uid), Some(device.gid))?;
    let mode = device.file_mode.unwrap_or(0o666) & 0o7777;
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Makes a node in a file system of its own and binds it. That file system stays for as long as the
/// container's mount does.
fn bind_new_node(root: &Root, kind: SFlag, device: &Device) -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    mount(
        Some("tmpfs"),
        SCRATCH,
        Some("tmpfs"),
        flags,
        Some("size=4k,mode=0700"),
    )?;
    let node = Path::new(SCRATCH).join("node");
    let made = make_node(&node, kind, device).and_then(|()| bind(root, &node, &device.path));
    umount2(SCRATCH, MntFlags::MNT_DETACH)?;
    made
}

fn bind(root: &Root, source: &Path, target: &Path) -> io::Result<()> {
    let target = find_file(root, target)?;
    mount(
        Some(source),
        &by_descriptor(&target),
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )?;
    Ok(())
}

/// Makes the links to a process's own descriptors, to the kernel's memory and to the terminals'
/// multiplexer.
pub fn make_links(root: &Root) -> Result<(), Refusal> {
    let failed =
        |error: io::Error| Refusal::failed(format!("make the links of /dev: {}", said(&error)));
    let directory = find_directory(root, Path::new("/dev")).map_err(failed)?;
    let place = by_descriptor(&directory);
    let core = Path::new("/proc/kcore")
        .exists()
        .then_some(("/proc/kcore", "core"));
    for (target, name) in LINKS.into_iter().chain(core) {
        match symlink(target, place.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(error));
            }
            _ => {}
        }
    }
    let multiplexer = place.join("ptmx");
    match fs::remove_file(&multiplexer) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    symlink("pts/ptmx", multiplexer).map_err(failed)
}
