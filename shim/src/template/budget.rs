//! Keeping the templates' disk space within bounds.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::key::TemplateKey;
use super::lock::{KeyLock, last_use};
use super::marker::Markers;

/// Disk space that all templates together may take.
pub(super) const DISK_BUDGET: u64 = 8 << 30;

/// Keys of all templates in `directory`, whatever state they are in.
pub(super) fn keys(directory: &Path) -> io::Result<Vec<TemplateKey>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut keys = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        if let Some(key) = name.to_str().and_then(|name| name.parse().ok()) {
            keys.push(key);
        }
    }
    keys.sort();
    Ok(keys)
}

/// Disk space that the template of `key` takes: allocated blocks, not apparent size.
pub(super) fn allocated_bytes(directory: &Path, key: TemplateKey) -> u64 {
    let Ok(entries) = fs::read_dir(directory.join(key.to_string())) else {
        return 0;
    };
    entries
        .flatten()
        .filter_map(|entry| entry.metadata().ok())
        .map(|m| m.blocks() * 512)
        .sum()
}

/// Remove least recently used templates until all together take at most `budget` bytes. That of
/// `keep` stays, as do those that somebody is building or verifying. Guests that run from a removed
/// template keep its files until they end.
pub(super) fn enforce(directory: &Path, markers: &Markers, keep: TemplateKey, budget: u64) {
    let keys = match keys(directory) {
        Ok(keys) => keys,
        Err(error) => {
            tracing::warn!(directory = %directory.display(), %error, "cannot list templates");
            return;
        }
    };
    let mut total = 0;
    let mut candidates = Vec::new();
    for key in keys {
        let bytes = allocated_bytes(directory, key);
        total += bytes;
        if key != keep {
            candidates.push((last_use(directory, key), key, bytes));
        }
    }
    candidates.sort();
    for (_, key, bytes) in candidates {
        if total <= budget {
            break;
        }
        match KeyLock::try_acquire(directory, key) {
            Ok(Some(lock)) => match remove(directory, markers, key, lock) {
                Ok(()) => {
                    tracing::info!(
                        key = key.short(),
                        bytes,
                        "removed the template that was not used for longest"
                    );
                    total -= bytes;
                }
                Err(error) => tracing::warn!(key = key.short(), %error, "cannot remove a template"),
            },
            Ok(None) => {}
            Err(error) => tracing::warn!(key = key.short(), %error, "cannot lock a template"),
        }
    }
}

/// Remove the template of `key` and its lock.
pub(super) fn remove(
    directory: &Path,
    markers: &Markers,
    key: TemplateKey,
    lock: KeyLock,
) -> io::Result<()> {
    remove_files(directory, markers, key)?;
    lock.remove()
}

/// Remove the files of the template of `key`, whose lock the caller has.
pub(super) fn remove_files(
    directory: &Path,
    markers: &Markers,
    key: TemplateKey,
) -> io::Result<()> {
    markers.remove(key);
    let path = directory.join(key.to_string());
    // The manifest first: without it nobody takes the rest for a template.
    for name in ["manifest.json", "state", "memory"] {
        match fs::remove_file(path.join(name)) {
            Err(error)
                if !matches!(
                    error.kind(),
                    io::ErrorKind::NotFound
                        | io::ErrorKind::NotADirectory
                        | io::ErrorKind::IsADirectory
                ) =>
            {
                return Err(error);
            }
            _ => {}
        }
    }
    let result = match fs::symlink_metadata(&path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(&path),
        Ok(_) => fs::remove_file(&path),
        Err(error) => Err(error),
    };
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
