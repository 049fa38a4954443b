//! The system calls that have no safe wrapper elsewhere. All of the agent's `unsafe` is here.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// `linux/random.h`: `_IOW('R', 0x03, int[2])`.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
/// `linux/random.h`: `_IO('R', 0x07)`.
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

/// How a process ended, as `waitpid` tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// With this exit code.
    Exited(i32),
    /// By this signal.
    Signaled(i32),
}

impl Ended {
    /// The status that runtimes report: the code, or 128 plus the signal.
    pub fn code(self) -> u32 {
        match self {
            Ended::Exited(code) => code as u32 & 0xff,
            Ended::Signaled(signal) => 128 + signal as u32,
        }
    }
}

/// Reaps one child that has ended; `None` when there is none now.
///
/// Not nix's `waitpid`: that one has no name for real-time signals and would lose such an exit.
pub fn reap() -> Option<(i32, Ended)> {
    loop {
        let mut status = 0;
        // SAFETY: waitpid writes one int through a valid pointer.
        let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
        if pid < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) {
            continue;
        }
        if pid <= 0 {
            return None;
        }
        if libc::WIFEXITED(status) {
            return Some((pid, Ended::Exited(libc::WEXITSTATUS(status))));
        }
        if libc::WIFSIGNALED(status) {
            return Some((pid, Ended::Signaled(libc::WTERMSIG(status))));
        }
    }
}

/// Sends a signal by number, real-time ones and 0 included.
pub fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: kill takes two integers.
    check(unsafe { libc::kill(pid, signal) })
}

/// Adds `bytes` to the kernel's entropy pool and credits them fully (random(4), RNDADDENTROPY).
pub fn add_entropy(random: impl AsFd, bytes: &[u8]) -> io::Result<()> {
    /// `struct rand_pool_info` of `linux/random.h` with room for one chunk.
    #[repr(C)]
    struct PoolInfo {
        entropy_count: libc::c_int,
        buf_size: libc::c_int,
        buf: [u8; 256],
    }
    for chunk in bytes.chunks(256) {
        let mut info = PoolInfo {
            entropy_count: chunk.len() as libc::c_int * 8,
            buf_size: chunk.len() as libc::c_int,
            buf: [0; 256],
        };
        info.buf[..chunk.len()].copy_from_slice(chunk);
        let fd = random.as_fd().as_raw_fd();
        // SAFETY: the kernel reads buf_size bytes after the two ints, which lie within info.
        check(unsafe { libc::ioctl(fd, RNDADDENTROPY, &raw const info) })?;
    }
    Ok(())
}

/// Makes the kernel's generator take a new key from the pool at once (RNDRESEEDCRNG).
pub fn reseed_generator(random: impl AsFd) -> io::Result<()> {
    // SAFETY: this request takes no argument.
    check(unsafe { libc::ioctl(random.as_fd().as_raw_fd(), RNDRESEEDCRNG) })
}

/// Sets the size of a terminal, through its master.
pub fn set_window_size(terminal: impl AsFd, rows: u16, columns: u16) -> io::Result<()> {
    let size = libc::winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: TIOCSWINSZ reads one winsize.
    check(unsafe {
        libc::ioctl(
            terminal.as_fd().as_raw_fd(),
            libc::TIOCSWINSZ,
            &raw const size,
        )
    })
}

/// Sets the loopback interface up (netdevice(7), SIOCSIFFLAGS).
pub fn loopback_up(socket: impl AsFd) -> io::Result<()> {
    // SAFETY: all zeroes is a valid ifreq.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: SIOCSIFFLAGS reads one ifreq.
    check(unsafe { libc::ioctl(fd, libc::SIOCSIFFLAGS, &raw const request) })
}

/// Writes back one file system, that of `file`.
pub fn sync_file_system(file: impl AsFd) -> io::Result<()> {
    // SAFETY: syncfs takes a descriptor.
    check(unsafe { libc::syncfs(file.as_fd().as_raw_fd()) })
}

/// Gives the allocator's free pages back to the kernel.
pub fn trim_heap() {
    // SAFETY: malloc_trim has no preconditions.
    unsafe { libc::malloc_trim(0) };
}

/// Restores the default action of the C library's two internal signals: its `posix_spawn` leaves
/// them ignored in the child, and a container would inherit that.
pub fn default_internal_signals() {
    /// `struct sigaction` as the kernel has it (`asm/signal.h`): handler, flags, restorer, mask.
    #[repr(C)]
    struct KernelAction([u64; 4]);
    let action = KernelAction([libc::SIG_DFL as u64, 0, 0, 0]);
    for signal in [32, 33] {
        let none = std::ptr::null_mut::<KernelAction>();
        // SAFETY: the kernel reads one action; SIG_DFL runs no code of ours.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, &raw const action, none, 8) };
    }
}

/// Ignores SIGPIPE, so that writes to a closed peer fail with EPIPE.
pub fn ignore_sigpipe() {
    // SAFETY: SIG_IGN runs no code of ours.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// One message of a socket, and the descriptors that came with it (at most eight).
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> nix::Result<(usize, Vec<OwnedFd>)> {
    let mut space = nix::cmsg_space!([RawFd; 8]);
    let mut parts = [io::IoSliceMut::new(buffer)];
    let message = recvmsg::<()>(
        socket.as_fd().as_raw_fd(),
        &mut parts,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )?;
    let mut descriptors = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = control {
            // SAFETY: the kernel has just installed these for us; nobody else knows them.
            descriptors.extend(
                fds.into_iter()
                    .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
            );
        }
    }
    Ok((message.bytes, descriptors))
}

/// Takes over what `accept4` and the like return.
pub fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: the callers pass a descriptor that a system call has just returned to them.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Puts a descriptor into the reactor of the running tokio runtime.
pub fn register(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd stays open, and the same, until it is dropped together with the AsyncFd.
    unsafe { AsyncFd::register(fd) }.map_err(Into::into)
}

/// Like [`register`], for one kind of readiness.
pub fn register_for(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: as in register.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(Into::into)
}

/// Makes reads and writes return at once.
pub fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
    if !flags.contains(OFlag::O_NONBLOCK) {
        fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    }
    Ok(())
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
