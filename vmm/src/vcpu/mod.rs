//! vCPUs: what they are told about themselves, their state, and the threads that run them.

mod boot;
mod cpuid;
mod msr;
mod run;
mod state;
mod stats;
#[cfg(test)]
mod tests;

use kvm_ioctls::{VcpuFd, VmFd};

use crate::kvm::{KvmError, doing};
pub use boot::GDT as BOOT_GDT_ENTRIES;
pub use cpuid::normalise;
pub use msr::indices_to_save;
pub use run::{ExitNotice, GuestIo, RunningVcpus};
pub use state::{VcpuState, VcpuStateError};
pub use stats::VcpuCounters;

/// One vCPU that does not run.
pub struct Vcpu {
    fd: VcpuFd,
    index: u8,
}

impl Vcpu {
    /// Make vCPU `index` of `vm`. Its index is its APIC id.
    pub fn new(vm: &VmFd, index: u8) -> Result<Self, KvmError> {
        let fd = vm
            .create_vcpu(index.into())
            .map_err(doing("creating a vCPU"))?;
        Ok(Self { fd, index })
    }

    /// Its number.
    pub fn index(&self) -> u8 {
        self.index
    }

    /// KVM's counters of this vCPU, readable while it runs.
    pub fn counters(&self) -> Result<VcpuCounters, KvmError> {
        VcpuCounters::of(&self.fd)
    }
}
