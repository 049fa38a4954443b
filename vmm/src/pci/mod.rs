//! The PCI bus: configuration mechanism #1, a host bridge, and one function per virtio device.
//!
//! Nothing is hotplugged and nothing moves. The functions, their order and the addresses of their
//! BARs are the same in every machine, so a snapshot holds register values only. There are no INTx
//! lines: interrupts are MSI-X through irqfd, notifications ioeventfd, and neither leaves the kernel.

mod common_config;
mod config_space;
mod function;
pub(crate) mod layout;
mod msix;
mod router;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::layout::{PCI_WINDOW, PCI_WINDOW_SIZE};
use crate::memory::LiveMemory;
use crate::virtio::{Device, DeviceError};
use config_space::ConfigSpace;
use function::{Function, FunctionState};
pub use router::{InterruptRouter, MsiRoute, Wiring};

/// First port of configuration mechanism #1.
pub const CONFIG_PORT: u16 = 0xcf8;
/// Number of its ports: four of the address, four of the data.
pub const CONFIG_PORTS: u16 = 8;

/// Device numbers that a bus has.
const MAX_DEVICES: usize = 32;

const ADDRESS_ENABLE: u32 = 1 << 31;

/// Why the bus could not do what was asked.
#[derive(Debug, Error)]
pub enum PciError {
    /// More devices than a bus has numbers for.
    #[error("the PCI bus is full")]
    Full,
    /// Part of a snapshot that does not fit this machine.
    #[error("saved PCI state does not fit this machine: {0}")]
    State(&'static str),
    /// A queue whose rings are not in guest memory.
    #[error("queue {0} lies outside of guest memory")]
    Queue(u16),
    /// The device refused.
    #[error(transparent)]
    Device(DeviceError),
    /// A system call failed.
    #[error("{doing}: {source}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// The cause.
        source: std::io::Error,
    },
}

impl PciError {
    fn system<E: Into<std::io::Error>>(doing: &'static str) -> impl Fn(E) -> Self {
        move |source| Self::System {
            doing,
            source: source.into(),
        }
    }
}

/// What a snapshot keeps of the bus. Untrusted until [`PciRoot::restore`] has taken it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PciState {
    address: u32,
    functions: Vec<FunctionState>,
}

/// Bus 0 and everything on it.
pub struct PciRoot {
    router: Arc<InterruptRouter>,
    memory: LiveMemory,
    host_bridge: ConfigSpace,
    address: u32,
    functions: Vec<Function>,
}

impl PciRoot {
    /// A bus with a host bridge alone.
    pub fn new(router: Arc<InterruptRouter>, memory: LiveMemory) -> Self {
        let host_bridge = ConfigSpace::host_bridge();
        Self {
            router,
            memory,
            host_bridge,
            address: 0,
            functions: Vec::new(),
        }
    }

    /// Add `device` under the next device number; the first is 1.
    pub fn add(&mut self, device: Box<dyn Device>) -> Result<(), PciError> {
        let number = self.functions.len() + 1;
        let bar = PCI_WINDOW + number as u64 * layout::BAR_SIZE;
        if number >= MAX_DEVICES || bar + layout::BAR_SIZE > PCI_WINDOW + PCI_WINDOW_SIZE {
            return Err(PciError::Full);
        }
        let function = Function::new(device, bar, self.router.clone(), self.memory.clone())?;
        self.functions.push(function);
        Ok(())
    }

    /// The guest reads `data.len()` bytes from a port of mechanism #1.
    pub fn port_read(&mut self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        let offset = usize::from(port.wrapping_sub(CONFIG_PORT));
        match offset {
            0..4 => {
                let bytes = self.address.to_le_bytes();
                for (byte, value) in data.iter_mut().zip(&bytes[offset..]) {
                    *byte = *value;
                }
            }
            4..8 => match self.selected() {
                Some((0, register)) => self.host_bridge.read(register + offset - 4, data),
                Some((number, register)) => {
                    if let Some(function) = self.functions.get(number - 1) {
                        function.config_read(register + offset - 4, data);
                    }
                }
                None => {}
            },
            _ => {}
        }
    }

    /// The guest writes `data` to a port of mechanism #1.
    pub fn port_write(&mut self, port: u16, data: &[u8]) {
        let offset = usize::from(port.wrapping_sub(CONFIG_PORT));
        match (offset, data) {
            // Only whole writes reach the address register (PCI 3.0, 3.2.2.3.2).
            (0, &[a, b, c, d]) => self.address = u32::from_le_bytes([a, b, c, d]),
            (4..8, data) => {
                let Some((number @ 1.., register)) = self.selected() else {
                    return;
                };
                if let Some(function) = self.functions.get_mut(number - 1) {
                    function.config_write(register + offset - 4, data);
                }
            }
            _ => {}
        }
    }

    /// Device number and register that the address register selects; function 0 of bus 0 only.
    fn selected(&self) -> Option<(usize, usize)> {
        let bus_and_function = self.address >> 16 & 0xff | self.address >> 8 & 7;
        let enabled = self.address & ADDRESS_ENABLE != 0 && bus_and_function == 0;
        enabled.then_some((
            (self.address >> 11 & 0x1f) as usize,
            (self.address & 0xfc) as usize,
        ))
    }

    /// The guest reads from the window of the BARs. What does not exist reads as ones.
    pub fn window_read(&mut self, address: u64, data: &mut [u8]) {
        match self.decode(address) {
            Some((function, offset)) => function.bar_read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// The guest writes to the window of the BARs. What does not exist is ignored.
    pub fn window_write(&mut self, address: u64, data: &[u8]) {
        if let Some((function, offset)) = self.decode(address) {
            function.bar_write(offset, data);
        }
    }

    fn decode(&mut self, address: u64) -> Option<(&mut Function, u64)> {
        let offset = address.checked_sub(PCI_WINDOW)?;
        let number = usize::try_from(offset / layout::BAR_SIZE).ok()?;
        let function = self.functions.get_mut(number.checked_sub(1)?)?;
        Some((function, offset % layout::BAR_SIZE))
    }

    /// Start every device whose driver is ready and that has something behind it.
    pub fn activate(&mut self) -> Result<(), PciError> {
        self.connect()?;
        self.start()
    }

    /// The first half of [`PciRoot::activate`]: route interrupts and wire notifications. The guest may
    /// run from now on: what it notifies waits for the device.
    pub fn connect(&mut self) -> Result<(), PciError> {
        let routes: Vec<_> = self
            .functions
            .iter()
            .flat_map(|f| f.msix().routes())
            .collect();
        self.router
            .route(routes)
            .map_err(PciError::system("routing interrupts"))?;
        self.functions.iter_mut().try_for_each(Function::connect)
    }

    /// The second half of [`PciRoot::activate`]: start every device that is connected.
    pub fn start(&mut self) -> Result<(), PciError> {
        self.functions.iter_mut().try_for_each(Function::start)
    }

    /// Stop every device: afterwards nothing of the bus touches guest memory.
    pub fn deactivate(&mut self) {
        self.functions.iter_mut().for_each(Function::deactivate);
    }

    /// What a snapshot keeps. No device may be active.
    pub fn save(&self) -> Result<PciState, PciError> {
        let functions = self
            .functions
            .iter()
            .map(Function::save)
            .collect::<Result<_, _>>()?;
        Ok(PciState {
            address: self.address,
            functions,
        })
    }

    /// Take back what a snapshot kept; no device is active afterwards. Refused when it is not of a
    /// bus like this.
    pub fn restore(&mut self, state: PciState) -> Result<(), PciError> {
        if state.functions.len() != self.functions.len() {
            return Err(PciError::State("number of devices"));
        }
        self.address = state.address;
        let mut pairs = self.functions.iter_mut().zip(state.functions);
        pairs.try_for_each(|(function, state)| function.restore(state))
    }
}
