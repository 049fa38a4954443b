//! vCPUs on the host's KVM, with guests of a few instructions. Without `/dev/kvm` they are skipped,
//! and say so.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs};
use serde::Serialize;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::kvm::Hypervisor;
use crate::memory::GuestRam;
use kvm_ioctls::VmFd;
use std::ops::ControlFlow;
use std::sync::Arc;
use thaw_vmm_control::GuestExit;

const RAM: u64 = 128 << 20;
const CODE: u64 = 0x1000;
/// How long a guest of a few instructions may take before the test fails.
const LONG: Duration = Duration::from_secs(30);

struct TestVm {
    hypervisor: Hypervisor,
    vm: Arc<VmFd>,
    ram: GuestRam,
}

fn test_vm() -> Option<TestVm> {
    let hypervisor = crate::kvm::test_hypervisor()?;
    let ram = GuestRam::new(RAM).unwrap();
    let vm = hypervisor.create_vm(&ram).unwrap();
    Some(TestVm {
        hypervisor,
        vm,
        ram,
    })
}

impl TestVm {
    fn msrs(&self) -> Vec<u32> {
        indices_to_save(&self.hypervisor.msr_indices().unwrap())
    }

    /// A vCPU in real mode at the start of `code`.
    fn real_mode(&self, index: u8, code: &[u8]) -> Vcpu {
        self.ram
            .memory()
            .write_slice(code, GuestAddress(CODE))
            .unwrap();
        let vcpu = Vcpu::new(&self.vm, index).unwrap();
        let cpuid = normalise(&self.hypervisor.supported_cpuid().unwrap(), index, 1);
        vcpu.set_cpuid(&cpuid).unwrap();
        let mut sregs = vcpu.fd.get_sregs().unwrap();
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        vcpu.fd.set_sregs(&sregs).unwrap();
        let regs = kvm_regs {
            rip: CODE,
            rflags: 2,
            ..Default::default()
        };
        vcpu.fd.set_regs(&regs).unwrap();
        vcpu
    }
}

/// Counts accesses, and tells of each of the first.
#[derive(Default)]
struct Counting {
    reads: AtomicU64,
    seen: Mutex<Option<Sender<()>>>,
}

impl Counting {
    fn count(&self, data: &mut [u8]) {
        let count = self.reads.fetch_add(1, Ordering::SeqCst);
        data.fill(count as u8);
        if count > 100
            && let Some(seen) = self.seen.lock().unwrap().take()
        {
            seen.send(()).unwrap();
        }
    }
}

impl GuestIo for Counting {
    fn port_read(&self, _: u16, data: &mut [u8]) {
        self.count(data);
    }
    fn port_write(&self, port: u16, _: &[u8]) -> ControlFlow<GuestExit> {
        if port == 0x64 {
            ControlFlow::Break(GuestExit::Reset)
        } else {
            ControlFlow::Continue(())
        }
    }
    fn memory_read(&self, _: u64, data: &mut [u8]) {
        self.count(data);
    }
    fn memory_write(&self, _: u64, _: &[u8]) {}
}

/// Run `vcpu` until it has been seen to do more than 100 reads, stop it, and count.
fn run_until_busy(vcpu: Vcpu) -> (Vcpu, u64) {
    let (sender, receiver) = channel();
    let counting = Arc::new(Counting {
        seen: Mutex::new(Some(sender)),
        ..Default::default()
    });
    let io: Arc<dyn GuestIo> = counting.clone();
    let notice = ExitNotice::new().unwrap();
    let running = RunningVcpus::start(vec![vcpu], &io, &notice).unwrap();
    receiver.recv_timeout(LONG).unwrap();
    let vcpu = running.stop().unwrap().remove(0);
    assert_eq!(notice.exit(), None);
    assert!(notice.first_run().is_some());
    (vcpu, counting.reads.load(Ordering::SeqCst))
}

/// Run `vcpu` until its guest ends.
fn run_to_the_end(vcpu: Vcpu) -> GuestExit {
    let io: Arc<dyn GuestIo> = Arc::new(Counting::default());
    let notice = ExitNotice::new().unwrap();
    let running = RunningVcpus::start(vec![vcpu], &io, &notice).unwrap();
    let mut poll = [rustix::event::PollFd::from_borrowed_fd(
        notice.event(),
        rustix::event::PollFlags::IN,
    )];
    let timeout = rustix::event::Timespec {
        tv_sec: LONG.as_secs() as i64,
        tv_nsec: 0,
    };
    assert_eq!(
        rustix::event::poll(&mut poll, Some(&timeout)).unwrap(),
        1,
        "the guest goes on"
    );
    running.stop().unwrap();
    notice.exit().unwrap()
}

#[track_caller]
fn assert_same<T: Serialize>(name: &str, a: &T, b: &T) {
    let bytes = |value| postcard::to_stdvec(value).unwrap();
    let (a, b) = (bytes(a), bytes(b));
    let differs = a.iter().zip(&b).position(|(a, b)| a != b);
    assert_eq!(a.len(), b.len(), "{name}");
    assert_eq!(differs, None, "{name} differs at this byte");
}

fn set_msr(vcpu: &Vcpu, index: u32, data: u64) {
    let entry = kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let msrs = Msrs::from_entries(&[entry]).unwrap();
    assert_eq!(vcpu.fd.set_msrs(&msrs).unwrap(), 1, "MSR {index:#x}");
}

/// Give every class of state values that no vCPU has by itself.
fn mark_all_state(vcpu: &Vcpu) {
    let mut regs = vcpu.fd.get_regs().unwrap();
    (regs.rax, regs.rbx, regs.rsi, regs.r8, regs.r15) = (0x11, 0x2222, 0x33, 0x44 << 40, u64::MAX);
    vcpu.fd.set_regs(&regs).unwrap();

    let mut sregs = vcpu.fd.get_sregs().unwrap();
    (sregs.cr2, sregs.fs.base, sregs.gs.base, sregs.cr8) = (0xdead_0000, 0x7000, 0x8000, 3);
    (sregs.gdt.base, sregs.gdt.limit) = (0x500, 31);
    vcpu.fd.set_sregs(&sregs).unwrap();

    let mut xsave = vcpu.fd.get_xsave().unwrap();
    // XMM0 is at byte 160 of the legacy area; XSTATE_BV, at 512, says that it is in use.
    (xsave.region[40], xsave.region[43]) = (0x1234_5678, 0x9abc_def0);
    xsave.region[128] |= 3;
    // SAFETY: 4096 bytes, as the state of this process' vCPUs has.
    #[allow(unsafe_code)]
    unsafe {
        vcpu.fd.set_xsave(&xsave).unwrap();
    }
    let mut xcrs = vcpu.fd.get_xcrs().unwrap();
    xcrs.xcrs[0].value = 3;
    vcpu.fd.set_xcrs(&xcrs).unwrap();

    let mut debug = vcpu.fd.get_debug_regs().unwrap();
    debug.db = [0x1000, 0x2000, 0x3000, 0x4000];
    debug.dr7 |= 1;
    vcpu.fd.set_debug_regs(&debug).unwrap();

    let mut lapic = vcpu.fd.get_lapic().unwrap();
    // Software-enabled; the timer in deadline mode with vector 0x31; priority 0x20.
    for (register, value) in [(0xf0, 0x1ffu32), (0x320, 2 << 17 | 0x31), (0x80, 0x20)] {
        for (byte, value) in lapic.regs[register..].iter_mut().zip(value.to_le_bytes()) {
            *byte = value as libc::c_char;
        }
    }
    vcpu.fd.set_lapic(&lapic).unwrap();

    set_msr(vcpu, 0xc000_0082, 0xffff_8000_0000_1234); // LSTAR
    set_msr(vcpu, 0xc000_0102, 0xffff_8000_0000_5678); // KERNEL_GS_BASE
    set_msr(vcpu, 0x176, 0x4242); // SYSENTER_EIP
    set_msr(vcpu, 0x277, 0x0007_0406_0007_0406); // PAT
    set_msr(vcpu, 0x200, 0x1000_0006); // MTRR base 0
    set_msr(vcpu, msr::TSC, 1 << 50);
    set_msr(vcpu, msr::TSC_DEADLINE, 1 << 60);

    let mut events = vcpu.fd.get_vcpu_events().unwrap();
    events.nmi.masked = 1;
    events.interrupt.shadow = 1;
    vcpu.fd.set_vcpu_events(&events).unwrap();
}

#[test]
fn test_every_class_of_state_survives_a_save_and_restore() {
    let (Some(first), Some(second)) = (test_vm(), test_vm()) else {
        return;
    };
    let vcpu = first.real_mode(0, &[0xf4]);
    mark_all_state(&vcpu);
    let saved = vcpu.save(&first.msrs()).unwrap();
    let restored = Vcpu::new(&second.vm, 0).unwrap();
    restored.restore(&saved).unwrap();
    let again = restored.save(&second.msrs()).unwrap();

    // That the marks arrived at all.
    assert_eq!(again.regs.r15, u64::MAX);
    assert_eq!(again.sregs.cr2, 0xdead_0000);
    assert_eq!(again.xsave.region[40], 0x1234_5678);
    assert_eq!(again.debug_regs.db[3], 0x4000);
    assert_ne!(
        again.tsc_deadline.unwrap().data,
        0,
        "the deadline was dropped"
    );
    assert_same("TSC deadline", &saved.tsc_deadline, &again.tsc_deadline);

    assert_same("regs", &saved.regs, &again.regs);
    assert_same("sregs", &saved.sregs, &again.sregs);
    assert_same("xsave", &saved.xsave, &again.xsave);
    assert_same("xcrs", &saved.xcrs, &again.xcrs);
    assert_same("debug registers", &saved.debug_regs, &again.debug_regs);
    assert_same("local APIC", &saved.lapic, &again.lapic);
    assert_same("run state", &saved.mp_state, &again.mp_state);
    assert_same("events", &saved.events, &again.events);
    assert_same("CPUID", &saved.cpuid, &again.cpuid);
    let msrs = |state: &VcpuState| -> Vec<_> {
        state
            .msrs
            .iter()
            .filter(|e| e.index != msr::TSC)
            .copied()
            .collect()
    };
    assert_same("MSRs", &msrs(&saved), &msrs(&again));
    assert!(
        msrs(&saved)
            .iter()
            .any(|e| (e.index, e.data) == (0x176, 0x4242))
    );
    let tsc = |state: &VcpuState| {
        state
            .msrs
            .iter()
            .find(|e| e.index == msr::TSC)
            .unwrap()
            .data
    };
    // Not compared with what was written: there is a KVM whose guests have the host's TSC.
    assert!(tsc(&again) >= tsc(&saved));
}

#[test]
fn test_msrs_that_a_new_vcpu_has_by_itself_are_left_out_and_restored_all_the_same() {
    let (Some(first), Some(second)) = (test_vm(), test_vm()) else {
        return;
    };
    let vcpu = first.real_mode(0, &[0xf4]);
    set_msr(&vcpu, 0x176, 0x4242);
    let saved = vcpu.save(&first.msrs()).unwrap();
    let mut dropped = vcpu.save(&first.msrs()).unwrap();
    let bare = first.hypervisor.create_bare_vm().unwrap();
    dropped
        .drop_defaults(&Vcpu::new(&bare, 0).unwrap())
        .unwrap();
    assert!(dropped.msrs.len() < saved.msrs.len() / 2);
    assert!(dropped.msrs.iter().any(|e| e.index == msr::TSC));

    let restored = Vcpu::new(&second.vm, 0).unwrap();
    restored.restore(&dropped).unwrap();
    let again = restored.save(&second.msrs()).unwrap();
    let msrs = |state: &VcpuState| -> Vec<_> {
        state
            .msrs
            .iter()
            .filter(|e| e.index != msr::TSC)
            .copied()
            .collect()
    };
    assert_same("MSRs", &msrs(&saved), &msrs(&again));
}

#[test]
fn test_a_vcpu_that_waits_for_its_start_stays_waiting() {
    let (Some(first), Some(second)) = (test_vm(), test_vm()) else {
        return;
    };
    let _boot = Vcpu::new(&first.vm, 0).unwrap();
    let saved = Vcpu::new(&first.vm, 1)
        .unwrap()
        .save(&first.msrs())
        .unwrap();
    assert_eq!(
        saved.mp_state.mp_state,
        kvm_bindings::KVM_MP_STATE_UNINITIALIZED
    );
    let _boot = Vcpu::new(&second.vm, 0).unwrap();
    let restored = Vcpu::new(&second.vm, 1).unwrap();
    restored.restore(&saved).unwrap();
    assert_same(
        "run state",
        &saved.mp_state,
        &restored.fd.get_mp_state().unwrap(),
    );
}

#[test]
fn test_a_snapshot_of_another_tsc_frequency_is_refused() {
    let Some(vm) = test_vm() else { return };
    let vcpu = vm.real_mode(0, &[0xf4]);
    let mut state = vcpu.save(&vm.msrs()).unwrap();
    state.tsc_khz += state.tsc_khz / 1000;
    let error = vcpu.restore(&state).unwrap_err();
    assert!(
        matches!(error, VcpuStateError::TscFrequency { .. }),
        "{error}"
    );
}

#[test]
fn test_an_msr_that_kvm_refuses_is_named() {
    let Some(vm) = test_vm() else { return };
    let vcpu = vm.real_mode(0, &[0xf4]);
    let mut state = vcpu.save(&vm.msrs()).unwrap();
    state.msrs.push(kvm_msr_entry {
        index: 0xdead_beef,
        data: 1,
        ..Default::default()
    });
    let error = vcpu.restore(&state).unwrap_err();
    assert_eq!(
        error.to_string(),
        "KVM refuses MSR 0xdeadbeef with value 0x1"
    );
}

#[test]
fn test_a_stopped_vcpu_has_completed_its_port_access() {
    let Some(vm) = test_vm() else { return };
    // in al, 0x10; inc ebx; jmp back
    let vcpu = vm.real_mode(0, &[0xe4, 0x10, 0x66, 0x43, 0xeb, 0xfa]);
    let (vcpu, reads) = run_until_busy(vcpu);
    let regs = vcpu.fd.get_regs().unwrap();
    assert_eq!(
        regs.rax & 0xff,
        (reads - 1) & 0xff,
        "the last answer is lost"
    );
    // Either before or after the increment that follows the last read.
    assert!(
        regs.rbx == reads || regs.rip == CODE + 2 && regs.rbx == reads - 1,
        "{regs:x?}"
    );
}

#[test]
fn test_a_stopped_vcpu_has_completed_its_memory_access() {
    let Some(vm) = test_vm() else { return };
    // mov al, [ds:0]; inc ebx; jmp back; DS is where no RAM is.
    let vcpu = vm.real_mode(0, &[0xa0, 0x00, 0x00, 0x66, 0x43, 0xeb, 0xf9]);
    let mut sregs = vcpu.fd.get_sregs().unwrap();
    sregs.ds.base = 0xd000_0000;
    vcpu.fd.set_sregs(&sregs).unwrap();
    let (vcpu, reads) = run_until_busy(vcpu);
    let regs = vcpu.fd.get_regs().unwrap();
    assert_eq!(
        regs.rax & 0xff,
        (reads - 1) & 0xff,
        "the last answer is lost"
    );
    assert!(
        regs.rbx == reads || regs.rip == CODE + 3 && regs.rbx == reads - 1,
        "{regs:x?}"
    );
}

#[test]
fn test_a_stopped_vcpu_goes_on_in_another_vm() {
    let (Some(first), Some(second)) = (test_vm(), test_vm()) else {
        return;
    };
    let code = [0xe4, 0x10, 0x66, 0x43, 0xeb, 0xfa];
    let (vcpu, reads) = run_until_busy(first.real_mode(0, &code));
    let state = vcpu.save(&first.msrs()).unwrap();
    second
        .ram
        .memory()
        .write_slice(&code, GuestAddress(CODE))
        .unwrap();
    let vcpu = Vcpu::new(&second.vm, 0).unwrap();
    vcpu.restore(&state).unwrap();
    let (vcpu, more) = run_until_busy(vcpu);
    let count = vcpu.fd.get_regs().unwrap().rbx;
    assert!(
        count.abs_diff(reads + more) <= 1,
        "{reads} and {more} reads, counted {count}"
    );
}

#[test]
fn test_halted_vcpus_can_be_stopped() {
    let Some(vm) = test_vm() else { return };
    let io: Arc<dyn GuestIo> = Arc::new(Counting::default());
    let notice = ExitNotice::new().unwrap();
    // One halts, the other never starts.
    let vcpus = vec![vm.real_mode(0, &[0xf4]), Vcpu::new(&vm.vm, 1).unwrap()];
    let running = RunningVcpus::start(vcpus, &io, &notice).unwrap();
    let vcpus = running.stop().unwrap();
    assert_eq!(vcpus.iter().map(Vcpu::index).collect::<Vec<_>>(), [0, 1]);
    // And started and stopped again.
    let running = RunningVcpus::start(vcpus, &io, &notice).unwrap();
    assert_eq!(running.stop().unwrap().len(), 2);
    assert_eq!(notice.exit(), None);
}

#[test]
fn test_a_guest_ends_by_the_reset_port() {
    // mov al, 0xfe; out 0x64, al
    let Some(vm) = test_vm() else { return };
    let exit = run_to_the_end(vm.real_mode(0, &[0xb0, 0xfe, 0xe6, 0x64]));
    assert_eq!(exit, GuestExit::Reset);
}

#[test]
fn test_exits_are_counted() {
    let Some(vm) = test_vm() else { return };
    let vcpu = vm.real_mode(0, &[0xe4, 0x10, 0xeb, 0xfc]);
    let counters = vcpu.counters().unwrap();
    let (_vcpu, reads) = run_until_busy(vcpu);
    let counted = counters.read().unwrap();
    let value = |name| {
        counted
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| *value)
    };
    assert!(value("exits").is_some(), "{counted:?}");
    // A KVM that emulates the guest's kernel mode counts no hardware exits.
    assert!(
        value("io_exits") == Some(0) || value("io_exits") >= Some(reads),
        "{counted:?}"
    );
}
