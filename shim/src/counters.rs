//! What is counted over all sandboxes of a host since its boot, for `thaw metrics`:
//! `/run/thaw/.counters`.
//!
//! Counters must outlive the shims that count, and no process is there to keep them: they are one small
//! file, changed under a lock by each start after it is done. A file that cannot be read, as after a
//! crash of the host, is begun anew, which is what counters may do.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::facts;
use crate::trace::Summary;

/// Upper bounds of a histogram's buckets, in milliseconds.
pub const BUCKETS_MS: [u64; 12] = [
    5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 60_000,
];

/// Most kinds of failures that are told apart; what else there is counts as [`OTHER`].
const MOST_FAILURES: usize = 64;

/// A failure of no kind of its own.
const OTHER: &str = "other";

/// All counters.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Containers that were started.
    pub starts: u64,
    /// Duration of each phase of these starts.
    pub phases: BTreeMap<String, Histogram>,
    /// Starts that failed: by reason, then by the step after which it was.
    pub failures: BTreeMap<String, BTreeMap<String, u64>>,
}

/// How often a duration was in each of [`BUCKETS_MS`], the last one being for what is longer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram {
    counts: [u64; BUCKETS_MS.len() + 1],
    /// Nanoseconds of all together.
    pub sum_ns: u64,
}

impl Histogram {
    fn add(&mut self, ns: u64) {
        let bucket = BUCKETS_MS.iter().position(|most| ns <= most * 1_000_000);
        self.counts[bucket.unwrap_or(BUCKETS_MS.len())] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// How many durations were no longer than each bound, and at the end all of them.
    pub fn cumulative(&self) -> [u64; BUCKETS_MS.len() + 1] {
        let mut sum = 0;
        self.counts.map(|count| {
            sum += count;
            sum
        })
    }
}

impl Counters {
    fn add_start(&mut self, summary: &Summary) {
        self.starts += 1;
        for (name, ns) in summary.phases() {
            if let Some(ns) = ns {
                self.phases.entry(name.to_owned()).or_default().add(ns);
            }
        }
    }

    fn add_failure(&mut self, reason: &str, after: &str) {
        let kinds: usize = self.failures.values().map(BTreeMap::len).sum();
        let known = self
            .failures
            .get(reason)
            .is_some_and(|steps| steps.contains_key(after));
        let (reason, after) = if known || kinds < MOST_FAILURES {
            (reason, after)
        } else {
            (OTHER, OTHER)
        };
        let steps = self.failures.entry(reason.to_owned()).or_default();
        *steps.entry(after.to_owned()).or_default() += 1;
    }
}

/// The directory of the counters.
pub fn directory() -> PathBuf {
    facts::root().join(".counters")
}

/// Count a start.
pub fn count_start(directory: &Path, summary: &Summary) -> io::Result<()> {
    change(directory, |counters| counters.add_start(summary))
}

/// Count a start that failed for `reason`, after the step `after`. Both are words of thaw's own.
pub fn count_failure(directory: &Path, reason: &str, after: &str) -> io::Result<()> {
    change(directory, |counters| counters.add_failure(reason, after))
}

/// The counters in `directory`; all zero where there are none.
pub fn read(directory: &Path) -> io::Result<Counters> {
    match fs::read(directory.join(FILE)) {
        Ok(text) => Ok(serde_json::from_slice(&text).unwrap_or_default()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Counters::default()),
        Err(error) => Err(error),
    }
}

fn change(directory: &Path, change: impl FnOnce(&mut Counters)) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)?;
    let lock = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(directory.join("lock"))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    let mut counters = read(directory)?;
    change(&mut counters);
    let unfinished = directory.join("counters.json.new");
    let text = serde_json::to_vec(&counters).map_err(io::Error::other)?;
    fs::write(&unfinished, text)?;
    fs::rename(&unfinished, directory.join(FILE))
}

const FILE: &str = "counters.json";

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(create_ns: u64) -> Summary {
        Summary {
            create_ns: Some(create_ns),
            ..Summary::default()
        }
    }

    #[test]
    fn test_counts_of_many_at_once_add_up() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().join("counters");
        std::thread::scope(|scope| {
            for number in 0..8 {
                let directory = &directory;
                scope.spawn(move || {
                    for _ in 0..25 {
                        count_start(directory, &summary(number * 10_000_000)).unwrap();
                        count_failure(directory, "failed", "spec read").unwrap();
                    }
                });
            }
        });
        let counters = read(&directory).unwrap();
        assert_eq!(counters.starts, 200);
        assert_eq!(counters.failures["failed"]["spec read"], 200);
        let create = &counters.phases["create"];
        assert_eq!(
            create.sum_ns,
            25 * (0..8).map(|n| n * 10_000_000).sum::<u64>()
        );
        assert_eq!(create.cumulative()[..5], [25, 50, 75, 150, 200]);
        assert_eq!(create.cumulative()[BUCKETS_MS.len()], 200);
        assert!(!counters.phases.contains_key("restore"));
    }

    #[test]
    fn test_damaged_counters_begin_anew_and_absent_ones_are_zero() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(read(directory.path()).unwrap(), Counters::default());
        fs::write(directory.path().join(FILE), "{\"starts\": 4").unwrap();
        count_start(directory.path(), &summary(1)).unwrap();
        assert_eq!(read(directory.path()).unwrap().starts, 1);
    }

    #[test]
    fn test_kinds_of_failures_are_bounded() {
        let mut counters = Counters::default();
        for number in 0..1000 {
            counters.add_failure("failed", &number.to_string());
        }
        let kinds: usize = counters.failures.values().map(BTreeMap::len).sum();
        assert_eq!(kinds, MOST_FAILURES + 1);
        assert_eq!(counters.failures[OTHER][OTHER], 1000 - MOST_FAILURES as u64);
        counters.add_failure("failed", "3");
        assert_eq!(counters.failures["failed"]["3"], 2);
    }
}
