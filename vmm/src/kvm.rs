//! The hypervisor: `/dev/kvm` opened, checked, and asked what a guest can have.

use std::io;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::{
    KVM_API_VERSION, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, Kvm, VmFd};
use thiserror::Error;
use vm_memory::{GuestMemory, GuestMemoryRegion, MmapRegion};

use crate::layout::TSS;
use crate::memory::{GuestRam, MemorySlots};

/// A KVM call that failed, or a KVM that cannot do what is needed.
#[derive(Debug, Error)]
pub enum KvmError {
    /// A call failed.
    #[error("KVM: {doing}: {source}")]
    Call {
        /// What was being done.
        doing: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// Another API than the stable one.
    #[error("/dev/kvm speaks API version {0} instead of 12: is it really KVM?")]
    Version(i32),
    /// Something that the host's KVM lacks.
    #[error("the host's KVM lacks {0}: Linux 5.15 or later with hardware virtualization is needed")]
    Capability(&'static str),
}

/// For `map_err`: name what was being done.
pub fn doing<E: Into<std::io::Error>>(doing: &'static str) -> impl FnOnce(E) -> KvmError {
    move |source| KvmError::Call {
        doing,
        source: source.into(),
    }
}

/// `/dev/kvm`.
pub struct Hypervisor {
    kvm: Kvm,
}

impl Hypervisor {
    /// Open `/dev/kvm`.
    pub fn open() -> Result<Self, KvmError> {
        Self::checked(Kvm::new().map_err(doing("opening /dev/kvm"))?)
    }

    /// Take `/dev/kvm` as somebody else has opened it.
    #[allow(unsafe_code)]
    pub fn from_descriptor(descriptor: OwnedFd) -> Result<Self, KvmError> {
        use std::os::fd::FromRawFd;
        // SAFETY: the descriptor is owned and given up here. That it is KVM's is checked below,
        // and ioctls on another kind of file fail.
        Self::checked(unsafe { Kvm::from_raw_fd(descriptor.into_raw_fd()) })
    }

    fn checked(kvm: Kvm) -> Result<Self, KvmError> {
        match kvm.get_api_version() {
            version if version == KVM_API_VERSION as i32 => Ok(Self { kvm }),
            version => Err(KvmError::Version(version)),
        }
    }

    /// Refuse a KVM that cannot run, save and restore a guest. For a boot: what a snapshot was made
    /// with is there when it is restored, since a template belongs to one host kernel.
    pub fn check_capabilities(&self) -> Result<(), KvmError> {
        let needed = [
            (Cap::Irqchip, "an in-kernel interrupt controller"),
            (Cap::Irqfd, "irqfd"),
            (Cap::Ioeventfd, "ioeventfd"),
            (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
            (Cap::MpState, "KVM_CAP_MP_STATE"),
            (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
            (Cap::Debugregs, "KVM_CAP_DEBUGREGS"),
            (Cap::Xsave, "KVM_CAP_XSAVE"),
            (Cap::Xcrs, "KVM_CAP_XCRS"),
            (Cap::AdjustClock, "KVM_CAP_ADJUST_CLOCK"),
            (Cap::GetTscKhz, "KVM_CAP_GET_TSC_KHZ"),
            (Cap::TscDeadlineTimer, "the TSC deadline timer"),
        ];
        match needed
            .iter()
            .find(|(capability, _)| !self.kvm.check_extension(*capability))
        {
            Some((_, name)) => Err(KvmError::Capability(name)),
            None => Ok(()),
        }
    }

    /// The CPUID leaves that KVM can give a guest on this host.
    pub fn supported_cpuid(&self) -> Result<Vec<kvm_cpuid_entry2>, KvmError> {
        let cpuid = self
            .kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(doing("asking for the supported CPUID"))?;
        Ok(cpuid.as_slice().to_vec())
    }

    /// The MSRs that make up a vCPU's state.
    pub fn msr_indices(&self) -> Result<Vec<u32>, KvmError> {
        let list = self
            .kvm
            .get_msr_index_list()
            .map_err(doing("asking for the list of MSRs"))?;
        Ok(list.as_slice().to_vec())
    }

    /// A VM with PIC, IOAPIC and `ram`, without vCPUs. No interval timer: a kernel of a
    /// hardware-reduced machine does not look for one (arch/x86/kernel/acpi/boot.c,
    /// `acpi_generic_reduced_hw_init`), and KVM's would be a kernel thread for each VM.
    pub fn create_vm(&self, ram: &GuestRam) -> Result<Arc<VmFd>, KvmError> {
        let vm = self.create_bare_vm()?;
        for (slot, region) in ram.memory().iter().enumerate() {
            let (guest, size) = (region.start_addr().0, region.len());
            vm.add(slot as u32, guest, region, 0, size)
                .map_err(doing("giving guest memory to the VM"))?;
        }
        Ok(Arc::new(vm))
    }

    /// A VM without memory, to ask its vCPUs what they are like.
    pub fn create_bare_vm(&self) -> Result<VmFd, KvmError> {
        let vm = self.kvm.create_vm().map_err(doing("creating a VM"))?;
        vm.set_tss_address(TSS as usize)
            .map_err(doing("placing the TSS"))?;
        vm.create_irq_chip()
            .map_err(doing("creating the interrupt controllers"))?;
        Ok(vm)
    }
}

impl MemorySlots for VmFd {
    #[allow(unsafe_code)]
    fn add(
        &self,
        slot: u32,
        guest: u64,
        region: &MmapRegion,
        at: u64,
        size: u64,
    ) -> io::Result<()> {
        let end = at.checked_add(size);
        if end.is_none_or(|end| end > region.size() as u64) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let memory = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: guest,
            memory_size: size,
            userspace_addr: region.as_ptr() as u64 + at,
        };
        // SAFETY: the range was checked to lie in a mapping that the region owns. A machine drops its
        // memory after its VM, and guest memory is accessed as volatile bytes only.
        Ok(unsafe { self.set_user_memory_region(memory) }?)
    }

    #[allow(unsafe_code)]
    fn remove(&self, slot: u32, guest: u64) -> io::Result<()> {
        let memory = kvm_userspace_memory_region {
            slot,
            guest_phys_addr: guest,
            ..Default::default()
        };
        // SAFETY: a size of zero takes the slot away from the guest.
        Ok(unsafe { self.set_user_memory_region(memory) }?)
    }
}

/// KVM for tests. Where there is none they are skipped, and say so.
#[cfg(test)]
pub(crate) fn test_hypervisor() -> Option<Hypervisor> {
    match Hypervisor::open() {
        Ok(hypervisor) => Some(hypervisor),
        Err(error) => {
            eprintln!("SKIPPED, a test that needs KVM: {error}");
            None
        }
    }
}
