//! Starting a program of the host's from a shim, which lives in a mount namespace of its own.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
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
    command: Command,
    mount_namespace: BorrowedFd<'_>,
    descriptors: Option<Descriptors>,
) -> io::Result<Child> {
    let placement = Placement {
        mount_namespace: Some(mount_namespace),
        ..Placement::default()
    };
    start(command, placement, descriptors)
}

/// Where a program is started, and how long it may live.
#[derive(Debug, Clone, Copy, Default)]
pub struct Placement<'a> {
    /// Its mount namespace; the caller's own without.
    pub mount_namespace: Option<BorrowedFd<'a>>,
    /// Its working directory, in that namespace. Where there is none any more it is the root.
    pub directory: Option<&'a Path>,
    /// It is killed when the thread that calls ends, which must be one that lives as long as its process.
    pub ends_with_caller: bool,
}

/// Start `command` at such a place.
pub fn start_placed(command: Command, placement: Placement<'_>) -> io::Result<Child> {
    start(command, placement, None)
}

fn start(
    mut command: Command,
    placement: Placement<'_>,
    descriptors: Option<Descriptors>,
) -> io::Result<Child> {
    let mount_namespace = placement
        .mount_namespace
        .map(|namespace| namespace.try_clone_to_owned().and_then(above))
        .transpose()?;
    let directory = placement
        .directory
        .map(|path| CString::new(path.as_os_str().as_bytes()))
        .transpose()?;
    let ends_with_caller = placement.ends_with_caller;
    let limit = original_limit();
    let become_host_s = move || {
        // SAFETY: plain system calls on descriptors and strings that the closure owns; nothing is
        // allocated.
        unsafe {
            if ends_with_caller
                && libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) == -1
            {
                return Err(io::Error::last_os_error());
            }
            if let Some(mount_namespace) = &mount_namespace
                && libc::setns(mount_namespace.as_raw_fd(), libc::CLONE_NEWNS) == -1
            {
                return Err(io::Error::last_os_error());
            }
            // Afterwards: the namespace brings its root as the working directory.
            if let Some(directory) = &directory
                && libc::chdir(directory.as_ptr()) == -1
                && libc::chdir(c"/".as_ptr()) == -1
            {
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
