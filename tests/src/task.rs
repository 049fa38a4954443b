//! A container's task, asked directly at its shim's socket: what containerd's own client has no words
//! for. It holds for every runtime, as the interface is the same.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use containerd_shim_protos::api::{
    CloseIORequest, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest,
    PauseRequest, ResizePtyRequest, ResumeRequest, StartRequest, StartResponse, StateRequest,
    StateResponse, StatsRequest, StatsResponse, Status, UpdateTaskRequest, WaitRequest,
    WaitResponse,
};
use containerd_shim_protos::cgroups_v2::metrics::Metrics;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{Message, MessageField};
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};

use crate::container::Container;
use crate::testbed::{LIMIT, Testbed};

/// The type of the metrics of a cgroup of version 2.
const METRICS: &str = "io.containerd.cgroups.v2.Metrics";

/// A connection to a shim, for one container.
#[derive(Clone)]
pub struct Task {
    client: ttrpc::Client,
    service: &'static str,
    id: String,
}

/// What a shim refuses with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// What kind.
    pub code: ttrpc::Code,
    /// In words.
    pub message: String,
}

/// Where the streams of an exec go.
#[derive(Debug, Clone, Default)]
pub struct Streams {
    /// Path or URI of standard input; empty for none.
    pub stdin: String,
    /// Path or URI of standard output; empty for none.
    pub stdout: String,
    /// Path or URI of standard error; empty for none.
    pub stderr: String,
    /// Whether the first two are a terminal.
    pub terminal: bool,
}

impl Task {
    /// The task of `container`.
    ///
    /// # Panics
    ///
    /// When its shim is not to be found, or not there.
    #[track_caller]
    pub fn of(bed: &Testbed, container: &Container<'_>) -> Self {
        let bundle = bed.containerd().bundles().join(&container.id);
        let (address, version) = address(&bundle);
        let client = ttrpc::Client::connect(&address)
            .unwrap_or_else(|error| panic!("connecting to {address}: {error}"));
        let service = match version {
            3 => "containerd.task.v3.Task",
            _ => "containerd.task.v2.Task",
        };
        let id = container.id.clone();
        Self {
            client,
            service,
            id,
        }
    }

    fn call<A: Message>(&self, method: &str, request: &impl Message) -> Result<A, Refusal> {
        let mut envelope = ttrpc::Request::new();
        envelope.service = self.service.to_owned();
        envelope.method = method.to_owned();
        envelope.timeout_nano = LIMIT.as_nanos() as i64;
        envelope.payload = request.write_to_bytes().expect("it is small");
        match self.client.request(envelope) {
            Ok(answer) => Ok(A::parse_from_bytes(&answer.payload)
                .unwrap_or_else(|error| panic!("the answer to {method}: {error}"))),
            Err(ttrpc::Error::RpcStatus(status)) => Err(Refusal {
                code: status.code(),
                message: status.message,
            }),
            Err(error) => panic!("{method} of {}: {error}", self.id),
        }
    }

    /// Registers an exec that runs `process`, an OCI process in JSON.
    pub fn exec(&self, exec_id: &str, process: &Value, streams: &Streams) -> Result<(), Refusal> {
        let Streams {
            stdin,
            stdout,
            stderr,
            terminal,
        } = streams.clone();
        let request = ExecProcessRequest {
            id: self.id.clone(),
            exec_id: exec_id.to_owned(),
            stdin,
            stdout,
            stderr,
            terminal,
            spec: any("Process", process),
            ..ExecProcessRequest::default()
        };
        self.call::<Empty>("Exec", &request).map(drop)
    }

    /// Starts an exec, and the container for the empty id; returns the pid.
    pub fn start(&self, exec_id: &str) -> Result<u32, Refusal> {
        let request = StartRequest {
            id: self.id.clone(),
            exec_id: exec_id.to_owned(),
            ..StartRequest::default()
        };
        let started: StartResponse = self.call("Start", &request)?;
        Ok(started.pid)
    }

    /// The exit status of an exec, or of the container, once there is one.
    pub fn wait(&self, exec_id: &str) -> Result<u32, Refusal> {
        let request = WaitRequest {
            id: self.id.clone(),
            exec_id: exec_id.to_owned(),
            ..WaitRequest::default()
        };
        let ended: WaitResponse = self.call("Wait", &request)?;
        Ok(ended.exit_status)
    }

    /// Deletes an exec, or the container; returns its exit status.
    pub fn delete(&self, exec_id: &str) -> Result<u32, Refusal> {
        let request = DeleteRequest {
            id: self.id.clone(),
            exec_id: exec_id.to_owned(),
            ..DeleteRequest::default()
        };
        let deleted: DeleteResponse = self.call("Delete", &request)?;
        Ok(deleted.exit_status)
    }

    /// What an exec, or the container, is doing.
    pub fn status(&self, exec_id: &str) -> Result<Status, Refusal> {
        let request = StateRequest {
            id: self.id.clone(),
            exec_id: exec_id.to_owned(),
            ..StateRequest::default()
        };
        let state: StateResponse = self.call("State", &request)?;
        Ok(state.status.enum_value_or_default())
    }

    /// Sends a signal by its number to an exec, or to the container's first process or `all` of it.
    pub fn kill(&self, exec_id: &str, signal: u32, all: bool) -> Result<(), Refusal> {
        let request = KillRequest {
            id: self.id.clone(),
            exec_id: exec_id.to_owned(),
            signal,
            all,
            ..KillRequest::default()
        };
        self.call::<Empty>("Kill", &request).map(drop)
    }

    /// Says that no more input comes.
    pub fn close_input(&self, exec_id: &str) -> Result<(), Refusal> {
        let request = CloseIORequest {
            id: self.id.clone(),
            exec_id: exec_id.to_owned(),
            stdin: true,
            ..CloseIORequest::default()
        };
        self.call::<Empty>("CloseIO", &request).map(drop)
    }

    /// Sets the size of a terminal.
    pub fn resize(&self, exec_id: &str, rows: u32, columns: u32) -> Result<(), Refusal> {
        let request = ResizePtyRequest {
            id: self.id.clone(),
            exec_id: exec_id.to_owned(),
            height: rows,
            width: columns,
            ..ResizePtyRequest::default()
        };
        self.call::<Empty>("ResizePty", &request).map(drop)
    }

    /// Freezes the container.
    pub fn pause(&self) -> Result<(), Refusal> {
        let request = PauseRequest {
            id: self.id.clone(),
            ..PauseRequest::default()
        };
        self.call::<Empty>("Pause", &request).map(drop)
    }

    /// Thaws it.
    pub fn resume(&self) -> Result<(), Refusal> {
        let request = ResumeRequest {
            id: self.id.clone(),
            ..ResumeRequest::default()
        };
        self.call::<Empty>("Resume", &request).map(drop)
    }

    /// Changes limits: `resources` is OCI's `LinuxResources` in JSON.
    pub fn update(&self, resources: &Value) -> Result<(), Refusal> {
        let request = UpdateTaskRequest {
            id: self.id.clone(),
            resources: any("LinuxResources", resources),
            ..UpdateTaskRequest::default()
        };
        self.call::<Empty>("Update", &request).map(drop)
    }

    /// The counters of the container's cgroup.
    ///
    /// # Panics
    ///
    /// When they are not those of version 2.
    #[track_caller]
    pub fn metrics(&self) -> Result<Metrics, Refusal> {
        let request = StatsRequest {
            id: self.id.clone(),
            ..StatsRequest::default()
        };
        let stats: StatsResponse = self.call("Stats", &request)?;
        let stats = stats.stats.unwrap_or_default();
        assert_eq!(stats.type_url, METRICS);
        Ok(Metrics::parse_from_bytes(&stats.value).expect("they are what they are said to be"))
    }

    /// Runs a program to its end, its output in files of `directory`; deletes the exec. Returns its
    /// exit status, standard output and standard error.
    ///
    /// # Panics
    ///
    /// When it cannot be run.
    #[track_caller]
    pub fn run(&self, directory: &Path, exec_id: &str, process: &Value) -> (u32, String, String) {
        let [out, err] = ["out", "err"].map(|name| directory.join(format!("{exec_id}.{name}")));
        let streams = Streams {
            stdout: format!("file://{}", out.display()),
            stderr: format!("file://{}", err.display()),
            ..Streams::default()
        };
        self.exec(exec_id, process, &streams)
            .expect("it can be registered");
        self.start(exec_id).expect("it can be started");
        let status = self.wait(exec_id).expect("it ends");
        assert_eq!(self.delete(exec_id), Ok(status));
        let read = |path: &PathBuf| {
            let text = fs::read(path).unwrap_or_default();
            let _ = fs::remove_file(path);
            String::from_utf8_lossy(&text).into_owned()
        };
        (status, read(&out), read(&err))
    }
}

/// An OCI process of user 0 with these arguments and without capabilities.
pub fn process(arguments: &[&str]) -> Value {
    json!({
        "args": arguments,
        "cwd": "/",
        "env": ["PATH=/usr/bin:/bin:/usr/sbin:/sbin"],
        "user": {"uid": 0, "gid": 0},
    })
}

/// One that runs a line for the shell.
pub fn shell(line: &str) -> Value {
    process(&["sh", "-c", line])
}

fn any(kind: &str, value: &Value) -> MessageField<Any> {
    MessageField::some(Any {
        type_url: format!("types.containerd.io/opencontainers/runtime-spec/1/{kind}"),
        value: value.to_string().into_bytes(),
        ..Any::default()
    })
}

/// Address of the shim of a bundle, and the version of its interface.
#[track_caller]
fn address(bundle: &Path) -> (String, u64) {
    // containerd 2 writes the one, a shim for an older one the other.
    for name in ["bootstrap.json", "address"] {
        let Ok(text) = fs::read_to_string(bundle.join(name)) else {
            continue;
        };
        let Ok(bootstrap) = serde_json::from_str::<BTreeMap<String, Value>>(&text) else {
            return (text.trim().to_owned(), 2);
        };
        let address = bootstrap["address"].as_str().unwrap_or_default();
        return (
            address.to_owned(),
            bootstrap["version"].as_u64().unwrap_or(2),
        );
    }
    panic!("{} has no address of a shim", bundle.display());
}

/// A FIFO for output of a process, whose reading end is open.
#[derive(Debug)]
pub struct Output {
    path: PathBuf,
    file: File,
}

impl Output {
    /// Makes one in `directory`.
    ///
    /// # Panics
    ///
    /// When it cannot be made.
    pub fn new(directory: &Path, name: &str) -> Self {
        let path = fifo(directory, name);
        let nonblocking = OFlag::O_NONBLOCK.bits();
        let file = File::options()
            .read(true)
            .custom_flags(nonblocking)
            .open(&path)
            .expect("it was just made");
        Self { path, file }
    }

    /// Its path, for a shim.
    pub fn uri(&self) -> String {
        self.path.display().to_string()
    }

    /// What reads it to its end. To be asked for once the process was started: before, nobody writes,
    /// which looks like the end.
    pub fn reader(self) -> Reader {
        Reader(self.file)
    }
}

/// Reads a FIFO, and waits for at most [`LIMIT`] for more.
#[derive(Debug)]
pub struct Reader(File);

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let limit = PollTimeout::try_from(LIMIT).map_err(io::Error::other)?;
        let mut poll = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        match nix::poll::poll(&mut poll, limit)? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => self.0.read(buffer),
        }
    }
}

impl Reader {
    /// All up to the end.
    ///
    /// # Panics
    ///
    /// When there is no end to it.
    #[track_caller]
    pub fn text(mut self) -> String {
        let mut bytes = Vec::new();
        let read = self.read_to_end(&mut bytes);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        assert!(read.is_ok(), "{read:?} after {text:?}");
        text
    }

    /// Up to where `seen` says that it is enough.
    ///
    /// # Panics
    ///
    /// When it ends before, or nothing more comes.
    #[track_caller]
    pub fn until(&mut self, seen: impl Fn(&str) -> bool) -> String {
        let mut text = String::new();
        let mut buffer = [0; 4096];
        while !seen(&text) {
            let read = self.read(&mut buffer);
            let length = *read.as_ref().unwrap_or(&0);
            assert!(length > 0, "{read:?} after {text:?}");
            text.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
        text
    }
}

/// Makes a FIFO in `directory`.
///
/// # Panics
///
/// When it cannot be made.
pub fn fifo(directory: &Path, name: &str) -> PathBuf {
    let path = directory.join(name);
    mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR).expect("the tests' directory can be written");
    path
}
