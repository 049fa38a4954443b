//! The steps of a start and when each was done.

use thaw_vmm_control::Phase;

/// CLOCK_MONOTONIC in nanoseconds.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The steps so far.
#[derive(Debug, Default, Clone)]
pub struct Phases(Vec<Phase>);

impl Phases {
    /// Step `name` is complete.
    pub fn mark(&mut self, name: &str) {
        self.mark_at(name, monotonic_ns());
    }

    /// Step `name` was complete at `monotonic_ns`.
    pub fn mark_at(&mut self, name: &str, monotonic_ns: u64) {
        self.0.push(Phase {
            name: name.to_owned(),
            monotonic_ns,
        });
    }

    /// The steps in order, to send them.
    pub fn into_vec(self) -> Vec<Phase> {
        self.0
    }

    /// The steps in order.
    pub fn as_slice(&self) -> &[Phase] {
        &self.0
    }
}
