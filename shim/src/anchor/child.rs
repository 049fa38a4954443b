//! The process of an anchor.
//!
//! It is cloned from a process that may have threads, so until its end it may not allocate, lock or
//! use anything of the C library that does: everything is prepared in [`Plan`], and only plain system
//! calls are made (rustix makes them without the C library).

#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, read, write};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount_bind, mount_change, mount_remount,
    unmount,
};
use rustix::process::{Pid, chdir, pivot_root};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// What the child needs.
pub struct Plan {
    /// The directory that becomes its root.
    pub root: CString,
    /// The network namespace to join; a new one without.
    pub network_namespace: Option<CString>,
}

/// What the child was doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Joining the given network namespace.
    JoinNetwork = 1,
    /// Making new namespaces.
    Unshare = 2,
    /// Changing its root.
    Root = 3,
}

/// What the child sends once: nothing wrong, or which step failed how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// The last step.
    pub step: Step,
    /// Its error.
    pub errno: Option<Errno>,
}

impl Report {
    /// On the wire: step, three zero bytes, errno (zero for none) in native order.
    pub const LENGTH: usize = 8;

    fn encode(self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[0] = self.step as u8;
        let errno = self.errno.map_or(0, Errno::raw_os_error);
        bytes[4..].copy_from_slice(&errno.to_ne_bytes());
        bytes
    }

    /// As received.
    pub fn decode(bytes: [u8; Self::LENGTH]) -> Option<Self> {
        let step = match bytes[0] {
            1 => Step::JoinNetwork,
            2 => Step::Unshare,
            3 => Step::Root,
            _ => return None,
        };
        let errno = i32::from_ne_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let errno = (errno != 0).then(|| Errno::from_raw_os_error(errno));
        Some(Self { step, errno })
    }
}

/// Clone the child, whose end of the socket is `socket`.
pub fn start(plan: &Plan, socket: &OwnedFd) -> io::Result<(Pid, OwnedFd)> {
    let mut pidfd: RawFd = -1;
    let flags = libc::CLONE_PIDFD | libc::SIGCHLD;
    // SAFETY: without CLONE_VM and with no stack given this is a fork: the child has a copy of all
    // memory and goes on in its copy of this stack. It calls `run` only, which does not return and
    // makes nothing but system calls, whatever state locks were in when it was cloned. The kernel
    // writes the descriptor to `pidfd`, which lives until after the call.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone,
            flags,
            std::ptr::null::<u8>(),
            &raw mut pidfd,
            0usize,
            0usize,
        )
    };
    match pid {
        0 => run(plan, socket.as_fd()),
        -1 => Err(io::Error::last_os_error()),
        pid => {
            // SAFETY: the kernel made this descriptor for this process just now.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
            Ok((
                pid.ok_or_else(|| io::Error::other("clone returned no pid"))?,
                pidfd,
            ))
        }
    }
}

/// The child, from its first instruction to its last.
fn run(plan: &Plan, socket: BorrowedFd<'_>) -> ! {
    thaw_fault_points::point("anchor-cloned");
    // SAFETY: system calls on descriptors and memory of this process alone; the name is a
    // NUL-terminated string.
    unsafe {
        libc::syscall(
            libc::SYS_prctl,
            libc::PR_SET_NAME,
            c"thaw-anchor".as_ptr(),
            0,
            0,
            0,
        );
        // The socket becomes descriptor 0 and all others are closed, those of the shim's other
        // sockets above all: their ends must not be kept open here.
        if libc::syscall(libc::SYS_dup3, socket.as_raw_fd(), 0, 0) < 0 {
            exit(1);
        }
        libc::syscall(libc::SYS_close_range, 1, u32::MAX, 0);
    }
    // SAFETY: just made, and never closed.
    let socket = unsafe { BorrowedFd::borrow_raw(0) };
    let report = match isolate(plan) {
        Ok(()) => Report {
            step: Step::Root,
            errno: None,
        },
        Err((step, errno)) => Report {
            step,
            errno: Some(errno),
        },
    };
    if write(socket, &report.encode()) != Ok(Report::LENGTH) || report.errno.is_some() {
        exit(1);
    }
    thaw_fault_points::point("anchor-ready");
    let mut byte = [0; 1];
    loop {
        match read(socket, &mut byte) {
            Ok(0) => exit(0),
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => exit(1),
        }
    }
}

fn isolate(plan: &Plan) -> Result<(), (Step, Errno)> {
    let mut flags = UnshareFlags::NEWNS;
    match &plan.network_namespace {
        Some(path) => join_network(path).map_err(|errno| (Step::JoinNetwork, errno))?,
        None => flags |= UnshareFlags::NEWNET,
    }
    // SAFETY: descriptors stay as they are.
    unsafe { unshare_unsafe(flags) }.map_err(|errno| (Step::Unshare, errno))?;
    change_root(&plan.root).map_err(|errno| (Step::Root, errno))
}

fn join_network(path: &CStr) -> Result<(), Errno> {
    let namespace = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
}

/// Make `root`, read-only, all that there is.
fn change_root(root: &CStr) -> Result<(), Errno> {
    mount_change(
        c"/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )?;
    mount_bind(root, root)?;
    let flags = MountFlags::BIND
        | MountFlags::RDONLY
        | MountFlags::NOSUID
        | MountFlags::NODEV
        | MountFlags::NOEXEC;
    mount_remount(root, flags, c"")?;
    chdir(root)?;
    // The old root comes to lie on top of the new one (pivot_root(2), "pivot_root(".", ".")").
    pivot_root(c".", c".")?;
    unmount(c".", UnmountFlags::DETACH)?;
    chdir(c"/")
}

fn exit(status: i32) -> ! {
    loop {
        // SAFETY: ends this process.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_report_round_trip() {
        for step in [Step::JoinNetwork, Step::Unshare, Step::Root] {
            for errno in [None, Some(Errno::NOENT)] {
                let report = Report { step, errno };
                assert_eq!(Report::decode(report.encode()), Some(report));
            }
        }
        assert_eq!(Report::decode([0; 8]), None);
    }
}
