//! Complaints about the guest, at a rate that it cannot use to fill the log.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// The least time between two lines of one device.
const INTERVAL: Duration = Duration::from_secs(10);

/// What a guest's driver does wrong, logged at most once in ten seconds for each device.
#[derive(Debug)]
pub struct GuestErrors {
    device: &'static str,
    last: Option<Instant>,
    unsaid: u64,
}

impl GuestErrors {
    /// Nothing reported yet.
    pub fn new(device: &'static str) -> Self {
        GuestErrors {
            device,
            last: None,
            unsaid: 0,
        }
    }

    /// Log that the guest has done something wrong, or count it.
    pub fn report(&mut self, error: &dyn Display) {
        let now = Instant::now();
        if self.last.is_some_and(|last| now - last < INTERVAL) {
            self.unsaid += 1;
            return;
        }
        self.last = Some(now);
        let unsaid = std::mem::take(&mut self.unsaid);
        tracing::warn!(
            device = self.device,
            unsaid,
            "the guest's driver broke the rules: {error}"
        );
    }
}
