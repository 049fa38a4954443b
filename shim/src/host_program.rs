//! Starting a program of the host's from a shim, which lives in a mount namespace of its own.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use crate::descriptors::original_limit;

/// Number of the first descriptor that a program is given beside its standard streams.
const FIRST: i32 = 3;

/// Descriptors that a program finds as 3, 4 and 5.
#[derive(Debug)]
pub struct Descriptors([OwnedFd; 3]);

impl Descriptors {
    /// The three, in order.
    pub fn from_three(descriptors: [OwnedFd; 3]) -> io::Result<Self> {
        let [first, second, third] = descriptors;
        Ok(Self([above(first)?, above(second)?, above(third)?]))
    }
}

/// The same file under a number that none of those is in the way of which the program gets.
fn above(descriptor: OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(descriptor, FIRST + 3)?)
}

/// Start `command` in the mount namespace `mount_namespace`, with `descriptors`, if any, of which this
/// process then has none any more. It may open as many files as the shim was allowed to when it was
/// started.
pub fn start_on_host(
    mut command: Command,
    mount_namespace: BorrowedFd<'_>,
    descriptors: Option<Descriptors>,
) -> io::Result<Child> {
    let mount_namespace = above(mount_namespace.try_clone_to_owned()?)?;
    let limit = original_limit();
    let become_host_s = move || {
        // SAFETY: plain system calls on descriptors that the closure owns; nothing is allocated.
        unsafe {
            if libc::setns(mount_namespace.as_raw_fd(), libc::CLONE_NEWNS) == -1 {
                return Err(io::Error::last_os_error());
            }
            if let Some(limit) = &limit
                && libc::setrlimit(libc::RLIMIT_NOFILE, limit) == -1
            {
                return Err(io::Error::last_os_error());
            }
            let given = descriptors.iter().flat_map(|three| &three.0);
            for (number, descriptor) in (FIRST..).zip(given) {
                // The copy is not closed at the execution, unlike what it is a copy of.
                if libc::dup2(descriptor.as_raw_fd(), number) == -1 {
                    return Err(io::Error::last_os_error());
                }
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec it does system calls only, see there.
    unsafe { command.pre_exec(become_host_s) };
    command.spawn()
}
