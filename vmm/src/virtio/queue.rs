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
use crate::memory::MemoryView;

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

    /// Descriptors in the queue, as the driver chose.
    pub fn size(&self) -> u16 {
        self.active.queue.size()
    }

    /// Take note of the driver's notification. Not to be called without one.
    pub fn acknowledge(&self) {
        // Fails when another reset of the counter came first, which is what is wanted.
        let _ = self.active.notify.read();
    }

    /// The next chain, or `None` when the driver has made no more available. Also when the memory has
    /// changed since `memory` was refreshed: the chain may be in what is new. [`DeviceQueue::listen`]
    /// says then that there is more.
    pub fn pop<'m>(&mut self, memory: &'m MemoryView) -> Option<Chain<'m>> {
        if self.broken {
            return None;
        }
        match self.try_pop(memory) {
            Ok(chain) => chain,
            Err(error) => {
                self.break_down(&error);
                None
            }
        }
    }

    fn try_pop<'m>(
        &mut self,
        view: &'m MemoryView,
    ) -> Result<Option<Chain<'m>>, virtio_queue::Error> {
        let memory: &GuestMemoryMmap = view;
        // Looked at once, and first: the driver may add a chain at any moment, and only a ring that
        // was not empty before is one that cannot be read.
        let available = self.active.queue.avail_idx(memory, Ordering::Acquire)?;
        if available.0 == self.active.queue.next_avail() || view.is_stale() {
            return Ok(None);
        }
        let chain = self.active.queue.iter(memory)?.next();
        match chain {
            Some(chain) if chain.head_index() < self.active.queue.size() => Ok(Some(chain)),
            Some(_) => Err(virtio_queue::Error::InvalidDescriptorIndex),
            None => Err(virtio_queue::Error::InvalidAvailRingIndex),
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
    memory: &mut MemoryView,
    mut round: impl FnMut(&mut DeviceQueue, &MemoryView) -> Round,
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
        memory.refresh();
        queue.suppress(memory);
        more = round(queue, memory) == Round::Share || queue.listen(memory);
        queue.signal(memory);
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_driver::{DriverQueue, FEATURES, TestInterrupt, activation, memory};
    use super::*;

    /// A driver may add a chain between any two looks at its ring. That must not be taken for a
    /// ring that contradicts itself.
    #[test]
    fn chains_added_at_any_moment_do_not_break_the_queue() {
        const CHAINS: u32 = 200_000;
        let memory = memory(0x1_0000);
        let interrupt = Arc::new(TestInterrupt::default());
        let mut driver = DriverQueue::new(&memory, &interrupt, 0, 16, 0);
        let mut activation = activation(&memory, &interrupt, vec![driver.device_side()], FEATURES);
        let mut queue = DeviceQueue::take(&mut activation, 0, "test").unwrap();
        let adding = std::thread::spawn(move || {
            let mut added = 0;
            while added < CHAINS {
                if driver.room() > 0 {
                    driver.add(&[(0x8000, 16, true)]);
                    added += 1;
                }
                while driver.take_used().is_some() {}
            }
        });
        let mut popped = 0;
        while popped < CHAINS {
            assert!(!queue.broken, "after {popped}");
            if let Some(chain) = queue.pop(&activation.memory) {
                let head = chain.head_index();
                queue.push_used(&memory, head, 0);
                popped += 1;
            }
        }
        adding.join().unwrap();
    }

    #[test]
    fn a_head_that_is_no_descriptor_breaks_the_queue() {
        let memory = memory(0x1_0000);
        let interrupt = Arc::new(TestInterrupt::default());
        let mut driver = DriverQueue::new(&memory, &interrupt, 0, 16, 0);
        let mut activation = activation(&memory, &interrupt, vec![driver.device_side()], FEATURES);
        let mut queue = DeviceQueue::take(&mut activation, 0, "test").unwrap();
        driver.offer(16);
        driver.add(&[(0x8000, 16, true)]);
        assert!(queue.pop(&activation.memory).is_none());
        assert!(queue.pop(&activation.memory).is_none());
        assert!(!queue.listen(&memory), "nothing to wait for");
    }

    #[test]
    fn a_chain_put_back_comes_again() {
        let memory = memory(0x1_0000);
        let interrupt = Arc::new(TestInterrupt::default());
        let mut driver = DriverQueue::new(&memory, &interrupt, 0, 16, 0);
        let mut activation = activation(&memory, &interrupt, vec![driver.device_side()], FEATURES);
        let mut queue = DeviceQueue::take(&mut activation, 0, "test").unwrap();
        let head = driver.add(&[(0x8000, 16, true)]);
        for _ in 0..2 {
            assert_eq!(queue.pop(&activation.memory).unwrap().head_index(), head);
            assert!(queue.pop(&activation.memory).is_none());
            queue.unpop();
        }
        assert!(queue.listen(&memory));
    }
}
