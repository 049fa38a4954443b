//! What an operator asks: the Operator service.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use thaw_agent_api::MOST_PROCESSES;
use thaw_agent_api::agent::{ProcessesRequest, ProcessesResponse};
use thaw_agent_api::agent_ttrpc::Operator;
use tokio::sync::oneshot;
use ttrpc::Code;
use ttrpc::asynchronous::TtrpcContext;

use crate::processes;
use crate::status::Refusal;

/// The service.
#[derive(Debug)]
pub struct OperatorService {
    /// Parent of the containers' cgroups, with a leading slash.
    cgroups: String,
    /// Whether a call is being answered.
    busy: Arc<AtomicBool>,
}

impl OperatorService {
    /// For containers whose cgroups are below `cgroups`.
    pub fn new(cgroups: &str) -> Self {
        Self {
            cgroups: cgroups.to_owned(),
            busy: Arc::default(),
        }
    }
}

#[async_trait]
impl Operator for OperatorService {
    async fn processes(
        &self,
        _: &TtrpcContext,
        _: ProcessesRequest,
    ) -> ttrpc::Result<ProcessesResponse> {
        if self.busy.swap(true, Ordering::AcqRel) {
            let text = "the guest's processes are being looked at already";
            return Err(Refusal::new(Code::UNAVAILABLE, text).into());
        }
        let (answer, answered) = oneshot::channel();
        let (busy, cgroups) = (self.busy.clone(), self.cgroups.clone());
        // Not on the agent's own thread: reading a command line waits for the memory map of its process,
        // which that can keep locked for as long as it likes.
        let looking = std::thread::Builder::new()
            .name("processes".to_owned())
            .spawn(move || {
                let found = processes::list(&cgroups, MOST_PROCESSES);
                busy.store(false, Ordering::Release);
                // Nobody waits any more when it has taken too long.
                let _ = answer.send(found);
            });
        if let Err(error) = looking {
            self.busy.store(false, Ordering::Release);
            return Err(Refusal::failed(format!("start a thread: {error}")).into());
        }
        let found = answered
            .await
            .map_err(|_| Refusal::failed("a thread ended"))?;
        let (processes, truncated) =
            found.map_err(|error| Refusal::failed(format!("read /proc: {error}")))?;
        Ok(ProcessesResponse {
            processes,
            truncated,
            ..Default::default()
        })
    }
}
