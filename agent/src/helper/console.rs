//! The terminal of a container's process, which is one of the container's own.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;

use nix::fcntl::{OFlag, open};
use nix::mount::{MsFlags, mount};
use nix::pty::{PtyMaster, posix_openpt, ptsname_r, unlockpt};
use nix::sys::stat::Mode;
use nix::unistd::{dup2_stderr, dup2_stdin, dup2_stdout};

use super::mounts::said;
use crate::status::Refusal;
use crate::sys;

/// Opens a terminal in this process's root and puts it in place of standard input, output and error, and,
/// for a first process, of `/dev/console`. Returns its master, which only exec closes: its end would be a
/// hangup for this process, that may have something left to say.
pub fn set_up(first: bool) -> Result<ManuallyDrop<OwnedFd>, Refusal> {
    open_terminal(first)
        .map(ManuallyDrop::new)
        .map_err(|error| Refusal::failed(format!("process.terminal: {}", said(&error))))
}

fn open_terminal(first: bool) -> io::Result<OwnedFd> {
    let master: PtyMaster = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC)?;
    unlockpt(&master)?;
    let name = ptsname_r(&master)?;
    if first {
        let none = None::<&str>;
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open("/dev/console")
            .map(drop)?;
        mount(
            Some(name.as_str()),
            "/dev/console",
            none,
            MsFlags::MS_BIND,
            none,
        )?;
    }
    let terminal = open(
        name.as_str(),
        OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC,
        Mode::empty(),
    )?;
    dup2_stdin(&terminal)?;
    dup2_stdout(&terminal)?;
    dup2_stderr(&terminal)?;
    sys::take_terminal()?;
    Ok(master.into())
}
