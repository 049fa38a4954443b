//! Complaints about what a guest does or causes, at a rate that it cannot use to fill the log.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// The least time between two lines of one kind.
const INTERVAL: Duration = Duration::from_secs(10);

/// Complaints of one device, each kind at most once in ten seconds.
#[derive(Debug)]
pub struct GuestErrors {
    device: &'static str,
    driver: Limit,
    host: Limit,
}

impl GuestErrors {
    /// Nothing reported yet.
    pub fn new(device: &'static str) -> Self {
        GuestErrors {
            device,
            driver: Limit::default(),
            host: Limit::default(),
        }
    }

    /// Log that the guest's driver has done something wrong, or count it.
    pub fn report(&mut self, error: &dyn Display) {
        if let Some(unsaid) = self.driver.take() {
            let device = self.device;
            tracing::warn!(
                device,
                unsaid,
                "the guest's driver broke the rules: {error}"
            );
        }
    }

    /// Log that the host could not do what the guest rightly asked for, or count it.
    pub fn report_failure(&mut self, error: &dyn Display) {
        if let Some(unsaid) = self.host.take() {
            let device = self.device;
            tracing::warn!(device, unsaid, "a request of the guest failed: {error}");
        }
    }
}

#[derive(Debug, Default)]
struct Limit {
    last: Option<Instant>,
    unsaid: u64,
}

impl Limit {
    /// How many were not said since the last line, when it is time for another.
    fn take(&mut self) -> Option<u64> {
        let now = Instant::now();
        if self.last.is_some_and(|last| now - last < INTERVAL) {
            self.unsaid += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_of_many_is_said() {
        let mut limit = Limit::default();
        assert_eq!(limit.take(), Some(0));
        for _ in 0..3 {
            assert_eq!(limit.take(), None);
        }
        limit.last = Instant::now().checked_sub(INTERVAL);
        assert_eq!(limit.take(), Some(3));
    }
}
