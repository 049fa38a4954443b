//! A container's task, asked directly at its shim's socket: what containerd's own client has no words
//! for. It holds for every runtime, as the interface is the same.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use containerd_shim_protos::api::{ExecProcessRequest, Status};
use containerd_shim_protos::cgroups_v2::metrics::Metrics;
use containerd_shim_protos::protobuf::Message;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};

use crate::container::Container;
use crate::player::{self, Api, CallError, any};
use crate::testbed::{LIMIT, Testbed};

/// The type of the metrics of a cgroup of version 2.
const METRICS: &str = "io.containerd.cgroups.v2.Metrics";

/// A connection to a shim, for one container.
#[derive(Clone)]
pub struct Task {
    shim: player::Task,
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

/// The tests of this kind of task break no connection.
impl From<CallError> for Refusal {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused { code, text } => Self {
                code,
                message: text,
            },
            CallError::Broken(reason) => panic!("no answer: {reason}"),
        }
    }
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
        let (address, api) = address(&bundle);
        let socket = address.strip_prefix("unix://").unwrap_or(&address);
        Self {
            shim: player::Task::connect_to(Path::new(socket), api),
            id: container.id.clone(),
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
            spec: Some(any("Process", process)).into(),
            ..ExecProcessRequest::default()
        };
        Ok(self.shim.exec(&request).map(drop)?)
    }

    /// Starts an exec, and the container for the empty id; returns the pid.
    pub fn start(&self, exec_id: &str) -> Result<u32, Refusal> {
        Ok(self.shim.start(&self.id, exec_id)?.pid)
    }

    /// The exit status of an exec, or of the container, once there is one.
    pub fn wait(&self, exec_id: &str) -> Result<u32, Refusal> {
        Ok(self.shim.wait(&self.id, exec_id)?.exit_status)
    }

    /// Deletes an exec, or the container; returns its exit status.
    pub fn delete(&self, exec_id: &str) -> Result<u32, Refusal> {
        Ok(self.shim.delete(&self.id, exec_id)?.exit_status)
    }

    /// What an exec, or the container, is doing.
    pub fn status(&self, exec_id: &str) -> Result<Status, Refusal> {
        let state = self.shim.state(&self.id, exec_id)?;
        Ok(state.status.enum_value_or_default())
    }

    /// Sends a signal by its number to an exec, or to the container's first process or `all` of it.
    pub fn kill(&self, exec_id: &str, signal: u32, all: bool) -> Result<(), Refusal> {
        let killed = match all {
            true => self.shim.kill_all(&self.id, signal),
            false => self.shim.kill(&self.id, exec_id, signal),
        };
        Ok(killed.map(drop)?)
    }

    /// Says that no more input comes.
    pub fn close_input(&self, exec_id: &str) -> Result<(), Refusal> {
        Ok(self.shim.close_stdin(&self.id, exec_id).map(drop)?)
    }

    /// Sets the size of a terminal.
    pub fn resize(&self, exec_id: &str, rows: u32, columns: u32) -> Result<(), Refusal> {
        let size = (columns, rows);
        Ok(self.shim.resize(&self.id, exec_id, size).map(drop)?)
    }

    /// Freezes the container.
    pub fn pause(&self) -> Result<(), Refusal> {
        Ok(self.shim.pause(&self.id).map(drop)?)
    }

    /// Thaws it.
    pub fn resume(&self) -> Result<(), Refusal> {
        Ok(self.shim.resume(&self.id).map(drop)?)
    }

    /// Changes limits: `resources` is OCI's `LinuxResources` in JSON.
    pub fn update(&self, resources: &Value) -> Result<(), Refusal> {
        let resources = any("LinuxResources", resources);
        Ok(self.shim.update(&self.id, resources).map(drop)?)
    }

    /// The counters of the container's cgroup.
    ///
    /// # Panics
    ///
    /// When they are not those of version 2.
    #[track_caller]
    pub fn metrics(&self) -> Result<Metrics, Refusal> {
        let stats = self.shim.stats(&self.id)?;
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

/// Address of the shim of a bundle, and the version of its interface.
#[track_caller]
fn address(bundle: &Path) -> (String, Api) {
    // containerd 2 writes the one, a shim for an older one the other.
    for name in ["bootstrap.json", "address"] {
        let Ok(text) = fs::read_to_string(bundle.join(name)) else {
            continue;
        };
        let Ok(bootstrap) = serde_json::from_str::<BTreeMap<String, Value>>(&text) else {
            return (text.trim().to_owned(), Api::V2);
        };
        let address = bootstrap["address"].as_str().unwrap_or_default();
        let api = match bootstrap["version"].as_u64() {
            Some(3) => Api::V3,
            _ => Api::V2,
        };
        return (address.to_owned(), api);
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
