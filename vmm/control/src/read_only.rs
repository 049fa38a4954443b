//! Files that a VMM is lent to be read, and nothing else.
//!
//! A descriptor that was opened for reading does not bind a process that is uid 0 towards the file
//! and can open it anew by `/proc/self/fd`, as the VMM's file server must be able to: it could open
//! it for writing, or change its mode. A file that was opened through a read-only mount stays as it
//! is, because the mount goes with the descriptor. So everything that outlives one sandbox, such as
//! template files, images and device nodes, is opened through a [`ReadOnlyView`] before it is given
//! away.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{OpenTreeFlags, open_tree};

/// A directory as a detached, read-only mount of its own, with everything mounted below it.
///
/// Needs `CAP_SYS_ADMIN` and Linux 5.12. Costs the kernel some 60 µs.
#[derive(Debug)]
pub struct ReadOnlyView {
    tree: OwnedFd,
}

const CLONE: OpenTreeFlags = OpenTreeFlags::OPEN_TREE_CLONE
    .union(OpenTreeFlags::OPEN_TREE_CLOEXEC)
    .union(OpenTreeFlags::AT_RECURSIVE);

impl ReadOnlyView {
    /// A view of `directory`.
    pub fn new(directory: &Path) -> io::Result<Self> {
        let tree = open_tree(CWD, directory, CLONE)?;
        make_read_only(&tree)?;
        Ok(Self { tree })
    }

    /// A view of a directory that is open.
    pub fn of(directory: &impl AsFd) -> io::Result<Self> {
        let tree = open_tree(directory, "", CLONE | OpenTreeFlags::AT_EMPTY_PATH)?;
        make_read_only(&tree)?;
        Ok(Self { tree })
    }

    /// Open `name` in the directory for reading. The descriptor is close-on-exec.
    pub fn open(&self, name: &str) -> io::Result<File> {
        self.open_with(name, OFlags::RDONLY)
    }

    /// Open the device node `name` in the directory for reading and writing, which a read-only mount
    /// does not hinder. The node itself cannot be changed.
    pub fn open_device(&self, name: &str) -> io::Result<File> {
        self.open_with(name, OFlags::RDWR)
    }

    fn open_with(&self, name: &str, access: OFlags) -> io::Result<File> {
        let flags = access | OFlags::CLOEXEC | OFlags::NOCTTY;
        Ok(openat(&self.tree, name, flags, Mode::empty())?.into())
    }
}

/// The directory, to open what is in it with flags of the caller's own.
impl AsFd for ReadOnlyView {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tree.as_fd()
    }
}

/// `mount_setattr(2)`: all of the detached `tree` becomes read-only.
fn make_read_only(tree: &impl AsFd) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_RDONLY,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    // SAFETY: the path is an empty C string, as AT_EMPTY_PATH wants it, and the structure is read
    // for the size that is given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | libc::AT_RECURSIVE,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::io::{Read, Write};

    use rustix::fs::{fchmod, fchown};
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn test_what_is_lent_cannot_be_opened_for_writing_nor_changed() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: making a mount needs root");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("memory"), "pages").unwrap();
        let view = ReadOnlyView::new(directory.path()).unwrap();
        let mut file = view.open("memory").unwrap();
        drop(view);

        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "pages");
        let again = format!("/proc/self/fd/{}", file.as_raw_fd());
        let error = OpenOptions::new().write(true).open(again).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EROFS));
        assert_eq!(fchmod(&file, Mode::RWXO), Err(Errno::ROFS));
        assert_eq!(fchown(&file, None, None), Err(Errno::ROFS));
        // The host's way to it is not affected.
        std::fs::write(directory.path().join("memory"), "other").unwrap();
    }

    #[test]
    fn test_a_lent_device_works_and_cannot_be_changed() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: making a mount needs root");
            return;
        }
        let view = ReadOnlyView::new(Path::new("/dev")).unwrap();
        let mut null = view.open_device("null").unwrap();
        null.write_all(b"text").unwrap();
        assert_eq!(fchmod(&null, Mode::RWXO), Err(Errno::ROFS));
        let error = view.open_device("no such device").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
