//! Hooks: programs of the host that a spec has run at moments of its container's life, as CNI set-ups
//! by nerdctl and Docker are. See the OCI runtime spec, "POSIX-platform Hooks" and "State".
//!
//! A hook reads the container's state on standard input. That and what it prints are files in memory,
//! not pipes, so that neither a hook that does not read nor a process that it leaves behind with its
//! output open keeps anybody waiting. It runs in the host's mount namespace, in the bundle's directory,
//! as its own process group.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::io::Interest;
use tracing::warn;

use crate::host_program::{Placement, start_placed};
use crate::readiness::register;
use crate::spec::Hook;

/// Bytes of the end of what a hook has printed that are told when it fails.
const MOST_OUTPUT: u64 = 2048;

/// Why a hook has failed. The text names it.
#[derive(Debug, Error)]
#[error("hooks.{kind}[{index}] ({}): {reason}", .path.display())]
pub struct HookError {
    kind: &'static str,
    index: usize,
    path: PathBuf,
    reason: String,
}

/// What hooks are told of a container whatever it is doing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    /// Its id.
    pub id: String,
    /// Its bundle.
    pub bundle: PathBuf,
    /// The version that its spec names.
    pub oci_version: String,
    /// Its annotations.
    pub annotations: HashMap<String, String>,
}

/// A container's state as the OCI runtime spec has it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct State<'a> {
    oci_version: &'a str,
    id: &'a str,
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    bundle: &'a Path,
    #[serde(skip_serializing_if = "HashMap::is_empty")]
    annotations: &'a HashMap<String, String>,
}

/// What a container is doing when a kind of hooks runs.
#[derive(Debug, Clone, Copy)]
pub enum Moment {
    /// It is being created; its namespaces are those of the process of this id.
    Prestart(u32),
    /// The same.
    CreateRuntime(u32),
    /// Its program runs.
    Poststart(u32),
    /// It is gone.
    Poststop,
}

impl Moment {
    fn name(self) -> &'static str {
        match self {
            Self::Prestart(_) => "prestart",
            Self::CreateRuntime(_) => "createRuntime",
            Self::Poststart(_) => "poststart",
            Self::Poststop => "poststop",
        }
    }

    fn state(self, subject: &Subject) -> State<'_> {
        let (status, pid) = match self {
            Self::Prestart(pid) | Self::CreateRuntime(pid) => ("creating", Some(pid)),
            Self::Poststart(pid) => ("running", Some(pid)),
            Self::Poststop => ("stopped", None),
        };
        State {
            oci_version: &subject.oci_version,
            id: &subject.id,
            status,
            pid,
            bundle: &subject.bundle,
            annotations: &subject.annotations,
        }
    }
}

/// Run `hooks` one after the other, from a shim, whose end is also theirs. The first that fails ends it.
pub async fn run(
    moment: Moment,
    hooks: &[Hook],
    subject: &Subject,
    mount_namespace: BorrowedFd<'_>,
) -> Result<(), HookError> {
    for (index, hook) in hooks.iter().enumerate() {
        let placement = Placement {
            mount_namespace: Some(mount_namespace),
            directory: Some(&subject.bundle),
            ends_with_caller: true,
        };
        let running = Running::start(moment, index, hook, subject, placement)?;
        running.finish(hook.limit()).await?;
    }
    Ok(())
}

/// Run poststop `hooks` from the shim, all of them: what fails is logged.
pub async fn run_poststop(hooks: &[Hook], subject: &Subject, mount_namespace: BorrowedFd<'_>) {
    for (index, hook) in hooks.iter().enumerate() {
        let placement = Placement {
            mount_namespace: Some(mount_namespace),
            directory: Some(&subject.bundle),
            ends_with_caller: true,
        };
        let run = async {
            let running = Running::start(Moment::Poststop, index, hook, subject, placement)?;
            running.finish(hook.limit()).await
        };
        if let Err(error) = run.await {
            warn!(container = subject.id, %error, "a hook has failed");
        }
    }
}

/// Run poststop `hooks` for a shim that is gone, from a process in the host's mount namespace that has
/// until `deadline`. What has not ended by then is left to itself; what fails is logged.
pub fn run_poststop_until(hooks: &[Hook], subject: &Subject, deadline: Instant) {
    for (index, hook) in hooks.iter().enumerate() {
        let placement = Placement {
            mount_namespace: None,
            directory: Some(&subject.bundle),
            ends_with_caller: false,
        };
        let done = Running::start(Moment::Poststop, index, hook, subject, placement)
            .and_then(|running| running.finish_until(hook.limit(), deadline));
        if let Err(error) = done {
            warn!(container = subject.id, %error, "a hook has failed");
        }
    }
}

/// A hook that runs. When this is dropped before it has ended it is killed, with its descendants.
struct Running {
    child: Option<Child>,
    pidfd: OwnedFd,
    output: File,
    kind: &'static str,
    index: usize,
    path: PathBuf,
}

impl Running {
    fn start(
        moment: Moment,
        index: usize,
        hook: &Hook,
        subject: &Subject,
        placement: Placement<'_>,
    ) -> Result<Self, HookError> {
        let start = || -> io::Result<(Child, OwnedFd, File)> {
            let state = serde_json::to_vec(&moment.state(subject))?;
            let input = memory_file("hook-state")?;
            // At an offset of its own, so that the reader begins at the start.
            input.write_all_at(&state, 0)?;
            let output = memory_file("hook-output")?;
            let mut command = command(hook);
            command
                .stdin(input)
                .stdout(output.try_clone()?)
                .stderr(output.try_clone()?)
                .process_group(0);
            let mut child = start_placed(command, placement)?;
            match watch(&child) {
                Ok(pidfd) => Ok((child, pidfd, output)),
                Err(error) => {
                    let _ = child.kill();
                    let _ = child.wait();
                    Err(error)
                }
            }
        };
        let (kind, path) = (moment.name(), hook.path.clone());
        match start() {
            Ok((child, pidfd, output)) => Ok(Self {
                child: Some(child),
                pidfd,
                output,
                kind,
                index,
                path,
            }),
            Err(error) => Err(HookError {
                kind,
                index,
                path,
                reason: error.to_string(),
            }),
        }
    }

    /// Wait until it has ended, and end it when that takes longer than `limit`.
    async fn finish(mut self, limit: Option<Duration>) -> Result<(), HookError> {
        let ended = async {
            let pidfd = register(self.pidfd.as_fd(), Interest::READABLE)?;
            pidfd.readable().await.map(drop)
        };
        match limit {
            Some(limit) => match tokio::time::timeout(limit, ended).await {
                Ok(ended) => ended.map_err(|error| self.failed(error.to_string()))?,
                Err(_) => return Err(self.too_slow(limit)),
            },
            None => ended
                .await
                .map_err(|error| self.failed(error.to_string()))?,
        }
        self.judge()
    }

    /// The same without an event loop. At `deadline` it is left to itself.
    fn finish_until(mut self, limit: Option<Duration>, deadline: Instant) -> Result<(), HookError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let patience = limit.map_or(left, |limit| limit.min(left));
        let patience = Timespec::try_from(patience).ok();
        let mut descriptors = [PollFd::new(&self.pidfd, PollFlags::IN)];
        match poll(&mut descriptors, patience.as_ref()) {
            Ok(0) => match limit.filter(|limit| *limit <= left) {
                Some(limit) => Err(self.too_slow(limit)),
                None => {
                    // Its process is no longer this one's to end.
                    drop(self.child.take());
                    Err(self.failed("still runs, and is left to itself".to_owned()))
                }
            },
            Ok(_) => self.judge(),
            Err(errno) => Err(self.failed(io::Error::from(errno).to_string())),
        }
    }

    /// Take the status of a hook that has ended.
    fn judge(&mut self) -> Result<(), HookError> {
        let Some(mut child) = self.child.take() else {
            return Ok(());
        };
        match child.wait() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(self.failed(in_words(status))),
            Err(error) => Err(self.failed(error.to_string())),
        }
    }

    fn too_slow(&self, limit: Duration) -> HookError {
        self.failed(format!(
            "not done after its timeout of {} s",
            limit.as_secs()
        ))
    }

    /// It has failed: what it printed is part of the reason.
    fn failed(&self, reason: String) -> HookError {
        let output = last_words(&self.output).unwrap_or_default();
        let reason = match output.is_empty() {
            true => reason,
            false => format!("{reason}: {output}"),
        };
        HookError {
            kind: self.kind,
            index: self.index,
            path: self.path.clone(),
            reason,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else {
            return;
        };
        // Not reaped, so the id is still its own.
        if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = child.wait();
    }
}

fn command(hook: &Hook) -> Command {
    let mut command = Command::new(&hook.path);
    if let Some((name, arguments)) = hook.args.split_first() {
        command.arg0(name).args(arguments);
    }
    if let Some(environment) = &hook.env {
        command.env_clear();
        // What has no value is none.
        let variables = environment.iter().filter_map(|text| text.split_once('='));
        command.envs(variables);
    }
    command
}

fn memory_file(name: &str) -> io::Result<File> {
    Ok(memfd_create(name, MemfdFlags::CLOEXEC)?.into())
}

fn watch(child: &Child) -> io::Result<OwnedFd> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

fn in_words(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (_, Some(signal)) => format!("was killed by signal {signal}"),
        _ => "ended".to_owned(),
    }
}

/// The end of what was printed, in one line.
fn last_words(output: &File) -> io::Result<String> {
    let length = output.metadata()?.len();
    let told = length.min(MOST_OUTPUT);
    let mut bytes = vec![0; told as usize];
    output.read_exact_at(&mut bytes, length - told)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    Ok(lines.collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests;
