//! The host's way to connect to the guest.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::EventFd;

use super::table::MAX_STREAMS;

#[derive(Debug, Default)]
struct Waiting {
    requests: VecDeque<(u32, OwnedFd)>,
    /// Wakes the active device.
    wake: Option<EventFd>,
}

/// Connections that the device has not yet seen.
#[derive(Debug, Default)]
pub struct Requests(Mutex<Waiting>);

impl Requests {
    /// Take all.
    pub fn take(&self) -> VecDeque<(u32, OwnedFd)> {
        std::mem::take(&mut self.lock().requests)
    }

    /// Signal `wake` (if any) for each new one.
    pub fn set_wake(&self, wake: Option<EventFd>) {
        self.lock().wake = wake;
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // A panic in between cannot leave it half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens streams to the guest. Cheap to clone, and to be called from any thread.
#[derive(Debug, Clone)]
pub struct VsockHost {
    requests: Arc<Requests>,
}

impl VsockHost {
    pub(super) fn new(requests: Arc<Requests>) -> Self {
        VsockHost { requests }
    }

    /// Connect `socket`, one end of a pair of Unix stream sockets, to `port` of the guest. Bytes
    /// may be written to the other end at once; they arrive when the stream is open. A half-closed
    /// socket is a half-closed stream. When the guest refuses, or the device stops, the socket is
    /// closed and its peer sees the end of data.
    ///
    /// Before the device is active the connection waits for it.
    pub fn connect(&self, port: u32, socket: OwnedFd) {
        let mut waiting = self.requests.lock();
        if waiting.requests.len() >= MAX_STREAMS {
            tracing::warn!("vsock: connection to port {port} refused: {MAX_STREAMS} are waiting");
            return;
        }
        waiting.requests.push_back((port, socket));
        if let Some(wake) = &waiting.wake
            && let Err(error) = wake.write(1)
        {
            // Only a counter at its maximum fails, and then the device wakes anyway.
            tracing::debug!("vsock: {error}");
        }
    }
}
