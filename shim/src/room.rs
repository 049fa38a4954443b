//! Whether the host has the memory that a start takes. Where it has not, the start is refused: a VMM that
//! was killed half-way would say nothing.

use std::fs;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Bytes that a sandbox takes until its container runs, with what it shares with nobody yet.
const NEEDED: u64 = 32 << 20;

/// What is short.
#[derive(Debug, Error)]
pub enum Shortage {
    /// All memory.
    #[error(
        "the host has {available} bytes of memory available, and a sandbox takes {NEEDED} to start: end \
         something first, or give the host more"
    )]
    Host {
        /// `MemAvailable`.
        available: u64,
    },
    /// What a cgroup may have.
    #[error(
        "cgroup {} has {left} bytes of memory left below its memory.max, and a sandbox takes {NEEDED} to \
         start: raise that limit (Kubernetes: the overhead of the RuntimeClass)", path.display()
    )]
    Cgroup {
        /// Its directory.
        path: PathBuf,
        /// What its limit leaves, with what the kernel can take back.
        left: u64,
    },
}

/// See that a start finds the memory that it takes, on the host and in `cgroup`, which need not be there
/// yet, and those above it.
pub fn check(cgroup: Option<&Path>) -> Result<(), Shortage> {
    // What cannot be read does not keep a container from starting.
    let available = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| number(&text, "MemAvailable:"))
        .map(|kib| kib.saturating_mul(1024));
    if let Some(available) = available.filter(|available| *available < NEEDED) {
        return Err(Shortage::Host { available });
    }
    for path in cgroup.into_iter().flat_map(Path::ancestors) {
        if let Some(left) = left_in(path).filter(|left| *left < NEEDED) {
            let path = path.to_owned();
            return Err(Shortage::Cgroup { path, left });
        }
    }
    Ok(())
}

/// Bytes that the limit of the cgroup `path` leaves, if it has one.
fn left_in(path: &Path) -> Option<u64> {
    let read = |file: &str| fs::read_to_string(path.join(file)).ok();
    let most: u64 = read("memory.max")?.trim().parse().ok()?;
    let current: u64 = read("memory.current")?.trim().parse().ok()?;
    let statistics = read("memory.stat").unwrap_or_default();
    let cached = ["inactive_file", "active_file"].map(|key| number(&statistics, key).unwrap_or(0));
    let used = current.saturating_sub(cached.iter().sum());
    Some(most.saturating_sub(used))
}

/// The number after `key` in a file of lines of both.
fn number(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(key)).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cgroup(directory: &Path, most: &str, current: u64, cached: u64) {
        fs::create_dir_all(directory).unwrap();
        let stat = format!("anon 1\ninactive_file {cached}\nactive_file 0\n");
        for (file, text) in [
            ("memory.max", most.to_owned()),
            ("memory.current", current.to_string()),
            ("memory.stat", stat),
        ] {
            fs::write(directory.join(file), text).unwrap();
        }
    }

    #[test]
    fn test_the_limit_of_a_cgroup_above_counts_and_page_cache_does_not() {
        let root = tempfile::tempdir().unwrap();
        let (above, below) = (root.path().join("a"), root.path().join("a/b/c"));
        cgroup(&above, "67108864\n", 60 << 20, 40 << 20);
        cgroup(&below, "max\n", 60 << 20, 0);
        check(Some(&below.join("new"))).unwrap();
        cgroup(&above, "67108864\n", 60 << 20, 20 << 20);
        let error = check(Some(&below)).unwrap_err().to_string();
        let start = format!("cgroup {} has 25165824 bytes", above.display());
        assert!(error.starts_with(&start), "{error}");
        cgroup(&above, "0\n", 60 << 20, 20 << 20);
        check(Some(&below)).unwrap_err();
    }

    #[test]
    fn test_numbers_are_those_of_the_whole_key() {
        assert_eq!(number("a 1\nab 2 kB\n", "ab"), Some(2));
        assert_eq!(number("a 1\nab x\n", "ab"), None);
        assert_eq!(number("", "a"), None);
    }
}
