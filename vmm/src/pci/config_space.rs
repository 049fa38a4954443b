//! The configuration space of a function (PCI Local Bus Specification 3.0, 6.1) with the
//! capabilities of a virtio device (virtio 1.2, 4.1.4).

use super::layout;
use crate::virtio::DeviceType;

/// Bytes of a conventional configuration space.
pub const SIZE: usize = 256;

const VENDOR_VIRTIO: u16 = 0x1af4;
/// virtio 1.2, 4.1.2.1: the device id of a modern device is its type above this.
const DEVICE_BASE: u16 = 0x1040;

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const REVISION: usize = 0x08;
const CACHE_LINE_SIZE: usize = 0x0c;
const BAR0: usize = 0x10;
const SUBSYSTEM: usize = 0x2c;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const FIRST_CAPABILITY: usize = 0x40;

const STATUS_CAPABILITIES: u16 = 1 << 4;
/// Memory space, bus master, and INTx disable: the bits of the command register that can be set.
const COMMAND_WRITABLE: u16 = 1 << 1 | 1 << 2 | 1 << 10;

const CAPABILITY_VENDOR: u8 = 0x09;
const CAPABILITY_MSIX: u8 = 0x11;

/// What a write to the configuration space asks for beyond itself.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing more.
    None,
    /// The MSI-X message control word was written.
    MsixControl(u16),
}

/// Registers of one function. Only what the specification lets a driver change changes.
pub struct ConfigSpace {
    bytes: [u8; SIZE],
    writable: [u8; SIZE],
    msix_control: usize,
    /// The driver has written all ones to BAR 0 and reads its size back.
    sizing: bool,
    bar: u32,
}

impl ConfigSpace {
    /// The host bridge, which is only there to be found: Linux scans bus 0 after it.
    pub fn host_bridge() -> Self {
        let mut space = Self::empty();
        space.set16(0x00, 0x8086);
        space.set16(0x02, 0x0d57);
        space.bytes[REVISION + 3] = 0x06;
        space
    }

    /// A virtio function of `device_type` with `vectors` MSI-X vectors and BAR 0 at `bar`.
    pub fn virtio(device_type: DeviceType, vectors: u16, bar: u32) -> Self {
        let mut space = Self::empty();
        space.bar = bar;
        space.set16(0x00, VENDOR_VIRTIO);
        space.set16(0x02, DEVICE_BASE + device_type as u16);
        space.set16(STATUS, STATUS_CAPABILITIES);
        space.bytes[REVISION] = 1;
        space.bytes[REVISION + 2..REVISION + 4].copy_from_slice(&class(device_type));
        space.bytes[BAR0..BAR0 + 4].copy_from_slice(&bar.to_le_bytes());
        space.set16(SUBSYSTEM, VENDOR_VIRTIO);
        space.set16(SUBSYSTEM + 2, DEVICE_BASE + device_type as u16);
        space.writable[COMMAND..COMMAND + 2].copy_from_slice(&COMMAND_WRITABLE.to_le_bytes());
        space.writable[CACHE_LINE_SIZE] = 0xff;
        space.writable[INTERRUPT_LINE] = 0xff;
        space.add_capabilities(vectors);
        space
    }

    fn empty() -> Self {
        Self {
            bytes: [0; SIZE],
            writable: [0; SIZE],
            msix_control: SIZE,
            sizing: false,
            bar: 0,
        }
    }

    fn add_capabilities(&mut self, vectors: u16) {
        let mut at = FIRST_CAPABILITY;
        self.bytes[CAPABILITIES] = at as u8;
        let structures = [
            (1, layout::COMMON, layout::COMMON_SIZE),
            (3, layout::ISR, layout::ISR_SIZE),
            (4, layout::DEVICE, layout::DEVICE_SIZE),
        ];
        for (kind, offset, size) in structures {
            at = self.add_structure(at, kind, offset, size, 16);
        }
        at = self.add_structure(at, 2, layout::NOTIFY, layout::NOTIFY_SIZE, 20);
        let multiplier = (layout::NOTIFY_STRIDE as u32).to_le_bytes();
        self.bytes[at - 4..at].copy_from_slice(&multiplier);
        self.bytes[at] = CAPABILITY_MSIX;
        self.msix_control = at + 2;
        self.set16(at + 2, vectors - 1);
        self.set32(at + 4, layout::MSIX_TABLE as u32);
        self.set32(at + 8, layout::MSIX_PENDING as u32);
        self.writable[at + 3] = 0xc0;
    }

    /// A virtio structure capability (virtio 1.2, 4.1.4): BAR 0, `offset`, `size`.
    fn add_structure(&mut self, at: usize, kind: u8, offset: u64, size: u64, length: u8) -> usize {
        let next = at + usize::from(length);
        self.bytes[at] = CAPABILITY_VENDOR;
        self.bytes[at + 1] = next as u8;
        self.bytes[at + 2] = length;
        self.bytes[at + 3] = kind;
        self.set32(at + 8, offset as u32);
        self.set32(at + 12, size as u32);
        next
    }

    fn set16(&mut self, at: usize, value: u16) {
        self.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn set32(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    /// Read `data.len()` bytes from `offset`; what is past the end reads as ones.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        let size_mask = (!(layout::BAR_SIZE as u32 - 1)).to_le_bytes();
        for (at, byte) in (offset..).zip(data) {
            *byte = match at {
                BAR0..0x14 if self.sizing => size_mask[at - BAR0],
                0..SIZE => self.bytes[at],
                _ => 0xff,
            };
        }
    }

    /// Write `data` at `offset`; read-only bits keep their value.
    pub fn write(&mut self, offset: usize, data: &[u8]) -> Effect {
        if offset == BAR0 && data.len() == 4 && self.bar != 0 {
            // The address is fixed; only the question for the size is answered.
            self.sizing = data == [0xff; 4];
            return Effect::None;
        }
        for (at, byte) in (offset..SIZE).zip(data) {
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | byte & mask;
        }
        let end = offset.saturating_add(data.len());
        if (offset..end).contains(&(self.msix_control + 1)) {
            return Effect::MsixControl(u16::from(self.bytes[self.msix_control + 1]) << 8);
        }
        Effect::None
    }

    /// The bits that a driver has written, for a snapshot: command, cache line, interrupt line.
    pub fn save(&self) -> [u8; 4] {
        let [low, high] = [self.bytes[COMMAND], self.bytes[COMMAND + 1]];
        [
            low,
            high,
            self.bytes[CACHE_LINE_SIZE],
            self.bytes[INTERRUPT_LINE],
        ]
    }

    /// Take back what [`ConfigSpace::save`] gave, and the MSI-X control word.
    pub fn restore(&mut self, saved: [u8; 4], msix_control: u16) {
        self.write(COMMAND, &saved[..2]);
        self.write(CACHE_LINE_SIZE, &saved[2..3]);
        self.write(INTERRUPT_LINE, &saved[3..]);
        self.write(self.msix_control + 1, &[(msix_control >> 8) as u8]);
    }
}

/// Sub-class and class code; drivers go by the device id, tools print this.
fn class(device_type: DeviceType) -> [u8; 2] {
    match device_type {
        DeviceType::Network => [0x00, 0x02],
        DeviceType::Block => [0x80, 0x01],
        DeviceType::Console => [0x80, 0x07],
        DeviceType::FileSystem => [0x80, 0x01],
        DeviceType::Balloon | DeviceType::Memory => [0x80, 0x05],
        DeviceType::Vsock => [0x80, 0x02],
    }
}
