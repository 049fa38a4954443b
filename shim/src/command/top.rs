//! `thaw top`.

use std::io::Write;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use serde::Serialize;
use thaw_agent_api::agent::{GuestProcess, ProcessesRequest, ProcessesResponse};
use thaw_agent_api::agent_ttrpc::OperatorClient;
use ttrpc::{Code, Error, context};

use super::output::{bytes, json, table};
use super::sandboxes;
use crate::facts;
use crate::terminal;

/// How long the shim may take: longer than it gives its guest.
const LIMIT: Duration = Duration::from_secs(12);

/// A process of a guest, as `--json` gives it.
#[derive(Debug, Serialize)]
struct Process {
    pid: u32,
    parent: u32,
    user: u32,
    state: String,
    cpu_ns: u64,
    resident_bytes: u64,
    threads: u32,
    container: Option<String>,
    command: String,
}

impl From<&GuestProcess> for Process {
    fn from(process: &GuestProcess) -> Self {
        // Checked by the shim. Not every program that listens at its socket is one.
        let container = terminal::line(&process.container_id);
        Self {
            pid: process.pid,
            parent: process.parent,
            user: process.user,
            state: terminal::line(&process.state),
            cpu_ns: process.cpu_ns,
            resident_bytes: process.resident_bytes,
            threads: process.threads,
            container: (!container.is_empty()).then_some(container),
            command: terminal::line(&process.command),
        }
    }
}

/// Show the processes of the guest of sandbox or container `id`.
pub(super) fn run(
    id: &str,
    namespace: Option<&str>,
    as_json: bool,
    output: &mut dyn Write,
) -> Result<bool> {
    let (_, facts) = sandboxes::one(facts::root(), namespace, id)?;
    if !facts.is_alive() {
        bail!("the shim of {id} is gone, and its guest with it; `thaw gc` removes what is left");
    }
    let answer = sandboxes::runtime()?.block_on(async {
        let client = OperatorClient::new(sandboxes::connect(&facts)?);
        let context = context::with_duration(LIMIT);
        let answer = client.processes(context, &ProcessesRequest::new()).await;
        answer.map_err(|error| explain(id, error))
    })?;
    show(&answer, as_json, output)?;
    Ok(true)
}

fn explain(id: &str, error: Error) -> anyhow::Error {
    match error {
        Error::RpcStatus(status) if status.code() == Code::UNIMPLEMENTED => anyhow!(
            "{id} was started by a version of thaw that cannot tell its processes; start it again"
        ),
        Error::RpcStatus(status) => {
            anyhow!(
                "asking the guest of {id}: {}",
                terminal::line(&status.message)
            )
        }
        other => anyhow!("asking the guest of {id}: {other}"),
    }
}

fn show(answer: &ProcessesResponse, as_json: bool, output: &mut dyn Write) -> Result<()> {
    let mut processes: Vec<_> = answer.processes.iter().map(Process::from).collect();
    // As people look for what is busy.
    processes.sort_by_key(|process| (std::cmp::Reverse(process.cpu_ns), process.pid));
    if as_json {
        return Ok(json(output, &processes)?);
    }
    let heading = [
        "PID",
        "PARENT",
        "USER",
        "STATE",
        "CPU",
        "MEMORY",
        "CONTAINER",
        "COMMAND",
    ];
    let row = |process: &Process| {
        vec![
            process.pid.to_string(),
            process.parent.to_string(),
            process.user.to_string(),
            process.state.clone(),
            format!(
                "{}.{:02} s",
                process.cpu_ns / 1_000_000_000,
                process.cpu_ns / 10_000_000 % 100
            ),
            bytes(process.resident_bytes),
            process.container.clone().unwrap_or_else(|| "-".to_owned()),
            process.command.clone(),
        ]
    };
    let rows: Vec<_> = std::iter::once(heading.map(str::to_owned).to_vec())
        .chain(processes.iter().map(row))
        .collect();
    table(output, &rows)?;
    if answer.truncated {
        writeln!(output, "There are more than these {}.", processes.len())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer() -> ProcessesResponse {
        let process = |pid, cpu_ns, command: &str| GuestProcess {
            pid,
            cpu_ns,
            state: "S".into(),
            container_id: if pid == 1 {
                String::new()
            } else {
                "web".into()
            },
            command: command.into(),
            resident_bytes: 4096,
            ..GuestProcess::default()
        };
        ProcessesResponse {
            processes: vec![
                process(1, 20_000_000, "/init"),
                process(9, 1_230_000_000, "a\x1b[2J"),
            ],
            truncated: true,
            ..ProcessesResponse::default()
        }
    }

    #[test]
    fn test_the_busiest_comes_first_and_nothing_moves_the_cursor() {
        let mut output = Vec::new();
        show(&answer(), false, &mut output).unwrap();
        let text = String::from_utf8(output).unwrap();
        let lines: Vec<Vec<_>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            lines[1],
            ["9", "0", "0", "S", "1.23", "s", "4", "KiB", "web", "a?[2J"]
        );
        assert_eq!(
            lines[2],
            ["1", "0", "0", "S", "0.02", "s", "4", "KiB", "-", "/init"]
        );
        assert_eq!(lines[3].join(" "), "There are more than these 2.");
    }

    #[test]
    fn test_json_has_the_same() {
        let mut output = Vec::new();
        show(&answer(), true, &mut output).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&output).unwrap();
        assert_eq!(value[0]["pid"], 9);
        assert_eq!(value[0]["container"], "web");
        assert!(value[1]["container"].is_null());
    }
}
