//! containerd's part played to the real shim program, as far as that goes without a guest: how it is
//! started, what it answers, what it leaves. Needs root; works in the real `/run/thaw` and
//! `/run/containerd/s`, under names of its own.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use containerd_shim_protos::Client;
use containerd_shim_protos::TaskClient;
use containerd_shim_protos::api::{
    ConnectRequest, CreateTaskRequest, DeleteResponse, PidsRequest, ShutdownRequest, StateRequest,
};
use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult};
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::types::introspection::RuntimeInfo;
use serde_json::{Value, json};
use thaw_shim::cleanup::collect_garbage;
use thaw_shim::facts::{FactsFile, root, sandbox_directory};
use ttrpc::context::{Context, with_duration};
use ttrpc::{Code, Error};

const NAMESPACE: &str = "thaw-shim-test";

/// One bundle, as containerd makes it, and the shim for it.
struct Bundle {
    directory: tempfile::TempDir,
    id: String,
    /// Where the containerd whose bundle it is serves.
    address: &'static str,
    /// containerd's end of the log; without it the shim has none.
    _log: File,
}

fn spec() -> Value {
    json!({
        "ociVersion": "1.1.0",
        "root": { "path": "rootfs" },
        "process": { "args": ["true"], "cwd": "/" },
        "linux": { "namespaces": [
            { "type": "network" }, { "type": "pid" }, { "type": "mount" }, { "type": "ipc" },
            { "type": "uts" },
        ] },
    })
}

impl Bundle {
    fn new(spec: &Value) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("rootfs")).unwrap();
        fs::write(directory.path().join("config.json"), spec.to_string()).unwrap();
        let log = directory.path().join("log");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &log,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let log = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(nonblocking)
            .open(log)
            .unwrap();
        let id = format!("c{}-{number}", std::process::id());
        Self {
            directory,
            id,
            address: "/run/thaw-shim-test.sock",
            _log: log,
        }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn sandbox(&self) -> PathBuf {
        sandbox_directory(root(), NAMESPACE, &self.id).unwrap()
    }

    /// Run the shim as containerd does, with `input` on its standard input.
    fn run(&self, action: &[&str], input: &[u8]) -> Output {
        let mut child = Command::new(env!("CARGO_BIN_EXE_containerd-shim-thaw-v2"))
            .args(["-namespace", NAMESPACE, "-address", self.address])
            .args(["-publish-binary", "/usr/bin/containerd", "-id", &self.id])
            .args(action)
            .current_dir(self.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        child.wait_with_output().unwrap()
    }

    /// Start the shim; returns the path of its socket.
    fn start(&self) -> PathBuf {
        let output = self.run(&["start"], b"");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        assert_eq!(errors, "");
        let address = String::from_utf8(output.stdout).unwrap();
        assert_eq!(
            fs::read_to_string(self.path().join("address")).unwrap(),
            address
        );
        let path = address.strip_prefix("unix://").unwrap();
        assert!(path.starts_with("/run/containerd/s/"), "{path}");
        path.into()
    }

    fn delete(&self) -> DeleteResponse {
        let begin = Instant::now();
        let bundle = self.path().to_str().unwrap();
        let output = self.run(&["-bundle", bundle, "delete"], b"");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(begin.elapsed() < Duration::from_secs(5));
        DeleteResponse::parse_from_bytes(&output.stdout).unwrap()
    }

    fn shim_pid(&self) -> u32 {
        FactsFile::read(&self.sandbox())
            .unwrap()
            .unwrap()
            .shim
            .unwrap()
            .pid
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        let bundle = self.path().to_str().unwrap().to_owned();
        self.run(&["-bundle", &bundle, "delete"], b"");
    }
}

fn client(socket: &Path) -> TaskClient {
    let address = format!("unix://{}", socket.display());
    TaskClient::new(Client::connect(&address).unwrap())
}

fn limit() -> Context {
    with_duration(Duration::from_secs(20))
}

fn code(error: &Error) -> Code {
    match error {
        Error::RpcStatus(status) => status.code(),
        other => panic!("{other}"),
    }
}

fn process_is_there(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Wait, for as long as a test may, until `done`.
fn eventually(what: &str, done: impl Fn() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn assert_nothing_left(bundle: &Bundle, socket: &Path, pid: u32) {
    assert!(!bundle.sandbox().exists());
    assert!(!socket.exists());
    eventually("the shim is gone", || !process_is_there(pid));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(&bundle.id), "{mounts}");
}

#[test]
fn test_version_and_info_need_nothing() {
    let run = |flag: &str| {
        Command::new(env!("CARGO_BIN_EXE_containerd-shim-thaw-v2"))
            .arg(flag)
            .env_clear()
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    for flag in ["-v", "-version", "--version"] {
        let output = run(flag);
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains(env!("CARGO_PKG_VERSION")), "{text}");
    }
    let output = run("-info");
    assert!(output.status.success() && output.stderr.is_empty());
    let info = RuntimeInfo::parse_from_bytes(&output.stdout).unwrap();
    assert_eq!(info.name, "io.containerd.thaw.v2");
    let output = run("-nonsense");
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("-nonsense"));
}

#[test]
fn test_what_is_asked_before_a_container_is_there() {
    let bundle = Bundle::new(&spec());
    let socket = bundle.start();
    let client = client(&socket);
    let id = bundle.id.clone();
    let state = StateRequest {
        id: id.clone(),
        ..StateRequest::default()
    };
    assert_eq!(
        code(&client.state(limit(), &state).unwrap_err()),
        Code::NOT_FOUND
    );
    let pids = PidsRequest {
        id: id.clone(),
        ..PidsRequest::default()
    };
    assert_eq!(
        code(&client.pids(limit(), &pids).unwrap_err()),
        Code::NOT_FOUND
    );
    let connect = ConnectRequest {
        id: id.clone(),
        ..ConnectRequest::default()
    };
    let answer = client.connect(limit(), &connect).unwrap();
    let pid = bundle.shim_pid();
    assert_eq!((answer.shim_pid, answer.task_pid), (pid, 0));

    // Not of this process' session, and at no file of the bundle but the log.
    let link = |name: &str| fs::read_link(format!("/proc/{pid}/{name}")).unwrap();
    assert_eq!(link("cwd"), Path::new("/"));
    assert_eq!(link("fd/0"), Path::new("/dev/null"));
    assert_eq!(link("fd/1"), Path::new("/dev/null"));
    assert_eq!(link("fd/2"), bundle.path().join("log"));
    let own: i32 = fs::read_to_string("/proc/self/oom_score_adj")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let its = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
    assert_eq!(its.trim().parse::<i32>().unwrap(), (own + 1).min(1000));

    // The same program is no installed one here: the reason is told, and all is taken back.
    let create = CreateTaskRequest {
        id,
        ..CreateTaskRequest::default()
    };
    let error = client.create(limit(), &create).unwrap_err();
    assert_eq!(code(&error), Code::UNKNOWN);
    assert!(error.to_string().contains("PREFIX/bin"), "{error}");
    client
        .shutdown(limit(), &ShutdownRequest::default())
        .unwrap();
    eventually("the shim has cleaned up", || !bundle.sandbox().exists());
    assert_nothing_left(&bundle, &socket, pid);
}

#[test]
fn test_both_versions_of_the_task_service_are_served() {
    let bundle = Bundle::new(&spec());
    let socket = bundle.start();
    let client = Client::connect(&format!("unix://{}", socket.display())).unwrap();
    let call = |service: &str| {
        let mut request = ttrpc::Request::new();
        request.service = service.to_owned();
        request.method = "Connect".to_owned();
        request.timeout_nano = 20_000_000_000;
        client.request(request).map(drop)
    };
    call("containerd.task.v2.Task").unwrap();
    call("containerd.task.v3.Task").unwrap();
    call("containerd.task.v1.Task").unwrap_err();
}

#[test]
fn test_delete_after_the_shim_was_killed_leaves_nothing_and_may_be_repeated() {
    let bundle = Bundle::new(&spec());
    let socket = bundle.start();
    let pid = bundle.shim_pid();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid as i32).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    let deleted = bundle.delete();
    assert_eq!(deleted.exit_status, 137);
    assert!(deleted.exited_at.seconds > 0);
    assert_nothing_left(&bundle, &socket, pid);
    assert_eq!(bundle.delete().exit_status, 137);
}

#[test]
fn test_delete_ends_a_shim_that_still_runs() {
    let bundle = Bundle::new(&spec());
    let socket = bundle.start();
    let pid = bundle.shim_pid();
    bundle.delete();
    assert_nothing_left(&bundle, &socket, pid);
}

#[test]
fn test_a_new_start_takes_over_from_a_killed_one() {
    let bundle = Bundle::new(&spec());
    let socket = bundle.start();
    let first = bundle.shim_pid();
    // A second start for a sandbox that is served is the same sandbox.
    assert_eq!(bundle.start(), socket);
    assert_eq!(bundle.shim_pid(), first);
    let pid = rustix::process::Pid::from_raw(first as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    eventually("the shim is gone", || !process_is_there(first));
    assert_eq!(bundle.start(), socket);
    assert_ne!(bundle.shim_pid(), first);
    UnixStream::connect(&socket).unwrap();
}

#[test]
fn test_a_running_container_of_another_containerd_is_left_alone() {
    let bundle = Bundle::new(&spec());
    let socket = bundle.start();
    let pid = bundle.shim_pid();
    let mut other = Bundle::new(&spec());
    other.id.clone_from(&bundle.id);
    other.address = "/run/thaw-shim-test-other.sock";
    let output = other.run(&["start"], b"");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{errors}");
    assert!(errors.contains("another containerd"), "{errors}");
    other.delete();
    assert!(process_is_there(pid));
    bundle.delete();
    assert_nothing_left(&bundle, &socket, pid);
}

#[test]
fn test_garbage_collection_removes_what_a_killed_shim_left() {
    let bundle = Bundle::new(&spec());
    let socket = bundle.start();
    let first = bundle.shim_pid();
    let pid = rustix::process::Pid::from_raw(first as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    eventually("the shim is gone", || !process_is_there(first));
    let removed = collect_garbage(root()).unwrap();
    // Another test may be collecting too.
    if let Some(ours) = removed
        .iter()
        .find(|found| found.directory == bundle.sandbox())
    {
        assert!(ours.removed.is_ok(), "{ours:?}");
    }
    assert_nothing_left(&bundle, &socket, first);
}

#[test]
fn test_parameters_on_standard_input_are_answered_in_kind() {
    let bundle = Bundle::new(&spec());
    let sockets = tempfile::tempdir().unwrap();
    let params = BootstrapParams {
        instance_id: bundle.id.clone(),
        namespace: NAMESPACE.into(),
        socket_dir: Some(sockets.path().to_str().unwrap().into()),
        ..BootstrapParams::default()
    };
    let output = bundle.run(&["start"], &params.write_to_bytes().unwrap());
    assert!(output.status.success() && output.stderr.is_empty());
    let result = BootstrapResult::parse_from_bytes(&output.stdout).unwrap();
    assert_eq!((result.version, result.protocol.as_str()), (3, "ttrpc"));
    let socket = Path::new(result.address.strip_prefix("unix://").unwrap());
    assert_eq!(socket.parent(), Some(sockets.path()));
    let connect = ConnectRequest {
        id: bundle.id.clone(),
        ..ConnectRequest::default()
    };
    assert_eq!(
        client(socket).connect(limit(), &connect).unwrap().shim_pid,
        bundle.shim_pid()
    );
}

#[test]
fn test_a_spec_that_cannot_be_is_refused_before_anything_is_made() {
    let mut host_network = spec();
    host_network["linux"]["namespaces"] = json!([{ "type": "pid" }, { "type": "mount" }]);
    let mut hook = spec();
    hook["hooks"] = json!({ "prestart": [{ "path": "bin/true" }] });
    for (spec, words) in [
        (host_network, "no network namespace"),
        (hook, "hooks.prestart[0].path"),
        (json!({ "root": 3 }), "config.json"),
    ] {
        let bundle = Bundle::new(&spec);
        let output = bundle.run(&["start"], b"");
        assert!(!output.status.success() && output.stdout.is_empty());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(words), "{text}");
        assert!(!bundle.sandbox().exists());
    }
}

#[test]
fn test_an_id_that_leads_elsewhere_is_refused() {
    let mut bundle = Bundle::new(&spec());
    bundle.id = "../escape".into();
    let output = bundle.run(&["start"], b"");
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("../escape"));
    let output = bundle.run(&["delete"], b"");
    assert!(!output.status.success());
    bundle.id = "escaped".into();
}
