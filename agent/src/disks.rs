//! Disks: block slots that have a backing in this clone. The template's kernel has found them empty, and
//! hears of their size when it runs again.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, setsockopt,
    socket, sockopt,
};
use nix::sys::stat::{major, minor};
use nix::sys::time::{TimeVal, TimeValLike};
use nix::unistd::sync;
use serde::Deserialize;
use thaw_agent_api::agent::{Disk, DiskNumbers};
use thaw_agent_api::{ROOT_DISK, disk_path};
use tracing::warn;

use crate::status::Refusal;
use crate::sys;

/// How long the kernel may take to hear of a disk's size.
const LIMIT: Duration = Duration::from_secs(30);

/// The multicast group of the kernel's own events (`linux/netlink.h`, `NETLINK_KOBJECT_UEVENT`).
const KERNEL_EVENTS: u32 = 1;

/// Wait until all of `disks` have their size, and make the read-only ones that. Their numbers.
pub fn take(disks: &[Disk]) -> Result<Vec<DiskNumbers>, Refusal> {
    if disks.is_empty() {
        return Ok(Vec::new());
    }
    let failed = |disk: &Disk, error: io::Error| {
        Refusal::failed(format!("the disk in block slot {}: {error}", disk.slot))
    };
    ANY.store(true, Ordering::Relaxed);
    // Before the first look, so that no change is missed after it.
    let events = Events::listen()
        .map_err(|error| Refusal::failed(format!("listen for the kernel's events: {error}")))?;
    disks
        .iter()
        .map(|disk| take_one(disk, &events).map_err(|error| failed(disk, error)))
        .collect()
}

fn take_one(disk: &Disk, events: &Events) -> io::Result<DiskNumbers> {
    let path = disk_path(disk.slot);
    let name = Path::new(&path).file_name().unwrap_or_default();
    let size = Path::new("/sys/class/block").join(name).join("size");
    loop {
        let sectors = fs::read_to_string(&size)?;
        if sectors.trim() == disk.sectors.to_string() {
            break;
        }
        if !events.wait()? {
            return Err(io::Error::other(format!(
                "has {} sectors after {LIMIT:?}, and not {}",
                sectors.trim(),
                disk.sectors
            )));
        }
    }
    if disk.read_only {
        sys::make_block_device_read_only(&File::open(&path)?)?;
    }
    let number = fs::metadata(&path)?.rdev();
    let small = |number: u64| u32::try_from(number).map_err(io::Error::other);
    Ok(DiskNumbers {
        major: small(major(number))?,
        minor: small(minor(number))?,
        ..Default::default()
    })
}

/// What the kernel says of its devices.
struct Events(std::os::fd::OwnedFd);

impl Events {
    fn listen() -> io::Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Datagram,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkKObjectUEvent,
        )?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, KERNEL_EVENTS))?;
        let limit = TimeVal::milliseconds(LIMIT.as_millis() as i64);
        setsockopt(&socket, sockopt::ReceiveTimeout, &limit)?;
        Ok(Self(socket))
    }

    /// Wait for the next; false when there is none in time.
    fn wait(&self) -> io::Result<bool> {
        match recv(self.0.as_raw_fd(), &mut [0; 4096], MsgFlags::empty()) {
            // More than the socket holds: some were missed, and something has changed.
            Ok(_) | Err(Errno::ENOBUFS | Errno::EINTR) => Ok(true),
            Err(Errno::EAGAIN) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Whether the container with this spec has its root on a disk.
pub fn is_root_of(spec: &[u8]) -> bool {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Spec {
        root: Root,
    }
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Root {
        path: PathBuf,
    }
    serde_json::from_slice(spec).is_ok_and(|spec: Spec| spec.root.path == Path::new(ROOT_DISK))
}

/// Leave the disk that was a container's root as one that was unmounted. Its processes are gone, but
/// perhaps not yet their mounts, so that an unmounting would not be the end of the file system.
pub fn settle_root() {
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    let none = None::<&str>;
    if let Err(error) = mount(none, ROOT_DISK, none, flags, none) {
        warn!("make the root's disk read-only: {error}");
    }
}

/// Whether this clone has any disk.
static ANY: AtomicBool = AtomicBool::new(false);

/// Have all that was written be on the disks when this returns: a VM that is not needed any more is
/// ended without asking.
pub fn write_back() {
    if ANY.load(Ordering::Relaxed) {
        sync();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_root_on_a_disk_is_known_by_its_path() {
        assert!(is_root_of(br#"{"root":{"path":"/run/thaw/root"}}"#));
        for other in [
            &br#"{"root":{"path":"/run/thaw/share/x"}}"#[..],
            b"{}",
            b"no spec",
        ] {
            assert!(!is_root_of(other));
        }
    }

    #[test]
    fn test_no_disk_is_no_wait_and_a_missing_one_is_named() {
        assert!(take(&[]).unwrap().is_empty());
        let disk = Disk {
            slot: 25,
            sectors: 1,
            ..Default::default()
        };
        let refused = take(&[disk]).unwrap_err();
        assert!(
            refused.message.contains("the disk in block slot 25"),
            "{refused:?}"
        );
    }
}
