//! `thaw-vmm --root DIR`: one virtual machine, in a jail, at the service of the process that started
//! it. Descriptor 3 is the control channel, descriptor 4 is `/dev/kvm`, standard error takes the log.

use std::error::Error;
use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::process::ExitCode;

use thaw_vmm::jail;
use thaw_vmm::kvm::Hypervisor;
use thaw_vmm::phase::Phases;
use thaw_vmm::service::Service;
use thaw_vmm_control::{CONTROL_DESCRIPTOR, Channel, KVM_DESCRIPTOR};

const USAGE: &str = "usage: thaw-vmm --root DIR (started by thaw, with descriptors 3 and 4 open)";

fn main() -> ExitCode {
    let mut phases = Phases::default();
    phases.mark("start");
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_writer(std::io::stderr)
        .without_time()
        .with_ansi(false)
        .init();
    match run(phases) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("thaw-vmm: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut phases: Phases) -> Result<(), Box<dyn Error>> {
    let root = root_argument().ok_or(USAGE)?;
    let channel = Channel::from_fd(inherited(CONTROL_DESCRIPTOR)?);
    let hypervisor = Hypervisor::from_descriptor(inherited(KVM_DESCRIPTOR)?)?;
    // The jail has no procfs. Without it one figure of the statistics is missing.
    let smaps = File::open("/proc/self/smaps").ok();
    let files = jail::enter(&root)?.file_server_root();
    phases.mark("jail");
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

/// A descriptor that the process was started with. Each number may be taken once.
#[allow(unsafe_code)]
fn inherited(number: RawFd) -> Result<OwnedFd, String> {
    // SAFETY: fcntl on a number reads nothing but the descriptor table.
    let flags = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    if flags < 0 {
        return Err(format!("descriptor {number} is not open; {USAGE}"));
    }
    // SAFETY: it is open, and as this is called once for each number before any other descriptor is
    // made, nothing else in the process owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
