//! Locks on templates, and directories that exist only as long as their maker.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::digest::FileIdentity;
use super::key::TemplateKey;

/// The lock of one template. Held while it is built, verified for the first time, or removed, by
/// one thread of one process; gone with the process.
pub(super) struct KeyLock {
    _flock: Flock<File>,
    path: PathBuf,
}

impl KeyLock {
    /// Wait for the lock of `key`.
    pub fn acquire(directory: &Path, key: TemplateKey) -> io::Result<Self> {
        let path = Self::path(directory, key);
        if let Some(lock) = Self::lock(&path, FlockArg::LockExclusiveNonblock)? {
            return Ok(lock);
        }
        tracing::info!(
            key = key.short(),
            "waiting for another process that makes this template"
        );
        loop {
            if let Some(lock) = Self::lock(&path, FlockArg::LockExclusive)? {
                return Ok(lock);
            }
        }
    }

    /// The lock of `key`, unless somebody has it.
    pub fn try_acquire(directory: &Path, key: TemplateKey) -> io::Result<Option<Self>> {
        Self::lock(&Self::path(directory, key), FlockArg::LockExclusiveNonblock)
    }

    /// Where the lock of `key` is.
    pub fn path(directory: &Path, key: TemplateKey) -> PathBuf {
        directory.join(format!("{key}.lock"))
    }

    fn lock(path: &Path, how: FlockArg) -> io::Result<Option<Self>> {
        loop {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(path)?;
            let flock = match flock(file, how)? {
                Some(flock) => flock,
                None => return Ok(None),
            };
            // Whoever had the lock before may have removed the file: then it locks nothing.
            if is_at(&flock, path)? {
                return Ok(Some(Self {
                    _flock: flock,
                    path: path.to_owned(),
                }));
            }
        }
    }

    /// Release the lock and remove its file, for a template that is no more.
    pub fn remove(self) -> io::Result<()> {
        fs::remove_file(&self.path)
    }
}

/// Lock an open file or directory; `None` when somebody else has the lock and `how` is not to wait.
fn flock(mut file: File, how: FlockArg) -> io::Result<Option<Flock<File>>> {
    loop {
        match Flock::lock(file, how) {
            Ok(flock) => return Ok(Some(flock)),
            Err((again, Errno::EINTR)) => file = again,
            Err((_, Errno::EWOULDBLOCK)) => return Ok(None),
            Err((_, error)) => return Err(error.into()),
        }
    }
}

/// Whether `file` is what `path` names.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let held = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (held.dev(), held.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Beginning of the names of [`ScratchDirectory`]s.
const SCRATCH: &str = ".building-";

/// A directory that is removed with all that is in it when dropped. It is locked as long as it is in
/// use, so that one whose maker was killed is known by its lock being free.
pub(super) struct ScratchDirectory {
    flock: Option<Flock<File>>,
    path: PathBuf,
}

impl ScratchDirectory {
    /// A new, empty directory in `parent`, for its owner only.
    pub fn create(parent: &Path) -> io::Result<Self> {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = COUNTER.fetch_add(1, Ordering::Relaxed);
            let random = std::hash::BuildHasher::hash_one(
                &std::hash::RandomState::new(),
                (std::process::id(), number),
            );
            let path = parent.join(format!("{SCRATCH}{}-{random:016x}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            }
            // Between its creation and its lock, another process may take it for a stale one.
            let Ok(directory) = File::open(&path) else {
                continue;
            };
            let flock = flock(directory, FlockArg::LockExclusive)?;
            match &flock {
                Some(held) if is_at(held, &path)? => return Ok(Self { flock, path }),
                _ => continue,
            }
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Give the directory its final name, under which it stays.
    pub fn rename(mut self, target: &Path) -> io::Result<()> {
        fs::rename(&self.path, target)?;
        self.flock = None;
        Ok(())
    }

    /// What killed processes have left in `parent`. Whatever cannot be looked after is logged.
    pub fn stale(parent: &Path) -> Vec<Self> {
        let Ok(entries) = fs::read_dir(parent) else {
            return Vec::new();
        };
        let mut found = Vec::new();
        for entry in entries.flatten() {
            if !entry.file_name().to_string_lossy().starts_with(SCRATCH) {
                continue;
            }
            let path = entry.path();
            let stale = File::open(&path)
                .and_then(|directory| flock(directory, FlockArg::LockExclusiveNonblock));
            match stale {
                Ok(Some(flock)) => found.push(Self {
                    flock: Some(flock),
                    path,
                }),
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "cannot look after a build's directory");
                }
            }
        }
        found
    }

    /// Remove what killed processes have left in `parent`; what that was, and what came of it.
    pub fn remove_stale(parent: &Path) -> Vec<(PathBuf, io::Result<()>)> {
        let stale = Self::stale(parent).into_iter();
        let removed = stale.map(|mut directory| {
            tracing::info!(path = %directory.path.display(), "removing what a killed build has left");
            let result = directory.remove();
            directory.flock = None;
            (directory.path.clone(), result)
        });
        removed.collect()
    }

    /// Leave it where it is, for whoever comes next.
    pub fn leave(mut self) -> PathBuf {
        self.flock = None;
        std::mem::take(&mut self.path)
    }

    fn remove(&self) -> io::Result<()> {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

impl Drop for ScratchDirectory {
    fn drop(&mut self) {
        if self.flock.is_none() {
            return;
        }
        if let Err(error) = self.remove() {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove a build's directory");
        }
    }
}

/// When the template of `key` was last obtained, in nanoseconds since 1970, as its lock says.
pub(super) fn last_use(directory: &Path, key: TemplateKey) -> Option<i64> {
    let metadata = fs::metadata(KeyLock::path(directory, key)).ok()?;
    Some(FileIdentity::from_metadata(&metadata).mtime_ns())
}

/// Note that the template of `key` has been obtained now.
pub(super) fn note_use(directory: &Path, key: TemplateKey) {
    use nix::sys::stat::{UtimensatFlags, utimensat};
    use nix::sys::time::TimeSpec;
    let path = KeyLock::path(directory, key);
    let now = TimeSpec::UTIME_NOW;
    let result = utimensat(
        nix::fcntl::AT_FDCWD,
        &path,
        &now,
        &now,
        UtimensatFlags::FollowSymlink,
    );
    if let Err(error) = result {
        // On a read-only file system nothing is removed either.
        tracing::debug!(path = %path.display(), %error, "cannot note the use of a template");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_lock_excludes_until_it_is_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let key = TemplateKey::of(b"key");
        let lock = KeyLock::acquire(directory.path(), key).unwrap();
        assert!(
            KeyLock::try_acquire(directory.path(), key)
                .unwrap()
                .is_none()
        );
        assert!(
            KeyLock::try_acquire(directory.path(), TemplateKey::of(b"o"))
                .unwrap()
                .is_some()
        );
        drop(lock);
        assert!(
            KeyLock::try_acquire(directory.path(), key)
                .unwrap()
                .is_some()
        );
    }

    #[test]
    fn test_lock_file_removed_by_its_holder_is_made_anew_by_who_waited() {
        let directory = tempfile::tempdir().unwrap();
        let key = TemplateKey::of(b"key");
        let lock = KeyLock::acquire(directory.path(), key).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| KeyLock::acquire(directory.path(), key).unwrap());
            lock.remove().unwrap();
            let held = waiter.join().unwrap();
            assert!(
                KeyLock::try_acquire(directory.path(), key)
                    .unwrap()
                    .is_none()
            );
            drop(held);
        });
    }

    #[test]
    fn test_stale_directories_go_and_those_in_use_stay() {
        let parent = tempfile::tempdir().unwrap();
        let stale = parent.path().join(".building-1-0");
        fs::create_dir(&stale).unwrap();
        fs::write(stale.join("memory"), b"x").unwrap();
        let other = parent.path().join("other");
        fs::create_dir(&other).unwrap();
        let used = ScratchDirectory::create(parent.path()).unwrap();
        ScratchDirectory::remove_stale(parent.path());
        assert!(!stale.exists());
        assert!(other.exists());
        assert!(used.path().exists());
        let path = used.path().to_owned();
        drop(used);
        assert!(!path.exists());
    }

    #[test]
    fn test_renamed_directory_stays() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = ScratchDirectory::create(parent.path()).unwrap();
        scratch.rename(&parent.path().join("final")).unwrap();
        assert!(parent.path().join("final").exists());
    }
}
