//! The guest's side.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, VsockAddr, accept, bind, listen, socket,
};

use super::{OPERATIONS, PORT, READY, TAG};

/// The environment that the kernel makes of an unknown word of its command line: `report=ttyS0`.
const REPORT: &str = "report";

/// How often each operation is done where nobody asks for a number.
const COUNT: usize = 200;

/// Whether this process is a guest's first.
pub fn is_guest() -> bool {
    std::process::id() == 1
}

/// Mounts the file system and does what is asked for on vsock, an operation and a number in a line, each
/// answered by nanoseconds. With `report=TTY` on the kernel's command line all operations are done without
/// being asked for, each reported in a line (operation, number, nanoseconds) on that terminal.
///
/// # Panics
///
/// When the guest is not as it should be: the kernel says so on its console, and ends.
pub fn serve() -> ! {
    let error = match prepare().and_then(|()| match std::env::var(REPORT) {
        Ok(terminal) => report(&terminal),
        Err(_) => listen_and_serve(),
    }) {
        Ok(()) => {
            let _ = reboot(RebootMode::RB_POWER_OFF);
            "the power does not go off".to_owned()
        }
        Err(error) => error.to_string(),
    };
    panic!("{error}");
}

fn prepare() -> io::Result<()> {
    let none = None::<&str>;
    for (kind, place) in [
        ("devtmpfs", "/dev"),
        ("proc", "/proc"),
        ("tmpfs", "/memory"),
    ] {
        fs::create_dir_all(place)?;
        mount(Some(kind), place, Some(kind), MsFlags::empty(), none)?;
    }
    fs::create_dir_all("/share")?;
    mount(
        Some(TAG),
        "/share",
        Some("virtiofs"),
        MsFlags::empty(),
        none,
    )?;
    // One directory, so that a name is one look-up.
    std::env::set_current_dir("/share/disk")?;
    fs::create_dir("d")?;
    std::env::set_current_dir("d")
}

fn report(terminal: &str) -> io::Result<()> {
    let mut terminal = OpenOptions::new()
        .write(true)
        .open(format!("/dev/{terminal}"))?;
    for operation in OPERATIONS {
        let count = if operation.contains("MiB") { 16 } else { COUNT };
        let took = operate(operation, count)?;
        writeln!(terminal, "\nresult {operation} {count} {}", took.as_nanos())?;
    }
    writeln!(terminal, "\nresult end 0 0")
}

fn listen_and_serve() -> io::Result<()> {
    let listener = socket(
        AddressFamily::Vsock,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    let any = nix::libc::VMADDR_CID_ANY;
    bind(listener.as_raw_fd(), &VsockAddr::new(any, PORT))?;
    listen(&listener, Backlog::new(1)?)?;
    let mut console = OpenOptions::new().write(true).open("/dev/hvc0")?;
    writeln!(console, "{READY}")?;
    let connection = accept(listener.as_raw_fd())?;
    // SAFETY: the descriptor is new, and nobody else has it. A file reads and writes a socket as well as any.
    let mut connection = unsafe { File::from_raw_fd(connection) };
    let mut lines = BufReader::new(connection.try_clone()?).lines();
    while let Some(line) = lines.next().transpose()? {
        let (operation, count) = line.rsplit_once(' ').unwrap_or((&line, "0"));
        let took = operate(operation, count.parse().map_err(io::Error::other)?)?;
        writeln!(connection, "{}", took.as_nanos())?;
    }
    Ok(())
}

/// How long `operation` takes, `count` times.
fn operate(operation: &str, count: usize) -> io::Result<Duration> {
    let name = |number: usize| format!("f{number}");
    match operation {
        "stat" | "read" | "read MiB" => forget_all()?,
        "read again" => drop(fs::read(name(0))?),
        "read MiB of memory" => write_mib("/memory/big", count)?,
        _ => {}
    }
    let begun = Instant::now();
    match operation {
        "write MiB" => write_mib("big", count)?,
        "read MiB" | "read MiB again" => read_mib("big", count)?,
        "read MiB of memory" => read_mib("/memory/big", count)?,
        _ => {
            for number in 0..count {
                one(operation, &name(number), &name(0))?;
            }
        }
    }
    Ok(begun.elapsed())
}

/// One operation on `name`, or on `same` where it is always the same file.
fn one(operation: &str, name: &str, same: &str) -> io::Result<()> {
    match operation {
        "create" => drop(File::create(name)?),
        "stat" => return fs::metadata(name).map(|_| ()),
        "stat again" => return fs::metadata(same).map(|_| ()),
        "open" => drop(File::open(same)?),
        "write" => fs::write(name, [1; 4096])?,
        "read" => drop(fs::read(name)?),
        "read again" => drop(fs::read(same)?),
        "rename" => fs::rename(name, format!("to-{name}"))?,
        "remove" => fs::remove_file(format!("to-{name}"))?,
        _ => return Err(io::Error::other(format!("no operation {operation:?}"))),
    }
    Ok(())
}

/// Has the kernel forget all names, attributes and pages that it can.
fn forget_all() -> io::Result<()> {
    fs::write("/proc/sys/vm/drop_caches", "3")
}

fn write_mib(path: &str, count: usize) -> io::Result<()> {
    let mut file = File::create(path)?;
    let chunk = vec![7; 1 << 20];
    (0..count).try_for_each(|_| file.write_all(&chunk))
}

fn read_mib(path: &str, count: usize) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut chunk = vec![0; 1 << 20];
    (0..count).try_for_each(|_| file.read_exact(&mut chunk))
}
