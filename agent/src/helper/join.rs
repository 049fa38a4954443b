//! Another process in a container that runs.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, setns};
use nix::sys::prctl::set_dumpable;
use serde_json::Value;

use super::channel::Channel;
use super::create::{Ready, become_its_root, begin};
use super::description::{Description, ProcessDescription};
use super::executor::Program;
use super::identity;
use super::mounts::said;
use super::{Outcome, Stdio, console, read_json, spec, typed};
use crate::cgroup;
use crate::protocol::{Place, Reply, SPEC, process_file};
use crate::status::Refusal;
use crate::sys;

/// Namespaces that the process itself enters.
const ENTERED: [(&str, libc::c_int); 5] = [
    ("user", libc::CLONE_NEWUSER),
    ("mount", libc::CLONE_NEWNS),
    ("uts", libc::CLONE_NEWUTS),
    ("ipc", libc::CLONE_NEWIPC),
    ("cgroup", libc::CLONE_NEWCGROUP),
];

/// Namespaces that a process gets from the one that makes it.
const INHERITED: [(&str, libc::c_int); 2] =
    [("pid", libc::CLONE_NEWPID), ("time", libc::CLONE_NEWTIME)];

/// Runs a process in the container whose first one is `first`.
pub fn exec(
    place: &Place,
    exec_id: &str,
    first: i32,
    stdio: Stdio,
    window: Option<(u16, u16)>,
) -> Outcome {
    let container: Value = read_json(&place.bundle.join(SPEC), "runtime spec")?;
    let mut process: Value = read_json(&place.bundle.join(process_file(exec_id)), "process spec")?;
    spec::inherit(&mut process, &container);
    let facts = spec::adapt_process(&mut process, stdio.is_terminal())?;
    let process: ProcessDescription = typed(process, "process")?;
    let container: Description = typed(container, "spec")?;
    stdio.give_to(facts.uid, &container.linux.uid_mappings)?;
    let gone = |error: io::Error| Refusal::state(format!("join {}: {}", place.id, said(&error)));
    let joining = Joining {
        process_of: sys::open_process(first).map_err(gone)?,
        cgroup: Path::new(cgroup::ROOT).join(place.cgroup.trim_start_matches('/')),
        window: window.or(facts.window),
        find_home: facts.find_home,
        first,
        container,
        process,
        stdio,
    };
    joining.launch().map_err(|failure| match failure {
        Failure::Joining(error) => gone(error),
        Failure::Refused(refusal) => refusal,
    })
}

/// What goes wrong.
enum Failure {
    /// Because the container is no longer there, mostly.
    Joining(io::Error),
    Refused(Refusal),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Joining(error)
    }
}

impl From<nix::Error> for Failure {
    fn from(error: nix::Error) -> Self {
        Self::Joining(error.into())
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

struct Joining {
    container: Description,
    process: ProcessDescription,
    /// The container's first process.
    process_of: OwnedFd,
    first: i32,
    cgroup: PathBuf,
    stdio: Stdio,
    find_home: bool,
    window: Option<(u16, u16)>,
}

impl Joining {
    fn flags(&self, kinds: &[(&str, libc::c_int)]) -> libc::c_int {
        let has = |kind: &str| self.container.linux.namespace(kind).is_some();
        kinds
            .iter()
            .filter(|(kind, _)| has(kind))
            .fold(0, |all, (_, flag)| all | flag)
    }

    fn launch(self) -> Result<(Reply, Option<OwnedFd>), Failure> {
        // Until it is in all of them, what is in the container is not to look into it.
        let _ = set_dumpable(false);
        let (ours, theirs) = Channel::pair()?;
        let flags = self.flags(&INHERITED);
        if flags != 0 {
            setns(&self.process_of, CloneFlags::from_bits_retain(flags))?;
        }
        let pid = sys::fork_sibling(0)?;
        if pid == 0 {
            drop(ours);
            self.live(&theirs);
        }
        drop(theirs);
        let made = self.attend(pid, &ours);
        if made.is_err() {
            let _ = sys::kill(pid, libc::SIGKILL);
        }
        Ok((Reply::Started { pid }, made?))
    }

    fn attend(&self, pid: i32, channel: &Channel) -> Result<Option<OwnedFd>, Failure> {
        let affinity = self.process.affinity.as_ref();
        identity::set_affinity(pid, affinity, |affinity| &affinity.initial)?;
        self.join_cgroup(pid)?;
        identity::set_affinity(pid, affinity, |affinity| &affinity.last)?;
        identity::set_memory_score(pid, self.process.oom_score_adj)?;
        let _ = channel.go_on();
        let terminal = channel.outcome()?;
        identity::raise_limits(pid, &self.process.rlimits)?;
        let _ = channel.go_on();
        channel.executed()?;
        Ok(terminal)
    }

    /// The container's cgroup, or, where the container has divided that, its first process's.
    fn join_cgroup(&self, pid: i32) -> io::Result<()> {
        let join = |cgroup: &Path| fs::write(cgroup.join("cgroup.procs"), pid.to_string());
        join(&self.cgroup).or_else(|error| {
            let own = fs::read_to_string(format!("/proc/{}/cgroup", self.first))?;
            let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
            own.map_or(Err(error), |path| join(&Path::new(cgroup::ROOT).join(path)))
        })
    }

    /// The life of the process, which ends here where it does not become its program.
    fn live(&self, channel: &Channel) -> ! {
        let refusal = match self.set_up(channel) {
            Ok(program) => program.execute(),
            Err(Failure::Refused(refusal)) => refusal,
            Err(Failure::Joining(error)) => {
                Refusal::failed(format!("join the container: {}", said(&error)))
            }
        };
        let _ = channel.failed(&refusal);
        std::process::exit(1);
    }

    fn set_up(&self, channel: &Channel) -> Result<Program, Failure> {
        channel.wait()?;
        begin(&self.stdio)?;
        setns(
            &self.process_of,
            CloneFlags::from_bits_retain(self.flags(&ENTERED)),
        )?;
        if self.container.linux.namespace("user").is_some() {
            become_its_root()?;
        }
        let terminal = self
            .stdio
            .is_terminal()
            .then(|| console::set_up(false))
            .transpose()?;
        identity::set_scheduling(
            self.process.scheduler.as_ref(),
            self.process.io_priority.as_ref(),
        )?;
        identity::set_personality(self.container.linux.personality.as_ref())?;
        identity::set_umask(
            self.process
                .user
                .umask
                .or(self.container.process.user.umask),
        );
        let ready = Ready {
            process: &self.process,
            seccomp: self.container.linux.seccomp.clone(),
            find_home: self.find_home,
            window: self.window,
            terminal,
        };
        Ok(ready.become_user(channel)?)
    }
}
