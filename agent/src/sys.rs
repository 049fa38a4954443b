//! The system calls that have no safe wrapper elsewhere. All of the agent's `unsafe` is here.

use std::ffi::CStr;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// `linux/random.h`: `_IOW('R', 0x03, int[2])`.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
/// `linux/random.h`: `_IO('R', 0x07)`.
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
/// `linux/fs.h`: `_IO(0x12, 93)`.
const BLKROSET: libc::c_ulong = 0x125d;

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

/// Has the kernel refuse to write to a block device (`linux/fs.h`, BLKROSET).
pub fn make_block_device_read_only(device: impl AsFd) -> io::Result<()> {
    let yes: libc::c_int = 1;
    // SAFETY: BLKROSET reads one int.
    check(unsafe { libc::ioctl(device.as_fd().as_raw_fd(), BLKROSET, &raw const yes) })
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

/// The default action of SIGPIPE again.
pub fn default_sigpipe() {
    // SAFETY: SIG_DFL runs no code of ours.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
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

/// Sends one message, with descriptors. A peer that is gone is an error, not a signal.
pub fn send(
    socket: impl AsFd,
    message: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> nix::Result<usize> {
    let descriptors: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let control = if descriptors.is_empty() {
        &rights[..0]
    } else {
        &rights[..]
    };
    let parts = [io::IoSlice::new(message)];
    let socket = socket.as_fd().as_raw_fd();
    sendmsg::<()>(socket, &parts, control, MsgFlags::MSG_NOSIGNAL, None)
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

/// Duplicates this process, which must have a single thread, as a child of its own parent, in new
/// namespaces as `namespaces` says (clone(2)). 0 in the child.
pub fn fork_sibling(namespaces: libc::c_int) -> io::Result<i32> {
    let flags = libc::c_long::from(libc::CLONE_PARENT | namespaces);
    // SAFETY: without a new stack the child goes on in a copy of this one, as after fork(2). There are no
    // other threads that could hold locks of which it would have a copy.
    let result =
        unsafe { libc::syscall(libc::SYS_clone, flags, 0_usize, 0_usize, 0_usize, 0_usize) };
    check_long(result).map(|pid| pid as i32)
}

/// Duplicates this process as [`fork_sibling`] does, but as its own child, which waits for a signal and does
/// nothing else.
pub fn fork_paused(namespaces: libc::c_int) -> io::Result<i32> {
    let flags = libc::c_long::from(libc::SIGCHLD | namespaces);
    // SAFETY: as in fork_sibling.
    let result =
        unsafe { libc::syscall(libc::SYS_clone, flags, 0_usize, 0_usize, 0_usize, 0_usize) };
    if result == 0 {
        loop {
            // SAFETY: pause takes nothing.
            unsafe { libc::pause() };
        }
    }
    check_long(result).map(|pid| pid as i32)
}

/// Sets the domain name of this process's UTS namespace.
pub fn set_domain_name(name: &str) -> io::Result<()> {
    // SAFETY: the kernel reads as many bytes as are said.
    check(unsafe { libc::setdomainname(name.as_ptr().cast(), name.len()) })
}

/// A descriptor of a process.
pub fn open_process(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers.
    let result = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    check_long(result).map(|fd| own(fd as RawFd))
}

/// Sets a limit, `RLIMIT_…`, of another process.
pub fn set_limit(pid: i32, resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit64 {
        rlim_cur: soft,
        rlim_max: hard,
    };
    // SAFETY: prlimit64 reads one rlimit64 and writes none.
    check(unsafe { libc::prlimit64(pid, resource, &raw const limit, std::ptr::null_mut()) })
}

/// Makes the terminal on standard input the one that controls this session.
pub fn take_terminal() -> io::Result<()> {
    // SAFETY: this request takes a number.
    check(unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) })
}

/// Has exec close all descriptors from `first` on.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: with this flag close_range closes nothing yet.
    let result = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            first,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    check_long(result).map(drop)
}

/// Attributes of mounts to be set and cleared, `MOUNT_ATTR_…` (mount_setattr(2)).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MountAttributes {
    /// To be set.
    pub set: u64,
    /// To be cleared.
    pub clear: u64,
}

/// Changes a mount, and with `recursive` all below it. `user_namespace` maps its ids.
pub fn change_mount(
    mount: impl AsFd,
    attributes: MountAttributes,
    user_namespace: Option<BorrowedFd<'_>>,
    recursive: bool,
) -> io::Result<()> {
    let id_map = if user_namespace.is_some() {
        libc::MOUNT_ATTR_IDMAP
    } else {
        0
    };
    let attributes = libc::mount_attr {
        attr_set: attributes.set | id_map,
        attr_clr: attributes.clear,
        propagation: 0,
        userns_fd: user_namespace.map_or(0, |fd| fd.as_raw_fd() as u64),
    };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    let fd = mount.as_fd().as_raw_fd();
    let size = mem::size_of::<libc::mount_attr>();
    // SAFETY: the kernel reads an empty path and one mount_attr of the size that is said.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            fd,
            c"".as_ptr(),
            flags,
            &raw const attributes,
            size,
        )
    };
    check_long(result).map(drop)
}

/// A copy of the mount at `path`, and with `recursive` of all below it, that is nowhere yet (open_tree(2)).
pub fn copy_mount(path: &CStr, recursive: bool) -> io::Result<OwnedFd> {
    let recursive = if recursive {
        libc::AT_RECURSIVE as libc::c_uint
    } else {
        0
    };
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | recursive;
    // SAFETY: the kernel reads a path that ends in a zero.
    let result =
        unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) };
    check_long(result).map(|fd| own(fd as RawFd))
}

/// Puts a mount that is nowhere yet onto what `target` is (move_mount(2)).
pub fn place_mount(mount: impl AsFd, target: impl AsFd) -> io::Result<()> {
    let (from, to) = (mount.as_fd().as_raw_fd(), target.as_fd().as_raw_fd());
    let flags = libc::MOVE_MOUNT_F_EMPTY_PATH | libc::MOVE_MOUNT_T_EMPTY_PATH;
    // SAFETY: the kernel reads two empty paths.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            from,
            c"".as_ptr(),
            to,
            c"".as_ptr(),
            flags,
        )
    };
    check_long(result).map(drop)
}

/// `struct sched_attr` of `linux/sched/types.h`, its first version.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct SchedulerAttributes {
    /// Of this structure, in bytes.
    pub size: u32,
    /// `SCHED_…`.
    pub policy: u32,
    /// `SCHED_FLAG_…`.
    pub flags: u64,
    /// -20 to 19.
    pub nice: i32,
    /// Of a real-time policy.
    pub priority: u32,
    /// Nanoseconds.
    pub runtime: u64,
    /// Nanoseconds.
    pub deadline: u64,
    /// Nanoseconds.
    pub period: u64,
}

/// How this process is scheduled from now on.
pub fn set_scheduler(mut attributes: SchedulerAttributes) -> io::Result<()> {
    attributes.size = mem::size_of::<SchedulerAttributes>() as u32;
    // SAFETY: the kernel reads as many bytes as the structure says that it has.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    check_long(result).map(drop)
}

/// The priority of this process's reads and writes: class and level (`linux/ioprio.h`).
pub fn set_io_priority(class: u32, level: u32) -> io::Result<()> {
    const PROCESS: libc::c_int = 1;
    const CLASS_SHIFT: u32 = 13;
    // SAFETY: ioprio_set takes three integers.
    let result = unsafe {
        libc::syscall(
            libc::SYS_ioprio_set,
            PROCESS,
            0,
            class << CLASS_SHIFT | level,
        )
    };
    check_long(result).map(drop)
}

/// Loads a program that decides about devices (bpf(2), BPF_PROG_LOAD).
pub fn load_device_program(instructions: &[u64]) -> io::Result<OwnedFd> {
    const LOAD: libc::c_int = 5;
    const CGROUP_DEVICE: u32 = 15;
    /// The first fields of `union bpf_attr` for this command.
    #[repr(C)]
    struct Attributes {
        kind: u32,
        count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
        kernel_version: u32,
        flags: u32,
    }
    let attributes = Attributes {
        kind: CGROUP_DEVICE,
        count: instructions.len() as u32,
        instructions: instructions.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
    };
    let size = mem::size_of::<Attributes>();
    // SAFETY: the kernel reads as many instructions as there are, and a licence that ends in a zero.
    let result = unsafe { libc::syscall(libc::SYS_bpf, LOAD, &raw const attributes, size) };
    check_long(result).map(|fd| own(fd as RawFd))
}

/// The first fields of `union bpf_attr` for attaching programs to a cgroup and for asking which are.
#[repr(C)]
#[derive(Default)]
struct CgroupPrograms {
    cgroup: u32,
    /// Of the program, or the kind of programs.
    program: u32,
    /// The kind of programs, or flags of the question.
    kind: u32,
    flags: u32,
    ids: u64,
    count: u32,
    /// Makes the structure's end a field: of an attachment it is part of the revision that is expected.
    rest: u32,
}

/// `BPF_CGROUP_DEVICE`.
const DEVICE_PROGRAMS: u32 = 6;

/// Puts `program` in charge of the devices of `cgroup`, and those that were out of it.
pub fn attach_device_program(cgroup: impl AsFd, program: impl AsFd) -> io::Result<()> {
    const ATTACH: libc::c_int = 8;
    const DETACH: libc::c_int = 9;
    const BY_ID: libc::c_int = 13;
    const QUERY: libc::c_int = 16;
    // So that containers in the container may have programs of their own, which can only forbid more.
    const MULTIPLE: u32 = 2;
    let call = |command: libc::c_int, attributes: &mut CgroupPrograms| {
        let size = mem::size_of::<CgroupPrograms>();
        // SAFETY: the kernel reads and writes the structure, and as many ids as the structure says there is
        // room for.
        check_long(unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *attributes, size) })
    };
    let cgroup = cgroup.as_fd().as_raw_fd() as u32;
    let mut ids = [0_u32; 64];
    let mut query = CgroupPrograms {
        cgroup,
        program: DEVICE_PROGRAMS,
        ids: ids.as_mut_ptr() as u64,
        count: ids.len() as u32,
        ..CgroupPrograms::default()
    };
    call(QUERY, &mut query)?;
    let before = query.count as usize;
    let program = program.as_fd().as_raw_fd() as u32;
    let attach = |program: u32| CgroupPrograms {
        cgroup,
        program,
        kind: DEVICE_PROGRAMS,
        ..CgroupPrograms::default()
    };
    call(
        ATTACH,
        &mut CgroupPrograms {
            flags: MULTIPLE,
            ..attach(program)
        },
    )?;
    for id in &ids[..before.min(ids.len())] {
        let mut by_id = CgroupPrograms {
            cgroup: *id,
            ..CgroupPrograms::default()
        };
        let old = own(call(BY_ID, &mut by_id)? as RawFd);
        call(DETACH, &mut attach(old.as_raw_fd() as u32))?;
    }
    Ok(())
}

fn check_long(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
