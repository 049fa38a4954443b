//! From a running machine to a snapshot.

use std::fs::File;

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
};
use kvm_ioctls::VmFd;

use super::{Machine, MachineError, Vcpus};
use crate::kvm::{Hypervisor, KvmError, doing};
use crate::snapshot::{self, InterruptControllers, MachineState};
use crate::vcpu::{Vcpu, VcpuState, indices_to_save};

impl Machine {
    /// Stop the machine for good and write it to `state` and `memory`, which are empty files.
    pub fn snapshot(
        &mut self,
        hypervisor: &Hypervisor,
        state: &File,
        memory: &File,
    ) -> Result<(), MachineError> {
        let vcpus = match std::mem::replace(&mut self.vcpus, Vcpus::Stopped) {
            Vcpus::Ready(vcpus) => vcpus,
            Vcpus::Running(running) => running.stop()?,
            Vcpus::Stopped => return Err(MachineError::Phase("has been stopped already")),
        };
        if self.notice.exit().is_some() {
            return Err(MachineError::Phase("has ended: there is nothing to save"));
        }
        // Nothing raises an interrupt or writes to memory from here on.
        self.bus.deactivate();
        let vcpus = save_vcpus(hypervisor, &vcpus)?;
        let saved = MachineState {
            shape: self.shape,
            address_bits: self.address_bits,
            vcpus,
            controllers: save_controllers(&self.vm)?,
            clock: save_clock(&self.vm)?,
            serial: self.bus.serial().map(|mut serial| {
                serial.flush();
                serial.registers()
            }),
            pci: self.bus.pci().save()?,
            extents: self.ram.save(memory)?,
        };
        Ok(snapshot::write(state, &saved)?)
    }
}

fn save_vcpus(hypervisor: &Hypervisor, vcpus: &[Vcpu]) -> Result<Vec<VcpuState>, MachineError> {
    let msrs = indices_to_save(&hypervisor.msr_indices()?);
    let bare = hypervisor.create_bare_vm()?;
    let save = |vcpu: &Vcpu| {
        let mut state = vcpu.save(&msrs)?;
        state.drop_defaults(&Vcpu::new(&bare, vcpu.index())?)?;
        Ok(state)
    };
    vcpus.iter().map(save).collect()
}

fn save_controllers(vm: &VmFd) -> Result<InterruptControllers, KvmError> {
    let read = |chip_id| {
        let mut chip = kvm_irqchip {
            chip_id,
            ..Default::default()
        };
        vm.get_irqchip(&mut chip)
            .map_err(doing("reading an interrupt controller"))?;
        Ok(chip)
    };
    Ok(InterruptControllers {
        pic_master: read(KVM_IRQCHIP_PIC_MASTER)?,
        pic_slave: read(KVM_IRQCHIP_PIC_SLAVE)?,
        ioapic: read(KVM_IRQCHIP_IOAPIC)?,
    })
}

/// The clock's value alone. With the flags that KVM reports, a restore would add the wall time that
/// has passed (`KVM_CLOCK_REALTIME`), and the guest's monotonic clock would jump.
fn save_clock(vm: &VmFd) -> Result<kvm_clock_data, KvmError> {
    let clock = vm.get_clock().map_err(doing("reading the clock"))?;
    Ok(kvm_clock_data {
        clock: clock.clock,
        ..Default::default()
    })
}
