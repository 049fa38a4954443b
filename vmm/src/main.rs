//! `thaw-vmm --root DIR`: one virtual machine, in a jail, at the service of the process that started
//! it. Descriptor 3 is the control channel, descriptor 4 is `/dev/kvm`, standard error takes the log.
//!
//! `main` is C's: what Rust's own does before it (an alternate signal stack for each thread, to report
//! stack overflows, for which it reads `/proc/self/maps`) would be a visible part of a start.
#![no_main]

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

use thaw_vmm::kvm::Hypervisor;
use thaw_vmm::phase::Phases;
use thaw_vmm::service::Service;
use thaw_vmm::{jail, log};
use thaw_vmm_control::{CONTROL_DESCRIPTOR, Channel, KVM_DESCRIPTOR};

const USAGE: &str = "usage: thaw-vmm --root DIR (started by thaw, with descriptors 3 and 4 open)";

/// Room in the descriptor table from the start. The kernel lets a process with threads wait for an
/// RCU grace period when the table grows, which a machine's own descriptors would make it do twice.
const DESCRIPTORS: RawFd = 512;

/// The program. Called by the C library, once.
// SAFETY: the name and the signature are those that the C library calls; no other `main` is linked.
#[unsafe(no_mangle)]
pub extern "C" fn main(_: libc::c_int, _: *const *const libc::c_char) -> libc::c_int {
    let mut phases = Phases::default();
    phases.mark("start");
    log::init();
    thaw_fault_points::arm_by_environment();
    thaw_fault_points::point("vmm-executed");
    match run(phases) {
        Ok(()) => libc::EXIT_SUCCESS,
        Err(error) => {
            // One write, so that lines of several processes in one log stay whole.
            let line = format!("thaw-vmm: {error}\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
            libc::EXIT_FAILURE
        }
    }
}

fn run(mut phases: Phases) -> Result<(), Box<dyn Error>> {
    ignore_broken_pipes();
    share_one_heap();
    let root = root_argument().ok_or(USAGE)?;
    let channel = Channel::from_fd(inherited(CONTROL_DESCRIPTOR)?);
    let hypervisor = Hypervisor::from_descriptor(inherited(KVM_DESCRIPTOR)?)?;
    // Where fewer descriptors are allowed the table grows later.
    drop(rustix::io::fcntl_dupfd_cloexec(&channel, DESCRIPTORS - 1));
    // The jail has no procfs. Without it one figure of the statistics is missing.
    let smaps = File::open("/proc/self/smaps").ok();
    let files = jail::enter(&root)?.file_server_root();
    phases.mark("jail");
    thaw_fault_points::point("vmm-jailed");
    Service::new(channel, hypervisor, files, smaps, phases).serve()?;
    // The kernel takes a machine apart faster than its threads could be stopped one by one.
    std::process::exit(0)
}

fn root_argument() -> Option<PathBuf> {
    let mut arguments = std::env::args_os().skip(1);
    match (arguments.next(), arguments.next(), arguments.next()) {
        (Some(option), Some(root), None) if option == "--root" => Some(root.into()),
        _ => None,
    }
}

/// A peer that has closed its end is an error of the write, not the end of the process.
fn ignore_broken_pipes() {
    // SAFETY: no handler is installed, and no other thread exists that could install one.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// One heap for all threads. They allocate little; a heap for each would be mapped when it starts,
/// and is never given back.
fn share_one_heap() {
    // SAFETY: no other thread exists yet. Failure leaves the default, which works.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// A descriptor that the process was started with. Each number may be taken once.
fn inherited(number: RawFd) -> Result<OwnedFd, String> {
    // SAFETY: fcntl on a number touches nothing but the descriptor table.
    let result = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    if result < 0 {
        return Err(format!("descriptor {number} is not open; {USAGE}"));
    }
    // SAFETY: it is open, and as this is called once for each number before any other descriptor is
    // made, nothing else in the process owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
