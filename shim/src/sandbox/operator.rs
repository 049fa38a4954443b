//! What an operator asks of a sandbox, and what containerd says that an operator has set.

use std::io;
use std::path::Path;

use containerd_shim_protos::api::CreateTaskRequest;
use thaw_agent_api::agent::ProcessesResponse;

use tracing::warn;

use super::Sandbox;
use crate::counters;
use crate::error::TaskError;
use crate::settings::RuntimeOptions;
use crate::trace::Recorder;

impl Sandbox {
    /// The guest's processes, as it says: not checked.
    pub async fn processes(&self) -> Result<ProcessesResponse, TaskError> {
        let containers = self.all_containers();
        let agent = containers
            .iter()
            .find_map(|container| container.agent.get());
        let none = || TaskError::FailedPrecondition("no container was created yet".to_owned());
        let mut answer = agent.ok_or_else(none)?.processes().await?;
        for process in &mut answer.processes {
            if let Some(container) = self.container_in_guest(&process.container_id) {
                process.container_id.clone_from(&container.id);
            }
        }
        Ok(answer)
    }

    /// Count the start that is done now.
    pub(super) fn count_start(&self, trace: &Recorder) {
        let summary = trace.summary();
        self.count(move |directory| counters::count_start(directory, &summary));
    }

    /// Count a start that has failed.
    pub(super) fn count_failure(&self, trace: &Recorder, error: &TaskError) {
        let (reason, after) = (error.reason(), trace.last_step());
        self.count(move |directory| counters::count_failure(directory, reason, &after));
    }

    /// Beside everything else: others may have the lock.
    fn count(&self, count: impl FnOnce(&Path) -> io::Result<()> + Send + 'static) {
        let directory = self.home.counters.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(error) = count(&directory) {
                warn!(directory = %directory.display(), %error, "counting a start");
            }
        });
    }

    /// Refuse runtime options of a creation that are not those of the start: by them the VM was made.
    pub(super) fn check_options(&self, request: &CreateTaskRequest) -> Result<(), TaskError> {
        let Some(options) = request.options.as_ref() else {
            return Ok(());
        };
        let given = RuntimeOptions::from_any(&options.type_url, &options.value)
            .map_err(|error| TaskError::InvalidArgument(error.to_string()))?;
        if given.is_none() || given == self.home.options {
            return Ok(());
        }
        Err(TaskError::FailedPrecondition(format!(
            "container {}: its runtime options are others than those that its sandbox was started with; \
             give the same ones to all containers of a sandbox",
            request.id
        )))
    }
}
