//! Memory device (virtio 1.2, section 5.15): blocks of memory above the template's RAM, which the guest
//! plugs when its owner lets it.
//!
//! In a template nothing is requested, and a device of which nothing is requested has no thread
//! ([`Device::has_backing`]); its driver's set-up waits. [`MemorySlot::request`] says how much the guest
//! may have, and its driver plugs blocks until it has that. A block that is not plugged is nothing, to
//! the guest and to all devices: see [`PluggableMemory`].

mod request;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::epoll::EventSet;

use self::request::serve_round;
use super::queue::{DeviceQueue, serve};
use super::worker::{Poll, Worker};
use super::{Activation, ActiveQueue, Device, DeviceError, DeviceType, Interrupt, config_space};
use crate::memory::{BLOCK_SIZE, PluggableMemory};

/// The driver must not touch what is not plugged (`VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE`, 5.15.3).
const UNPLUGGED_INACCESSIBLE: u64 = 1 << 1;

/// Descriptors of the request queue. The driver has one request of two on its way.
const QUEUE_SIZE: u16 = 16;

/// Why a guest cannot be given that much.
#[derive(Debug, Error)]
#[error("plugging {wanted} bytes of memory: the guest has addresses for {most}")]
pub struct TooMuchMemory {
    wanted: u64,
    most: u64,
}

/// What the device and its owner share.
#[derive(Default)]
struct Shared {
    /// Bytes that the driver should plug.
    requested: u64,
    /// The way to a driver that is at work.
    interrupt: Option<Arc<dyn Interrupt>>,
}

/// The owner's side of a [`MemoryDevice`].
#[derive(Clone)]
pub struct MemorySlot {
    memory: Arc<PluggableMemory>,
    shared: Arc<Mutex<Shared>>,
}

impl MemorySlot {
    /// Let the guest have `bytes` beside its RAM, rounded up to blocks. It plugs or unplugs blocks until
    /// it has that, as far as it can. A device that had nothing has to be started afterwards.
    pub fn request(&self, bytes: u64) -> Result<(), TooMuchMemory> {
        let most = self.memory.range().size;
        let requested = bytes
            .checked_next_multiple_of(BLOCK_SIZE)
            .filter(|requested| *requested <= most)
            .ok_or(TooMuchMemory {
                wanted: bytes,
                most,
            })?;
        let mut shared = lock(&self.shared);
        if std::mem::replace(&mut shared.requested, requested) != requested
            && let Some(interrupt) = &shared.interrupt
        {
            interrupt.config();
        }
        Ok(())
    }

    /// Bytes that the guest has plugged.
    pub fn plugged(&self) -> u64 {
        self.memory.plugged()
    }
}

/// The device's own part of a snapshot: what its driver has read at probe.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct State {
    start: u64,
    size: u64,
}

/// A memory device with its request queue.
pub struct MemoryDevice {
    memory: Arc<PluggableMemory>,
    shared: Arc<Mutex<Shared>>,
    worker: Option<Worker<ActiveQueue>>,
}

impl MemoryDevice {
    /// The device through which `memory` is plugged, and its owner's side.
    pub fn new(memory: Arc<PluggableMemory>) -> (Self, MemorySlot) {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let slot = MemorySlot {
            memory: memory.clone(),
            shared: shared.clone(),
        };
        let device = MemoryDevice {
            memory,
            shared,
            worker: None,
        };
        (device, slot)
    }
}

impl Device for MemoryDevice {
    fn device_type(&self) -> DeviceType {
        DeviceType::Memory
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn features(&self) -> u64 {
        UNPLUGGED_INACCESSIBLE | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let range = self.memory.range();
        // struct virtio_mem_config: block size, node, padding, address, size of the region, usable and
        // plugged part of it, requested part. All of the region is usable: what counts is how much is
        // requested.
        let fields = [
            BLOCK_SIZE,
            0,
            range.start,
            range.size,
            range.size,
            self.memory.plugged(),
            lock(&self.shared).requested,
        ];
        let config: Vec<u8> = fields.into_iter().flat_map(u64::to_le_bytes).collect();
        config_space::read(&config, offset, data);
    }

    fn has_backing(&self) -> bool {
        lock(&self.shared).requested > 0 || self.memory.plugged() > 0
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), DeviceError> {
        let mut queue = DeviceQueue::take(&mut activation, 0, "memory")?;
        let mut view = activation.memory;
        let poll = Poll::new()?;
        poll.add(queue.notify(), 0, EventSet::IN)?;
        let (memory, shared) = (self.memory.clone(), self.shared.clone());
        self.worker = Some(Worker::start("thaw-memory", poll, move |poll| {
            serve(&poll, &mut queue, &mut view, |queue, view| {
                serve_round(queue, view, &memory, || lock(&shared).requested)
            });
            queue.into_active(&view)
        })?);
        // The driver has read that nothing is requested.
        activation.interrupt.config();
        lock(&self.shared).interrupt = Some(activation.interrupt);
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        lock(&self.shared).interrupt = None;
        self.worker
            .take()
            .and_then(Worker::stop)
            .into_iter()
            .collect()
    }

    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        if self.memory.plugged() > 0 {
            let text = "the guest has plugged memory, which cannot be saved: unplug it first";
            return Err(DeviceError::State(text.to_owned()));
        }
        let range = self.memory.range();
        let state = State {
            start: range.start,
            size: range.size,
        };
        postcard::to_stdvec(&state).map_err(|error| DeviceError::State(error.to_string()))
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        let state: State =
            postcard::from_bytes(state).map_err(|error| DeviceError::State(error.to_string()))?;
        let range = self.memory.range();
        if (state.start, state.size) != (range.start, range.size) {
            let text = "the guest's memory may grow in another range than when it was saved";
            return Err(DeviceError::State(text.to_owned()));
        }
        Ok(())
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // Every change is one assignment, so a panic cannot have left half of one.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
