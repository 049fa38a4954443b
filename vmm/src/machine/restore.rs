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
use crate::memory::GuestRam;
use crate::phase::Phases;
use crate::serial::SerialPort;
use crate::snapshot::{self, MachineState};
use crate::vcpu::Vcpu;
use kvm_ioctls::VmFd;

impl Machine {
    /// Make the machine of the snapshot in `state` and `memory`. Guest memory is mapped from
    /// `memory`, which must never change from now on.
    pub fn restore(
        hypervisor: &Hypervisor,
        state: &File,
        memory: &File,
        environment: Environment,
        phases: &mut Phases,
    ) -> Result<Self, MachineError> {
        let state = snapshot::read(state)?;
        phases.mark("state");
        let ram = GuestRam::restore(state.shape.memory_bytes(), memory, &state.extents)?;
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
        let (mut pci, attachments) = devices::make(&vm, &ram, environment)?;
        pci.restore(state.pci)?;
        phases.mark("devices");
        let bus = Bus::new(pci, serial);
        Self::assemble(state.shape, true, vcpus, bus, attachments, vm, ram)
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
