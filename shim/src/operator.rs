//! What an operator asks of a shim on its own socket, beside what containerd does: the Operator service
//! of the agent's interface, with the guest's answer checked on its way.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use thaw_agent_api::agent::{GuestProcess, ProcessesRequest, ProcessesResponse};
use thaw_agent_api::agent_ttrpc::{Operator, create_operator};
use thaw_agent_api::{MOST_COMMAND_BYTES, MOST_PROCESSES};
use ttrpc::asynchronous::{Service, TtrpcContext};

use crate::sandbox::Sandbox;
use crate::terminal;

/// The service for a ttrpc server.
pub fn service(sandbox: &Arc<Sandbox>) -> HashMap<String, Service> {
    create_operator(Arc::new(OperatorService {
        sandbox: sandbox.clone(),
    }))
}

struct OperatorService {
    sandbox: Arc<Sandbox>,
}

#[async_trait]
impl Operator for OperatorService {
    async fn processes(
        &self,
        _: &TtrpcContext,
        _: ProcessesRequest,
    ) -> ttrpc::Result<ProcessesResponse> {
        Ok(checked(self.sandbox.processes().await?))
    }
}

/// An answer of the guest, who may say anything: bounded, and with texts that can be shown.
fn checked(mut answer: ProcessesResponse) -> ProcessesResponse {
    answer.truncated |= answer.processes.len() > MOST_PROCESSES;
    answer.processes.truncate(MOST_PROCESSES);
    let processes = answer.processes.iter().map(|process| GuestProcess {
        pid: process.pid,
        parent: process.parent,
        user: process.user,
        state: text(&process.state, 1),
        cpu_ns: process.cpu_ns,
        resident_bytes: process.resident_bytes,
        threads: process.threads,
        container_id: text(&process.container_id, MOST_COMMAND_BYTES),
        command: text(&process.command, MOST_COMMAND_BYTES),
        ..GuestProcess::default()
    });
    ProcessesResponse {
        processes: processes.collect(),
        truncated: answer.truncated,
        ..ProcessesResponse::default()
    }
}

fn text(text: &str, most: usize) -> String {
    terminal::line(&text.chars().take(most).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_what_a_guest_says_is_bounded_and_can_be_shown() {
        let hostile = GuestProcess {
            state: "\x1b[2J".into(),
            command: format!("\x1b]0;owned\x07 a\nb{}", "x".repeat(10_000)),
            container_id: "web\r".into(),
            resident_bytes: u64::MAX,
            ..GuestProcess::default()
        };
        let answer = checked(ProcessesResponse {
            processes: vec![hostile; MOST_PROCESSES + 1],
            ..ProcessesResponse::default()
        });
        assert!(answer.truncated);
        assert_eq!(answer.processes.len(), MOST_PROCESSES);
        let process = &answer.processes[0];
        assert!(
            process.command.starts_with("?]0;owned? a?bxx"),
            "{}",
            process.command
        );
        assert_eq!(process.command.chars().count(), MOST_COMMAND_BYTES);
        assert_eq!(
            (process.state.as_str(), process.container_id.as_str()),
            ("?", "web?")
        );
    }
}
