//! From a snapshot to a machine that can run on.
//!
//! The order: memory, so that it is mapped before KVM knows of it; vCPUs with their state, since
//! writing a local APIC's state needs the controllers to exist but not their state; controllers
//! and clock; devices last, because what they raise must not be wiped out.

use std::fs::File;

use super::boot::serial_interrupt;
use super::bus::Bus;
use super::devices::{self, Environment};
use super::{Machine, MachineError};
use crate::generation;
use crate::kvm::{Hypervisor, KvmError, doing};
use crate::memory::{GuestRam, Population, Recording};
use crate::phase::Phases;
use crate::serial::SerialPort;
use crate::snapshot::{self, MachineState};
use crate::vcpu::Vcpu;
use kvm_ioctls::VmFd;
use thaw_vmm_control::WorkingSet;

/// What a machine is restored from.
pub struct RestoreSource {
    /// State of the machine and its devices.
    pub state: File,
    /// Guest memory; mapped, so it must never change.
    pub memory: File,
    /// Pages that are made ready before the guest runs.
    pub working_set: WorkingSet,
    /// This process' page map, when the pages that the guest touches are to be recorded.
    pub pagemap: Option<File>,
}

impl Machine {
    /// Make the machine of the snapshot in `source`.
    pub fn restore(
        hypervisor: &Hypervisor,
        source: RestoreSource,
        environment: Environment,
        phases: &mut Phases,
    ) -> Result<Self, MachineError> {
        let state = snapshot::read(&source.state)?;
        phases.mark("state");
        let size = state.shape.memory_bytes();
        let ram = GuestRam::restore(size, &source.memory, &state.extents)?;
        // Before anything is written to it.
        let recording = source
            .pagemap
            .map(|pagemap| Recording::start(&ram, pagemap).map_err(|error| error.to_string()));
        let population = match source.working_set {
            set if set.is_empty() => None,
            set => Some(Population::new(&ram, &set)?),
        };
        generation::renew(ram.memory())?;
        phases.mark("memory");
        let vm = hypervisor.create_vm(&ram)?;
        phases.mark("kvm");
        let mut vcpus = Vec::with_capacity(state.vcpus.len());
        for (index, state) in (0..).zip(&state.vcpus) {
            let vcpu = Vcpu::new(&vm, index)?;
            vcpu.restore(state)?;
            vcpus.push(vcpu);
        }
        // By the last vCPU: where there are several, the first, which resumes the guest's work, need
        // not wait for it.
        if let (Some(last), Some(population)) = (vcpus.last_mut(), population) {
            last.populate_first(population);
        }
        restore_vm(&vm, &state)?;
        phases.mark("vcpus");
        let serial = match &state.serial {
            Some(registers) => {
                let interrupt = serial_interrupt(&vm)?;
                let output = environment.console.clone();
                let port = SerialPort::restore(registers, interrupt, output);
                Some(port.map_err(doing("restoring the serial port"))?)
            }
            None => None,
        };
        let address_bits = state.address_bits;
        let (mut pci, attachments) =
            devices::make(&vm, &ram, state.shape.vcpus(), address_bits, environment)?;
        pci.restore(state.pci)?;
        phases.mark("devices");
        let bus = Bus::new(pci, serial);
        let mut machine = Self::assemble(
            state.shape,
            address_bits,
            true,
            vcpus,
            bus,
            attachments,
            vm,
            ram,
        )?;
        if let Some(recording) = recording {
            machine.recording = recording;
        }
        Ok(machine)
    }
}

/// The state that belongs to no vCPU. The clock goes on from where it stood: its flags, which are
/// zero, would make it catch up with the host's otherwise, and all timers of the guest fire.
fn restore_vm(vm: &VmFd, state: &MachineState) -> Result<(), KvmError> {
    let controllers = &state.controllers;
    for chip in [
        &controllers.pic_master,
        &controllers.pic_slave,
        &controllers.ioapic,
    ] {
        vm.set_irqchip(chip)
            .map_err(doing("writing an interrupt controller"))?;
    }
    vm.set_clock(&state.clock)
        .map_err(doing("writing the clock"))
}
