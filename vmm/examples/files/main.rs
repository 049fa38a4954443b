//! Counts what files over virtio-fs cost: requests to the file server and exits of the guest, by
//! operation. To be run as root, where KVM can run Linux.
//!
//! ```text
//! files VMM KERNEL INITRAMFS EXPORT
//! ```
//!
//! The guest's `/init` mounts tag "thaw" and says on its console, one a line, `begin OPERATION COUNT`
//! and `end` around each operation, and at last `done`; `init` beside this file does, and needs a
//! busybox as `/bin/busybox`. EXPORT is a directory that becomes the guest's file tree; below it,
//! `disk` is to be a mount that can be written to.

use std::error::Error;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Instant;

use thaw_vmm_control::{Event, Launch, Owner, Reply, Request, Shape, Statistics};

const COMMAND_LINE: &str = "console=hvc0 quiet panic=-1 reboot=t tsc=reliable no_timer_check \
     pci=conf1 8250.nr_uarts=0";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [vmm, kernel, initramfs, export] = arguments.as_slice() else {
        return Err("see the head of this program".into());
    };
    let log = std::io::stderr();
    let launch = Launch {
        program: Path::new(vmm),
        root: Path::new(export),
        network_namespace: None,
        log: Some(log.as_fd()),
    };
    let mut owner = launch.start()?.owner;
    let request = Request::Boot {
        shape: Shape::new(2, 512)?,
        command_line: COMMAND_LINE.into(),
    };
    let (kernel, initramfs) = (File::open(kernel)?, File::open(initramfs)?);
    owner.request(&request, &[kernel.as_fd(), initramfs.as_fd()])?;
    println!(
        "{:<28} {:>6} {:>10} {:>10} {:>10}",
        "operation", "count", "requests", "exits", "us"
    );
    measure(&mut owner)
}

/// An operation under way.
struct Begun {
    name: String,
    count: f64,
    at: Instant,
    statistics: Statistics,
}

fn measure(owner: &mut Owner) -> Result<(), Box<dyn Error>> {
    let mut console = String::new();
    let mut begun: Option<Begun> = None;
    loop {
        match owner.next_event()? {
            Some(Event::Console(bytes)) => console.push_str(&String::from_utf8_lossy(&bytes)),
            other => return Err(format!("the guest ended: {other:?}").into()),
        }
        while let Some((line, rest)) = console.split_once('\n') {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                ["begin", name @ .., count] => {
                    begun = Some(Begun {
                        name: name.join(" "),
                        count: count.parse()?,
                        statistics: statistics(owner)?,
                        at: Instant::now(),
                    });
                }
                ["end"] => report(owner, begun.take().ok_or("end without begin")?)?,
                ["done"] => return Ok(()),
                _ => eprintln!("guest: {line}"),
            }
            console = rest.to_owned();
        }
    }
}

/// Print what one operation cost, divided by its count.
fn report(owner: &mut Owner, begun: Begun) -> Result<(), Box<dyn Error>> {
    let elapsed = begun.at.elapsed().as_secs_f64() * 1e6;
    let now = statistics(owner)?;
    let requests = now.file_requests - begun.statistics.file_requests;
    let exits = exits(&now) - exits(&begun.statistics);
    println!(
        "{:<28} {:>6} {:>10.2} {:>10.2} {:>10.1}",
        begun.name,
        begun.count,
        requests as f64 / begun.count,
        exits as f64 / begun.count,
        elapsed / begun.count,
    );
    Ok(())
}

fn exits(statistics: &Statistics) -> u64 {
    let of_interest = statistics.kvm.iter().filter(|(name, _)| name == "exits");
    of_interest.map(|(_, count)| count).sum()
}

fn statistics(owner: &mut Owner) -> Result<Statistics, Box<dyn Error>> {
    match owner.request(&Request::Statistics, &[])? {
        Reply::Statistics(statistics) => Ok(statistics),
        other => Err(format!("no statistics but {other:?}").into()),
    }
}
