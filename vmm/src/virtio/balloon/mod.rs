//! Memory balloon (virtio 1.2, section 5.5), for one thing: the guest reports what it does not use
//! (5.5.6.7), and its host has that memory back at once.
//!
//! The host never asks for memory: the balloon's size is zero, always, and what a driver puts into the
//! queues of inflation and deflation stays there. A report is the guest's own doing, some seconds after
//! it has freed a block of 512 KiB or more; one that frees nothing reports nothing, and nothing here wakes
//! it. Reported pages may have any content afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::epoll::EventSet;

use super::queue::{Chain, DeviceQueue, Round, serve};
use super::worker::{Poll, Worker};
use super::{Activation, ActiveQueue, Device, DeviceError, DeviceType};
use crate::memory::{MemoryView, give_back};

/// The driver reports what it does not use (5.5.3).
const REPORTING: u64 = 1 << 5;

/// Number of the queue of reports: those of statistics and hints, which would be before it, are not
/// there without their features.
const REPORTS: u16 = 2;

/// Descriptors of the queues of inflation and deflation, of which nothing is used.
const IDLE_QUEUE_SIZE: u16 = 16;

/// Descriptors of the queue of reports: what Linux puts into one (`PAGE_REPORTING_CAPACITY`), and the
/// least that it accepts.
const REPORT_QUEUE_SIZE: u16 = 32;

/// Reports after which the worker looks up.
const SHARE: usize = 8;

/// What guests have reported.
#[derive(Debug, Default)]
pub struct Reported {
    reports: AtomicU64,
    bytes: AtomicU64,
}

impl Reported {
    /// How many reports there were.
    pub fn reports(&self) -> u64 {
        self.reports.load(Ordering::Relaxed)
    }

    /// Bytes that went back to the host, each time they did.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// A balloon that takes reports.
#[derive(Default)]
pub struct Balloon {
    reported: Arc<Reported>,
    /// The thread, and the queues that it leaves alone.
    work: Option<(Worker<ActiveQueue>, Vec<ActiveQueue>)>,
}

impl Balloon {
    /// What is reported, counted for the whole life of the device.
    pub fn reported(&self) -> Arc<Reported> {
        self.reported.clone()
    }
}

impl Device for Balloon {
    fn device_type(&self) -> DeviceType {
        DeviceType::Balloon
    }

    fn queue_sizes(&self) -> &[u16] {
        &[IDLE_QUEUE_SIZE, IDLE_QUEUE_SIZE, REPORT_QUEUE_SIZE]
    }

    fn features(&self) -> u64 {
        REPORTING | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        // The pages that the balloon should have, and those that the driver says it has.
        data.fill(0);
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), DeviceError> {
        // A driver without the feature has no such queue.
        if activation.features & REPORTING == 0 {
            return Ok(());
        }
        let mut queue = DeviceQueue::take(&mut activation, REPORTS, "balloon")?;
        let mut memory = activation.memory;
        let reported = self.reported.clone();
        let poll = Poll::new()?;
        poll.add(queue.notify(), 0, EventSet::IN)?;
        let worker = Worker::start("thaw-balloon", poll, move |poll| {
            serve(&poll, &mut queue, &mut memory, |queue, memory| {
                report_round(queue, memory, &reported)
            });
            queue.into_active(&memory)
        })?;
        self.work = Some((worker, activation.queues));
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let Some((worker, mut queues)) = self.work.take() else {
            return Vec::new();
        };
        queues.extend(worker.stop());
        queues
    }

    /// A report is answered before it is taken for done, so a snapshot finds none half-way.
    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        Ok(Vec::new())
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        match state {
            [] => Ok(()),
            _ => Err(DeviceError::State("a balloon has none".to_owned())),
        }
    }
}

fn report_round(queue: &mut DeviceQueue, memory: &MemoryView, reported: &Reported) -> Round {
    for _ in 0..SHARE {
        let Some(chain) = queue.pop(memory) else {
            return Round::Drained;
        };
        let head = chain.head_index();
        take_report(queue, memory, chain, reported);
        queue.push_used(memory, head, 0);
        // The driver waits for each, with the memory of it out of its reach.
        queue.signal(memory);
    }
    Round::Share
}

/// Give back what the chain lists. Its descriptors are the pages; there is nothing to read.
fn take_report(
    queue: &mut DeviceQueue,
    memory: &MemoryView,
    chain: Chain<'_>,
    reported: &Reported,
) {
    reported.reports.fetch_add(1, Ordering::Relaxed);
    for descriptor in chain.take(usize::from(REPORT_QUEUE_SIZE)) {
        let (address, length) = (descriptor.addr(), descriptor.len());
        match give_back(memory, address, length) {
            Some(Ok(bytes)) => drop(reported.bytes.fetch_add(bytes, Ordering::Relaxed)),
            Some(Err(error)) => queue.errors.report_failure(&format_args!(
                "giving {length} bytes at {:#x} back to the host: {error}",
                address.0
            )),
            None => queue.errors.report(&format_args!(
                "{length} bytes at {:#x}, which are not its memory, are reported as unused",
                address.0
            )),
        }
    }
}

#[cfg(test)]
mod tests;
