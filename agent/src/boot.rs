//! What PID 1 does before it listens: file systems, standard descriptors, loopback, limits.
//!
//! The initramfs holds the agent and nothing else, so everything is made here.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::mount::{MsFlags, mount};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use nix::sys::stat::Mode;
use nix::unistd;
use thiserror::Error;

use crate::sys;

/// The agent's program, as the kernel starts it from the initramfs.
pub const PROGRAM: &str = "/init";

/// How ready the kernel is to kill this process for want of memory (`proc_pid_oom_score_adj(5)`).
pub const OOM_SCORE: &str = "/proc/self/oom_score_adj";

/// Whether the kernel's messages are for the privileged only.
const KERNEL_MESSAGES: &str = "/proc/sys/kernel/dmesg_restrict";

/// The files a process may have open, soft and hard, unless its spec says otherwise.
pub const OPEN_FILES: (u64, u64) = (1024, 524_288);

/// A step of the start-up that failed; the guest is of no use then.
#[derive(Debug, Error)]
pub enum BootError {
    /// A directory, file or setting.
    #[error("{step} {path}: {source}")]
    File {
        /// What was being done.
        step: &'static str,
        /// To which file.
        path: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// Anything without a path.
    #[error("{step}: {source}")]
    Call {
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

const HARDENED: MsFlags = MsFlags::MS_NOSUID
    .union(MsFlags::MS_NODEV)
    .union(MsFlags::MS_NOEXEC);

/// The guest's own file systems: type, target, flags, data.
const FILE_SYSTEMS: [(&str, &str, MsFlags, &str); 9] = [
    ("devtmpfs", "/dev", MsFlags::MS_NOSUID, "mode=0755"),
    ("proc", "/proc", HARDENED, ""),
    ("sysfs", "/sys", HARDENED, ""),
    ("cgroup2", "/sys/fs/cgroup", HARDENED, "favordynmods"),
    (
        "tmpfs",
        "/run",
        MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV),
        "mode=0755",
    ),
    (
        "tmpfs",
        "/tmp",
        MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV),
        "mode=1777",
    ),
    (
        "devpts",
        "/dev/pts",
        MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC),
        "ptmxmode=0666,mode=0620",
    ),
    ("tmpfs", "/dev/shm", HARDENED, "mode=1777"),
    ("mqueue", "/dev/mqueue", HARDENED, ""),
];

/// Makes a usable system out of an initramfs.
pub fn set_up() -> Result<(), BootError> {
    leave_initramfs()?;
    for (kind, target, flags, data) in FILE_SYSTEMS {
        // Those below /sys exist already, and their file system lets nobody make any.
        if !Path::new(target).exists() {
            make_directory(target)?;
        }
        match mount(Some(kind), target, Some(kind), flags, Some(data)) {
            Ok(()) | Err(Errno::EBUSY) => {}
            Err(error) => return Err(at("mount", target)(error.into())),
        }
    }
    standard_descriptors()?;
    let inet = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .map_err(|error| BootError::Call {
        step: "open an inet socket",
        source: error.into(),
    })?;
    sys::loopback_up(inet).map_err(|source| BootError::Call {
        step: "set the loopback interface up",
        source,
    })?;
    limits().map_err(|error| BootError::Call {
        step: "set limits",
        source: error.into(),
    })?;
    // What the kernel has said is for those with CAP_SYSLOG, as distributions have it.
    fs::write(KERNEL_MESSAGES, "1").map_err(at("write", KERNEL_MESSAGES))?;
    // Whatever runs short, not this process: without it nothing is told any more. Helpers take it off
    // themselves, and with them all that containers run.
    fs::write(OOM_SCORE, "-1000").map_err(at("write", OOM_SCORE))?;
    // Nothing below / is written from here on. Containers are started through this mount, so that
    // no process in them can open the agent's file for writing by way of /proc/<pid>/exe.
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    mount(None::<&str>, "/", None::<&str>, read_only, None::<&str>)
        .map_err(|error| at("remount read-only", "/")(error.into()))
}

/// Puts a bind mount of the root over the root. The kernel's first root has no parent mount, and
/// `pivot_root` refuses to leave such a one (`fs/namespace.c`), so no container could start on it.
fn leave_initramfs() -> Result<(), BootError> {
    const STAGE: &str = "/run";
    let none = None::<&str>;
    make_directory(STAGE)?;
    mount(Some("/"), STAGE, none, MsFlags::MS_BIND, none)
        .and_then(|()| unistd::chdir(STAGE))
        .and_then(|()| mount(Some("."), "/", none, MsFlags::MS_MOVE, none))
        .and_then(|()| unistd::chroot("."))
        .and_then(|()| unistd::chdir("/"))
        .map_err(|error| at("leave the first root at", "/")(error.into()))
}

/// Gives 0, 1 and 2 something to refer to: the kernel leaves them closed when the initramfs has no
/// console node.
fn standard_descriptors() -> Result<(), BootError> {
    let null = open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(|error| at("open", "/dev/null")(error.into()))?;
    let console = open(
        "/dev/console",
        OFlag::O_WRONLY | OFlag::O_CLOEXEC,
        Mode::empty(),
    );
    let output = console.as_ref().unwrap_or(&null).as_fd();
    unistd::dup2_stdin(&null)
        .and_then(|()| unistd::dup2_stdout(output))
        .and_then(|()| unistd::dup2_stderr(output))
        .map_err(|error| BootError::Call {
            step: "set up stdio",
            source: error.into(),
        })
}

/// Limits that containers inherit where their spec has none: those a service manager gives to a
/// container engine, not those the kernel gives to its first process.
fn limits() -> nix::Result<()> {
    let (_, files) = OPEN_FILES;
    setrlimit(Resource::RLIMIT_NOFILE, files, files)?;
    setrlimit(Resource::RLIMIT_NPROC, RLIM_INFINITY, RLIM_INFINITY)
}

fn make_directory(path: &str) -> Result<(), BootError> {
    fs::create_dir_all(path).map_err(at("make directory", path))
}

fn at(step: &'static str, path: &str) -> impl FnOnce(io::Error) -> BootError {
    let path = path.to_owned();
    move |source| BootError::File { step, path, source }
}
