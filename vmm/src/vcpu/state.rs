//! The state of one vCPU, and the order in which it is read and written.
//!
//! The order matters; each line below was somebody's hung guest:
//!
//! * saving, `MP_STATE` comes first, because reading it can deliver pending INIT and SIPI, which
//!   changes other state; `VCPU_EVENTS` comes last;
//! * restoring, CPUID comes first, because it decides what else can be written;
//! * `SREGS` before `LAPIC`: they hold the APIC base;
//! * `REGS` before `VCPU_EVENTS`: writing the registers clears a pending exception;
//! * `LAPIC` before the MSRs: a write of `TSC_DEADLINE` is dropped while the timer's LVT entry is
//!   not in deadline mode;
//! * `TSC_DEADLINE` after all other MSRs: it is compared with the TSC, which is among them.
//!
//! Source: arch/x86/kvm/x86.c and lapic.c of Linux 6.12.

use kvm_bindings::{
    CpuId, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs,
    kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Vcpu, msr};
use crate::kvm::{KvmError, doing};

/// Difference of TSC frequencies below which a guest needs no scaling, in parts per million. The
/// host's own measurement of one and the same clock varies by less.
const TSC_TOLERANCE_PPM: u64 = 250;

/// Why a vCPU could not be saved or restored.
#[derive(Debug, Error)]
pub enum VcpuStateError {
    /// A call failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// KVM refused an MSR.
    #[error("KVM refuses MSR {index:#x} with value {value:#x}")]
    Msr {
        /// Number of the MSR.
        index: u32,
        /// Value that it should have had.
        value: u64,
    },
    /// A list longer than KVM takes.
    #[error("too many {0} in the vCPU's state")]
    TooMany(&'static str),
    /// Snapshot and host differ in TSC frequency.
    #[error("the snapshot is of a host whose TSC runs at {snapshot} kHz, this one's at {host} kHz")]
    TscFrequency {
        /// Frequency when the snapshot was made.
        snapshot: u32,
        /// Frequency of this host.
        host: u32,
    },
}

/// The state of one vCPU between two instructions.
#[derive(Debug, Serialize, Deserialize)]
pub struct VcpuState {
    pub(super) cpuid: Vec<kvm_cpuid_entry2>,
    pub(super) tsc_khz: u32,
    pub(super) mp_state: kvm_mp_state,
    pub(super) regs: kvm_regs,
    pub(super) sregs: kvm_sregs,
    pub(super) xsave: kvm_xsave,
    pub(super) xcrs: kvm_xcrs,
    pub(super) debug_regs: kvm_debugregs,
    pub(super) lapic: kvm_lapic_state,
    /// All but the deadline, in the order in which they are written.
    pub(super) msrs: Vec<kvm_msr_entry>,
    pub(super) tsc_deadline: Option<kvm_msr_entry>,
    pub(super) events: kvm_vcpu_events,
}

impl VcpuState {
    /// Frequency of the TSC that the guest has measured, in kHz.
    pub fn tsc_khz(&self) -> u32 {
        self.tsc_khz
    }

    /// Leave out the MSRs that a new vCPU has by itself: fewer to write at each restore. `fresh` is
    /// one with this state's index and CPUID, in a VM of this host.
    pub fn drop_defaults(&mut self, fresh: &Vcpu) -> Result<(), VcpuStateError> {
        fresh.set_cpuid(&self.cpuid)?;
        let indices: Vec<_> = self.msrs.iter().map(|entry| entry.index).collect();
        let defaults = msr::read(&fresh.fd, &indices)?;
        self.msrs.retain(|entry| {
            let same =
                |other: &kvm_msr_entry| (other.index, other.data) == (entry.index, entry.data);
            entry.index == msr::TSC || !defaults.iter().any(same)
        });
        Ok(())
    }

    /// Replace a deadline of zero by the current TSC. Zero means that the timer is not armed, but
    /// also that it has just fired: KVM zeroes the MSR and delivers the interrupt afterwards, so
    /// that the interrupt is lost when the state is taken in between. A guest can cope with one
    /// timer interrupt too many.
    fn fix_zero_deadline(&mut self) {
        let tsc = self
            .msrs
            .iter()
            .find(|entry| entry.index == msr::TSC)
            .map(|entry| entry.data);
        if let (Some(deadline), Some(tsc)) = (&mut self.tsc_deadline, tsc)
            && deadline.data == 0
        {
            deadline.data = tsc;
        }
    }
}

impl Vcpu {
    /// Read all state; `msrs` are the indices of those to save. The vCPU must have left `KVM_RUN`
    /// with nothing left to complete.
    pub fn save(&self, msrs: &[u32]) -> Result<VcpuState, VcpuStateError> {
        let fd = &self.fd;
        let mp_state = fd
            .get_mp_state()
            .map_err(doing("reading a vCPU's run state"))?;
        let regs = fd.get_regs().map_err(doing("reading a vCPU's registers"))?;
        let sregs = fd
            .get_sregs()
            .map_err(doing("reading a vCPU's system registers"))?;
        let xsave = fd
            .get_xsave()
            .map_err(doing("reading a vCPU's XSAVE area"))?;
        let xcrs = fd.get_xcrs().map_err(doing("reading a vCPU's XCRs"))?;
        let debug_regs = fd
            .get_debug_regs()
            .map_err(doing("reading a vCPU's debug registers"))?;
        let lapic = fd
            .get_lapic()
            .map_err(doing("reading a vCPU's local APIC"))?;
        let tsc_khz = self.tsc_khz()?;
        let cpuid = fd
            .get_cpuid2(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .map_err(doing("reading a vCPU's CPUID"))?;
        let mut msrs = msr::writable(fd, msr::read(fd, msrs)?)?;
        let deadline = msrs
            .iter()
            .position(|entry| entry.index == msr::TSC_DEADLINE);
        let tsc_deadline = deadline.map(|position| msrs.remove(position));
        let events = fd
            .get_vcpu_events()
            .map_err(doing("reading a vCPU's events"))?;
        let mut state = VcpuState {
            cpuid: cpuid.as_slice().to_vec(),
            tsc_khz,
            mp_state,
            regs,
            sregs,
            xsave,
            xcrs,
            debug_regs,
            lapic,
            msrs,
            tsc_deadline,
            events,
        };
        state.fix_zero_deadline();
        Ok(state)
    }

    /// Write all state into a vCPU that has never run.
    pub fn restore(&self, state: &VcpuState) -> Result<(), VcpuStateError> {
        self.check_tsc_frequency(state.tsc_khz)?;
        let fd = &self.fd;
        self.set_cpuid(&state.cpuid)?;
        fd.set_mp_state(state.mp_state)
            .map_err(doing("writing a vCPU's run state"))?;
        fd.set_regs(&state.regs)
            .map_err(doing("writing a vCPU's registers"))?;
        fd.set_sregs(&state.sregs)
            .map_err(doing("writing a vCPU's system registers"))?;
        set_xsave(fd, &state.xsave).map_err(doing("writing a vCPU's XSAVE area"))?;
        fd.set_xcrs(&state.xcrs)
            .map_err(doing("writing a vCPU's XCRs"))?;
        fd.set_debug_regs(&state.debug_regs)
            .map_err(doing("writing a vCPU's debug registers"))?;
        fd.set_lapic(&state.lapic)
            .map_err(doing("writing a vCPU's local APIC"))?;
        msr::write(fd, &state.msrs)?;
        msr::write(fd, state.tsc_deadline.as_slice())?;
        fd.set_vcpu_events(&state.events)
            .map_err(doing("writing a vCPU's events"))?;
        self.tell_of_pause()
    }

    /// Set what CPUID answers.
    pub(super) fn set_cpuid(&self, entries: &[kvm_cpuid_entry2]) -> Result<(), VcpuStateError> {
        let cpuid =
            CpuId::from_entries(entries).map_err(|_| VcpuStateError::TooMany("CPUID leaves"))?;
        Ok(self
            .fd
            .set_cpuid2(&cpuid)
            .map_err(doing("setting a vCPU's CPUID"))?)
    }

    fn tsc_khz(&self) -> Result<u32, KvmError> {
        self.fd
            .get_tsc_khz()
            .map_err(doing("reading the TSC's frequency"))
    }

    fn check_tsc_frequency(&self, snapshot: u32) -> Result<(), VcpuStateError> {
        let host = self.tsc_khz()?;
        let tolerated = u64::from(host) * TSC_TOLERANCE_PPM / 1_000_000;
        if u64::from(host.abs_diff(snapshot)) > tolerated {
            return Err(VcpuStateError::TscFrequency { snapshot, host });
        }
        Ok(())
    }

    /// Tell the guest's soft-lockup watchdog that it was paused. A guest that does not use the KVM
    /// clock cannot be told: not an error.
    fn tell_of_pause(&self) -> Result<(), VcpuStateError> {
        match self.fd.kvmclock_ctrl() {
            Err(error) if error.errno() != libc::EINVAL => {
                Err(doing("telling a vCPU of its pause")(error).into())
            }
            _ => Ok(()),
        }
    }
}

#[allow(unsafe_code)]
fn set_xsave(fd: &VcpuFd, xsave: &kvm_xsave) -> Result<(), vmm_sys_util::errno::Error> {
    // SAFETY: KVM reads more than the 4096 bytes of `kvm_xsave` only for a process that has asked for
    // dynamic XSAVE components (`arch_prctl(ARCH_REQ_XCOMP_GUEST_PERM)`), and this one never does.
    unsafe { fd.set_xsave(xsave) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(tsc: u64, deadline: u64) -> VcpuState {
        let entry = |index, data| kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        VcpuState {
            cpuid: Vec::new(),
            tsc_khz: 1_000_000,
            mp_state: Default::default(),
            regs: Default::default(),
            sregs: Default::default(),
            xsave: Default::default(),
            xcrs: Default::default(),
            debug_regs: Default::default(),
            lapic: Default::default(),
            msrs: vec![entry(msr::TSC, tsc)],
            tsc_deadline: Some(entry(msr::TSC_DEADLINE, deadline)),
            events: Default::default(),
        }
    }

    #[test]
    fn test_a_deadline_of_zero_becomes_one_that_fires_at_once() {
        let mut unarmed = state(1234, 0);
        unarmed.fix_zero_deadline();
        assert_eq!(unarmed.tsc_deadline.unwrap().data, 1234);
        let mut armed = state(1234, 99);
        armed.fix_zero_deadline();
        assert_eq!(armed.tsc_deadline.unwrap().data, 99);
    }
}
