//! The devices that every machine has, and the ends of them that the host uses.

use std::sync::Arc;

use kvm_ioctls::VmFd;

use super::MachineError;
use crate::memory::GuestRam;
use crate::pci::{InterruptRouter, PciRoot};
use crate::serial::ConsoleOutput;

/// What a machine needs of its surroundings.
pub struct Environment {
    /// Where the guest's console goes.
    pub console: ConsoleOutput,
}

/// The host's ends of the devices.
pub struct Attachments {}

/// A bus with all devices, none of them active. Their order is part of every snapshot.
pub fn make(
    vm: &Arc<VmFd>,
    ram: &GuestRam,
    _environment: Environment,
) -> Result<(PciRoot, Attachments), MachineError> {
    let router = Arc::new(InterruptRouter::new(vm.clone()));
    let pci = PciRoot::new(router, ram.memory().clone());
    Ok((pci, Attachments {}))
}
