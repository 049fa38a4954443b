//! What the containers of a sandbox bind of the host, each once: containers that bind one directory or
//! file in the same way have one mount of it, which is one file system to the guest. Its sockets and locks
//! then work between the containers, as they do where both are on the host.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::mount::MountFlags;
use thaw_agent_api::VOLUMES;

use super::options::{Options, Recursion};
use super::{Propagation, bind, make_like, take_away};

/// The sources that a sandbox's containers bind, below its export.
#[derive(Debug)]
pub struct Volumes {
    export: PathBuf,
    mounted: Mutex<Mounted>,
}

#[derive(Debug, Default)]
struct Mounted {
    by_number: BTreeMap<u64, Volume>,
    /// None is used twice: the guest may still know an old one by its name.
    last_number: u64,
}

#[derive(Debug)]
struct Volume {
    source: Source,
    users: usize,
}

/// What is bound, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Source {
    /// Of the file: its mount, its device's major and minor number, its inode.
    identity: (u64, u32, u32, u64),
    flags: MountFlags,
    recursion: Recursion,
    propagation: Propagation,
}

impl Source {
    fn new(path: &Path, options: &Options) -> io::Result<Self> {
        let wanted = StatxFlags::INO | StatxFlags::MNT_ID;
        let found = statx(CWD, path, AtFlags::empty(), wanted)?;
        Ok(Self {
            identity: (
                found.stx_mnt_id,
                found.stx_dev_major,
                found.stx_dev_minor,
                found.stx_ino,
            ),
            flags: options.flags,
            recursion: options.bind.unwrap_or(Recursion::Yes),
            propagation: options.propagation.unwrap_or(Propagation::Private),
        })
    }
}

impl Volumes {
    /// None yet, below `export`.
    pub fn new(export: PathBuf) -> Self {
        Self {
            export,
            mounted: Mutex::default(),
        }
    }

    /// Have `source` bound with `options` for one more user. Returns the volume's number.
    pub(super) fn add(&self, source: &Path, options: &Options) -> io::Result<u64> {
        let what = Source::new(source, options)?;
        let mut mounted = self.lock();
        let same = mounted.by_number.iter_mut();
        for (number, volume) in same.filter(|(_, volume)| volume.source == what) {
            if self.is_still_equal(*number, source, &what)? {
                volume.users += 1;
                return Ok(*number);
            }
        }
        let number = mounted.last_number + 1;
        let target = self.path(number);
        fs::create_dir_all(self.export.join(VOLUMES))?;
        make_like(source, &target)?;
        if let Err(error) = bind(source, &target, options) {
            let _ = take_away(&target);
            return Err(error);
        }
        mounted.last_number = number;
        let volume = Volume {
            source: what,
            users: 1,
        };
        mounted.by_number.insert(number, volume);
        Ok(number)
    }

    /// One user of volume `number` is gone; with the last one the mount goes.
    pub(super) fn release(&self, number: u64) -> io::Result<()> {
        let mut mounted = self.lock();
        let Some(volume) = mounted.by_number.get_mut(&number) else {
            return Ok(());
        };
        volume.users -= 1;
        if volume.users > 0 {
            return Ok(());
        }
        mounted.by_number.remove(&number);
        take_away(&self.path(number))
    }

    /// Whether volume `number` has what `source` has now: what is mounted below the one or the other since
    /// then shows in both only where mounts are passed on.
    fn is_still_equal(&self, number: u64, source: &Path, what: &Source) -> io::Result<bool> {
        if what.recursion == Recursion::No || what.propagation == Propagation::Slave {
            return Ok(true);
        }
        let (source, volume) = (fs::canonicalize(source)?, self.path(number));
        let table = fs::read("/proc/thread-self/mountinfo")?;
        let below = |point: PathBuf| {
            [&source, &volume]
                .iter()
                .any(|top| point != **top && point.starts_with(top))
        };
        Ok(!table
            .split(|byte| *byte == b'\n')
            .filter_map(mount_point)
            .any(below))
    }

    /// Where volume `number` is in the export.
    pub(super) fn name(number: u64) -> PathBuf {
        Path::new(VOLUMES).join(number.to_string())
    }

    fn path(&self, number: u64) -> PathBuf {
        self.export.join(Self::name(number))
    }

    fn lock(&self) -> MutexGuard<'_, Mounted> {
        self.mounted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The fifth field of a line of `/proc/self/mountinfo` (proc(5)), in which some bytes are written as a
/// backslash and three octal digits.
fn mount_point(line: &[u8]) -> Option<PathBuf> {
    let field = line.split(|byte| *byte == b' ').nth(4)?;
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..3).filter(|_| *first == b'\\');
        let octal = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|octal| u8::from_str_radix(octal, 8).ok()) {
            Some(byte) => {
                path.push(byte);
                rest = &after[3..];
            }
            None => {
                path.push(*first);
                rest = after;
            }
        }
    }
    Some(OsString::from_vec(path).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_mount_point_is_read_as_it_is_written() {
        let line = br"36 35 98:0 / /a\040b\134c\012 rw,noatime master:1 - ext3 /dev/root rw";
        let point = mount_point(line).unwrap();
        assert_eq!(point, Path::new("/a b\\c\n"));
        for odd in [&b""[..], b"1 2 3", br"a b c d"] {
            assert_eq!(mount_point(odd), None);
        }
        assert_eq!(mount_point(br"1 2 3 / \9 rw").unwrap(), Path::new(r"\9"));
    }
}
