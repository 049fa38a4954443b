//! The devices that every machine has, and the ends of them that the host uses.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvm_ioctls::VmFd;
use thaw_vmm_control::{BLOCK_SLOTS, FILE_SYSTEM_TAG, GUEST_CONTEXT_ID};

use super::MachineError;
use crate::memory::{GuestRam, PluggableMemory, PluggableRange};
use crate::pci::{InterruptRouter, PciRoot};
use crate::serial::ConsoleOutput;
use crate::virtio::balloon::{Balloon, Reported};
use crate::virtio::block::{Block, BlockSlot};
use crate::virtio::console::Console;
use crate::virtio::fs::{FileCounts, FileServerRoot, FileSystem};
use crate::virtio::memory::{MemoryDevice, MemorySlot, TooMuchMemory};
use crate::virtio::vsock::{Vsock, VsockHost};

/// What a machine needs of its surroundings.
pub struct Environment {
    /// Where the guest's console goes.
    pub console: ConsoleOutput,
    /// What the guest's virtio-fs serves.
    pub files: FileServerRoot,
}

/// The host's ends of the devices.
pub struct Attachments {
    blocks: Vec<BlockSlot>,
    vsock: VsockHost,
    file_counts: Arc<FileCounts>,
    reported: Arc<Reported>,
    memory: MemorySlot,
}

impl Attachments {
    /// Back block slot `slot` with `file`. Only before the machine runs.
    pub fn attach_block(&self, slot: u8, file: File, read_only: bool) -> Result<(), MachineError> {
        let blocks = self.blocks.get(usize::from(slot));
        blocks
            .ok_or(MachineError::NoSuchSlot(slot))?
            .attach(file, read_only)?;
        Ok(())
    }

    /// Connect `socket` to `port` of the guest.
    pub fn connect_vsock(&self, port: u32, socket: OwnedFd) {
        self.vsock.connect(port, socket);
    }

    /// Let the guest have `bytes` of memory beside its RAM.
    pub(super) fn request_memory(&self, bytes: u64) -> Result<(), TooMuchMemory> {
        self.memory.request(bytes)
    }

    /// Bytes of memory that the guest has plugged.
    pub fn plugged_memory(&self) -> u64 {
        self.memory.plugged()
    }

    /// What the guest has reported as unused.
    pub fn reported(&self) -> &Reported {
        &self.reported
    }

    /// What the file server has counted.
    pub fn file_counts(&self) -> &FileCounts {
        &self.file_counts
    }
}

/// A bus with all devices for a guest of `vcpus`, none of them active. Their order is part of every
/// snapshot. `address_bits` is the width of the vCPUs' physical addresses.
pub fn make(
    vm: &Arc<VmFd>,
    ram: &GuestRam,
    vcpus: u8,
    address_bits: u8,
    environment: Environment,
) -> Result<(PciRoot, Attachments), MachineError> {
    let Environment { console, files } = environment;
    let router = Arc::new(InterruptRouter::new(vm.clone()));
    let mut pci = PciRoot::new(router, ram.live().clone());
    let (vsock_device, vsock) = Vsock::new(GUEST_CONTEXT_ID);
    pci.add(Box::new(vsock_device))?;
    let file_system = FileSystem::new(FILE_SYSTEM_TAG, files, vcpus)?;
    let file_counts = file_system.counts();
    pci.add(Box::new(file_system))?;
    pci.add(Box::new(Console::new(Box::new(move |bytes| {
        console(bytes)
    }))))?;
    let mut blocks = Vec::new();
    for number in 0..usize::from(BLOCK_SLOTS) {
        let (device, slot) = Block::new(number);
        pci.add(Box::new(device))?;
        blocks.push(slot);
    }
    let balloon = Balloon::default();
    let reported = balloon.reported();
    pci.add(Box::new(balloon))?;
    let range = PluggableRange::above(ram.size(), address_bits);
    let (slots, live) = (vm.clone(), ram.live().clone());
    let pluggable = PluggableMemory::new(range, slots, ram.memory().clone(), live);
    let (device, memory) = MemoryDevice::new(Arc::new(pluggable));
    pci.add(Box::new(device))?;
    Ok((
        pci,
        Attachments {
            blocks,
            vsock,
            file_counts,
            reported,
            memory,
        },
    ))
}
