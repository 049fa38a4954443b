//! The first process of a container.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::prctl::{set_dumpable, set_no_new_privs};
use nix::unistd::{self, Gid, Uid, chdir, fchown, getcwd, sethostname, setsid};
use serde_json::{Value, json};
use ttrpc::Code;

use super::channel::Channel;
use super::description::{Description, Linux, ProcessDescription};
use super::executor::Program;
use super::identity::{self, Privileges};
use super::mounts::{self, Surroundings, said};
use super::{
    Outcome, Stdio, console, device_rules, hooks, limits, read_json, root, spec, typed,
    user_namespace, write_json,
};
use crate::cgroup;
use crate::protocol::{Place, RECEIVED_SPEC, Reply, SPEC, START_SOCKET};
use crate::status::Refusal;
use crate::sys;

/// Kinds of namespaces that come with the clone, when they are new.
const CLONED: [(&str, libc::c_int); 5] = [
    ("mount", libc::CLONE_NEWNS),
    ("pid", libc::CLONE_NEWPID),
    ("uts", libc::CLONE_NEWUTS),
    ("ipc", libc::CLONE_NEWIPC),
    ("user", libc::CLONE_NEWUSER),
];

/// Makes a container, up to its program's execution.
pub fn create(
    place: &Place,
    stdio: Stdio,
    window: Option<(u16, u16)>,
    others: &BTreeMap<String, i32>,
) -> Outcome {
    let received: Value = read_json(&place.bundle.join(RECEIVED_SPEC), "runtime spec")?;
    let adapted = spec::adapt(received, &place.cgroup, stdio.is_terminal(), others)?;
    for (file, value) in &adapted.network_settings {
        set(file, value)?;
    }
    write_json(&place.bundle.join(SPEC), &adapted.spec)?;
    let resources = adapted.spec["linux"]["resources"].clone();
    let description: Description = typed(adapted.spec, "spec")?;
    let mappings = [
        &description.linux.uid_mappings[..],
        &description.linux.gid_mappings[..],
    ];
    stdio.give_to(adapted.process.uid, mappings[0])?;
    let cgroup = Path::new(cgroup::ROOT).join(place.cgroup.trim_start_matches('/'));
    limits::set(place, &resources)?;
    let devices = device_rules::Program::of_container(&resources, "linux.resources")?;
    let mapped = mounts::make_mapped(&description.mounts, mappings)?;
    let first = FirstProcess {
        place,
        surroundings: Surroundings {
            user_namespace: description.linux.namespace("user").is_some(),
            cgroup: &cgroup,
            cgroup_namespace: description.linux.namespace("cgroup").is_some(),
        },
        listener: listen(place)
            .map_err(|error| Refusal::failed(format!("make the socket of the start: {error}")))?,
        find_home: adapted.process.find_home,
        window: window.or(adapted.process.window),
        description,
        mapped,
        devices,
        stdio,
    };
    first.launch()
}

/// Where it waits for its start. Bound by its bare name, as the path may be too long for an address.
fn listen(place: &Place) -> io::Result<UnixListener> {
    let directory = place.states.join(&place.id);
    fs::create_dir_all(&directory)?;
    std::env::set_current_dir(&directory)?;
    let listener = UnixListener::bind(START_SOCKET);
    std::env::set_current_dir("/")?;
    listener
}

fn set(file: &str, value: &str) -> Result<(), Refusal> {
    fs::write(Path::new("/proc/sys").join(file), value).map_err(|error| {
        let name = file.replace('/', ".");
        Refusal::invalid(format!(
            "linux.sysctl: {name} = {value:?}: {}",
            said(&error)
        ))
    })
}

/// A container's first process to be.
struct FirstProcess<'a> {
    place: &'a Place,
    description: Description,
    surroundings: Surroundings<'a>,
    mapped: BTreeMap<usize, OwnedFd>,
    devices: device_rules::Program,
    listener: UnixListener,
    stdio: Stdio,
    find_home: bool,
    window: Option<(u16, u16)>,
}

impl FirstProcess<'_> {
    fn launch(self) -> Outcome {
        let linux = &self.description.linux;
        let of_namespaces =
            |error: io::Error| Refusal::failed(format!("linux.namespaces: {}", said(&error)));
        enter_others(linux).map_err(of_namespaces)?;
        set_clocks(linux)?;
        let flags = CLONED
            .iter()
            .filter(|(kind, _)| linux.has_new(kind))
            .fold(0, |all, (_, flag)| all | flag);
        let (ours, theirs) = Channel::pair().map_err(of_namespaces)?;
        // What is in a namespace that is joined is not to look into this process.
        let _ = set_dumpable(false);
        let pid = sys::fork_sibling(flags).map_err(of_namespaces)?;
        if pid == 0 {
            drop(ours);
            self.live(&theirs);
        }
        drop(theirs);
        let made = self.attend(pid, &ours);
        if made.is_err() {
            let _ = sys::kill(pid, libc::SIGKILL);
        }
        made.map(|terminal| (Reply::Started { pid }, terminal))
    }

    /// What the process cannot do for itself.
    fn attend(&self, pid: i32, channel: &Channel) -> Result<Option<OwnedFd>, Refusal> {
        let Linux {
            uid_mappings,
            gid_mappings,
            ..
        } = &self.description.linux;
        let process = &self.description.process;
        if self.description.linux.has_new("user") {
            user_namespace::write_mappings(pid, [uid_mappings, gid_mappings]).map_err(|error| {
                Refusal::failed(format!("linux.uidMappings, gidMappings: {}", said(&error)))
            })?;
        }
        fs::write(
            self.surroundings.cgroup.join("cgroup.procs"),
            pid.to_string(),
        )
        .map_err(|error| {
            Refusal::failed(format!("join the container's cgroup: {}", said(&error)))
        })?;
        identity::set_memory_score(pid, process.oom_score_adj)?;
        // When it has ended already, it has said why.
        let _ = channel.go_on();
        let terminal = channel.outcome()?;
        // Not before its mounts are there: their sources may be devices that it may not use itself.
        self.devices
            .enforce(self.surroundings.cgroup, "linux.resources")?;
        identity::raise_limits(pid, &process.rlimits)?;
        let _ = channel.go_on();
        Ok(terminal)
    }

    /// The life of the process, which ends here where it does not become its program.
    fn live(self, channel: &Channel) -> ! {
        let made = self.set_up(channel);
        let program = made.unwrap_or_else(|refusal| {
            let _ = channel.failed(&refusal);
            std::process::exit(1);
        });
        let refusal = match self.wait_for_start(&program) {
            Ok(()) => program.execute(),
            Err(refusal) => refusal,
        };
        let _ = unistd::write(&self.stdio.report, refusal.message.as_bytes());
        std::process::exit(1);
    }

    fn set_up(&self, channel: &Channel) -> Result<Program, Refusal> {
        let Description {
            process,
            linux,
            hooks,
            ..
        } = &self.description;
        channel
            .wait()
            .map_err(|error| Refusal::failed(format!("wait for the helper: {error}")))?;
        begin(&self.stdio)?;
        if self.surroundings.user_namespace {
            become_its_root()?;
        }
        self.set_up_namespaces()?;
        identity::set_scheduling(process.scheduler.as_ref(), process.io_priority.as_ref())?;
        for (name, value) in &linux.sysctl {
            set(&spec::setting_file(name), value)?;
        }
        root::enter(&self.description, &self.mapped, &self.surroundings)?;
        super::hooks::check(&hooks.create_container, "createContainer")?;
        super::hooks::check(&hooks.start_container, "startContainer")?;
        hooks::run(
            &hooks.create_container,
            "createContainer",
            &self.state("creating"),
            &[],
        )?;
        let terminal = self
            .stdio
            .is_terminal()
            .then(|| console::set_up(true))
            .transpose()?;
        identity::set_personality(linux.personality.as_ref())?;
        make_working_directory(&process.cwd)?;
        root::finish(&self.description)?;
        identity::set_umask(process.user.umask);
        let ready = Ready {
            process,
            seccomp: linux.seccomp.clone(),
            find_home: self.find_home,
            window: self.window,
            terminal,
        };
        ready.become_user(channel)
    }

    fn set_up_namespaces(&self) -> Result<(), Refusal> {
        let Description {
            hostname,
            domainname,
            linux,
            ..
        } = &self.description;
        if linux.has_new("cgroup") {
            unshare(CloneFlags::CLONE_NEWCGROUP).map_err(|error| {
                Refusal::failed(format!("linux.namespaces: cgroup: {}", error.desc()))
            })?;
        }
        if linux.has_new("uts") {
            if !hostname.is_empty() {
                sethostname(hostname)
                    .map_err(|error| Refusal::failed(format!("hostname: {}", error.desc())))?;
            }
            if !domainname.is_empty() {
                sys::set_domain_name(domainname)
                    .map_err(|error| Refusal::failed(format!("domainname: {error}")))?;
            }
        }
        Ok(())
    }

    fn state(&self, status: &str) -> Value {
        let annotations = json!(self.description.annotations);
        hooks::state(
            &self.place.id,
            status,
            &self.place.bundle.to_string_lossy(),
            &annotations,
        )
    }

    fn wait_for_start(&self, program: &Program) -> Result<(), Refusal> {
        let failed = |error: io::Error| Refusal::failed(format!("wait for the start: {error}"));
        let (mut socket, _) = self.listener.accept().map_err(failed)?;
        socket.read_to_end(&mut Vec::new()).map_err(failed)?;
        let hooks = &self.description.hooks.start_container;
        hooks::run(
            hooks,
            "startContainer",
            &self.state("created"),
            program.environment(),
        )
    }
}

/// Joins the namespaces of other containers, which the process then inherits.
fn enter_others(linux: &Linux) -> io::Result<()> {
    for namespace in linux
        .namespaces
        .iter()
        .filter(|namespace| !namespace.path.as_os_str().is_empty())
    {
        setns(File::open(&namespace.path)?, CloneFlags::empty())?;
    }
    Ok(())
}

/// Makes a time namespace for the process that comes, and sets its clocks.
fn set_clocks(linux: &Linux) -> Result<(), Refusal> {
    if !linux.has_new("time") {
        return Ok(());
    }
    unshare(CloneFlags::from_bits_retain(libc::CLONE_NEWTIME))
        .map_err(|error| Refusal::failed(format!("linux.namespaces: time: {}", error.desc())))?;
    for (clock, offset) in &linux.time_offsets {
        let line = format!("{clock} {} {}", offset.secs, offset.nanosecs);
        fs::write("/proc/self/timens_offsets", line).map_err(|error| {
            Refusal::invalid(format!("linux.timeOffsets.{clock}: {}", said(&error)))
        })?;
    }
    Ok(())
}

/// Makes the working directory where it is missing, as other runtimes do.
fn make_working_directory(path: &Path) -> Result<(), Refusal> {
    match fs::create_dir_all(path) {
        // Entering it says what is wrong.
        Err(error)
            if !matches!(
                error.raw_os_error(),
                Some(libc::EEXIST | libc::ENOTDIR | libc::EROFS)
            ) =>
        {
            Err(Refusal::failed(format!(
                "make the working directory {}: {}",
                path.display(),
                said(&error)
            )))
        }
        _ => Ok(()),
    }
}

/// What every container process begins with.
pub fn begin(stdio: &Stdio) -> Result<(), Refusal> {
    let failed = |error: nix::Error| Refusal::failed(format!("begin a session: {}", error.desc()));
    setsid().map_err(failed)?;
    stdio.put_in_place().map_err(failed)
}

/// Becomes the user that a new user namespace calls 0.
pub fn become_its_root() -> Result<(), Refusal> {
    let failed = |error: nix::Error| {
        Refusal::failed(format!(
            "linux.uidMappings: become user 0: {}",
            error.desc()
        ))
    };
    let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
    nix::unistd::setgroups(&[]).map_err(failed)?;
    nix::unistd::setresgid(gid, gid, gid).map_err(failed)?;
    nix::unistd::setresuid(uid, uid, uid).map_err(failed)
}

/// A process that is in its container, and has still all privileges.
pub struct Ready<'a> {
    /// What it is to be.
    pub process: &'a ProcessDescription,
    /// Its filter.
    pub seccomp: Option<libcontainer::oci_spec::runtime::LinuxSeccomp>,
    /// Whether its home is to be looked up.
    pub find_home: bool,
    /// Rows and columns of its terminal.
    pub window: Option<(u16, u16)>,
    /// Its terminal's master.
    pub terminal: Option<ManuallyDrop<OwnedFd>>,
}

impl Ready<'_> {
    /// Becomes its user, says that it is there, and waits for its limits. Returns what it is to execute.
    pub fn become_user(self, channel: &Channel) -> Result<Program, Refusal> {
        let process = self.process;
        let failed = |error: io::Error| Refusal::failed(said(&error));
        if process.no_new_privileges {
            set_no_new_privs().map_err(|error| {
                Refusal::failed(format!("process.noNewPrivileges: {}", error.desc()))
            })?;
        }
        if self.terminal.is_some() {
            let stdin = io::stdin();
            let _ = fchown(stdin.as_fd(), Some(Uid::from_raw(process.user.uid)), None);
            if let Some((rows, columns)) = self.window {
                let _ = sys::set_window_size(stdin, rows, columns);
            }
        }
        // With all privileges, as the user need not be let into it; or else with the user's, as root need not
        // be let into it either.
        let entered = enter_directory(&process.cwd);
        let privileges = Privileges::of(&process.capabilities);
        privileges.take_on(&process.user)?;
        match entered {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES)) => {
                enter_directory(&process.cwd)
            }
            result => result,
        }
        .map_err(|error| {
            let message = format!(
                "chdir to cwd ({:?}) set in config.json failed: {}",
                process.cwd,
                said(&error)
            );
            Refusal::failed(message)
        })?;
        // One that lies outside of the root is not shown by a path that begins there.
        match getcwd() {
            Ok(path) if path.is_absolute() => {}
            _ => {
                return Err(Refusal::new(
                    Code::INVALID_ARGUMENT,
                    "process.cwd: outside of the container's root",
                ));
            }
        }
        sys::close_on_exec_from(3).map_err(failed)?;
        let program = Program::find(process, self.find_home, self.seccomp, privileges)?;
        channel.ready(self.terminal.as_deref()).map_err(failed)?;
        channel.wait().map_err(failed)?;
        Ok(program)
    }
}

fn enter_directory(path: &Path) -> io::Result<()> {
    Ok(chdir(path)?)
}
