//! The digests of the installed files, so that a start does not read them all.

use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::digest::{Digest, FileIdentity};

/// Digests of files by their identity, kept in a file beside the templates. A cache: what cannot be
/// read is as good as empty, and what cannot be written is not there next time.
pub(super) struct DigestCache {
    path: PathBuf,
    entries: Vec<Entry>,
    changed: bool,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    file: FileIdentity,
    sha256: Digest,
}

/// Entries kept: a few installations of three files each.
const ENTRIES: usize = 24;

/// More than [`ENTRIES`] entries take.
const MAX_BYTES: u64 = 64 << 10;

impl DigestCache {
    /// The cache that is kept in `directory`.
    pub fn load(directory: &Path) -> Self {
        let path = directory.join("digests.json");
        let entries = Self::read(&path).unwrap_or_default();
        Self {
            path,
            entries,
            changed: false,
        }
    }

    fn read(path: &Path) -> Option<Vec<Entry>> {
        let mut text = Vec::with_capacity(4096);
        File::open(path)
            .ok()?
            .take(MAX_BYTES)
            .read_to_end(&mut text)
            .ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// The digest of the file at `path`, computed if need be. A file that is known is not opened.
    pub fn digest(&mut self, path: &Path) -> io::Result<Digest> {
        let identity = FileIdentity::from_metadata(&std::fs::metadata(path)?);
        if let Some(entry) = self.entries.iter().find(|entry| entry.file == identity) {
            return Ok(entry.sha256);
        }
        let file = File::open(path)?;
        let sha256 = Digest::of_file(&file)?;
        // A file that has changed while it was read, or a moment before, may change once more
        // without a trace in its metadata: it is read again next time.
        if FileIdentity::of(&file)? == identity && !identity.is_fresh(now_ns()) {
            self.entries.insert(
                0,
                Entry {
                    file: identity,
                    sha256,
                },
            );
            self.entries.truncate(ENTRIES);
            self.changed = true;
        }
        Ok(sha256)
    }

    /// Keep what is new for the next process.
    pub fn store(&mut self) -> io::Result<()> {
        if !self.changed {
            return Ok(());
        }
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        // There before the first template: reading the images again costs more than a directory.
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
        super::publish::write_atomically(directory, &self.path, |file| {
            file.write_all(&serde_json::to_vec(&self.entries)?)
        })?;
        self.changed = false;
        Ok(())
    }
}

fn now_ns() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A file as it is some time after it was written. Only the mtime can be set, so the test waits
    /// for the ctime to age.
    fn settled_file(path: &Path, content: &[u8]) {
        std::fs::write(path, content).unwrap();
        std::thread::sleep(Duration::from_millis(2100));
    }

    #[test]
    fn test_settled_file_is_digested_once_and_again_after_a_change() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        settled_file(&path, b"content");
        let mut cache = DigestCache::load(directory.path());
        assert_eq!(cache.digest(&path).unwrap(), Digest::of(b"content"));
        cache.store().unwrap();

        // A wrong digest in the cache shows that it is used.
        let text = std::fs::read_to_string(&cache.path).unwrap();
        let wrong = Digest::of(b"wrong");
        let text = text.replace(&Digest::of(b"content").to_string(), &wrong.to_string());
        std::fs::write(&cache.path, text).unwrap();
        let mut cache = DigestCache::load(directory.path());
        assert_eq!(cache.digest(&path).unwrap(), wrong);

        std::fs::write(&path, b"contest").unwrap();
        assert_eq!(cache.digest(&path).unwrap(), Digest::of(b"contest"));
    }

    #[test]
    fn test_fresh_file_is_not_remembered() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, b"content").unwrap();
        let mut cache = DigestCache::load(directory.path());
        cache.digest(&path).unwrap();
        assert!(cache.entries.is_empty());
    }

    #[test]
    fn test_damaged_cache_is_empty() {
        let directory = tempfile::tempdir().unwrap();
        for text in ["", "{", "[{\"file\":1}]", "[]x"] {
            std::fs::write(directory.path().join("digests.json"), text).unwrap();
            assert!(
                DigestCache::load(directory.path()).entries.is_empty(),
                "{text}"
            );
        }
    }
}
