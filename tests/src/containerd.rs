//! A containerd with directories of its own.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::environment::{Environment, Version};

/// containerd's own name for what containers, images and tasks belong to.
pub const NAMESPACE: &str = "thaw-test";

/// A daemon, which runs but for the time between [`Containerd::kill`] and [`Containerd::restart`]. It
/// ends with this process.
#[derive(Debug)]
pub struct Containerd {
    /// Which one.
    pub version: Version,
    /// Where everything of it lies.
    pub directory: PathBuf,
    programs: PathBuf,
    running: Mutex<Option<Running>>,
}

/// The process of a daemon.
#[derive(Debug)]
struct Running {
    pid: Pid,
    /// Ends when the process has ended and its log is written.
    keeper: thread::JoinHandle<()>,
}

/// What no test needs, and starting it takes time.
const DISABLED: &[&str] = &[
    "io.containerd.grpc.v1.cri",
    "io.containerd.cri.v1.images",
    "io.containerd.cri.v1.runtime",
    "io.containerd.nri.v1.nri",
    "io.containerd.internal.v1.opt",
    "io.containerd.internal.v1.restart",
    "io.containerd.tracing.processor.v1.otlp",
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.native",
    "io.containerd.snapshotter.v1.zfs",
];

impl Containerd {
    /// Starts a daemon and waits until it serves.
    ///
    /// # Panics
    ///
    /// When it does not come up within two minutes, with its log.
    pub fn start(version: Version) -> Self {
        let environment = Environment::get();
        let directory = environment
            .directory
            .join(format!("containerd-{}", version.name()));
        fs::create_dir_all(&directory).expect("the tests' directory can be written");
        let daemon = Self {
            version,
            directory,
            programs: environment.containerd(version),
            running: Mutex::default(),
        };
        fs::write(daemon.configuration(), daemon.toml())
            .expect("the tests' directory can be written");
        File::create(daemon.log_path()).expect("the tests' directory can be written");
        daemon.launch();
        daemon
    }

    /// Kills it, as an upgrade or the kernel might: it writes nothing down any more.
    pub fn kill(&self) {
        if let Some(Running { pid, keeper }) = self.lock_running().take() {
            kill(pid, Signal::SIGKILL).expect("it is a child that nobody else waits for");
            keeper.join().expect("it does not panic");
        }
    }

    /// Starts it again, unless it runs, and waits until it serves.
    ///
    /// # Panics
    ///
    /// As [`Containerd::start`].
    pub fn restart(&self) {
        if self.lock_running().is_none() {
            self.launch();
        }
    }

    fn launch(&self) {
        let (booted, ready) = mpsc::channel();
        let mut command = Command::new(self.programs.join("containerd"));
        command
            .arg("--config")
            .arg(self.configuration())
            .env("PATH", self.path());
        let log = self.log_path();
        // A thread of its own, that lives as long as the process: the parent's death signal follows
        // the thread that has started the child.
        let keeper = thread::spawn(move || keep(command, &log, &booted));
        // Its pid, and once more when it serves.
        let limit = Duration::from_secs(120);
        let said = ready.recv_timeout(limit);
        let Ok((pid, Ok(_))) = said.map(|pid| (pid, ready.recv_timeout(limit))) else {
            panic!(
                "containerd {} does not come up: {}",
                self.version.name(),
                self.log()
            );
        };
        *self.lock_running() = Some(Running { pid, keeper });
    }

    fn lock_running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its shims are found beside it, and thaw's in the installed tree.
    fn path(&self) -> String {
        let path = std::env::var("PATH").unwrap_or_default();
        format!("{}:{path}", self.programs.display())
    }

    fn configuration(&self) -> PathBuf {
        self.directory.join("config.toml")
    }

    fn toml(&self) -> String {
        let directory = self.directory.display();
        let disabled: Vec<String> = DISABLED
            .iter()
            .map(|plugin| format!("{plugin:?}"))
            .collect();
        format!(
            "version = 2\nroot = \"{directory}/root\"\nstate = \"{directory}/state\"\n\
             disabled_plugins = [{}]\n[grpc]\naddress = \"{}\"\n",
            disabled.join(", "),
            self.address().display()
        )
    }

    /// Its socket.
    pub fn address(&self) -> PathBuf {
        self.directory.join("socket")
    }

    /// Directory of the bundles of the tests' namespace.
    pub fn bundles(&self) -> PathBuf {
        self.directory
            .join("state/io.containerd.runtime.v2.task")
            .join(NAMESPACE)
    }

    fn log_path(&self) -> PathBuf {
        self.directory.join("log")
    }

    /// What it and its shims have logged.
    pub fn log(&self) -> String {
        fs::read(self.log_path())
            .map(|log| String::from_utf8_lossy(&log).into_owned())
            .unwrap_or_default()
    }

    /// Its client, ready for a subcommand.
    pub fn ctr(&self) -> Command {
        let mut command = Command::new(self.programs.join("ctr"));
        command
            .arg("--address")
            .arg(self.address())
            .args(["--namespace", NAMESPACE]);
        command
    }
}

/// Runs the daemon, writes its log, says its pid when it is there and again when it serves.
fn keep(mut command: Command, log: &Path, booted: &mpsc::Sender<Pid>) {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let end_with_us = || set_pdeathsig(Signal::SIGKILL).map_err(std::io::Error::from);
    // SAFETY: prctl is async-signal-safe and nothing is allocated between fork and exec.
    unsafe { command.pre_exec(end_with_us) };
    let mut child = command
        .spawn()
        .expect("containerd is where tests/environment has put it");
    let pid = Pid::from_raw(child.id().cast_signed());
    let _ = booted.send(pid);
    let log = File::options().append(true).open(log);
    let mut log = log.expect("it was made before");
    for line in BufReader::new(child.stderr.take().expect("it is piped")).lines() {
        let Ok(line) = line else { break };
        let _ = writeln!(log, "{line}");
        if line.contains("containerd successfully booted") {
            let _ = booted.send(pid);
        }
    }
    let _ = child.wait();
}
