//! What a snapshot keeps of a machine.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
};
use serde::{Deserialize, Serialize};
use thaw_vmm_control::Shape;

use super::SnapshotError;
use crate::memory::{Extent, validate_extents};
use crate::pci::PciState;
use crate::serial::SerialRegisters;
use crate::vcpu::VcpuState;

/// The interrupt controllers that KVM emulates.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct InterruptControllers {
    /// The first PIC.
    pub pic_master: kvm_irqchip,
    /// The second PIC.
    pub pic_slave: kvm_irqchip,
    /// The IOAPIC.
    pub ioapic: kvm_irqchip,
}

/// A machine whose vCPUs are stopped and whose devices are not active, without its memory.
#[derive(Debug, Serialize, Deserialize)]
pub struct MachineState {
    /// vCPUs and memory.
    pub shape: Shape,
    /// Width of the vCPUs' physical addresses.
    pub address_bits: u8,
    /// What is data in the memory file.
    pub extents: Vec<Extent>,
    /// The vCPUs, in the order of their indices.
    pub vcpus: Vec<VcpuState>,
    /// PIC and IOAPIC.
    pub controllers: InterruptControllers,
    /// The paravirtual clock.
    pub clock: kvm_clock_data,
    /// The debug serial port, if there is one.
    pub serial: Option<SerialRegisters>,
    /// The devices.
    pub pci: PciState,
}

impl MachineState {
    /// Check that the parts fit together, and that nothing in them leads outside of the machine.
    /// Values of registers are KVM's to check, and PCI's state the bus'.
    pub(super) fn validate(&self) -> Result<(), SnapshotError> {
        if self.vcpus.len() != usize::from(self.shape.vcpus()) {
            return Err(SnapshotError::Invalid("number of vCPUs"));
        }
        let first = self.vcpus.first().map(VcpuState::tsc_khz);
        if self.vcpus.iter().any(|vcpu| Some(vcpu.tsc_khz()) != first) {
            return Err(SnapshotError::Invalid(
                "vCPUs with different TSC frequencies",
            ));
        }
        let chips = [
            (&self.controllers.pic_master, KVM_IRQCHIP_PIC_MASTER),
            (&self.controllers.pic_slave, KVM_IRQCHIP_PIC_SLAVE),
            (&self.controllers.ioapic, KVM_IRQCHIP_IOAPIC),
        ];
        if chips.iter().any(|(chip, id)| chip.chip_id != *id) {
            return Err(SnapshotError::Invalid(
                "interrupt controllers in the wrong order",
            ));
        }
        if self.clock.flags != 0 {
            return Err(SnapshotError::Invalid("a clock that would jump"));
        }
        Ok(validate_extents(&self.extents, self.shape.memory_bytes())?)
    }
}
