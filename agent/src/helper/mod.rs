//! The helper: a fresh, single-threaded process that the agent executes for one thing to do with a
//! container, and that ends when it has done it.
//!
//! libcontainer clones processes that go on running Rust code, changes the working directory and
//! writes to `/proc/self`; all of that is harmless only in a process of its own. The container
//! processes it makes are children of the agent (libcontainer's "sibling" mode), so the helper is
//! not needed once they exist.

mod console;
mod executor;
mod journal;
mod limits;
mod spec;

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;

use libcontainer::container::ContainerStatus;
use libcontainer::container::builder::ContainerBuilder;
use libcontainer::error::LibcontainerError;
use libcontainer::oci_spec::runtime::{LinuxCapabilities, LinuxSeccomp};
use libcontainer::syscall::syscall::SyscallType;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::{Gid, Uid, fchown};
use serde::de::DeserializeOwned;
use serde_json::Value;
use ttrpc::Code;

use self::console::ConsoleSocket;
use self::executor::{Confinement, ContainerExecutor, LastSteps};
use self::journal::Journal;
use self::spec::ProcessFacts;
use crate::boot::OPEN_FILES;
use crate::protocol::{MESSAGE_LIMIT, Place, RECEIVED_SPEC, Reply, Request, SPEC, process_file};
use crate::status::Refusal;
use crate::sys;

/// A reply, and the terminal's master where there is one.
type Outcome = Result<(Reply, Option<OwnedFd>), Refusal>;

/// Serves the one request on standard input.
pub fn run() -> ExitCode {
    sys::default_internal_signals();
    let _ = std::env::set_current_dir("/");
    let (soft, hard) = OPEN_FILES;
    // Refused only where the tests run without the right to; the limit is then theirs.
    let _ = setrlimit(Resource::RLIMIT_NOFILE, soft, hard);
    let journal = Journal::install();
    let mut buffer = vec![0; MESSAGE_LIMIT];
    let request = sys::receive(std::io::stdin(), &mut buffer);
    let Ok((length, descriptors)) = request else {
        return ExitCode::FAILURE;
    };
    let outcome = serde_json::from_slice(&buffer[..length])
        .map_err(|error| Refusal::new(Code::INTERNAL, format!("helper's request: {error}")))
        .and_then(|request| carry_out(request, descriptors));
    let (reply, terminal) = outcome.unwrap_or_else(|refusal| {
        let Refusal { code, message } = refusal;
        let message = match &journal {
            Ok(journal) => journal.explain(message),
            Err(_) => message,
        };
        (
            Reply::Refused {
                code: code as i32,
                message,
            },
            None,
        )
    });
    match answer(&reply, terminal.as_ref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn answer(reply: &Reply, terminal: Option<&OwnedFd>) -> Result<(), Box<dyn Error>> {
    let message = serde_json::to_vec(reply)?;
    let descriptors: Vec<_> = terminal.iter().map(|fd| fd.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let control = if descriptors.is_empty() {
        &rights[..0]
    } else {
        &rights[..]
    };
    let socket = std::io::stdin().as_raw_fd();
    sendmsg::<()>(
        socket,
        &[IoSlice::new(&message)],
        control,
        MsgFlags::empty(),
        None,
    )?;
    Ok(())
}

fn carry_out(request: Request, descriptors: Vec<OwnedFd>) -> Outcome {
    match request {
        Request::Create {
            place,
            terminal,
            window,
            others,
        } => create(&place, Stdio::new(descriptors, terminal)?, window, &others),
        Request::Exec {
            place,
            exec_id,
            terminal,
            window,
        } => exec(&place, &exec_id, Stdio::new(descriptors, terminal)?, window),
        Request::Update { place, resources } => {
            limits::update(&place, &resources).map(|()| (Reply::Done, None))
        }
        Request::Sync { place } => sync(&place),
    }
}

/// The descriptors of a process to be.
struct Stdio {
    report: OwnedFd,
    /// Standard input, output and error; `None` for a terminal.
    streams: Option<[OwnedFd; 3]>,
}

impl Stdio {
    fn new(descriptors: Vec<OwnedFd>, terminal: bool) -> Result<Self, Refusal> {
        let mut descriptors = descriptors.into_iter();
        let report = descriptors.next();
        let streams: Result<[OwnedFd; 3], _> = descriptors.collect::<Vec<_>>().try_into();
        match (report, streams, terminal) {
            (Some(report), Ok(streams), false) => Ok(Self {
                report,
                streams: Some(streams),
            }),
            (Some(report), Err(rest), true) if rest.is_empty() => Ok(Self {
                report,
                streams: None,
            }),
            _ => Err(Refusal::new(
                Code::INTERNAL,
                "helper's request: wrong descriptors",
            )),
        }
    }

    fn is_terminal(&self) -> bool {
        self.streams.is_none()
    }

    /// Lets the process's user open `/dev/stdout` and the like anew.
    fn give_to(&self, process: &ProcessFacts) -> Result<(), Refusal> {
        let (uid, gid) = (Uid::from_raw(process.uid), Gid::from_raw(process.gid));
        for fd in self.streams.iter().flatten() {
            let pipe = nix::sys::stat::fstat(fd)
                .is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFIFO);
            if pipe {
                fchown(fd, Some(uid), Some(gid))
                    .map_err(|error| Refusal::failed(format!("give stdio to its user: {error}")))?;
            }
        }
        Ok(())
    }
}

fn create(
    place: &Place,
    stdio: Stdio,
    window: Option<(u16, u16)>,
    others: &BTreeMap<String, i32>,
) -> Outcome {
    let received: Value = read_json(&place.bundle.join(RECEIVED_SPEC), "runtime spec")?;
    let adapted = spec::adapt(received, &place.cgroup, stdio.is_terminal(), others)?;
    for (file, value) in &adapted.network_settings {
        fs::write(Path::new("/proc/sys").join(file), value).map_err(|error| {
            Refusal::invalid(format!(
                "linux.sysctl: {} = {value:?}: {error}",
                file.replace('/', ".")
            ))
        })?;
    }
    write_json(&place.bundle.join(SPEC), &adapted.spec)?;
    make_working_directory(&adapted.spec);
    stdio.give_to(&adapted.process)?;
    let steps = LastSteps {
        confinement: None,
        window: window.or(adapted.process.window),
        find_home: adapted.process.find_home,
    };
    let (builder, console) = builder(place, stdio, steps)?;
    let mut container = builder
        .as_init(&place.bundle)
        .with_systemd(false)
        .as_sibling(true)
        .build()
        .map_err(refuse)?;
    let pid = container
        .pid()
        .ok_or_else(|| Refusal::failed("the container has no process"))?;
    // Processes may join from now on: libcontainer's own state would forbid it before the start.
    container
        .set_status(ContainerStatus::Running)
        .save()
        .map_err(refuse)?;
    started(pid.as_raw(), console)
}

/// Makes the working directory where it is missing, as other runtimes do. Where that fails, or where
/// a mount then hides it, entering it fails with its name.
fn make_working_directory(spec: &Value) {
    let text = |pointer| spec.pointer(pointer).and_then(Value::as_str);
    if let (Some(root), Some(cwd)) = (text("/root/path"), text("/process/cwd"))
        && let Ok(root) = pathrs::Root::open(root)
    {
        let _ = root.mkdir_all(cwd, &fs::Permissions::from_mode(0o755));
    }
}

fn exec(place: &Place, exec_id: &str, stdio: Stdio, window: Option<(u16, u16)>) -> Outcome {
    let file = place.bundle.join(process_file(exec_id));
    let container: Value = read_json(&place.bundle.join(SPEC), "runtime spec")?;
    let mut process: Value = read_json(&file, "process spec")?;
    spec::inherit(&mut process, &container);
    let facts = spec::adapt_process(&mut process, stdio.is_terminal())?;
    let confinement = confine(&container, &mut process)?;
    write_json(&file, &process)?;
    stdio.give_to(&facts)?;
    let steps = LastSteps {
        confinement,
        window: window.or(facts.window),
        find_home: facts.find_home,
    };
    let (builder, console) = builder(place, stdio, steps)?;
    let pid = builder
        .as_tenant()
        .with_process(Some(&file))
        .with_detach(true)
        .as_sibling(true)
        .build()
        .map_err(refuse)?;
    started(pid.as_raw(), console)
}

/// libcontainer installs a container's seccomp filter in its first process only. Others do it
/// themselves, in the executor; without `no_new_privs` that takes two capabilities, which the
/// process then keeps until the filter is in place.
fn confine(container: &Value, process: &mut Value) -> Result<Option<Confinement>, Refusal> {
    let Some(seccomp) = container.pointer("/linux/seccomp") else {
        return Ok(None);
    };
    let seccomp: LinuxSeccomp = typed(seccomp.clone(), "linux.seccomp")?;
    if spec::no_new_privileges(process) {
        return Ok(Some(Confinement {
            seccomp,
            capabilities: None,
        }));
    }
    let capabilities: LinuxCapabilities =
        typed(process["capabilities"].clone(), "process.capabilities")?;
    spec::add_capabilities(process, &["CAP_SYS_ADMIN", "CAP_SETPCAP"]);
    Ok(Some(Confinement {
        seccomp,
        capabilities: Some(capabilities),
    }))
}

fn builder(
    place: &Place,
    stdio: Stdio,
    steps: LastSteps,
) -> Result<(ContainerBuilder, Option<ConsoleSocket>), Refusal> {
    let Stdio { report, streams } = stdio;
    let mut builder = ContainerBuilder::new(place.id.clone(), SyscallType::default())
        .with_root_path(&place.states)
        .and_then(ContainerBuilder::validate_id)
        .map_err(refuse)?
        .with_executor(ContainerExecutor::new(report, steps));
    let mut console = None;
    match streams {
        Some([stdin, stdout, stderr]) => {
            builder = builder
                .with_stdin(stdin)
                .with_stdout(stdout)
                .with_stderr(stderr);
        }
        None => {
            let socket = ConsoleSocket::listen(&place.bundle)
                .map_err(|error| Refusal::failed(format!("console socket: {error}")))?;
            builder = builder.with_console_socket(Some(socket.path()));
            console = Some(socket);
        }
    }
    Ok((builder, console))
}

fn started(pid: i32, console: Option<ConsoleSocket>) -> Outcome {
    let terminal = console
        .map(ConsoleSocket::receive)
        .transpose()
        .map_err(|error| {
            // The process waits for a start that would never come.
            let _ = sys::kill(pid, libc::SIGKILL);
            Refusal::failed(format!("receive the terminal: {error}"))
        })?;
    Ok((Reply::Started { pid }, terminal))
}

fn sync(place: &Place) -> Outcome {
    let spec: Value = read_json(&place.bundle.join(SPEC), "runtime spec")?;
    let path = spec
        .pointer("/root/path")
        .and_then(Value::as_str)
        .unwrap_or("/");
    fs::File::open(path)
        .and_then(sys::sync_file_system)
        .map_err(|error| Refusal::failed(format!("write back {path}: {error}")))?;
    Ok((Reply::Done, None))
}

fn read_json(path: &Path, what: &str) -> Result<Value, Refusal> {
    let text = fs::read(path).map_err(|error| Refusal::failed(format!("read {what}: {error}")))?;
    serde_json::from_slice(&text).map_err(|error| Refusal::invalid(format!("{what}: {error}")))
}

fn write_json(path: &Path, value: &Value) -> Result<(), Refusal> {
    let text = serde_json::to_vec(value).map_err(|error| Refusal::failed(error.to_string()))?;
    fs::write(path, text)
        .map_err(|error| Refusal::failed(format!("write {}: {error}", path.display())))
}

fn typed<T: DeserializeOwned>(value: Value, field: &str) -> Result<T, Refusal> {
    serde_json::from_value(value).map_err(|error| Refusal::invalid(format!("{field}: {error}")))
}

fn refuse(error: LibcontainerError) -> Refusal {
    let code = match &error {
        LibcontainerError::InvalidSpec(_) | LibcontainerError::MissingSpec(_) => {
            Code::INVALID_ARGUMENT
        }
        LibcontainerError::IncorrectStatus(_) => Code::FAILED_PRECONDITION,
        _ => Code::UNKNOWN,
    };
    Refusal::new(code, chain(&error))
}

/// An error with its causes, each said once.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.ends_with(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}
