//! An agent in a directory, without a VM, and a client for it.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use containerd_shim_protos::api;
use containerd_shim_protos::shim_async::TaskClient;
use protobuf::MessageField;
use protobuf::well_known_types::any::Any;
use serde_json::{Value, json};
use tempfile::TempDir;
use thaw_agent_api::agent_ttrpc::{OperatorClient, SandboxClient};
use thaw_agent_api::{SPEC_TYPE_URL, StreamHeader, stream_uri};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;
use ttrpc::asynchronous::Client;
use ttrpc::context::{Context, with_timeout};

/// How long anything may take before a test fails.
pub const LIMIT: Duration = Duration::from_secs(60);

/// A running agent.
pub struct Guest {
    agent: Child,
    directory: TempDir,
    pub task: TaskClient,
    pub sandbox: SandboxClient,
    pub operator: OperatorClient,
    next_stream: AtomicU64,
}

/// The host's ends of a process's streams.
#[derive(Default)]
pub struct Host {
    pub stdin: Option<UnixStream>,
    pub stdout: Option<UnixStream>,
    pub stderr: Option<UnixStream>,
}

/// What came of a process.
#[derive(Debug, PartialEq, Eq)]
pub struct Ran {
    pub status: u32,
    pub stdout: String,
    pub stderr: String,
}

/// Says in the output that a test shows nothing here, and why.
macro_rules! guest_or_skip {
    () => {
        match $crate::guest::Guest::start().await {
            Some(guest) => guest,
            None => return,
        }
    };
}
pub(crate) use guest_or_skip;

impl Guest {
    /// Starts an agent, in a mount namespace where `/sys/fs/cgroup` is version 2. `None` where that
    /// takes rights that we do not have.
    pub async fn start() -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let script = "[ -e /sys/fs/cgroup/cgroup.controllers ] || mount -t cgroup2 none /sys/fs/cgroup \
                      && exec \"$0\" --listen \"unix:$1\"";
        // Process 1 of a guest has inherited no ignored signals, unlike a shell's background job.
        let mut agent = Command::new("env")
            .args([
                "--default-signal",
                "unshare",
                "--mount",
                "sh",
                "-c",
                script,
                env!("CARGO_BIN_EXE_thaw-agent"),
            ])
            .arg(directory.path())
            .env("THAW_LOG", "warn")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let control = directory.path().join("control");
        let client = loop {
            if let Some(status) = agent.try_wait().unwrap() {
                assert!(
                    std::env::var_os("THAW_TESTS_MUST_RUN").is_none(),
                    "no agent: {status}"
                );
                eprintln!("SKIPPED: no mount namespace with cgroup v2 to be had ({status})");
                return None;
            }
            match Client::connect(&format!("unix://{}", control.display())).await {
                Ok(client) => break client,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        make_root(&directory.path().join("root"));
        Some(Self {
            agent,
            task: TaskClient::new(client.clone()),
            operator: OperatorClient::new(client.clone()),
            sandbox: SandboxClient::new(client),
            directory,
            next_stream: AtomicU64::new(1),
        })
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn agent_pid(&self) -> u32 {
        self.agent.id()
    }

    pub fn root(&self) -> PathBuf {
        self.directory().join("root")
    }

    /// The cgroup of a container, seen from here.
    pub fn cgroup(&self, id: &str) -> PathBuf {
        let pid = self.agent.id();
        PathBuf::from(format!("/proc/{pid}/root/sys/fs/cgroup/thaw-{pid}/{id}"))
    }

    /// A spec as clients make them.
    pub fn spec(&self, arguments: &[&str]) -> Value {
        let capabilities = json!([
            "CAP_CHOWN",
            "CAP_DAC_OVERRIDE",
            "CAP_KILL",
            "CAP_SETUID",
            "CAP_SETGID"
        ]);
        json!({
            "ociVersion": "1.0.2",
            "process": {
                "args": arguments,
                "cwd": "/",
                "env": ["PATH=/bin:/sbin"],
                "user": {"uid": 0, "gid": 0},
                "capabilities": {
                    "bounding": capabilities, "effective": capabilities, "permitted": capabilities,
                },
            },
            "root": {"path": self.root()},
            "hostname": "test",
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
                {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
                 "options": ["newinstance", "ptmxmode=0666"]},
                {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
            ],
            "linux": {
                "namespaces": [
                    {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"},
                    {"type": "network"},
                ],
                "maskedPaths": ["/proc/kcore"],
                "readonlyPaths": ["/proc/sys"],
            },
        })
    }

    /// A stream's URI and the host's end of it.
    pub fn stream(&self) -> (String, UnixStream) {
        let id = self.next_stream.fetch_add(1, Ordering::Relaxed);
        let mut socket = UnixStream::connect(self.directory().join("stream")).unwrap();
        socket.write_all(&StreamHeader { id }.encode()).unwrap();
        (stream_uri(id), socket)
    }

    /// Creates a container with all three streams, or two and a terminal.
    pub async fn create(&self, id: &str, spec: &Value, terminal: bool) -> ttrpc::Result<Host> {
        let (stdin, stdin_socket) = self.stream();
        let (stdout, stdout_socket) = self.stream();
        let (stderr, stderr_socket) = self.stream();
        let request = api::CreateTaskRequest {
            id: id.into(),
            bundle: "/client/bundle".into(),
            terminal,
            stdin,
            stdout,
            stderr: if terminal { String::new() } else { stderr },
            options: any(SPEC_TYPE_URL, spec),
            ..Default::default()
        };
        self.task.create(context(), &request).await?;
        Ok(Host {
            stdin: Some(stdin_socket),
            stdout: Some(stdout_socket),
            stderr: (!terminal).then_some(stderr_socket),
        })
    }

    /// Registers an exec with stdout and stderr.
    pub async fn exec(&self, id: &str, exec_id: &str, process: &Value) -> ttrpc::Result<Host> {
        let (stdout, stdout_socket) = self.stream();
        let (stderr, stderr_socket) = self.stream();
        let request = api::ExecProcessRequest {
            id: id.into(),
            exec_id: exec_id.into(),
            stdout,
            stderr,
            spec: any(
                "types.containerd.io/opencontainers/runtime-spec/1/Process",
                process,
            ),
            ..Default::default()
        };
        self.task.exec(context(), &request).await?;
        Ok(Host {
            stdin: None,
            stdout: Some(stdout_socket),
            stderr: Some(stderr_socket),
        })
    }

    pub async fn start_process(&self, id: &str, exec_id: &str) -> ttrpc::Result<u32> {
        let request = api::StartRequest {
            id: id.into(),
            exec_id: exec_id.into(),
            ..Default::default()
        };
        self.task
            .start(context(), &request)
            .await
            .map(|response| response.pid)
    }

    pub async fn wait(&self, id: &str, exec_id: &str) -> ttrpc::Result<u32> {
        let request = api::WaitRequest {
            id: id.into(),
            exec_id: exec_id.into(),
            ..Default::default()
        };
        self.task
            .wait(context(), &request)
            .await
            .map(|response| response.exit_status)
    }

    pub async fn delete(&self, id: &str, exec_id: &str) -> ttrpc::Result<u32> {
        let request = api::DeleteRequest {
            id: id.into(),
            exec_id: exec_id.into(),
            ..Default::default()
        };
        self.task
            .delete(context(), &request)
            .await
            .map(|response| response.exit_status)
    }

    pub async fn kill(&self, id: &str, exec_id: &str, signal: i32, all: bool) -> ttrpc::Result<()> {
        let request = api::KillRequest {
            id: id.into(),
            exec_id: exec_id.into(),
            signal: signal as u32,
            all,
            ..Default::default()
        };
        self.task.kill(context(), &request).await.map(drop)
    }

    pub async fn state(&self, id: &str, exec_id: &str) -> ttrpc::Result<api::StateResponse> {
        let request = api::StateRequest {
            id: id.into(),
            exec_id: exec_id.into(),
            ..Default::default()
        };
        self.task.state(context(), &request).await
    }

    /// Runs a container to its end, and deletes it.
    pub async fn run(&self, id: &str, spec: &Value) -> ttrpc::Result<Ran> {
        let host = self.create(id, spec, false).await?;
        let (stdout, stderr) = host.collect();
        self.start_process(id, "").await?;
        let status = self.wait(id, "").await?;
        assert_eq!(self.delete(id, "").await?, status);
        Ok(Ran {
            status,
            stdout: text(stdout).await,
            stderr: text(stderr).await,
        })
    }

    /// Runs a shell script in a new container.
    pub async fn run_script(&self, id: &str, script: &str) -> Ran {
        self.run(id, &self.spec(&["sh", "-c", script]))
            .await
            .unwrap()
    }

    /// Runs an exec to its end, and deletes it.
    pub async fn run_exec(&self, id: &str, exec_id: &str, process: &Value) -> ttrpc::Result<Ran> {
        let (stdout, stderr) = self.exec(id, exec_id, process).await?.collect();
        if let Err(error) = self.start_process(id, exec_id).await {
            self.delete(id, exec_id).await?;
            return Err(error);
        }
        let status = self.wait(id, exec_id).await?;
        assert_eq!(self.delete(id, exec_id).await?, status);
        Ok(Ran {
            status,
            stdout: text(stdout).await,
            stderr: text(stderr).await,
        })
    }

    /// Runs a shell script in a container that is there.
    pub async fn exec_script(&self, id: &str, exec_id: &str, script: &str) -> Ran {
        let process = &self.spec(&["sh", "-c", script])["process"];
        self.run_exec(id, exec_id, process).await.unwrap()
    }

    /// A container that sleeps until it is killed.
    pub async fn sleeper(&self, id: &str) -> Host {
        let host = self
            .create(id, &self.spec(&["sleep", "1000"]), false)
            .await
            .unwrap();
        self.start_process(id, "").await.unwrap();
        host
    }
}

impl Host {
    /// Reads both outputs, each on a thread of its own; standard input ends.
    pub fn collect(self) -> (JoinHandle<Vec<u8>>, JoinHandle<Vec<u8>>) {
        if let Some(stdin) = self.stdin {
            stdin.shutdown(Shutdown::Write).unwrap();
        }
        (collect(self.stdout), collect(self.stderr))
    }
}

/// Reads a stream to its end.
pub fn collect(socket: Option<UnixStream>) -> JoinHandle<Vec<u8>> {
    spawn_blocking(move || {
        let mut data = Vec::new();
        if let Some(mut socket) = socket {
            socket.read_to_end(&mut data).unwrap();
        }
        data
    })
}

pub async fn text(collected: JoinHandle<Vec<u8>>) -> String {
    let data = timeout(LIMIT, collected)
        .await
        .expect("a stream did not end")
        .unwrap();
    String::from_utf8(data).unwrap()
}

pub fn context() -> Context {
    with_timeout(LIMIT.as_nanos() as i64)
}

pub fn any(type_url: &str, value: &Value) -> MessageField<Any> {
    MessageField::some(Any {
        type_url: type_url.into(),
        value: value.to_string().into_bytes(),
        ..Default::default()
    })
}

/// The code and message of an error.
pub fn refusal<T: std::fmt::Debug>(result: ttrpc::Result<T>) -> (ttrpc::Code, String) {
    match result.unwrap_err() {
        ttrpc::Error::RpcStatus(status) => (status.code(), status.message().to_owned()),
        other => panic!("{other}"),
    }
}

/// A root file system of busybox alone.
fn make_root(root: &Path) {
    for directory in ["bin", "dev", "etc", "proc", "root", "tmp"] {
        std::fs::create_dir_all(root.join(directory)).unwrap();
    }
    let busybox = root.join("bin/busybox");
    std::fs::copy("/bin/busybox", &busybox).expect("busybox-static is needed");
    let installed = Command::new("/bin/busybox")
        .arg("--install")
        .arg("-s")
        .arg(root.join("bin"))
        .status()
        .unwrap();
    assert!(installed.success());
    for entry in std::fs::read_dir(root.join("bin")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_symlink() {
            std::fs::remove_file(&path).unwrap();
            std::os::unix::fs::symlink("/bin/busybox", path).unwrap();
        }
    }
    std::fs::write(root.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\n").unwrap();
}

impl Drop for Guest {
    fn drop(&mut self) {
        let cgroup = self.cgroup("");
        for entry in std::fs::read_dir(&cgroup).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                let _ = std::fs::write(entry.path().join("cgroup.kill"), "1");
                for _ in 0..100 {
                    if std::fs::remove_dir(entry.path()).is_ok() {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
        let _ = std::fs::remove_dir(&cgroup);
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}
