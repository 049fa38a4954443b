//! What the file server has done, in numbers.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters for the whole life of a device.
#[derive(Debug, Default)]
pub struct FileCounts {
    requests: AtomicU64,
    releases: AtomicU64,
}

impl FileCounts {
    /// Requests that were answered.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Those of them that tell of a closed file or directory, for which no program waits.
    pub fn releases(&self) -> u64 {
        self.releases.load(Ordering::Relaxed)
    }

    pub(super) fn count_request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_release(&self) {
        self.releases.fetch_add(1, Ordering::Relaxed);
    }
}
