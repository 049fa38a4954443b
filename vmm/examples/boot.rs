//! Boots a guest in a `thaw-vmm` of its own, prints its console, snapshots it when it says so, restores
//! it. To be run as root.
//!
//! ```text
//! boot VMM boot KERNEL INITRAMFS VCPUS MIB COMMAND_LINE [SNAPSHOT_DIRECTORY MARKER]
//! boot VMM restore SNAPSHOT_DIRECTORY [MARKER]
//! ```
//!
//! With a directory, the machine is written there as soon as the console shows the marker. A restored
//! machine runs until the console shows the marker, or until it ends. Block slot 0 is backed by
//! `slot0` of the directory, if there is one.

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::Path;

use thaw_vmm::phase::monotonic_ns;
use thaw_vmm_control::{
    Event, Launch, Launched, Owner, Reply, Request, Shape, Statistics, WorkingSet,
};

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [
            vmm,
            "boot",
            kernel,
            initramfs,
            vcpus,
            memory,
            command_line,
            ref rest @ ..,
        ] => {
            let shape = Shape::new(vcpus.parse()?, memory.parse()?)?;
            let command_line = command_line.to_owned();
            let files = [File::open(kernel)?, File::open(initramfs)?];
            boot(
                vmm,
                Request::Boot {
                    shape,
                    command_line,
                },
                &files,
                rest,
            )
        }
        [vmm, "restore", directory, ref rest @ ..] => restore(vmm, Path::new(directory), rest),
        _ => Err("see the head of this program".into()),
    }
}

fn boot(vmm: &str, request: Request, files: &[File; 2], rest: &[&str]) -> Outcome {
    let (mut launched, launch) = start(vmm)?;
    let owner = &mut launched.owner;
    owner.request(&request, &[files[0].as_fd(), files[1].as_fd()])?;
    let marker = rest.get(1).copied();
    if console_until(owner, marker)?
        && let Some(directory) = rest.first()
    {
        std::fs::create_dir_all(directory)?;
        let directory = Path::new(directory);
        let start = monotonic_ns();
        let state = File::create_new(directory.join("state"))?;
        let memory = File::create_new(directory.join("memory"))?;
        owner.request(&Request::Snapshot, &[state.as_fd(), memory.as_fd()])?;
        eprintln!("snapshot: {} ms", (monotonic_ns() - start) / 1_000_000);
        report(owner, &launch)?;
    }
    Ok(())
}

fn restore(vmm: &str, directory: &Path, rest: &[&str]) -> Outcome {
    let state = File::open(directory.join("state"))?;
    let memory = File::open(directory.join("memory"))?;
    let (mut launched, launch) = start(vmm)?;
    let owner = &mut launched.owner;
    let request = Request::Restore {
        working_set: WorkingSet::default(),
    };
    owner.request(&request, &[state.as_fd(), memory.as_fd()])?;
    if let Ok(file) = File::open(directory.join("slot0")) {
        owner.request(
            &Request::AttachBlock {
                slot: 0,
                read_only: true,
            },
            &[file.as_fd()],
        )?;
    }
    owner.request(&Request::Run, &[])?;
    eprintln!(
        "{:>12} {:>8} us",
        "answered",
        (monotonic_ns() - launch.before) / 1000
    );
    report(owner, &launch)?;
    if console_until(owner, rest.first().copied())? {
        report(owner, &launch)?;
    }
    Ok(())
}

/// When the VMM was started, CLOCK_MONOTONIC in nanoseconds.
struct Times {
    before: u64,
    launched: u64,
}

fn start(vmm: &str) -> Result<(Launched, Times), Box<dyn Error>> {
    let log = std::io::stderr();
    let root = std::env::current_dir()?;
    let before = monotonic_ns();
    let launch = Launch {
        program: Path::new(vmm),
        root: &root,
        network_namespace: None,
        log: Some(log.as_fd()),
    };
    let launched = launch.start()?;
    Ok((
        launched,
        Times {
            before,
            launched: monotonic_ns(),
        },
    ))
}

/// Print the console until it shows `marker`, or the guest has ended (then false).
fn console_until(owner: &mut Owner, marker: Option<&str>) -> Result<bool, Box<dyn Error>> {
    let mut line = Vec::new();
    loop {
        match owner.next_event()? {
            Some(Event::Console(bytes)) => {
                std::io::stdout().write_all(&bytes)?;
                line.extend_from_slice(&bytes);
                let text = String::from_utf8_lossy(&line);
                if marker.is_some_and(|marker| text.contains(marker)) {
                    return Ok(true);
                }
                let end = line
                    .iter()
                    .rposition(|byte| *byte == b'\n')
                    .map_or(0, |end| end + 1);
                line.drain(..end);
            }
            Some(Event::GuestExit(exit)) => {
                eprintln!("the guest has ended: {exit:?}");
                return Ok(false);
            }
            None => return Err("the VMM has ended".into()),
        }
    }
}

fn report(owner: &mut Owner, times: &Times) -> Outcome {
    let Reply::Statistics(statistics) = owner.request(&Request::Statistics, &[])? else {
        return Err("another answer than statistics".into());
    };
    let Statistics {
        phases,
        kvm,
        file_requests,
        guest_dirty_bytes,
        reported_bytes,
        ..
    } = statistics;
    let since = |time: u64| time.saturating_sub(times.before) / 1000;
    eprintln!("{:>12} {:>8} us", "launched", since(times.launched));
    for phase in phases {
        eprintln!("{:>12} {:>8} us", phase.name, since(phase.monotonic_ns));
    }
    let counts = kvm
        .iter()
        .filter(|(name, value)| *value > 0 && name.contains("exits"));
    let counts: Vec<_> = counts
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    eprintln!("{}", counts.join(", "));
    eprintln!(
        "{file_requests} file requests, {} KiB of guest memory dirtied, {} KiB given back",
        guest_dirty_bytes >> 10,
        reported_bytes >> 10
    );
    Ok(())
}
