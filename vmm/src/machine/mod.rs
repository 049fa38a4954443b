//! A machine: guest memory, vCPUs, interrupt controllers and devices, and what can be done with it.
//!
//! It is made by [`Machine::boot`] or [`Machine::restore`], in both cases with its vCPUs stopped;
//! [`Machine::run`] lets them go, once. [`Machine::snapshot`] stops them for good.

mod boot;
mod bus;
mod devices;
mod load;
mod restore;
mod snapshot;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use kvm_ioctls::VmFd;
use thaw_vmm_control::{BLOCK_SLOTS, InvalidWorkingSet, Shape, WorkingSet};
use thiserror::Error;
use vm_memory::{GuestMemory, GuestMemoryRegion};

use crate::acpi::AcpiError;
use crate::generation::{self, GenerationError};
use crate::kvm::KvmError;
use crate::memory::{GuestRam, MemoryError, Recording, RecordingError};
use crate::pci::PciError;
use crate::snapshot::SnapshotError;
use crate::vcpu::{ExitNotice, GuestIo, RunningVcpus, Vcpu, VcpuCounters, VcpuStateError};
use crate::virtio::block::AttachError;
use crate::virtio::fs::FileSystemError;
use crate::virtio::memory::TooMuchMemory;
pub use boot::BootSource;
use bus::Bus;
pub use devices::{Attachments, Environment};
pub use load::LoadError;
pub use restore::RestoreSource;
#[cfg(test)]
pub(crate) use tests::kernel as test_kernel;

/// Why a machine could not be made, run or saved.
#[derive(Debug, Error)]
pub enum MachineError {
    /// KVM.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// A vCPU's state.
    #[error(transparent)]
    Vcpu(#[from] VcpuStateError),
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Kernel, initramfs or command line.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// ACPI tables.
    #[error(transparent)]
    Acpi(#[from] AcpiError),
    /// The generation id.
    #[error(transparent)]
    Generation(#[from] GenerationError),
    /// A device or its bus.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// The file server.
    #[error(transparent)]
    Files(#[from] FileSystemError),
    /// A backing that a block device cannot have.
    #[error(transparent)]
    Block(#[from] AttachError),
    /// A block device that does not exist.
    #[error("block slot {0}: there are {BLOCK_SLOTS}, from 0 on")]
    NoSuchSlot(u8),
    /// The state file.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// A working set that is not one of this machine's memory.
    #[error(transparent)]
    WorkingSet(#[from] InvalidWorkingSet),
    /// What the guest touches could not be recorded.
    #[error(transparent)]
    Recording(#[from] RecordingError),
    /// What the guest touches is not recorded, and why.
    #[error("the machine is not recorded: {0}")]
    NotRecorded(String),
    /// More memory than the guest has addresses for.
    #[error(transparent)]
    TooMuchMemory(#[from] TooMuchMemory),
    /// Something was asked at the wrong time.
    #[error("the machine {0}")]
    Phase(&'static str),
}

/// What the vCPUs are doing.
enum Vcpus {
    /// They have not run yet.
    Ready(Vec<Vcpu>),
    /// They run.
    Running(RunningVcpus),
    /// They have been stopped for a snapshot, or could not be.
    Stopped,
}

/// One virtual machine.
pub struct Machine {
    shape: Shape,
    /// Width of the vCPUs' physical addresses, on which it depends where memory can be plugged.
    address_bits: u8,
    /// Whether the guest must be told of a new generation when it runs.
    restored: bool,
    vcpus: Vcpus,
    counters: Vec<VcpuCounters>,
    notice: Arc<ExitNotice>,
    bus: Arc<Bus>,
    attachments: Attachments,
    /// MSRs that a snapshot keeps; asked for when needed.
    vm: Arc<VmFd>,
    /// What the guest touches, or why that is not known.
    recording: Result<Recording, String>,
    /// After the VM, which has it mapped.
    ram: GuestRam,
}

impl Machine {
    /// Put a machine together.
    #[allow(clippy::too_many_arguments)]
    fn assemble(
        shape: Shape,
        address_bits: u8,
        restored: bool,
        vcpus: Vec<Vcpu>,
        bus: Bus,
        attachments: Attachments,
        vm: Arc<VmFd>,
        ram: GuestRam,
    ) -> Result<Self, MachineError> {
        let counters = vcpus.iter().map(Vcpu::counters).collect::<Result<_, _>>()?;
        let notice = ExitNotice::new().map_err(crate::kvm::doing("making an event descriptor"))?;
        Ok(Self {
            shape,
            address_bits,
            restored,
            vcpus: Vcpus::Ready(vcpus),
            counters,
            notice,
            bus: Arc::new(bus),
            attachments,
            vm,
            recording: Err("it was not made for a rehearsal".to_owned()),
            ram,
        })
    }

    /// Make the working set ready now, so that nothing of that is left when the machine is to run.
    pub fn populate(&mut self) {
        if let Vcpus::Ready(vcpus) = &mut self.vcpus {
            vcpus.iter_mut().for_each(Vcpu::populate);
        }
    }

    /// Run the vCPUs and the devices. Only once.
    ///
    /// The devices' threads start when the guest runs already. It cannot tell: nothing that it
    /// notifies is missed, and an access to a device's registers waits for the bus.
    pub fn run(&mut self) -> Result<(), MachineError> {
        let Vcpus::Ready(vcpus) = std::mem::replace(&mut self.vcpus, Vcpus::Stopped) else {
            return Err(MachineError::Phase("has been started already"));
        };
        self.bus.connect()?;
        if self.restored {
            generation::announce(&self.vm)?;
        }
        let io: Arc<dyn GuestIo> = self.bus.clone();
        self.vcpus = Vcpus::Running(RunningVcpus::start(vcpus, &io, &self.notice)?);
        Ok(self.bus.start()?)
    }

    /// Let the guest have `bytes` of memory beside its RAM, in all. It plugs them by itself.
    pub fn request_memory(&self, bytes: u64) -> Result<(), MachineError> {
        self.attachments.request_memory(bytes)?;
        if let Vcpus::Running(_) = self.vcpus {
            // The device had nothing behind it, if this is the first time.
            self.bus.pci().activate()?;
        }
        Ok(())
    }

    /// vCPUs and memory.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// How and when the guest ends.
    pub fn notice(&self) -> &Arc<ExitNotice> {
        &self.notice
    }

    /// The parts of the devices that the host's side uses.
    pub fn attachments(&self) -> &Attachments {
        &self.attachments
    }

    /// KVM's counters, summed over all vCPUs, in KVM's order.
    pub fn counters(&self) -> std::io::Result<Vec<(String, u64)>> {
        let mut sums: Vec<(String, u64)> = Vec::new();
        for counters in &self.counters {
            for (position, (name, value)) in counters.read()?.into_iter().enumerate() {
                match sums.get_mut(position) {
                    Some((known, sum)) if *known == name => *sum += value,
                    _ => sums.push((name, value)),
                }
            }
        }
        Ok(sums)
    }

    /// The pages that the guest has touched so far, when it was restored to have them recorded.
    pub fn touched(&self) -> Result<WorkingSet, MachineError> {
        match &self.recording {
            Ok(recording) => Ok(recording.working_set(&self.ram)?),
            Err(reason) => Err(MachineError::NotRecorded(reason.clone())),
        }
    }

    /// Where guest memory is mapped in this process: first address and the one after the last.
    pub fn memory_ranges(&self) -> Vec<(u64, u64)> {
        let range = |region: &vm_memory::GuestRegionMmap| {
            let start = region.as_ptr() as u64;
            (start, start + region.len())
        };
        self.ram.live().view().iter().map(range).collect()
    }
}

impl Drop for Machine {
    /// Stop everything that uses guest memory before it is unmapped.
    fn drop(&mut self) {
        if let Vcpus::Running(running) = std::mem::replace(&mut self.vcpus, Vcpus::Stopped)
            && let Err(error) = running.stop()
        {
            tracing::warn!("{error}");
        }
        self.bus.deactivate();
    }
}
