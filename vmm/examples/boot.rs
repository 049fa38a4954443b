//! Boots a guest in this process, prints its console, snapshots it when it says so, restores it.
//!
//! ```text
//! boot boot KERNEL INITRAMFS VCPUS MIB COMMAND_LINE [SNAPSHOT_DIRECTORY MARKER]
//! boot restore SNAPSHOT_DIRECTORY [MARKER]
//! ```
//!
//! With a directory, the machine is written there as soon as the console shows the marker. A restored
//! machine runs until the console shows the marker, or until it ends.

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use thaw_vmm::kvm::Hypervisor;
use thaw_vmm::machine::{BootSource, Environment, Machine};
use thaw_vmm::phase::{Phases, monotonic_ns};
use thaw_vmm::serial::ConsoleOutput;
use thaw_vmm::virtio::fs::FileServerRoot;
use thaw_vmm_control::Shape;

/// What ends the wait for a machine.
enum Happened {
    Marker,
    Ended,
}

fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [
            "boot",
            kernel,
            initramfs,
            vcpus,
            memory,
            command_line,
            ref rest @ ..,
        ] => {
            let source = BootSource {
                shape: Shape::new(vcpus.parse()?, memory.parse()?)?,
                command_line: command_line.to_owned(),
                kernel: File::open(kernel)?,
                initramfs: File::open(initramfs)?,
            };
            boot(source, rest)
        }
        ["restore", directory, ref rest @ ..] => restore(Path::new(directory), rest),
        _ => Err("see the head of this program".into()),
    }
}

fn boot(source: BootSource, rest: &[&str]) -> Result<(), Box<dyn Error>> {
    let (sender, receiver) = channel();
    let hypervisor = Hypervisor::open()?;
    let mut phases = Phases::default();
    let marker = rest.get(1).copied();
    let environment = environment(marker, sender.clone())?;
    let mut machine = Machine::boot(&hypervisor, source, environment, &mut phases)?;
    run(&mut machine, &mut phases, sender)?;
    if let (Happened::Marker, Some(directory)) = (receiver.recv()?, rest.first()) {
        let directory = Path::new(directory);
        std::fs::create_dir_all(directory)?;
        let start = monotonic_ns();
        let state = File::create_new(directory.join("state"))?;
        let memory = File::create_new(directory.join("memory"))?;
        machine.snapshot(&hypervisor, &state, &memory)?;
        eprintln!("snapshot: {} ms", (monotonic_ns() - start) / 1_000_000);
    }
    report(&machine, &phases);
    Ok(())
}

fn restore(directory: &Path, rest: &[&str]) -> Result<(), Box<dyn Error>> {
    let mut phases = Phases::default();
    phases.mark("start");
    let (sender, receiver): (Sender<Happened>, Receiver<Happened>) = channel();
    let hypervisor = Hypervisor::open()?;
    let state = File::open(directory.join("state"))?;
    let memory = File::open(directory.join("memory"))?;
    phases.mark("open");
    let environment = environment(rest.first().copied(), sender.clone())?;
    let mut machine = Machine::restore(&hypervisor, &state, &memory, environment, &mut phases)?;
    run(&mut machine, &mut phases, sender)?;
    receiver.recv()?;
    report(&machine, &phases);
    Ok(())
}

fn run(
    machine: &mut Machine,
    phases: &mut Phases,
    sender: Sender<Happened>,
) -> Result<(), Box<dyn Error>> {
    machine.run()?;
    phases.mark("run");
    let notice = machine.notice().clone();
    thread::spawn(move || {
        let event = notice.event();
        let mut poll = [rustix::event::PollFd::new(
            &event,
            rustix::event::PollFlags::IN,
        )];
        let _ = rustix::event::poll(&mut poll, None);
        eprintln!("the guest has ended: {:?}", notice.exit());
        let _ = sender.send(Happened::Ended);
    });
    Ok(())
}

fn environment(
    marker: Option<&str>,
    sender: Sender<Happened>,
) -> Result<Environment, Box<dyn Error>> {
    let marker = marker.map(str::to_owned);
    let console: ConsoleOutput = Arc::new(move |bytes: &[u8]| {
        let _ = std::io::stdout().write_all(bytes);
        let text = String::from_utf8_lossy(bytes);
        if marker.as_ref().is_some_and(|marker| text.contains(marker)) {
            let _ = sender.send(Happened::Marker);
        }
    });
    let files = FileServerRoot::without_jail(&std::env::current_dir()?)?;
    Ok(Environment { console, files })
}

fn report(machine: &Machine, phases: &Phases) {
    let first_run = machine.notice().first_run();
    let start = phases
        .as_slice()
        .first()
        .map_or(0, |phase| phase.monotonic_ns);
    for phase in phases.as_slice() {
        eprintln!(
            "{:>10} {:>8} us",
            phase.name,
            (phase.monotonic_ns - start) / 1000
        );
    }
    if let Some(time) = first_run {
        eprintln!("{:>10} {:>8} us", "first run", (time - start) / 1000);
    }
    for (name, value) in machine.counters().unwrap_or_default() {
        if value > 0 && (name.contains("exits") || name.contains("injections")) {
            eprintln!("{name:>30} {value}");
        }
    }
    if let Ok(mut smaps) = File::open("/proc/self/smaps") {
        let ranges = machine.memory_ranges();
        let bytes = thaw_vmm::statistics::anonymous_bytes(&mut smaps, &ranges);
        eprintln!("guest memory dirtied: {} KiB", bytes >> 10);
    }
}
