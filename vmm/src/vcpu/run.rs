//! Threads that run vCPUs, one each, and how they are stopped.
//!
//! A thread leaves `KVM_RUN` for good only when it has been told to stop or its guest has ended.
//! Being told is `immediate_exit` and then a signal: whichever way the thread is going, it meets one
//! of the two. `KVM_RUN` completes the port or memory access of the previous exit before it looks at
//! `immediate_exit`, so a stopped vCPU is always between two instructions (arch/x86/kvm/x86.c,
//! `kvm_arch_vcpu_ioctl_run`).

use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread::{self, JoinHandle};

use kvm_bindings::{KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN};
use kvm_ioctls::VcpuExit;
use rustix::event::{EventfdFlags, eventfd};
use thaw_vmm_control::GuestExit;
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler, unblock_signal};

use super::Vcpu;
use crate::kvm::{KvmError, doing};
use crate::phase::monotonic_ns;

/// Stack of a vCPU thread. Device emulation on it is shallow.
const STACK_SIZE: usize = 256 << 10;

/// The signal that makes a vCPU thread leave `KVM_RUN`.
fn stop_signal() -> libc::c_int {
    SIGRTMIN()
}

/// The machine around the vCPUs: what answers an access that is not RAM. Called by all vCPU threads
/// at once.
pub trait GuestIo: Send + Sync {
    /// The guest reads an I/O port.
    fn port_read(&self, port: u16, data: &mut [u8]);
    /// The guest writes an I/O port; breaks when it has ended itself by that.
    fn port_write(&self, port: u16, data: &[u8]) -> ControlFlow<GuestExit>;
    /// The guest reads an address where no RAM is.
    fn memory_read(&self, address: u64, data: &mut [u8]);
    /// The guest writes an address where no RAM is.
    fn memory_write(&self, address: u64, data: &[u8]);
}

/// How a guest has ended, and the event that says that it has. Shared by its vCPUs.
pub struct ExitNotice {
    exit: Mutex<Option<GuestExit>>,
    event: OwnedFd,
    first_run: AtomicU64,
}

impl ExitNotice {
    /// A notice of a guest that goes on.
    pub fn new() -> io::Result<Arc<Self>> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Arc::new(Self {
            exit: Mutex::new(None),
            event,
            first_run: AtomicU64::new(0),
        }))
    }

    /// Readable when the guest has ended.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// How the guest has ended, if it has.
    pub fn exit(&self) -> Option<GuestExit> {
        self.exit
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// CLOCK_MONOTONIC in nanoseconds when vCPU 0 was about to run for the first time.
    pub fn first_run(&self) -> Option<u64> {
        Some(self.first_run.load(Ordering::Relaxed)).filter(|time| *time != 0)
    }

    /// The guest has ended. The first word counts.
    fn report(&self, exit: GuestExit) {
        let mut slot = self.exit.lock().unwrap_or_else(PoisonError::into_inner);
        if slot.is_none() {
            *slot = Some(exit);
            if let Err(error) = rustix::io::write(&self.event, &1u64.to_ne_bytes()) {
                tracing::error!("telling of the guest's end: {error}");
            }
        }
    }
}

/// vCPUs that run.
pub struct RunningVcpus {
    threads: Vec<VcpuThread>,
}

struct VcpuThread {
    handle: JoinHandle<Vcpu>,
    immediate_exit: ImmediateExit,
}

impl RunningVcpus {
    /// Run `vcpus`, each in a thread of its own.
    pub fn start(
        vcpus: Vec<Vcpu>,
        io: &Arc<dyn GuestIo>,
        notice: &Arc<ExitNotice>,
    ) -> Result<Self, KvmError> {
        install_signal_handler()?;
        let mut running = Self {
            threads: Vec::with_capacity(vcpus.len()),
        };
        for mut vcpu in vcpus {
            let immediate_exit = ImmediateExit::of(&mut vcpu);
            let (io, notice) = (io.clone(), notice.clone());
            let handle = thread::Builder::new()
                .name(format!("vcpu{}", vcpu.index))
                .stack_size(STACK_SIZE)
                .spawn(move || run(vcpu, io.as_ref(), &notice))
                .map_err(doing("starting a vCPU's thread"))?;
            running.threads.push(VcpuThread {
                handle,
                immediate_exit,
            });
        }
        Ok(running)
    }

    /// Stop all vCPUs between two instructions and give them back, in the order of their indices.
    pub fn stop(self) -> Result<Vec<Vcpu>, KvmError> {
        for thread in &self.threads {
            thread.immediate_exit.set();
            // An error is a thread that has ended by itself: it will be joined all the same.
            if let Err(error) = thread.handle.kill(stop_signal()) {
                tracing::debug!("stopping a vCPU: {error}");
            }
        }
        let join = |thread: VcpuThread| {
            let panicked = |_| io::Error::other("its thread has panicked");
            let mut vcpu = thread.handle.join().map_err(panicked)?;
            vcpu.fd.set_kvm_immediate_exit(0);
            Ok(vcpu)
        };
        let vcpus: io::Result<Vec<_>> = self.threads.into_iter().map(join).collect();
        vcpus.map_err(doing("stopping a vCPU"))
    }
}

fn install_signal_handler() -> Result<(), KvmError> {
    extern "C" fn ignore(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    static INSTALLED: Once = Once::new();
    let mut result = Ok(());
    INSTALLED.call_once(|| result = register_signal_handler(stop_signal(), ignore));
    result.map_err(doing("installing the vCPUs' signal handler"))
}

/// The `immediate_exit` byte of a vCPU's shared page.
struct ImmediateExit(*const AtomicU8);

// SAFETY: the byte is accessed atomically, and lives as long as said at `ImmediateExit::of`.
#[allow(unsafe_code)]
unsafe impl Send for ImmediateExit {}

impl ImmediateExit {
    /// For a vCPU whose thread is not joined before the last use of this: moving a `Vcpu` does not
    /// move its shared page, and the thread gives the `Vcpu` back when it is joined.
    fn of(vcpu: &mut Vcpu) -> Self {
        let byte: *mut u8 = &raw mut vcpu.fd.get_kvm_run().immediate_exit;
        Self(byte.cast_const().cast())
    }

    fn set(&self) {
        self.byte().store(1, Ordering::SeqCst);
    }

    fn is_set(&self) -> bool {
        self.byte().load(Ordering::SeqCst) != 0
    }

    #[allow(unsafe_code)]
    fn byte(&self) -> &AtomicU8 {
        // SAFETY: the page is mapped as long as the vCPU lives, see `of`. All threads of this process
        // access the byte atomically; that the kernel reads it meanwhile is its documented use.
        unsafe { &*self.0 }
    }
}

/// The life of a vCPU thread.
fn run(mut vcpu: Vcpu, io: &dyn GuestIo, notice: &ExitNotice) -> Vcpu {
    // Whoever started this process may have left it blocked.
    if let Err(error) = unblock_signal(stop_signal()) {
        tracing::error!("unblocking the vCPUs' signal: {error}");
    }
    // The rest of the machine need not wait for it.
    vcpu.populate();
    if vcpu.index == 0 && notice.first_run().is_none() {
        notice.first_run.store(monotonic_ns(), Ordering::Relaxed);
    }
    loop {
        match step(&mut vcpu, io) {
            ControlFlow::Continue(()) => {}
            ControlFlow::Break(Stop::Asked) => return vcpu,
            ControlFlow::Break(Stop::Ended(exit)) => {
                notice.report(exit);
                return vcpu;
            }
        }
    }
}

/// Why a vCPU does not go on.
enum Stop {
    /// Somebody else wants it to stop.
    Asked,
    /// The guest is no more.
    Ended(GuestExit),
}

/// Run until the next exit and handle it.
fn step(vcpu: &mut Vcpu, io: &dyn GuestIo) -> ControlFlow<Stop> {
    let index = vcpu.index;
    let failed = |what: String| {
        ControlFlow::Break(Stop::Ended(GuestExit::Failed(format!(
            "vCPU {index}: {what}"
        ))))
    };
    match vcpu.fd.run() {
        Ok(VcpuExit::IoIn(port, data)) => io.port_read(port, data),
        Ok(VcpuExit::IoOut(port, data)) => {
            if let ControlFlow::Break(exit) = io.port_write(port, data) {
                return ControlFlow::Break(Stop::Ended(exit));
            }
        }
        Ok(VcpuExit::MmioRead(address, data)) => io.memory_read(address, data),
        Ok(VcpuExit::MmioWrite(address, data)) => io.memory_write(address, data),
        Ok(VcpuExit::Intr) => {}
        Ok(VcpuExit::Shutdown) => return ControlFlow::Break(Stop::Ended(GuestExit::Shutdown)),
        Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN | KVM_SYSTEM_EVENT_RESET, _)) => {
            return ControlFlow::Break(Stop::Ended(GuestExit::Reset));
        }
        Ok(VcpuExit::InternalError) => {
            return failed(
                "KVM cannot emulate what the guest does (KVM_EXIT_INTERNAL_ERROR)".into(),
            );
        }
        Ok(VcpuExit::FailEntry(reason, _)) => {
            return failed(format!(
                "the processor refuses the guest's state, reason {reason:#x}"
            ));
        }
        Ok(other) => return failed(format!("unexpected exit {other:?}")),
        Err(error) => match error.errno() {
            libc::EINTR if ImmediateExit::of(vcpu).is_set() => {
                return ControlFlow::Break(Stop::Asked);
            }
            // EAGAIN: a vCPU that waited for its start-up interrupt has got it.
            libc::EINTR | libc::EAGAIN => {}
            _ => return failed(format!("KVM_RUN: {error}")),
        },
    }
    ControlFlow::Continue(())
}
