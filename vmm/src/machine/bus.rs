//! Where an access of the guest goes that is not RAM and not KVM's.

use std::ops::ControlFlow;
use std::sync::{Mutex, MutexGuard, PoisonError};

use thaw_vmm_control::GuestExit;

use crate::layout::{
    NMI_STATUS_PORT, PCI_WINDOW, PCI_WINDOW_SIZE, RESET_PORT, RESET_VALUE, SERIAL_PORT,
    SERIAL_PORTS, SLEEP_CONTROL_PORT, SLEEP_STATUS_PORT, SLEEP_TYPE_OFF,
};
use crate::pci::{CONFIG_PORT, CONFIG_PORTS, PciError, PciRoot};
use crate::serial::SerialPort;
use crate::vcpu::GuestIo;

/// `SLP_EN` of the sleep control register: go to sleep now.
const SLEEP_ENABLE: u8 = 1 << 5;

/// The PCI bus, the debug serial port, and the ports of reset and power-off.
pub struct Bus {
    pci: Mutex<PciRoot>,
    serial: Option<Mutex<SerialPort>>,
}

/// A lock that a panic elsewhere does not poison: every step leaves the device in order.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bus {
    /// The bus of a machine.
    pub fn new(pci: PciRoot, serial: Option<SerialPort>) -> Self {
        Self {
            pci: Mutex::new(pci),
            serial: serial.map(Mutex::new),
        }
    }

    /// Connect the devices whose drivers are ready: from now on they miss nothing of the guest.
    pub fn connect(&self) -> Result<(), PciError> {
        self.pci().connect()
    }

    /// Start the devices that are connected.
    pub fn start(&self) -> Result<(), PciError> {
        self.pci().start()
    }

    /// Stop all devices.
    pub fn deactivate(&self) {
        lock(&self.pci).deactivate();
    }

    /// The PCI bus.
    pub fn pci(&self) -> MutexGuard<'_, PciRoot> {
        lock(&self.pci)
    }

    /// The debug serial port, if there is one.
    pub fn serial(&self) -> Option<MutexGuard<'_, SerialPort>> {
        self.serial.as_ref().map(lock)
    }
}

fn is_pci(port: u16) -> bool {
    (CONFIG_PORT..CONFIG_PORT + CONFIG_PORTS).contains(&port)
}

fn is_serial(port: u16) -> bool {
    (SERIAL_PORT..SERIAL_PORT + SERIAL_PORTS).contains(&port)
}

fn is_pci_window(address: u64) -> bool {
    (PCI_WINDOW..PCI_WINDOW + PCI_WINDOW_SIZE).contains(&address)
}

impl GuestIo for Bus {
    fn port_read(&self, port: u16, data: &mut [u8]) {
        match port {
            port if is_pci(port) => self.pci().port_read(port, data),
            port if is_serial(port) => match self.serial() {
                Some(mut serial) => serial.read(port, data),
                None => data.fill(0xff),
            },
            // The keyboard controller is ready for a command, the machine awake.
            // And no NMI has a reason that a board would report.
            RESET_PORT | SLEEP_STATUS_PORT | NMI_STATUS_PORT => data.fill(0),
            _ => data.fill(0xff),
        }
    }

    fn port_write(&self, port: u16, data: &[u8]) -> ControlFlow<GuestExit> {
        match (port, data) {
            (port, data) if is_pci(port) => self.pci().port_write(port, data),
            (port, data) if is_serial(port) => {
                if let Some(mut serial) = self.serial() {
                    serial.write(port, data);
                }
            }
            (RESET_PORT, [RESET_VALUE]) => return ControlFlow::Break(GuestExit::Reset),
            (SLEEP_CONTROL_PORT, [value]) => {
                let asleep = value & SLEEP_ENABLE != 0;
                if asleep && value >> 2 & 7 == SLEEP_TYPE_OFF {
                    return ControlFlow::Break(GuestExit::Reset);
                }
            }
            _ => {}
        }
        ControlFlow::Continue(())
    }

    fn memory_read(&self, address: u64, data: &mut [u8]) {
        if is_pci_window(address) {
            self.pci().window_read(address, data);
        } else {
            data.fill(0xff);
        }
    }

    fn memory_write(&self, address: u64, data: &[u8]) {
        if is_pci_window(address) {
            self.pci().window_write(address, data);
        }
    }
}
