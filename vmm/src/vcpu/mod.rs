//! vCPUs: what they are told about themselves, their state, and the threads that run them.

mod boot;
mod cpuid;
mod msr;
mod prefault;
mod run;
mod state;
mod stats;
#[cfg(test)]
mod tests;

use kvm_ioctls::{VcpuFd, VmFd};

use crate::kvm::{KvmError, doing};
use crate::memory::Population;
pub use boot::GDT as BOOT_GDT_ENTRIES;
pub use cpuid::{address_bits, normalise};
pub use msr::indices_to_save;
use prefault::prefault;
pub use run::{ExitNotice, GuestIo, RunningVcpus};
pub use state::{VcpuState, VcpuStateError};
pub use stats::VcpuCounters;

/// One vCPU that does not run.
pub struct Vcpu {
    fd: VcpuFd,
    index: u8,
    /// What is made ready before it runs.
    population: Option<Population>,
}

impl Vcpu {
    /// Make vCPU `index` of `vm`. Its index is its APIC id.
    pub fn new(vm: &VmFd, index: u8) -> Result<Self, KvmError> {
        let fd = vm
            .create_vcpu(index.into())
            .map_err(doing("creating a vCPU"))?;
        Ok(Self {
            fd,
            index,
            population: None,
        })
    }

    /// Its number.
    pub fn index(&self) -> u8 {
        self.index
    }

    /// Have guest memory made ready before this vCPU runs: by [`Vcpu::populate`], or at the latest by
    /// its thread.
    pub fn populate_first(&mut self, population: Population) {
        self.population = Some(population);
    }

    /// Make the working set ready, if there is one and it is not. What the kernel does not do is left
    /// to the guest's own accesses.
    pub fn populate(&mut self) {
        let Some(population) = self.population.take() else {
            return;
        };
        // Copies first: KVM maps a page for writing where the process may write it.
        if let Err(error) = population.copy_written() {
            tracing::debug!("copying the pages of the working set: {error}");
        }
        if let Err(error) = prefault(&self.fd, &population.guest_ranges()) {
            tracing::debug!("mapping the pages of the working set: {error}");
        }
    }

    /// KVM's counters of this vCPU, readable while it runs.
    pub fn counters(&self) -> Result<VcpuCounters, KvmError> {
        VcpuCounters::of(&self.fd)
    }
}
