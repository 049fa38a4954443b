//! The common configuration structure (virtio 1.2, 4.1.4.3) and the device status (2.1).

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};
use virtio_queue::QueueState;

use super::msix::Msix;
use super::{PciError, layout};

/// What a write means beyond the register.
#[derive(Debug, PartialEq, Eq)]
pub enum Written {
    /// Nothing.
    Nothing,
    /// The driver resets the device.
    Reset,
    /// The driver has set DRIVER_OK.
    DriverOk,
}

/// What a snapshot keeps. Untrusted until [`CommonConfig::restore`] has taken it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CommonState {
    selects: (u32, u32, u16),
    driver_features: u64,
    status: u8,
    generation: u8,
    queues: Vec<SavedQueue>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct SavedQueue {
    size: u16,
    ready: bool,
    next_avail: u16,
    next_used: u16,
    desc_table: u64,
    avail_ring: u64,
    used_ring: u64,
}

/// The registers.
pub struct CommonConfig {
    device_features: u64,
    /// Feature bits that the driver has accepted; always a subset of those offered.
    pub driver_features: u64,
    device_feature_select: u32,
    driver_feature_select: u32,
    queue_select: u16,
    /// Device status bits.
    pub status: u8,
    generation: u8,
    /// Every queue, enabled or not.
    pub queues: Vec<QueueState>,
}

impl CommonConfig {
    /// After a reset, with `features` offered and queues of at most `sizes`.
    pub fn new(features: u64, sizes: &[u16]) -> Self {
        Self {
            device_features: features,
            driver_features: 0,
            device_feature_select: 0,
            driver_feature_select: 0,
            queue_select: 0,
            status: 0,
            generation: 0,
            queues: sizes.iter().map(|size| reset_queue(*size)).collect(),
        }
    }

    /// Back to the state after power-on, except for the generation.
    pub fn reset(&mut self, sizes: &[u16]) {
        *self = Self {
            generation: self.generation,
            ..Self::new(self.device_features, sizes)
        };
    }

    fn has(&self, status: u32) -> bool {
        u32::from(self.status) & status != 0
    }

    /// The driver reads `data.len()` bytes of the register at `offset`.
    pub fn read(&self, offset: u64, data: &mut [u8], msix: &Msix) {
        let queue = self.queues.get(usize::from(self.queue_select));
        let field = |get: fn(&QueueState) -> u64| queue.map_or(0, get);
        let value: u64 = match offset {
            0x00 => self.device_feature_select.into(),
            0x04 => feature_word(self.device_features, self.device_feature_select).into(),
            0x08 => self.driver_feature_select.into(),
            0x0c => feature_word(self.driver_features, self.driver_feature_select).into(),
            0x10 => msix.config_vector().into(),
            0x12 => self.queues.len() as u64,
            0x14 => self.status.into(),
            0x15 => self.generation.into(),
            0x16 => self.queue_select.into(),
            0x18 => field(|queue| queue.size.into()),
            0x1a => msix.queue_vector(self.queue_select).into(),
            0x1c => field(|queue| queue.ready.into()),
            0x1e => queue.map_or(0, |_| self.queue_select.into()),
            0x20 => field(|queue| queue.desc_table),
            0x24 => field(|queue| queue.desc_table >> 32),
            0x28 => field(|queue| queue.avail_ring),
            0x2c => field(|queue| queue.avail_ring >> 32),
            0x30 => field(|queue| queue.used_ring),
            0x34 => field(|queue| queue.used_ring >> 32),
            _ => 0,
        };
        let bytes = value.to_le_bytes();
        let length = data.len().min(bytes.len());
        data[..length].copy_from_slice(&bytes[..length]);
    }

    /// The driver writes `data` to the register at `offset`.
    pub fn write(&mut self, offset: u64, data: &[u8], msix: &Msix) -> Written {
        let mut bytes = [0; 8];
        let length = data.len().min(bytes.len());
        bytes[..length].copy_from_slice(&data[..length]);
        let value = u64::from_le_bytes(bytes);
        let (low, half) = (value as u32, value as u16);
        match offset {
            0x00 => self.device_feature_select = low,
            0x08 => self.driver_feature_select = low,
            0x0c => self.accept_features(low),
            0x10 => msix.set_config_vector(half),
            0x14 => return self.write_status(value as u8),
            0x16 => self.queue_select = half,
            0x1a => msix.set_queue_vector(self.queue_select, half),
            0x18 | 0x1c | 0x20..=0x37 => self.write_queue(offset, value, data.len()),
            _ => {}
        }
        Written::Nothing
    }

    fn accept_features(&mut self, word: u32) {
        // Fixed once FEATURES_OK is set (virtio 1.2, 2.2.1).
        if self.has(VIRTIO_CONFIG_S_FEATURES_OK) || self.driver_feature_select > 1 {
            return;
        }
        let shift = 32 * self.driver_feature_select;
        let other = self.driver_features & !(0xffff_ffff << shift);
        self.driver_features = other | u64::from(word) << shift;
    }

    fn write_status(&mut self, value: u8) -> Written {
        if value == 0 {
            return Written::Reset;
        }
        let had = self.status;
        // A driver cannot clear a bit other than by a reset.
        self.status |= value & !(VIRTIO_CONFIG_S_NEEDS_RESET as u8);
        let acceptable = self.driver_features & !self.device_features == 0
            && self.driver_features & 1 << VIRTIO_F_VERSION_1 != 0;
        if self.has(VIRTIO_CONFIG_S_FEATURES_OK) && !acceptable {
            self.status &= !(VIRTIO_CONFIG_S_FEATURES_OK as u8 | VIRTIO_CONFIG_S_DRIVER_OK as u8);
        }
        let new = self.status & !had;
        let ready = u32::from(new) & VIRTIO_CONFIG_S_DRIVER_OK != 0;
        if ready && self.has(VIRTIO_CONFIG_S_FEATURES_OK) {
            Written::DriverOk
        } else {
            Written::Nothing
        }
    }

    fn write_queue(&mut self, offset: u64, value: u64, length: usize) {
        let running = self.has(VIRTIO_CONFIG_S_DRIVER_OK);
        let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) else {
            return;
        };
        if running || queue.ready {
            return;
        }
        match offset {
            0x18 => {
                let size = value as u16;
                if size.is_power_of_two() && size <= queue.max_size {
                    queue.size = size;
                }
            }
            0x1c => queue.ready = value as u16 == 1,
            0x20 | 0x24 => set_address(&mut queue.desc_table, offset - 0x20, value, length),
            0x28 | 0x2c => set_address(&mut queue.avail_ring, offset - 0x28, value, length),
            0x30 | 0x34 => set_address(&mut queue.used_ring, offset - 0x30, value, length),
            _ => {}
        }
    }

    /// What a snapshot keeps.
    pub fn save(&self) -> CommonState {
        let saved = |queue: &QueueState| SavedQueue {
            size: queue.size,
            ready: queue.ready,
            next_avail: queue.next_avail,
            next_used: queue.next_used,
            desc_table: queue.desc_table,
            avail_ring: queue.avail_ring,
            used_ring: queue.used_ring,
        };
        CommonState {
            selects: (
                self.device_feature_select,
                self.driver_feature_select,
                self.queue_select,
            ),
            driver_features: self.driver_features,
            status: self.status,
            generation: self.generation,
            queues: self.queues.iter().map(saved).collect(),
        }
    }

    /// Take back what a snapshot kept, for a device with queues of at most `sizes`. The generation
    /// moves on: what is behind the device may be another thing than before.
    pub fn restore(&mut self, state: CommonState, sizes: &[u16]) -> Result<(), PciError> {
        if state.queues.len() != sizes.len() {
            return Err(PciError::State("number of queues"));
        }
        if state.driver_features & !self.device_features != 0 {
            return Err(PciError::State("features that the device does not offer"));
        }
        let mut queues = Vec::with_capacity(sizes.len());
        for (max_size, queue) in sizes.iter().zip(&state.queues) {
            if !queue.size.is_power_of_two() || queue.size > *max_size {
                return Err(PciError::State("size of a queue"));
            }
            queues.push(QueueState {
                max_size: *max_size,
                next_avail: queue.next_avail,
                next_used: queue.next_used,
                event_idx_enabled: false,
                size: queue.size,
                ready: queue.ready,
                desc_table: queue.desc_table,
                avail_ring: queue.avail_ring,
                used_ring: queue.used_ring,
            });
        }
        (
            self.device_feature_select,
            self.driver_feature_select,
            self.queue_select,
        ) = state.selects;
        self.driver_features = state.driver_features;
        self.status = state.status;
        self.generation = state.generation.wrapping_add(1);
        self.queues = queues;
        Ok(())
    }
}

fn reset_queue(max_size: u16) -> QueueState {
    QueueState {
        max_size,
        next_avail: 0,
        next_used: 0,
        event_idx_enabled: false,
        size: max_size,
        ready: false,
        desc_table: 0,
        avail_ring: 0,
        used_ring: 0,
    }
}

fn feature_word(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

/// Write four bytes at `part` (0 or 4) of a 64-bit address register, or all eight at 0.
fn set_address(address: &mut u64, part: u64, value: u64, length: usize) {
    let low = 0xffff_ffff;
    *address = match (part, length) {
        (0, 8) => value,
        (0, _) => *address & !low | value & low,
        _ => *address & low | value << 32,
    };
}

const _: () = assert!(layout::COMMON_SIZE >= 0x3c);
