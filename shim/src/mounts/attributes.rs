//! `mount_setattr(2)`, Linux 5.12: attributes of a whole tree of mounts at once, also of one that is
//! attached nowhere yet.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::mount::MountFlags;

/// What later mounts below a mount are shared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Propagation {
    /// Nothing.
    Private,
    /// They come from where it was cloned from.
    Slave,
}

impl Propagation {
    fn bits(self) -> u64 {
        match self {
            Self::Private => libc::MS_PRIVATE,
            Self::Slave => libc::MS_SLAVE,
        }
    }
}

/// Attributes of a mount that can be set recursively (`MOUNT_ATTR_*`).
const SETTABLE: [(MountFlags, u64); 6] = [
    (MountFlags::RDONLY, libc::MOUNT_ATTR_RDONLY),
    (MountFlags::NOSUID, libc::MOUNT_ATTR_NOSUID),
    (MountFlags::NODEV, libc::MOUNT_ATTR_NODEV),
    (MountFlags::NOEXEC, libc::MOUNT_ATTR_NOEXEC),
    (MountFlags::NODIRATIME, libc::MOUNT_ATTR_NODIRATIME),
    (
        MountFlags::from_bits_retain(1 << 8),
        libc::MOUNT_ATTR_NOSYMFOLLOW,
    ),
];

/// Set on every mount of the tree that `tree` is the root of: the attributes among `flags`, and the
/// propagation.
pub fn set_on_tree(
    tree: BorrowedFd<'_>,
    flags: MountFlags,
    propagation: Propagation,
) -> io::Result<()> {
    let mut attributes = libc::mount_attr {
        attr_set: 0,
        attr_clr: 0,
        propagation: propagation.bits(),
        userns_fd: 0,
    };
    for (flag, attribute) in SETTABLE {
        if flags.contains(flag) {
            attributes.attr_set |= attribute;
        }
    }
    if flags.contains(MountFlags::NOATIME) {
        // The times are one field of several bits, which has to be cleared to be set.
        attributes.attr_clr |= libc::MOUNT_ATTR__ATIME;
        attributes.attr_set |= libc::MOUNT_ATTR_NOATIME;
    }
    // SAFETY: the path is a NUL-terminated string, and the kernel reads no more of the attributes
    // than the size that it is given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | libc::AT_RECURSIVE,
            &raw const attributes,
            size_of_val(&attributes),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
