//! One queue as its device serves it: chains out, used buffers in, few interrupts.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::EventFd;

use super::guest_error::GuestErrors;
use super::worker::{Poll, Wake};
use super::{Activation, ActiveQueue, DeviceError, Interrupt};

/// A chain that the driver has made available.
pub type Chain<'m> = DescriptorChain<&'m GuestMemoryMmap>;

/// A queue between activation and deactivation.
///
/// A ring that contradicts itself (indices that run ahead, heads outside of the table) makes the
/// queue *broken*: it yields nothing more until the driver resets the device. The rest of the
/// device, and the machine, are not affected.
pub struct DeviceQueue {
    active: ActiveQueue,
    interrupt: Arc<dyn Interrupt>,
    /// Buffers have been used since the last [`DeviceQueue::signal`].
    used: bool,
    broken: bool,
    /// Complaints about what the driver puts into the queue.
    pub errors: GuestErrors,
}

impl DeviceQueue {
    /// Take `index` out of the queues of an activation, for the device called `device`.
    pub fn take(
        activation: &mut Activation,
        index: u16,
        device: &'static str,
    ) -> Result<Self, DeviceError> {
        let position = activation
            .queues
            .iter()
            .position(|queue| queue.index == index)
            .ok_or(DeviceError::MissingQueue(index))?;
        let mut active = activation.queues.remove(position);
        active
            .queue
            .set_event_idx(activation.features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0);
        Ok(DeviceQueue {
            active,
            interrupt: activation.interrupt.clone(),
            used: false,
            broken: false,
            errors: GuestErrors::new(device),
        })
    }

    /// Readable when the driver has notified the queue.
    pub fn notify(&self) -> &EventFd {
        &self.active.notify
    }

    /// Take note of the driver's notification. Not to be called without one.
    pub fn acknowledge(&self) {
        // Fails when another reset of the counter came first, which is what is wanted.
        let _ = self.active.notify.read();
    }

    /// The next chain, or `None` when the driver has made no more available.
    pub fn pop<'m>(&mut self, memory: &'m GuestMemoryMmap) -> Option<Chain<'m>> {
        if self.broken {
            return None;
        }
        let chain = match self.active.queue.iter(memory) {
            Ok(mut chains) => chains.next(),
            Err(error) => {
                self.break_down(&error);
                return None;
            }
        };
        match chain {
            Some(chain) if chain.head_index() < self.active.queue.size() => Some(chain),
            Some(chain) => {
                self.break_down(&format_args!(
                    "head {} is no descriptor",
                    chain.head_index()
                ));
                None
            }
            None => {
                // Nothing there, or a ring that cannot be read.
                if let Err(error) = self.is_drained(memory) {
                    self.break_down(&error);
                }
                None
            }
        }
    }

    /// Give the chain that was popped last back to the driver's side, as if never popped.
    pub fn unpop(&mut self) {
        self.active.queue.go_to_previous_position();
    }

    /// The device is done with the chain `head` and has written `len` bytes into it.
    pub fn push_used(&mut self, memory: &GuestMemoryMmap, head: u16, len: u32) {
        match self.active.queue.add_used(memory, head, len) {
            Ok(()) => self.used = true,
            Err(error) => self.break_down(&error),
        }
    }

    /// Interrupt the driver if buffers have been used and it wants to know.
    pub fn signal(&mut self, memory: &GuestMemoryMmap) {
        if std::mem::take(&mut self.used)
            && self.active.queue.needs_notification(memory).unwrap_or(true)
        {
            self.interrupt.queue(self.active.index);
        }
    }

    /// Ask the driver not to notify, because the queue is looked at anyway.
    pub fn suppress(&mut self, memory: &GuestMemoryMmap) {
        if let Err(error) = self.active.queue.disable_notification(memory) {
            self.break_down(&error);
        }
    }

    /// Ask the driver to notify the next chain. True when one has come meanwhile, of which no
    /// notification may be expected.
    pub fn listen(&mut self, memory: &GuestMemoryMmap) -> bool {
        if self.broken {
            return false;
        }
        match self.active.queue.enable_notification(memory) {
            Ok(more) => more,
            Err(error) => {
                self.break_down(&error);
                false
            }
        }
    }

    /// Give the queue back with its indices.
    pub fn into_active(mut self, memory: &GuestMemoryMmap) -> ActiveQueue {
        self.signal(memory);
        self.active
    }

    fn is_drained(&self, memory: &GuestMemoryMmap) -> Result<(), virtio_queue::Error> {
        let available = self.active.queue.avail_idx(memory, Ordering::Acquire)?;
        if available.0 == self.active.queue.next_avail() {
            Ok(())
        } else {
            Err(virtio_queue::Error::InvalidAvailRingIndex)
        }
    }

    fn break_down(&mut self, error: &dyn std::fmt::Display) {
        if !std::mem::replace(&mut self.broken, true) {
            self.errors.report(&format_args!(
                "queue {} is not served until the device is reset: {error}",
                self.active.index
            ));
        }
    }
}

/// How a round of work on a queue ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Round {
    /// No chain is left.
    Drained,
    /// The round has done its share of work and there may be more.
    Share,
}

/// Serve one queue until the worker is to stop. `round` takes chains until there are no more or it
/// has done a bounded share of work; the driver is interrupted at most once after each round.
pub fn serve(
    poll: &Poll,
    queue: &mut DeviceQueue,
    memory: &GuestMemoryMmap,
    mut round: impl FnMut(&mut DeviceQueue, &GuestMemoryMmap) -> Round,
) {
    let mut events = Vec::new();
    // What became available before activation is not notified again.
    let mut more = true;
    loop {
        let timeout = more.then_some(std::time::Duration::ZERO);
        if poll.wait(&mut events, timeout) == Wake::Stop {
            return;
        }
        if events
            .iter()
            .any(|event| event.ready.contains(EventSet::IN))
        {
            queue.acknowledge();
        }
        queue.suppress(memory);
        more = round(queue, memory) == Round::Share || queue.listen(memory);
        queue.signal(memory);
    }
}
