//! Whether what the guest has of a file in its page cache is still the file.
//!
//! FUSE drops a file's cached pages at each open, unless the reply says that they may be kept
//! (FOPEN_KEEP_CACHE). Without that, each start of a program reads its file and libraries anew. Here
//! an open says so when the file has not changed since the open before, so the guest sees what the
//! host has written at its next open, as without a cache.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use virtiofsd::fuse::Attr;

/// A change is sure to show in the change time when the last one is at least this old: the kernel's
/// clock for it ticks every 1 to 10 ms, and two changes within a tick look like one.
const TICKS: Duration = Duration::from_millis(25);

/// What tells one content of a file from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    size: u64,
    modified: Duration,
    changed: Duration,
}

/// The content of each inode at its last open.
#[derive(Debug, Default)]
pub struct Freshness {
    stamps: Mutex<HashMap<u64, Stamp>>,
}

impl Freshness {
    /// `inode` is being opened and has attributes `attributes`: whether cached pages are still good.
    pub fn is_unchanged(&self, inode: u64, attributes: &Attr) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        self.is_unchanged_at(inode, attributes, now.unwrap_or_default())
    }

    fn is_unchanged_at(&self, inode: u64, attributes: &Attr, now: Duration) -> bool {
        let stamp = Stamp {
            size: attributes.size,
            modified: Duration::new(attributes.mtime, attributes.mtimensec),
            changed: Duration::new(attributes.ctime, attributes.ctimensec),
        };
        let mut stamps = self.stamps.lock().unwrap_or_else(PoisonError::into_inner);
        let settled = now
            .checked_sub(stamp.changed)
            .is_some_and(|age| age >= TICKS);
        match settled {
            true => stamps.insert(inode, stamp) == Some(stamp),
            false => {
                stamps.remove(&inode);
                false
            }
        }
    }

    /// The guest has forgotten `inode`, and its pages with it.
    pub fn forget(&self, inode: u64) {
        let mut stamps = self.stamps.lock().unwrap_or_else(PoisonError::into_inner);
        stamps.remove(&inode);
    }

    /// The guest has forgotten all.
    pub fn clear(&self) {
        let mut stamps = self.stamps.lock().unwrap_or_else(PoisonError::into_inner);
        *stamps = HashMap::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes(size: u64, changed_ms: u64) -> Attr {
        let changed = Duration::from_millis(changed_ms);
        Attr {
            size,
            mtime: 5,
            ctime: changed.as_secs(),
            ctimensec: changed.subsec_nanos(),
            ..Attr::default()
        }
    }

    const NOW: Duration = Duration::from_secs(100);

    #[test]
    fn test_the_second_open_of_an_unchanged_file_keeps() {
        let freshness = Freshness::default();
        assert!(!freshness.is_unchanged_at(1, &attributes(4, 1000), NOW));
        assert!(freshness.is_unchanged_at(1, &attributes(4, 1000), NOW));
        assert!(!freshness.is_unchanged_at(2, &attributes(4, 1000), NOW));
    }

    #[test]
    fn test_a_changed_file_does_not_keep_once() {
        let freshness = Freshness::default();
        freshness.is_unchanged_at(1, &attributes(4, 1000), NOW);
        for changed in [attributes(5, 1000), attributes(5, 1001)] {
            assert!(!freshness.is_unchanged_at(1, &changed, NOW));
            assert!(freshness.is_unchanged_at(1, &changed, NOW));
        }
    }

    #[test]
    fn test_a_file_changed_just_now_does_not_keep() {
        let freshness = Freshness::default();
        // It may change again without a sign. So may one of the future.
        for changed_ms in [99_990, 100_000, 200_000] {
            let attributes = attributes(4, changed_ms);
            assert!(!freshness.is_unchanged_at(1, &attributes, NOW));
            assert!(!freshness.is_unchanged_at(1, &attributes, NOW));
        }
        // What was read while it was unsettled is not kept when it is.
        let attributes = attributes(4, 99_990);
        let later = NOW + Duration::from_secs(1);
        assert!(!freshness.is_unchanged_at(1, &attributes, later));
        assert!(freshness.is_unchanged_at(1, &attributes, later));
    }

    #[test]
    fn test_what_is_forgotten_does_not_keep() {
        let freshness = Freshness::default();
        for forget in [|f: &Freshness| f.forget(1), |f: &Freshness| f.clear()] {
            freshness.is_unchanged_at(1, &attributes(4, 1000), NOW);
            forget(&freshness);
            assert!(!freshness.is_unchanged_at(1, &attributes(4, 1000), NOW));
        }
    }

    #[test]
    fn test_odd_times_are_no_panic() {
        let odd = Attr {
            mtime: u64::MAX,
            ctime: u64::MAX,
            mtimensec: 999_999_999,
            ctimensec: 999_999_999,
            ..Attr::default()
        };
        assert!(!Freshness::default().is_unchanged_at(1, &odd, NOW));
    }
}
