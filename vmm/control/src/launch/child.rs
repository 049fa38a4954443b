//! The child between `clone3` and `execve`.
//!
//! The caller may have many threads, any of which may hold a lock of the allocator or of libc at
//! the moment of the clone. So the child makes nothing but plain system calls on what was prepared
//! before: no allocation, no lock, no panic, and no libc function that knows of threads (such as
//! `setgroups`, which asks every thread to do the same).

use std::ffi::CString;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

/// `CLONE_CLEAR_SIGHAND` of `linux/sched.h`; libc's constant of that name is too narrow for it.
const CLEAR_SIGNAL_HANDLERS: u64 = 1 << 32;

/// All that the child needs, made before it is cloned.
pub(super) struct Plan {
    /// The program, executed as `PROGRAM --root DIR`.
    pub program: CString,
    /// DIR.
    pub root: CString,
    /// What becomes descriptor 0, 1, 2 and so on.
    pub descriptors: [OwnedFd; 5],
    /// Where the child writes why it failed; closed by a successful `execve`.
    pub failure: OwnedFd,
    /// Where the child waits for one byte, before it does anything.
    pub go: OwnedFd,
    /// The parent's end of `go`, which the child closes to see the parent's death as end of file.
    pub parents_go: OwnedFd,
}

/// The network namespace of the child.
#[derive(Clone, Copy)]
pub(super) enum Network {
    /// That of the calling thread.
    Current,
    /// A new, empty one.
    New,
}

/// Where and why a child failed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Failure {
    step: Step,
    errno: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Step {
    Session,
    Groups,
    Descriptors,
    Signals,
    Execute,
}

impl Failure {
    const STEPS: [(Step, &'static str); 5] = [
        (Step::Session, "starting a session"),
        (Step::Groups, "leaving supplementary groups"),
        (Step::Descriptors, "putting descriptors in place"),
        (Step::Signals, "unblocking signals"),
        (Step::Execute, "execve"),
    ];

    fn encode(&self) -> [u8; 5] {
        let [a, b, c, d] = self.errno.to_ne_bytes();
        [self.step as u8, a, b, c, d]
    }

    /// What `bytes`, read to end of file from [`Plan::failure`], say; `None` when there are none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (step, errno) = bytes.split_first()?;
        let errno = errno.try_into().map_or(libc::EIO, i32::from_ne_bytes);
        let step = Self::STEPS
            .get(usize::from(*step))
            .map_or(Step::Execute, |(step, _)| *step);
        Some(Self { step, errno })
    }

    pub fn doing(&self) -> &'static str {
        Self::STEPS[self.step as usize].1
    }

    pub fn source(&self) -> io::Error {
        io::Error::from_raw_os_error(self.errno)
    }
}

/// Clone a child that follows `plan`. Returns its pid and a close-on-exec pidfd.
pub(super) fn clone(plan: &Plan, network: Network) -> io::Result<(i32, OwnedFd)> {
    let mut pidfd: RawFd = -1;
    let mut flags = libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_PIDFD;
    if let Network::New = network {
        flags |= libc::CLONE_NEWNET;
    }
    // SAFETY: every field of `clone_args` is an integer, for which zero means "not used".
    let mut arguments: libc::clone_args = unsafe { mem::zeroed() };
    arguments.flags = u64::from(flags.cast_unsigned()) | CLEAR_SIGNAL_HANDLERS;
    arguments.pidfd = &raw mut pidfd as u64;
    arguments.exit_signal = libc::SIGCHLD as u64;
    let argv = [
        plan.program.as_ptr(),
        c"--root".as_ptr(),
        plan.root.as_ptr(),
        ptr::null(),
    ];
    // Empty, but for a test of sudden ends.
    let fault = thaw_fault_points::environment().map_or(ptr::null(), |variable| variable.as_ptr());
    let environment = [fault, ptr::null()];

    // No handler of the caller may run in the child, whose copies of descriptors it would use.
    let mask = SignalMask::block_all()?;
    // SAFETY: without CLONE_VM the child works on a copy of this address space and returns here
    // on a copy of this stack; `arguments` and the `pidfd` it points to live in this frame. The
    // child then runs `run` only, which never returns.
    let result = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            &raw const arguments,
            mem::size_of::<libc::clone_args>(),
        )
    };
    if result == 0 {
        // SAFETY: we are the child, and both are null-terminated arrays of C strings.
        unsafe { run(plan, argv.as_ptr(), environment.as_ptr()) }
    }
    let error = io::Error::last_os_error();
    drop(mask);
    match super::pid(result) {
        // SAFETY: clone3 succeeded, so `pidfd` is a new descriptor that nobody else owns.
        Some(pid) => Ok((pid, unsafe { OwnedFd::from_raw_fd(pidfd) })),
        None => Err(error),
    }
}

/// The child's life until `execve`.
///
/// # Safety
///
/// To be called in a cloned child only, with null-terminated arrays of C strings.
unsafe fn run(
    plan: &Plan,
    argv: *const *const libc::c_char,
    environment: *const *const libc::c_char,
) -> ! {
    // SAFETY: plain system calls on descriptors and memory of the plan; see the module's text.
    unsafe {
        libc::close(plan.parents_go.as_raw_fd());
        let mut byte = 0_u8;
        loop {
            match libc::read(plan.go.as_raw_fd(), (&raw mut byte).cast(), 1) {
                1 => break,
                -1 if *libc::__errno_location() == libc::EINTR => {}
                // The parent gave up or died.
                _ => libc::_exit(1),
            }
        }
        if libc::setsid() < 0 {
            fail(plan.failure.as_raw_fd(), Step::Session);
        }
        if libc::syscall(libc::SYS_setgroups, 0, ptr::null::<libc::gid_t>()) < 0 {
            fail(plan.failure.as_raw_fd(), Step::Groups);
        }
        let failure = put_descriptors(plan);
        let mut none: libc::sigset_t = mem::zeroed();
        libc::sigemptyset(&raw mut none);
        if libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()) < 0 {
            fail(failure, Step::Signals);
        }
        libc::execve(plan.program.as_ptr(), argv, environment);
        fail(failure, Step::Execute)
    }
}

/// Put the plan's descriptors at 0 and above, the failure pipe behind them, and close the rest.
/// Returns the new number of the failure pipe.
///
/// # Safety
///
/// As for [`run`].
unsafe fn put_descriptors(plan: &Plan) -> RawFd {
    let failure = plan.descriptors.len() as RawFd;
    // SAFETY: plain system calls. All sources are above all targets (`super::lift`).
    unsafe {
        for (target, source) in (0..).zip(&plan.descriptors) {
            if libc::dup2(source.as_raw_fd(), target) < 0 {
                fail(plan.failure.as_raw_fd(), Step::Descriptors);
            }
        }
        if libc::dup3(plan.failure.as_raw_fd(), failure, libc::O_CLOEXEC) < 0 {
            fail(plan.failure.as_raw_fd(), Step::Descriptors);
        }
        if libc::syscall(libc::SYS_close_range, failure + 1, libc::c_uint::MAX, 0) < 0 {
            fail(failure, Step::Descriptors);
        }
    }
    failure
}

/// Say where the child failed, with `errno`, and end.
///
/// # Safety
///
/// As for [`run`].
unsafe fn fail(failure: RawFd, step: Step) -> ! {
    // SAFETY: plain system calls on a buffer of this frame.
    unsafe {
        let bytes = Failure {
            step,
            errno: *libc::__errno_location(),
        }
        .encode();
        libc::write(failure, bytes.as_ptr().cast(), bytes.len());
        libc::_exit(1)
    }
}

/// All signals blocked in the calling thread, until dropped.
struct SignalMask {
    before: libc::sigset_t,
}

impl SignalMask {
    fn block_all() -> io::Result<Self> {
        // SAFETY: a `sigset_t` is plain bits, and both pointers are to values of this frame.
        unsafe {
            let mut all: libc::sigset_t = mem::zeroed();
            let mut before: libc::sigset_t = mem::zeroed();
            libc::sigfillset(&raw mut all);
            match libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) {
                0 => Ok(Self { before }),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }
}

impl Drop for SignalMask {
    fn drop(&mut self) {
        // SAFETY: `before` was filled in by `pthread_sigmask`. It can only fail for a bad `how`.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_failure_survives_the_pipe() {
        for (step, doing) in Failure::STEPS {
            let failure = Failure {
                step,
                errno: libc::ENOENT,
            };
            let decoded = Failure::decode(&failure.encode()).unwrap();
            assert_eq!(decoded, failure);
            assert_eq!(decoded.doing(), doing);
        }
        assert_eq!(Failure::decode(&[]), None);
        assert_eq!(Failure::decode(&[200]).unwrap().errno, libc::EIO);
    }
}
