//! A container on a shim, as containerd has it.

use std::os::fd::AsFd;
use std::time::Duration;

use containerd_shim_protos::api::{ExecProcessRequest, WaitResponse};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;

use super::bundle::process;
use super::client::Called;
use super::{Fifos, Shim, Task, any};
use crate::testbed::LIMIT;
use crate::thaw::{self, Processes};

/// A container that was created.
#[derive(Debug)]
pub struct Container<'p> {
    /// Its shim.
    pub shim: Shim<'p>,
    /// A connection to that.
    pub task: Task,
    /// The pid that the creation has answered.
    pub pid: u32,
}

impl<'p> Container<'p> {
    pub(super) fn new(shim: Shim<'p>, pid: u32) -> Self {
        Self {
            task: shim.task.clone(),
            shim,
            pid,
        }
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.shim.bundle.id
    }

    /// The processes of its sandbox on the host.
    #[track_caller]
    pub fn processes(&self) -> Processes {
        thaw::processes(self.id())
    }

    /// Starts its program.
    #[track_caller]
    pub fn start(&self) {
        let started = self.task.start(self.id(), "");
        let started = started.unwrap_or_else(|error| panic!("starting {}: {error}", self.id()));
        assert_eq!(started.pid, self.pid, "the pid of Create is that of Start");
    }

    /// Waits for the end of its first process.
    #[track_caller]
    pub fn wait(&self) -> WaitResponse {
        let waited = self.task.wait(self.id(), "");
        waited.unwrap_or_else(|error| panic!("waiting for {}: {error}", self.id()))
    }

    /// Its status, in the words of the protocol.
    #[track_caller]
    pub fn status(&self) -> String {
        let state = self.task.state(self.id(), "");
        let state = state.unwrap_or_else(|error| panic!("the state of {}: {error}", self.id()));
        format!("{:?}", state.status.enum_value_or_default())
    }

    /// Registers an exec of `words`.
    pub fn exec(&self, exec_id: &str, words: &[&str], fifos: &Fifos) -> Called<()> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        self.exec_process(exec_id, &process(&words), fifos)
    }

    /// Registers an exec of any process.
    pub fn exec_process(&self, exec_id: &str, process: &Value, fifos: &Fifos) -> Called<()> {
        let request = ExecProcessRequest {
            id: self.id().to_owned(),
            exec_id: exec_id.to_owned(),
            terminal: fifos.terminal,
            stdin: fifos.stdin(),
            stdout: fifos.stdout(),
            stderr: fifos.stderr(),
            spec: Some(any("Process", process)).into(),
            ..ExecProcessRequest::default()
        };
        self.task.exec(&request).map(drop)
    }

    /// Runs `words` in it to the end; the exit status.
    #[track_caller]
    pub fn run(&self, exec_id: &str, words: &[&str]) -> u32 {
        let fails = |what: &str, error| -> ! { panic!("{what} of exec {exec_id}: {error}") };
        let none = Fifos::none();
        if let Err(error) = self.exec(exec_id, words, &none) {
            fails("registration", error);
        }
        if let Err(error) = self.task.start(self.id(), exec_id) {
            fails("start", error);
        }
        let waited = self.task.wait(self.id(), exec_id);
        let status = waited.unwrap_or_else(|error| fails("wait", error));
        if let Err(error) = self.task.delete(self.id(), exec_id) {
            fails("deletion", error);
        }
        status.exit_status
    }

    /// Ends it, if it has not, deletes it, has the shim end, and does what containerd does then.
    #[track_caller]
    pub fn remove(self) {
        // Refused when it has ended by itself.
        let _ = self.task.kill(self.id(), "", 9);
        self.wait();
        let deleted = self.task.delete(self.id(), "");
        deleted.unwrap_or_else(|error| panic!("deleting {}: {error}", self.id()));
        self.shim.shut_down();
        self.shim.bundle.delete();
        self.shim.bundle.remains().remove_directory();
    }

    /// Kills the shim itself.
    #[track_caller]
    pub fn kill_shim(&self) {
        let pid = self.shim.pid();
        send(pid, Signal::KILL);
        wait_gone(pid);
    }
}

/// Sends a signal to a process of the host.
///
/// # Panics
///
/// When there is no such process.
#[track_caller]
pub fn send(pid: i32, signal: Signal) {
    let process = Pid::from_raw(pid).expect("a pid is positive");
    kill_process(process, signal).unwrap_or_else(|error| panic!("signal to {pid}: {error}"));
}

/// Waits until a process of the host has ended.
///
/// # Panics
///
/// When it does not.
#[track_caller]
pub fn wait_gone(pid: i32) {
    assert!(is_gone_within(pid, LIMIT), "process {pid} does not end");
}

fn is_gone_within(pid: i32, limit: Duration) -> bool {
    let process = Pid::from_raw(pid).expect("a pid is positive");
    // None any more when this fails.
    let Ok(descriptor) = pidfd_open(process, PidfdFlags::empty()) else {
        return true;
    };
    let mut polled = [PollFd::new(descriptor.as_fd(), PollFlags::POLLIN)];
    let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
    poll(&mut polled, limit).is_ok_and(|ready| ready == 1)
}
