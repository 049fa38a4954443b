//! Locks: of a whole file, of ranges by process, of ranges by open file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::{Case, Failure, done};

pub const CASES: &[Case] = &[
    ("flock by two", || {
        let (one, two) = (file()?, file()?);
        let first = done(flock(&one, FlockOperation::LockExclusive));
        let second = done(flock(&two, FlockOperation::NonBlockingLockExclusive));
        drop(one);
        let third = done(flock(&two, FlockOperation::NonBlockingLockExclusive));
        Ok(format!("{first} {second} {third}"))
    }),
    ("flock shared by two", || {
        let (one, two) = (file()?, file()?);
        let first = done(flock(&one, FlockOperation::LockShared));
        let second = done(flock(&two, FlockOperation::NonBlockingLockShared));
        Ok(format!(
            "{first} {second} {}",
            done(flock(&two, FlockOperation::NonBlockingLockExclusive))
        ))
    }),
    ("POSIX lock and another process", || {
        let one = file()?;
        let first = lock(&one, libc::F_SETLK, 0, 10);
        // Overlapping, then beside it.
        let codes = (in_child(&one, 5)?, in_child(&one, 10)?);
        Ok(format!("{first} {codes:?}"))
    }),
    ("POSIX lock gone with any descriptor", || {
        let one = file()?;
        let first = lock(&one, libc::F_SETLK, 0, 10);
        drop(file()?);
        Ok(format!("{first} {}", in_child(&one, 5)?))
    }),
    ("locks by open file", || {
        let (one, two) = (file()?, file()?);
        let first = lock(&one, libc::F_OFD_SETLK, 0, 10);
        let second = lock(&two, libc::F_OFD_SETLK, 5, 10);
        drop(one);
        Ok(format!(
            "{first} {second} {}",
            lock(&two, libc::F_OFD_SETLK, 5, 10)
        ))
    }),
];

fn file() -> Result<File, Failure> {
    let mut options = OpenOptions::new();
    Ok(options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open("f")?)
}

fn range(start: i64, length: i64) -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: length,
        l_pid: 0,
    }
}

/// Takes a write lock of the kind that `command` says, without waiting.
fn lock(file: &File, command: i32, start: i64, length: i64) -> String {
    let range = range(start, length);
    let argument = match command {
        libc::F_OFD_SETLK => FcntlArg::F_OFD_SETLK(&range),
        _ => FcntlArg::F_SETLK(&range),
    };
    done(fcntl(file, argument))
}

/// Whether another process gets the lock of 5 bytes at `start`: its exit status, which is the error.
fn in_child(file: &File, start: i64) -> Result<i32, Failure> {
    let range = range(start, 5);
    let descriptor = file.as_raw_fd();
    // SAFETY: this program has one thread, and the child makes two system calls.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => match waitpid(child, None)? {
            WaitStatus::Exited(_, code) => Ok(code),
            _ => Ok(-1),
        },
        ForkResult::Child => {
            // SAFETY: the descriptor is open in the parent, so in the child too; the range is a value of its own.
            let result = unsafe { libc::fcntl(descriptor, libc::F_SETLK, &range) };
            let code = if result == 0 {
                0
            } else {
                nix::errno::Errno::last_raw()
            };
            // SAFETY: ends the process without running what the parent has to run at its end.
            unsafe { libc::_exit(code) }
        }
    }
}

/// Locks `file` if nobody has, says so, and waits for the end of the input.
pub fn hold(file: &str) -> io::Result<()> {
    let file = File::open(file)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => println!("locked"),
        Err(Errno::WOULDBLOCK) => {
            println!("taken");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    }
    io::copy(&mut io::stdin(), &mut io::sink()).map(drop)
}
