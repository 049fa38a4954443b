//! The helper: a fresh, single-threaded process that the agent executes for one thing to do with a
//! container, and that ends when it has done it.
//!
//! A container process begins as a copy of the helper that goes on running Rust code, and the helper
//! enters namespaces for it; both are harmless only in a process of its own. The container processes
//! are children of the agent (`CLONE_PARENT`), so the helper is not needed once they exist.

mod channel;
mod console;
mod create;
mod description;
mod device_rules;
mod devices;
mod executor;
mod hooks;
mod identity;
mod join;
mod limits;
mod mount_options;
mod mounts;
mod root;
mod spec;
mod user_namespace;

use std::error::Error;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;

use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::{Uid, dup2_stderr, dup2_stdin, dup2_stdout, fchown};
use serde::de::DeserializeOwned;
use serde_json::Value;
use ttrpc::Code;

use self::description::IdMapping;
use crate::boot::{OOM_SCORE, OPEN_FILES};
use crate::protocol::{MESSAGE_LIMIT, Place, Reply, Request, SPEC};
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
    // The agent's is not for what containers run.
    let _ = std::fs::write(OOM_SCORE, "0");
    let mut buffer = vec![0; MESSAGE_LIMIT];
    let request = sys::receive(std::io::stdin(), &mut buffer);
    let Ok((length, descriptors)) = request else {
        return ExitCode::FAILURE;
    };
    let outcome = serde_json::from_slice(&buffer[..length])
        .map_err(|error| Refusal::new(Code::INTERNAL, format!("helper's request: {error}")))
        .and_then(|request| carry_out(request, descriptors));
    let (reply, terminal) = outcome.unwrap_or_else(|Refusal { code, message }| {
        let code = code as i32;
        (Reply::Refused { code, message }, None)
    });
    match answer(&reply, terminal.as_ref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn answer(reply: &Reply, terminal: Option<&OwnedFd>) -> Result<(), Box<dyn Error>> {
    let message = serde_json::to_vec(reply)?;
    let terminal = terminal.map(AsFd::as_fd);
    sys::send(std::io::stdin(), &message, terminal.as_slice())?;
    Ok(())
}

fn carry_out(request: Request, descriptors: Vec<OwnedFd>) -> Outcome {
    match request {
        Request::Create {
            place,
            terminal,
            window,
            others,
        } => create::create(&place, Stdio::new(descriptors, terminal)?, window, &others),
        Request::Exec {
            place,
            exec_id,
            first,
            terminal,
            window,
        } => join::exec(
            &place,
            &exec_id,
            first,
            Stdio::new(descriptors, terminal)?,
            window,
        ),
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

    /// Lets the process's user open `/dev/stdout` and the like anew. `users` are the container's mappings.
    fn give_to(&self, uid: u32, users: &[IdMapping]) -> Result<(), Refusal> {
        let uid = users
            .iter()
            .find_map(|mapping| {
                let place = uid
                    .checked_sub(mapping.container)
                    .filter(|place| *place < mapping.size)?;
                Some(mapping.host + place)
            })
            .unwrap_or(uid);
        for fd in self.streams.iter().flatten() {
            let pipe = nix::sys::stat::fstat(fd)
                .is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFIFO);
            if pipe {
                fchown(fd, Some(Uid::from_raw(uid)), None)
                    .map_err(|error| Refusal::failed(format!("give stdio to its user: {error}")))?;
            }
        }
        Ok(())
    }

    /// Puts the streams in place of this process's own.
    fn put_in_place(&self) -> nix::Result<()> {
        let Some([stdin, stdout, stderr]) = &self.streams else {
            return Ok(());
        };
        dup2_stdin(stdin)?;
        dup2_stdout(stdout)?;
        dup2_stderr(stderr)
    }
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
