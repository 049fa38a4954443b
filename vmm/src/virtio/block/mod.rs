//! Block device (virtio 1.2, section 5.2), as a slot.
//!
//! A [`Block`] is probed by the guest when the template boots and has no backing then: its capacity
//! is 0. [`BlockSlot::attach`] gives it a file or block device before it is activated again, and
//! the guest hears of the new capacity by an interrupt. What the guest reads at probe (features,
//! block size, number of segments) is the same for every backing. Whether it may be written is
//! known only with the backing, so writes to a read-only one fail with an I/O error.

mod request;

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_SEG_MAX,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::epoll::EventSet;

use self::request::{Medium, serve_round};
use super::config_space;
use super::queue::{DeviceQueue, serve};
use super::worker::{Poll, Worker};
use super::{Activation, ActiveQueue, Device, DeviceError, DeviceType};

/// Unit of all sector numbers and of the capacity, in bytes (virtio 1.2, 5.2.4).
pub const SECTOR: u64 = 512;

/// Descriptors in the request queue.
const QUEUE_SIZE: u16 = 256;

/// Data segments of one request: the queue's size without request header and status.
const SEG_MAX: u32 = QUEUE_SIZE as u32 - 2;

const FEATURES: u64 = 1 << VIRTIO_BLK_F_SEG_MAX
    | 1 << VIRTIO_BLK_F_BLK_SIZE
    | 1 << VIRTIO_BLK_F_FLUSH
    | 1 << VIRTIO_RING_F_INDIRECT_DESC
    | 1 << VIRTIO_RING_F_EVENT_IDX;

/// Why a backing could not be attached.
#[derive(Debug, Error)]
pub enum AttachError {
    /// There is a backing already.
    #[error("block slot {0} has a backing already; use another slot")]
    Occupied(usize),
    /// The guest may be using the device.
    #[error("block slot {0} is in use by the running guest; attach before it runs")]
    Active(usize),
    /// Something that has no sectors.
    #[error("the backing of block slot {0} is neither a regular file nor a block device")]
    NotBlocks(usize),
    /// A system call failed.
    #[error("cannot learn the size of the backing of block slot {slot}: {source}")]
    Size {
        /// The slot's number.
        slot: usize,
        /// The cause.
        source: io::Error,
    },
}

/// What the device and its slot share.
#[derive(Debug, Default)]
struct Shared {
    medium: Option<Arc<Medium>>,
    active: bool,
}

impl Shared {
    fn capacity(&self) -> u64 {
        self.medium.as_ref().map_or(0, |medium| medium.sectors)
    }
}

/// The way to give a [`Block`] its backing.
#[derive(Debug, Clone)]
pub struct BlockSlot {
    number: usize,
    shared: Arc<Mutex<Shared>>,
}

impl BlockSlot {
    /// Back the device with `file`, a regular file or a block device, before it is activated. The
    /// capacity is the file's size now, in whole sectors.
    pub fn attach(&self, mut file: File, read_only: bool) -> Result<(), AttachError> {
        let slot = self.number;
        let size = |source| AttachError::Size { slot, source };
        let kind = file.metadata().map_err(size)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(AttachError::NotBlocks(slot));
        }
        let bytes = file.seek(SeekFrom::End(0)).map_err(size)?;
        let mut shared = lock(&self.shared);
        if shared.active {
            return Err(AttachError::Active(slot));
        }
        if shared.medium.is_some() {
            return Err(AttachError::Occupied(slot));
        }
        shared.medium = Some(Arc::new(Medium {
            file,
            read_only,
            sectors: bytes / SECTOR,
            serial: format!("thaw-block-{slot}"),
        }));
        Ok(())
    }
}

/// The device's own part of a snapshot.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    /// Capacity that the driver has been told, in sectors.
    capacity: u64,
}

enum Work {
    /// Not activated.
    None,
    /// Activated without backing: the queue waits untouched.
    Idle(Vec<ActiveQueue>),
    /// At work.
    Thread(Worker<ActiveQueue>),
}

/// A virtio block device with one request queue.
pub struct Block {
    number: usize,
    shared: Arc<Mutex<Shared>>,
    /// Capacity that the driver of a restored machine has read, in sectors.
    told: Option<u64>,
    work: Work,
}

impl Block {
    /// The device of slot `number`, which the guest sees as serial `thaw-block-<number>`, and the
    /// way to attach a backing to it.
    pub fn new(number: usize) -> (Self, BlockSlot) {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let slot = BlockSlot {
            number,
            shared: shared.clone(),
        };
        let block = Block {
            number,
            shared,
            told: None,
            work: Work::None,
        };
        (block, slot)
    }

    fn start(
        &self,
        mut activation: Activation,
        medium: Arc<Medium>,
    ) -> Result<Worker<ActiveQueue>, DeviceError> {
        let mut queue = DeviceQueue::take(&mut activation, 0, "block")?;
        // Without FLUSH the driver cannot ask for durability, so every write has it (5.2.6.2).
        let write_through = activation.features & (1 << VIRTIO_BLK_F_FLUSH) == 0;
        let mut memory = activation.memory;
        let poll = Poll::new()?;
        poll.add(queue.notify(), 0, EventSet::IN)?;
        let name = format!("thaw-block-{}", self.number);
        Worker::start(&name, poll, move |poll| {
            serve(&poll, &mut queue, &mut memory, |queue, memory| {
                serve_round(queue, memory, &medium, write_through)
            });
            queue.into_active(&memory)
        })
    }
}

impl Device for Block {
    fn device_type(&self) -> DeviceType {
        DeviceType::Block
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn features(&self) -> u64 {
        FEATURES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        // struct virtio_blk_config up to blk_size; what follows belongs to features not offered.
        let mut config = [0; 24];
        config[0..8].copy_from_slice(&lock(&self.shared).capacity().to_le_bytes());
        config[12..16].copy_from_slice(&SEG_MAX.to_le_bytes());
        config[20..24].copy_from_slice(&(SECTOR as u32).to_le_bytes());
        config_space::read(&config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let (medium, capacity) = {
            let mut shared = lock(&self.shared);
            shared.active = true;
            (shared.medium.clone(), shared.capacity())
        };
        if self.told.take().is_some_and(|told| told != capacity) {
            activation.interrupt.config();
        }
        self.work = match medium {
            None => Work::Idle(activation.queues),
            Some(medium) => Work::Thread(self.start(activation, medium)?),
        };
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let queues = match std::mem::replace(&mut self.work, Work::None) {
            Work::None => Vec::new(),
            Work::Idle(queues) => queues,
            Work::Thread(worker) => worker.stop().into_iter().collect(),
        };
        lock(&self.shared).active = false;
        queues
    }

    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        let state = State {
            capacity: lock(&self.shared).capacity(),
        };
        postcard::to_stdvec(&state).map_err(|error| DeviceError::State(error.to_string()))
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        let state: State =
            postcard::from_bytes(state).map_err(|error| DeviceError::State(error.to_string()))?;
        self.told = Some(state.capacity);
        Ok(())
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // Every change of the shared state is one assignment, so a panic cannot have left half of one.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
