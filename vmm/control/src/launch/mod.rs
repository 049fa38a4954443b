//! Starting `thaw-vmm` in namespaces of its own.
//!
//! The child is cloned with new user, mount, pid, ipc and uts namespaces, in the network namespace
//! that it is given or a new one. Its user namespace maps every id onto itself, so that the ids it
//! sees on files are the host's, while its capabilities count in its own namespaces only. The maps
//! are written before the program is executed: it holds all capabilities of its user namespace from
//! its first instruction, and drops them itself (`jail::enter`).

mod child;

use std::ffi::CString;
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::thread;

use rustix::io::{fcntl_dupfd_cloexec, retry_on_intr, write};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, WaitIdStatus, geteuid, getrlimit,
    pidfd_send_signal, prlimit, waitid,
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use thiserror::Error;

use crate::{Channel, Owner, ReadOnlyView};

/// Every id of the parent namespace, onto itself (`user_namespaces(7)`); 4294967295 is no id.
const IDENTITY_MAP: &str = "0 0 4294967295\n";

/// How many descriptors the child may have: its file server holds one for each inode that the guest
/// remembers.
const DESCRIPTOR_LIMIT: u64 = 1 << 20;

/// Descriptors that the child is to have are first moved to this number or above, so that none is
/// overwritten while they are put in place.
const ABOVE_STANDARD: i32 = 10;

/// How to start one `thaw-vmm`.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The program to execute, as `PROGRAM --root DIR` with an empty environment.
    pub program: &'a Path,
    /// The directory that becomes the program's root. Mounts that are made below it later, in the
    /// caller's mount namespace, reach the program when they are made under a shared mount.
    pub root: &'a Path,
    /// The network namespace it runs in; a new, empty one when none is given.
    pub network_namespace: Option<BorrowedFd<'a>>,
    /// Where its standard error goes; `/dev/null` when nothing is given.
    pub log: Option<BorrowedFd<'a>>,
}

/// A `thaw-vmm` that has been executed. It exits when `owner` is dropped; whoever launched it must
/// [`Launched::wait`] for it, or it stays a zombie.
#[derive(Debug)]
pub struct Launched {
    /// Its process id in the caller's pid namespace; 1 in its own.
    pub pid: i32,
    /// A descriptor of the process, readable when it has ended. Close-on-exec.
    pub pidfd: OwnedFd,
    /// The control channel.
    pub owner: Owner,
}

/// Why `thaw-vmm` could not be started.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// Only root may map all ids of the host into a user namespace.
    #[error("starting a VM: only root can make its namespaces (effective uid is {0})")]
    NotRoot(u32),
    /// `/dev/kvm` is not to be had.
    #[error(
        "opening /dev/kvm: {0}: load kvm_intel or kvm_amd, and see that the firmware allows \
         virtualisation and that this machine, if it is one of many, may nest"
    )]
    Kvm(io::Error),
    /// A path that no system call takes.
    #[error("{0:?} contains a NUL byte")]
    Path(PathBuf),
    /// The given descriptor is no network namespace, or may not be joined.
    #[error("joining the network namespace of the VMM: {0}")]
    NetworkNamespace(io::Error),
    /// `clone3(2)` failed.
    #[error(
        "cloning into new namespaces: {0}: see the limits in /proc/sys/user (max_user_namespaces \
         and its like) and RLIMIT_NPROC"
    )]
    Clone(io::Error),
    /// The id maps could not be written.
    #[error("writing {path}: {source}: the host's ids must all exist where the shim runs")]
    Maps {
        /// The map.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The child failed before or in `execve(2)`.
    #[error("{doing} for {program:?}: {source}")]
    Execute {
        /// What the child was doing.
        doing: &'static str,
        /// The program that was to be executed.
        program: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another system call failed.
    #[error("{doing}: {source}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// The cause.
        source: io::Error,
    },
}

impl Launch<'_> {
    /// Start the program; returns once it has been executed. Opens `/dev/kvm` for it. May be called
    /// from any thread of a process with many.
    pub fn start(self) -> Result<Launched, LaunchError> {
        let uid = geteuid();
        if !uid.is_root() {
            return Err(LaunchError::NotRoot(uid.as_raw()));
        }
        let devices =
            ReadOnlyView::new(Path::new("/dev")).map_err(|source| LaunchError::System {
                doing: DEVICES,
                source,
            })?;
        let kvm = devices.open_device("kvm").map_err(LaunchError::Kvm)?;
        let null = devices
            .open_device("null")
            .map_err(|source| LaunchError::System {
                doing: DEVICES,
                source,
            })?;
        let (ours, theirs) = Channel::pair().map_err(|source| LaunchError::System {
            doing: PAIR,
            source,
        })?;
        let (go_reader, go_writer) = pipe_with(PipeFlags::CLOEXEC).map_err(system(PIPE))?;
        let (failure_reader, failure_writer) =
            pipe_with(PipeFlags::CLOEXEC).map_err(system(PIPE))?;

        let plan = child::Plan {
            program: c_string(self.program)?,
            root: c_string(self.root)?,
            descriptors: [
                lift(null.as_fd())?,
                lift(null.as_fd())?,
                lift(self.log.unwrap_or(null.as_fd()))?,
                lift(theirs.as_fd())?,
                lift(kvm.as_fd())?,
            ],
            failure: lift(failure_writer.as_fd())?,
            go: lift(go_reader.as_fd())?,
            parents_go: go_writer,
        };
        drop(failure_writer);
        let (pid, pidfd) = clone(&plan, self.network_namespace)?;
        let launched = Launched {
            pid,
            pidfd,
            owner: Owner::new(ours),
        };
        let started = self.release(pid, plan, failure_reader);
        if let Err(error) = started {
            // It waits for the maps or has failed itself; nothing that it could lose.
            let _ = launched.kill();
            let _ = launched.wait();
            return Err(error);
        }
        Ok(launched)
    }

    /// Write the maps of child `pid`, let it go on, and wait until it has executed the program.
    fn release(
        &self,
        pid: i32,
        plan: child::Plan,
        failure_reader: OwnedFd,
    ) -> Result<(), LaunchError> {
        for map in ["uid_map", "gid_map"] {
            let path = PathBuf::from(format!("/proc/{pid}/{map}"));
            fs::write(&path, IDENTITY_MAP).map_err(|source| LaunchError::Maps { path, source })?;
        }
        raise_descriptor_limit(pid);
        retry_on_intr(|| write(&plan.parents_go, &[1])).map_err(system(PIPE))?;
        // With the plan go our copies of what the child has; the other end of the pipe is then its
        // alone, and its end of file means that the program was executed.
        drop(plan);
        let mut failure = Vec::new();
        fs::File::from(failure_reader)
            .read_to_end(&mut failure)
            .map_err(|source| LaunchError::System {
                doing: PIPE,
                source,
            })?;
        match child::Failure::decode(&failure) {
            None => Ok(()),
            Some(failure) => Err(LaunchError::Execute {
                doing: failure.doing(),
                program: self.program.to_owned(),
                source: failure.source(),
            }),
        }
    }
}

impl Launched {
    /// Kill it, with everything in its pid namespace. Succeeds when it has ended already.
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Err(rustix::io::Errno::SRCH) | Ok(()) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Wait until it has ended, and reap it. An error when something else has reaped it.
    pub fn wait(&self) -> io::Result<ExitStatus> {
        let id = WaitId::PidFd(self.pidfd.as_fd());
        let status = retry_on_intr(|| waitid(id.clone(), WaitIdOptions::EXITED))?;
        let status = status.ok_or_else(|| io::Error::from(io::ErrorKind::WouldBlock))?;
        Ok(ExitStatus::from_raw(wait_status(&status)))
    }
}

const DEVICES: &str = "opening /dev/null by a read-only mount of /dev";
const PAIR: &str = "making the control channel of a VMM";
const PIPE: &str = "using a pipe to a new VMM";

/// The status word of `wait(2)` for what `waitid(2)` says.
fn wait_status(status: &WaitIdStatus) -> i32 {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code << 8,
        (None, signal) => signal.unwrap_or(0),
    }
}

/// Raise the limit of child `pid` to [`DESCRIPTOR_LIMIT`], from out here, where root may do so. Where
/// it may not, the child has the limit that its parent has, and serves as many inodes less.
fn raise_descriptor_limit(pid: i32) {
    let limit = Rlimit {
        current: Some(DESCRIPTOR_LIMIT),
        maximum: Some(DESCRIPTOR_LIMIT),
    };
    let lower = |maximum: Option<u64>| maximum.is_some_and(|maximum| maximum < DESCRIPTOR_LIMIT);
    if lower(getrlimit(Resource::Nofile).maximum) {
        let _ = prlimit(Pid::from_raw(pid), Resource::Nofile, limit);
    }
}

/// Clone the child: here, or on a thread of its own that first joins `network_namespace` and is gone
/// afterwards, since the calling thread must stay where it is.
fn clone(
    plan: &child::Plan,
    network_namespace: Option<BorrowedFd<'_>>,
) -> Result<(i32, OwnedFd), LaunchError> {
    let Some(namespace) = network_namespace else {
        return child::clone(plan, child::Network::New).map_err(LaunchError::Clone);
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name("launch".into())
            .spawn_scoped(scope, || {
                move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))
                    .map_err(|errno| LaunchError::NetworkNamespace(errno.into()))?;
                child::clone(plan, child::Network::Current).map_err(LaunchError::Clone)
            })
            .map_err(|source| LaunchError::System {
                doing: "starting a thread",
                source,
            })?;
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn lift(descriptor: BorrowedFd<'_>) -> Result<OwnedFd, LaunchError> {
    fcntl_dupfd_cloexec(descriptor, ABOVE_STANDARD).map_err(system("duplicating a descriptor"))
}

fn c_string(path: &Path) -> Result<CString, LaunchError> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| LaunchError::Path(path.to_owned()))
}

fn system(doing: &'static str) -> impl Fn(rustix::io::Errno) -> LaunchError {
    move |errno| LaunchError::System {
        doing,
        source: errno.into(),
    }
}

/// The pid as a positive number: what `clone3` returned.
fn pid(raw: i64) -> Option<i32> {
    i32::try_from(raw)
        .ok()
        .and_then(Pid::from_raw)
        .map(|pid| pid.as_raw_nonzero().get())
}
