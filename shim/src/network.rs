//! The network namespace of all VMMs of the host: an empty one, which is made once and pinned.
//!
//! A VMM has no business with any network: it is handed the descriptors that it needs. A namespace
//! of its own for each would cost every start its making, every sandbox its memory, and give the VMM
//! the rights of an owner in it; this one belongs to the host.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FlockOperation, flock, fstatfs};
use rustix::mount::mount_bind;
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// `NSFS_MAGIC` (linux/magic.h): what is opened is a namespace and not the file that it is pinned on.
const NSFS_MAGIC: i64 = 0x6e73_6673;

/// The empty network namespace that is pinned at `path`; makes it when it is not there. Must be
/// called in the host's mount namespace, where the pin is to be.
pub fn pinned(path: &Path) -> io::Result<OwnedFd> {
    if let Some(namespace) = open(path)? {
        return Ok(namespace);
    }
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    flock(&file, FlockOperation::LockExclusive)?;
    // Somebody else may have been quicker: of them the lock was waited for.
    if let Some(namespace) = open(path)? {
        return Ok(namespace);
    }
    let namespace = make()?;
    let source = format!(
        "/proc/self/fd/{}",
        std::os::fd::AsRawFd::as_raw_fd(&namespace)
    );
    mount_bind(source.as_str(), path)?;
    Ok(namespace)
}

/// What is pinned at `path`.
fn open(path: &Path) -> io::Result<Option<OwnedFd>> {
    let file = match File::open(path) {
        Ok(file) => OwnedFd::from(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let is_namespace = fstatfs(file.as_fd())?.f_type as i64 == NSFS_MAGIC;
    Ok(is_namespace.then_some(file))
}

/// A new network namespace, made by a thread that is gone when this returns.
fn make() -> io::Result<OwnedFd> {
    let thread = std::thread::Builder::new().spawn(|| {
        #[allow(unsafe_code)]
        // SAFETY: descriptors stay shared; only the network namespace of this thread is separated.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
        Ok(OwnedFd::from(File::open("/proc/thread-self/ns/net")?))
    })?;
    thread
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn inode(namespace: &OwnedFd) -> u64 {
        File::from(namespace.try_clone().unwrap())
            .metadata()
            .unwrap()
            .ino()
    }

    #[test]
    fn test_one_namespace_for_all_that_is_not_the_caller_s() {
        // The pin is a mount, which is not to be left on the host.
        std::thread::spawn(|| {
            crate::mounts::enter_own_namespace().unwrap();
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("pin");
            let first = pinned(&path).unwrap();
            let second = pinned(&path).unwrap();
            assert_eq!(inode(&first), inode(&second));
            let own = File::open("/proc/self/ns/net").unwrap();
            assert_ne!(inode(&first), inode(&own.into()));
            rustix::mount::unmount(&path, rustix::mount::UnmountFlags::DETACH).unwrap();
            // A file without a namespace on it, as after a restart of the host.
            assert_ne!(inode(&pinned(&path).unwrap()), 0);
            rustix::mount::unmount(&path, rustix::mount::UnmountFlags::DETACH).unwrap();
        })
        .join()
        .unwrap();
    }
}
