//! What a file server is given to serve.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::process::{Resource, getrlimit};

/// Descriptors that the file server leaves to the rest of the process (vsock connections, block
/// devices, its own short-lived ones).
const RESERVED: u64 = 1024;

/// Most descriptors of a guest, whatever the process may have, which can be a thousand times more.
/// Each costs the host some 2 KiB that the guest need not have itself, and a guest's kernel that
/// caches this many inodes needs more than 1 GiB for them.
const MOST: u64 = 1 << 20;

/// A directory to export, and the means that the server needs beside it.
#[derive(Debug)]
pub struct FileServerRoot {
    pub(super) directory: PathBuf,
    /// `/proc/self/fd`, to open a file anew by the number of its descriptor.
    pub(super) descriptors: File,
    /// How many descriptors the guest's inodes and open files may take.
    pub(super) guest_limit: u64,
}

impl FileServerRoot {
    /// `directory`, with `descriptors` open on `/proc/self/fd` and `file_limit` descriptors in all.
    pub fn new(directory: &Path, descriptors: OwnedFd, file_limit: u64) -> Self {
        Self {
            directory: directory.to_owned(),
            descriptors: descriptors.into(),
            guest_limit: (file_limit - RESERVED.min(file_limit / 4)).min(MOST),
        }
    }

    /// `directory` for a process that is not jailed: a test or a tool. What the guest may do there,
    /// it may do with the rights of this process.
    pub fn without_jail(directory: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let descriptors = openat(CWD, "/proc/self/fd", flags, Mode::empty())?;
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Ok(Self::new(directory, descriptors, limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_guest_s_descriptors_are_bounded() {
        let limit = |file_limit| {
            let descriptors = File::open("/proc/self/fd").unwrap().into();
            FileServerRoot::new(Path::new("/"), descriptors, file_limit).guest_limit
        };
        assert_eq!(limit(64), 48);
        assert_eq!(limit(524_288), 524_288 - RESERVED);
        assert_eq!(limit(1 << 30), MOST);
        assert_eq!(limit(u64::MAX), MOST);
    }
}
