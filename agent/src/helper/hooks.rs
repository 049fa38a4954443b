//! The hooks that are programs of the container's root, run in the container.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::{Value, json};

use super::description::Hook;
use super::mounts::said;
use crate::status::Refusal;
use crate::sys;
use std::os::fd::AsFd;

/// A container, as hooks are told of it (runtime-spec, `runtime.md`, "State").
pub fn state(id: &str, status: &str, bundle: &str, annotations: &Value) -> Value {
    json!({
        "ociVersion": "1.2.0", "id": id, "status": status, "pid": std::process::id(), "bundle": bundle,
        "annotations": annotations,
    })
}

/// That each hook is there: they are programs of the container's root, as the host's are not in the guest.
pub fn check(hooks: &[Hook], field: &str) -> Result<(), Refusal> {
    for (index, hook) in hooks.iter().enumerate() {
        if !hook.path.is_absolute() || !hook.path.is_file() {
            return Err(Refusal::invalid(format!(
                "hooks.{field}[{index}].path: {} is not in the container's root, where this hook runs in a VM",
                hook.path.display()
            )));
        }
    }
    Ok(())
}

/// Runs each hook to its end. Without variables of its own it gets `environment`.
pub fn run(
    hooks: &[Hook],
    field: &str,
    state: &Value,
    environment: &[String],
) -> Result<(), Refusal> {
    for (index, hook) in hooks.iter().enumerate() {
        run_one(hook, state, environment).map_err(|what| {
            Refusal::failed(format!(
                "hooks.{field}[{index}]: {}: {what}",
                hook.path.display()
            ))
        })?;
    }
    Ok(())
}

fn run_one(hook: &Hook, state: &Value, environment: &[String]) -> Result<(), String> {
    let words = |error: std::io::Error| said(&error);
    let variables = if hook.env.is_empty() {
        environment
    } else {
        &hook.env
    };
    let mut command = Command::new(&hook.path);
    command.env_clear().envs(
        variables
            .iter()
            .filter_map(|variable| variable.split_once('=')),
    );
    if let Some((name, arguments)) = hook.args.split_first() {
        command.arg0(name).args(arguments);
    }
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut child = command.spawn().map_err(words)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A hook need not read it.
        let _ = stdin.write_all(state.to_string().as_bytes());
    }
    let limit = hook.timeout.filter(|seconds| *seconds > 0);
    if let Some(seconds) = limit {
        let process = sys::open_process(child.id() as i32).map_err(words)?;
        let milliseconds = i32::try_from(seconds.saturating_mul(1000)).unwrap_or(i32::MAX);
        let timeout = PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX);
        let ended = poll(
            &mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)],
            timeout,
        );
        if ended.map_err(|error| words(error.into()))? == 0 {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("not done after {seconds} s"));
        }
    }
    let status = child.wait().map_err(words)?;
    if status.success() {
        Ok(())
    } else {
        Err(status.to_string())
    }
}
