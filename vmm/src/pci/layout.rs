//! Where things lie in BAR 0 of a virtio function. Offsets and sizes in bytes.

/// Size of BAR 0, a power of two.
pub const BAR_SIZE: u64 = 0x8000;

/// Common configuration (virtio 1.2, 4.1.4.3).
pub const COMMON: u64 = 0x0000;
/// Size of the common configuration, up to `queue_reset`.
pub const COMMON_SIZE: u64 = 0x40;

/// Interrupt status (virtio 1.2, 4.1.4.5). Always zero: interrupts are MSI-X only.
pub const ISR: u64 = 0x1000;
/// Size of the interrupt status.
pub const ISR_SIZE: u64 = 4;

/// Device configuration (virtio 1.2, 4.1.4.6).
pub const DEVICE: u64 = 0x2000;
/// Size of the device configuration.
pub const DEVICE_SIZE: u64 = 0x1000;

/// Notifications (virtio 1.2, 4.1.4.4): queue `n` at `NOTIFY + n * NOTIFY_STRIDE`.
pub const NOTIFY: u64 = 0x3000;
/// Size of the notification area.
pub const NOTIFY_SIZE: u64 = 0x1000;
/// Distance between the notification addresses of two queues.
pub const NOTIFY_STRIDE: u64 = 4;
/// Queues a function can have.
pub const MAX_QUEUES: usize = 64;

/// MSI-X vector table.
pub const MSIX_TABLE: u64 = 0x4000;
/// MSI-X pending bit array.
pub const MSIX_PENDING: u64 = 0x5000;
