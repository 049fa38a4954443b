//! A bundle as containerd makes it, and the shim program executed for it: `start` and `delete`.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use containerd_shim_protos::api::{CreateTaskRequest, DeleteResponse, Mount};
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};

use super::bootstrap::Params;
use super::{Answer, Api, Container, Fifos, Player, Protocol, Publish, Task};
use super::{root_directory, shim_program};
use crate::command::{Finished, finish_within};
use crate::containerd::NAMESPACE;
use crate::testbed::LIMIT;

/// The search path of containers, and of the shim.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What a container runs, and with which spec.
#[derive(Debug, Clone)]
pub struct Program {
    /// The whole spec.
    pub spec: Value,
    /// Whether it gets a terminal.
    pub terminal: bool,
}

impl Program {
    /// A program with its arguments.
    pub fn new<S: Into<String>>(words: impl IntoIterator<Item = S>) -> Self {
        let words: Vec<String> = words.into_iter().map(Into::into).collect();
        let spec = json!({
            "ociVersion": "1.1.0",
            "root": { "path": "rootfs" },
            "process": process(&words),
            "mounts": [
                { "destination": "/proc", "type": "proc", "source": "proc",
                  "options": ["nosuid", "noexec", "nodev"] },
                { "destination": "/dev", "type": "tmpfs", "source": "tmpfs",
                  "options": ["nosuid", "strictatime", "mode=755", "size=65536k"] },
                { "destination": "/dev/pts", "type": "devpts", "source": "devpts",
                  "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"] },
                { "destination": "/sys", "type": "sysfs", "source": "sysfs",
                  "options": ["nosuid", "noexec", "nodev", "ro"] },
            ],
            "linux": { "namespaces": [
                { "type": "network" }, { "type": "pid" }, { "type": "mount" }, { "type": "ipc" },
                { "type": "uts" },
            ] },
        });
        Self {
            spec,
            terminal: false,
        }
    }

    /// A line for the container's shell.
    pub fn shell(line: &str) -> Self {
        Self::new(["sh", "-c", line])
    }

    /// With a terminal.
    #[must_use]
    pub fn on_terminal(mut self) -> Self {
        self.terminal = true;
        self.spec["process"]["terminal"] = json!(true);
        self
    }

    /// With something else in its spec.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Value)) -> Self {
        change(&mut self.spec);
        self
    }
}

/// The process of a spec, or of an exec.
pub(super) fn process(words: &[String]) -> Value {
    json!({
        "args": words,
        "cwd": "/",
        "env": [format!("PATH={PATH}")],
        "user": { "uid": 0, "gid": 0 },
    })
}

/// A container's directory on the host, and how its shim will be started.
#[derive(Debug)]
pub struct Bundle<'p> {
    pub(super) player: &'p Player,
    /// The container's id.
    pub id: String,
    /// The directory.
    pub path: PathBuf,
    /// How containerd starts the shim.
    pub protocol: Protocol,
    /// How it gets events: by this program instead of over its socket.
    pub publish: Option<&'p Publish>,
    /// Type and value of the runtime options.
    pub options: Option<(String, Vec<u8>)>,
    /// Where the shim is to put its socket, as containerd 2.3 and later may say.
    pub socket_directory: Option<String>,
    terminal: bool,
    log: Arc<Mutex<Vec<u8>>>,
    /// containerd's own end of the log, so that it does not end.
    _log: Arc<File>,
}

impl<'p> Bundle<'p> {
    pub(super) fn new(player: &'p Player, id: &str, path: PathBuf, program: Program) -> Self {
        let unwritable = "the tests' directory can be written";
        fs::create_dir_all(path.join("rootfs")).expect(unwritable);
        fs::write(path.join("config.json"), program.spec.to_string()).expect(unwritable);
        let (log, hold) = listen_to_log(&path.join("log"));
        Self {
            player,
            id: id.to_owned(),
            path,
            protocol: Protocol::V2_0,
            publish: None,
            options: None,
            socket_directory: None,
            terminal: program.terminal,
            log,
            _log: hold,
        }
    }

    /// Started in another way.
    #[must_use]
    pub fn by(mut self, protocol: Protocol) -> Self {
        self.protocol = protocol;
        self
    }

    /// With events going to a program.
    #[must_use]
    pub fn publishing_to(mut self, publish: &'p Publish) -> Self {
        self.publish = Some(publish);
        self
    }

    /// The command line of the shim for `action`, in containerd's order.
    pub fn command(&self, action: &[&str]) -> Command {
        let mut command = Command::new(shim_program());
        let binary = self.publish.map(Publish::program);
        let binary = binary.unwrap_or(Path::new("/usr/bin/containerd"));
        command
            .args(["-namespace", NAMESPACE, "-address"])
            .arg(self.player.address())
            .arg("-publish-binary")
            .arg(binary)
            .args(["-id", &self.id])
            .args(action)
            .env_clear()
            .env("PATH", PATH)
            .current_dir(if self.path.exists() {
                &self.path
            } else {
                Path::new("/")
            });
        command
    }

    /// Executes `start`; what came of it.
    pub fn try_start(&self) -> Finished {
        let grpc = self.player.address();
        let grpc = grpc.to_str().expect("the tests' paths are text");
        let events = self.player.events().path().to_str();
        let ttrpc = events.filter(|_| self.publish.is_none());
        let binary = self.publish.and_then(|publish| publish.program().to_str());
        let options = self.options.as_ref();
        let params = Params {
            id: &self.id,
            namespace: NAMESPACE,
            debug: true,
            ttrpc,
            grpc,
            binary: binary.unwrap_or("/usr/bin/containerd"),
            options: options.map(|(url, value)| (url.as_str(), value.as_slice())),
            socket_directory: self.socket_directory.as_deref(),
        };
        let mut command = self.command(&["-debug", "start"]);
        command.envs(self.protocol.environment(grpc, ttrpc, NAMESPACE));
        finish_within(&mut command, &self.protocol.input(&params), LIMIT)
    }

    /// Executes `start` and connects to what it says. Nothing but the answer may have been written:
    /// containerd reads output and errors as one text.
    ///
    /// # Panics
    ///
    /// When that fails.
    #[track_caller]
    pub fn start(self) -> Shim<'p> {
        let started = self.try_start().succeeded();
        assert_eq!(started.stderr(), "", "on the standard error of a start");
        let answer = self.protocol.parse(&started.out);
        let api = if answer.version == 3 {
            Api::V3
        } else {
            Api::V2
        };
        let task = Task::connect_to(&answer.socket, api);
        Shim {
            bundle: self,
            answer,
            task,
        }
    }

    /// Executes `delete`, as containerd does when the connection to a shim has closed.
    #[track_caller]
    pub fn delete(&self) -> DeleteResponse {
        self.remains().execute_delete(self.player)
    }

    /// What the shim has logged so far.
    pub fn log(&self) -> String {
        self.remains().log()
    }

    pub(super) fn remains(&self) -> Remains {
        Remains {
            id: self.id.clone(),
            path: self.path.clone(),
            log: self.log.clone(),
            _log: self._log.clone(),
        }
    }
}

/// Makes the log's FIFO and reads it until the end of all who may write it.
fn listen_to_log(path: &Path) -> (Arc<Mutex<Vec<u8>>>, Arc<File>) {
    mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR).expect("the tests' directory can be written");
    let both = OpenOptions::new().read(true).write(true).open(path);
    let hold = both.expect("the log was just made");
    let mut reader = File::open(path).expect("the log was just made");
    let log = Arc::new(Mutex::new(Vec::new()));
    let lines = log.clone();
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = reader.read(&mut buffer) {
            let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
            lines.extend_from_slice(&buffer[..count]);
        }
    });
    (log, Arc::new(hold))
}

/// A bundle that is left to be deleted.
#[derive(Debug, Clone)]
pub(super) struct Remains {
    id: String,
    path: PathBuf,
    log: Arc<Mutex<Vec<u8>>>,
    _log: Arc<File>,
}

impl Remains {
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn log(&self) -> String {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&log).into_owned()
    }

    /// Executes `delete` and removes the bundle, if it is there.
    pub(super) fn delete(&self, player: &Player) {
        if self.path.exists() {
            self.execute_delete(player);
            self.remove_directory();
        }
    }

    /// Removes the bundle. Its root must not be mounted any more, as for containerd.
    pub(super) fn remove_directory(&self) {
        match fs::remove_dir(self.path.join("rootfs")) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                panic!("the root of {} is in use: {error}", self.id)
            }
            _ => fs::remove_dir_all(&self.path).expect("the bundle is the test's"),
        }
    }

    #[track_caller]
    fn execute_delete(&self, player: &Player) -> DeleteResponse {
        let mut command = Command::new(shim_program());
        command
            .args(["-namespace", NAMESPACE, "-address"])
            .arg(player.address())
            .args([
                "-publish-binary",
                "/usr/bin/containerd",
                "-id",
                &self.id,
                "-bundle",
            ])
            .arg(&self.path)
            .arg("delete")
            .env_clear()
            .env("PATH", PATH)
            .current_dir(if self.path.exists() {
                &self.path
            } else {
                Path::new("/")
            });
        let deleted = finish_within(&mut command, b"", LIMIT).succeeded();
        DeleteResponse::parse_from_bytes(&deleted.out)
            .unwrap_or_else(|error| panic!("no DeleteResponse: {error}: {deleted}"))
    }
}

/// A shim that serves.
#[derive(Debug)]
pub struct Shim<'p> {
    /// What it was started for.
    pub bundle: Bundle<'p>,
    /// What its start has answered.
    pub answer: Answer,
    /// A connection to it.
    pub task: Task,
}

impl<'p> Shim<'p> {
    /// Another connection.
    pub fn connect(&self, api: Api) -> Task {
        Task::connect_to(&self.answer.socket, api)
    }

    /// The request that creates the container of the bundle: its root is a directory that is mounted
    /// for it.
    pub fn create_request(&self, fifos: &Fifos) -> CreateTaskRequest {
        let root = Mount {
            type_: "bind".to_owned(),
            source: root_directory().to_string_lossy().into_owned(),
            options: vec!["rbind".to_owned(), "rw".to_owned()],
            ..Mount::default()
        };
        let options = self.bundle.options.clone();
        let options = options.map(|(type_url, value)| Any {
            type_url,
            value,
            ..Any::default()
        });
        CreateTaskRequest {
            id: self.bundle.id.clone(),
            bundle: self.bundle.path.to_string_lossy().into_owned(),
            rootfs: vec![root],
            terminal: self.bundle.terminal,
            stdin: fifos.stdin(),
            stdout: fifos.stdout(),
            stderr: fifos.stderr(),
            options: options.into(),
            ..CreateTaskRequest::default()
        }
    }

    /// Creates the container.
    ///
    /// # Panics
    ///
    /// When it cannot be.
    #[track_caller]
    pub fn create(self, fifos: &Fifos) -> Container<'p> {
        let created = self.task.create(&self.create_request(fifos));
        match created {
            Ok(created) => Container::new(self, created.pid),
            Err(error) => panic!("creating {}: {error}", self.bundle.id),
        }
    }

    /// Asks it to end, which it does without a container, and waits until it has.
    #[track_caller]
    pub fn shut_down(&self) {
        let pid = self.pid();
        // It may be gone before the answer is out.
        let _ = self.task.shutdown(&self.bundle.id);
        super::container::wait_gone(pid);
    }

    /// Its pid.
    #[track_caller]
    pub fn pid(&self) -> i32 {
        let connected = self.task.connect(&self.bundle.id);
        let connected = connected.unwrap_or_else(|error| panic!("Connect: {error}"));
        connected.shim_pid.cast_signed()
    }
}
