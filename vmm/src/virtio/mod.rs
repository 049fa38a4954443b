//! What a virtio device is to the PCI transport, and what the transport is to a device.
//!
//! A device is configured by the transport through [`Device`] and moves data in a worker thread of
//! its own between [`Device::activate`] and [`Device::deactivate`]. Everything it reads from guest
//! memory is untrusted: copied once, checked, and bounded per notification.

pub mod balloon;
pub mod block;
pub mod buffers;
pub mod config_space;
pub mod console;
pub mod fs;
pub mod guest_error;
pub mod guest_io;
pub mod memory;
pub mod queue;
#[cfg(test)]
mod test_driver;
pub mod vsock;
pub mod worker;

use std::sync::Arc;

use thiserror::Error;
use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

use crate::memory::MemoryView;

/// Device identifiers of virtio 1.2, section 5.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum DeviceType {
    /// Network card (5.1).
    Network = 1,
    /// Block device (5.2).
    Block = 2,
    /// Console (5.3).
    Console = 3,
    /// Traditional memory balloon (5.5).
    Balloon = 5,
    /// Socket device (5.10).
    Vsock = 19,
    /// Memory device (5.15).
    Memory = 24,
    /// File system device (5.11).
    FileSystem = 26,
}

/// Tells the guest that something has changed. Given to a device when it is activated; cheap to
/// call from any thread.
pub trait Interrupt: Send + Sync {
    /// Signal used buffers of queue `queue` (virtio 1.2, 2.7.7). Out of range is ignored.
    fn queue(&self, queue: u16);
    /// Signal a change of the device's configuration space.
    fn config(&self);
}

/// One queue that the driver has enabled.
pub struct ActiveQueue {
    /// The queue's number.
    pub index: u16,
    /// Ring addresses and indices, validated against guest memory when the device was activated.
    pub queue: Queue,
    /// Readable when the driver has notified the queue.
    pub notify: EventFd,
}

/// All that a device needs to work.
pub struct Activation {
    /// The guest's memory, as it is now.
    pub memory: MemoryView,
    /// The queues that the driver has enabled, in the order of their numbers.
    pub queues: Vec<ActiveQueue>,
    /// The way to the guest.
    pub interrupt: Arc<dyn Interrupt>,
    /// Feature bits that both sides have accepted.
    pub features: u64,
}

/// Why a device could not do what the transport asked.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// The driver did not enable a queue that the device needs.
    #[error("the driver did not enable queue {0}")]
    MissingQueue(u16),
    /// Saved state that does not fit the device.
    #[error("saved state of the device: {0}")]
    State(String),
    /// A system call failed.
    #[error("{doing}: {source}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// The cause.
        source: std::io::Error,
    },
}

/// One virtio device, as the transport sees it.
pub trait Device: Send {
    /// Its type.
    fn device_type(&self) -> DeviceType;

    /// The largest size of each queue; the length is the number of queues.
    fn queue_sizes(&self) -> &[u16];

    /// Feature bits offered, without those of the transport (VIRTIO_F_VERSION_1 is added by it).
    fn features(&self) -> u64;

    /// Read the device's configuration space. Bytes past its end read as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Write the device's configuration space. Most devices have nothing that can be written.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// Whether there is something behind this device. A slot without backing is never activated and
    /// has no event descriptors; its driver's set-up is kept for the restore that gives it one.
    fn has_backing(&self) -> bool {
        true
    }

    /// The driver is ready (DRIVER_OK), or the machine of a snapshot in which it was is about to
    /// run. Start to work, beginning with whatever is in the queues already.
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError>;

    /// Stop to work and give the queues back with their current indices: no thread touches guest
    /// memory any more when this returns. For a reset by the driver and for a snapshot. Empty when
    /// the device was not active.
    fn deactivate(&mut self) -> Vec<ActiveQueue>;

    /// The device's own state for a snapshot, encoded; called when not active.
    fn save(&self) -> Result<Vec<u8>, DeviceError>;

    /// Take back what [`Device::save`] gave, before activation. The bytes are untrusted.
    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError>;
}
