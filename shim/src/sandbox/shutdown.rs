//! When the shim ends: containerd says so once, after a deletion, and whoever does not end then stays.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Sandbox;

/// Deletions that are under way.
#[derive(Debug, Default)]
pub(super) struct Deletions(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    under_way: usize,
    /// Shutdown was asked for during one of them.
    shutdown: bool,
}

impl Deletions {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A deletion that is under way until this is dropped.
pub(super) struct Deletion<'a>(&'a Sandbox);

impl Drop for Deletion<'_> {
    fn drop(&mut self) {
        let asked = {
            let mut state = self.0.deletions.lock();
            state.under_way -= 1;
            let asked = state.shutdown;
            // A group goes on; containerd asks again after its last container.
            state.shutdown &= state.under_way > 0;
            asked
        };
        if asked && self.0.close_if_empty() {
            self.0.finish();
        }
    }
}

impl Sandbox {
    /// A deletion begins.
    pub(super) fn begin_deletion(&self) -> Deletion<'_> {
        self.deletions.lock().under_way += 1;
        Deletion(self)
    }

    /// containerd wants the shim to end: it does, unless it has a container. A deletion may take longer
    /// than containerd waits for it, which then asks for the end during it, and not again.
    pub fn shut_down(&self) {
        if self.close_if_empty() {
            self.finish();
            return;
        }
        let mut state = self.deletions.lock();
        if state.under_way > 0 {
            state.shutdown = true;
        }
    }
}
