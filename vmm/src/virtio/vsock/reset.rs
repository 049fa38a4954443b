//! Telling the driver that all its connections are gone (virtio 1.2, section 5.10.6.7).
//!
//! A snapshot does not hold the host's ends of streams. If some were open when the device stopped,
//! the driver gets `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET` and resets every connection it has. It does
//! so some time later, so nothing may be opened before: the driver has handled the event when it
//! gives the event's buffer back to the ring.

use crate::memory::MemoryView;

use crate::virtio::buffers::Buffers;
use crate::virtio::queue::DeviceQueue;

/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`.
const TRANSPORT_RESET: [u8; 4] = 0u32.to_le_bytes();

/// The most descriptors of an event's buffer.
const MAX_DESCRIPTORS: usize = 4;

/// The event queue, and how far the reset is.
pub struct TransportReset {
    queue: DeviceQueue,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The driver knows all.
    Done,
    /// Waiting for an event buffer.
    Owed,
    /// Waiting for the driver to give the buffer back. So many further buffers have been taken out
    /// of the ring, because a driver notifies only what follows the last that was taken.
    Sent(u16),
}

impl TransportReset {
    /// Serve the event queue; `owed` says whether a reset is to be told.
    pub fn new(queue: DeviceQueue, owed: bool) -> Self {
        let state = if owed { State::Owed } else { State::Done };
        TransportReset { queue, state }
    }

    /// The event queue.
    pub fn queue(&self) -> &DeviceQueue {
        &self.queue
    }

    /// Whether streams may be opened.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Go as far as the driver's buffers allow. To be called at the start and at each notification
    /// of the event queue.
    pub fn advance(&mut self, memory: &MemoryView) {
        if self.state == State::Done {
            return;
        }
        // A second round only when a buffer came between looking and listening. Not for one that may be
        // in memory which is not known yet.
        while self.step(memory) && self.queue.listen(memory) && !memory.is_stale() {}
        self.queue.signal(memory);
    }

    /// False when the reset is done.
    fn step(&mut self, memory: &MemoryView) -> bool {
        let Some(chain) = self.queue.pop(memory) else {
            return true;
        };
        if let State::Sent(taken) = self.state {
            // The driver's answer. It stays in the ring, with those that were taken out before it.
            self.put_back(taken + 1);
            self.state = State::Done;
            return false;
        }
        let head = chain.head_index();
        let mut event = Buffers::collect(memory, chain, MAX_DESCRIPTORS).unwrap_or_default();
        if event.writable.write(&TRANSPORT_RESET) < TRANSPORT_RESET.len() {
            self.queue.errors.report(&"an event buffer without room");
            self.queue.push_used(memory, head, 0);
            self.state = State::Done;
            return false;
        }
        // Before the driver can answer, so that none of them is its answer.
        let mut taken = 0;
        while taken < super::EVENT_QUEUE_SIZE && self.queue.pop(memory).is_some() {
            taken += 1;
        }
        self.queue
            .push_used(memory, head, TRANSPORT_RESET.len() as u32);
        self.state = State::Sent(taken);
        true
    }

    fn put_back(&mut self, count: u16) {
        for _ in 0..count {
            self.queue.unpop();
        }
    }

    /// Give the queue back, and whether the reset is still to be told (again).
    pub fn into_queue(mut self) -> (DeviceQueue, bool) {
        if let State::Sent(taken) = self.state {
            self.put_back(taken);
        }
        let unfinished = !self.is_done();
        (self.queue, unfinished)
    }
}
