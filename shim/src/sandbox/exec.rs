//! More processes in the container.

use std::sync::Arc;

use containerd_shim_protos::api::{DeleteRequest, ExecProcessRequest, StartRequest};
use containerd_shim_protos::events::task::{TaskExecAdded, TaskExecStarted};
use containerd_shim_protos::topics::{TASK_EXEC_ADDED_EVENT_TOPIC, TASK_EXEC_STARTED_EVENT_TOPIC};

use thaw_fault_points::point;

use super::Sandbox;
use super::create::connect_streams;
use crate::container::{Container, Exec};
use crate::error::TaskError;
use crate::facts::Exit;
use crate::process::{Life, Process};
use crate::spec::guest_process;
use crate::stdio::{Connections, Paths};

impl Sandbox {
    /// Register an exec. Its creation in the guest begins at once; what comes of it is told by the
    /// start.
    pub async fn exec(self: Arc<Self>, request: ExecProcessRequest) -> Result<(), TaskError> {
        let container = self.container(&request.id)?;
        container.agent()?;
        if request.exec_id.is_empty() {
            return Err(TaskError::InvalidArgument(
                "an exec needs an exec_id".to_owned(),
            ));
        }
        let paths = Paths {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
        };
        let mut spec = request.spec.unwrap_or_default();
        spec.value = guest_process(&spec.value).map_err(|error| {
            TaskError::InvalidArgument(format!("exec {}: spec: {error}", request.exec_id))
        })?;
        let exec = container.add_exec(&request.exec_id, |guest_id| {
            Exec::new(Process::new(&request.exec_id, guest_id, paths), spec)
        })?;
        let preparing = self.clone().prepare(container.clone(), exec.clone());
        *exec.prepared.lock().await = Some(tokio::spawn(preparing));
        let event = TaskExecAdded {
            container_id: container.id.clone(),
            exec_id: request.exec_id,
            ..TaskExecAdded::default()
        };
        self.publisher.publish(TASK_EXEC_ADDED_EVENT_TOPIC, &event);
        point("shim-exec-added");
        Ok(())
    }

    /// Create an exec in the guest.
    async fn prepare(
        self: Arc<Self>,
        container: Arc<Container>,
        exec: Arc<Exec>,
    ) -> Result<(), TaskError> {
        let (vmm, agent) = (self.vmm()?, container.agent()?);
        let process = &exec.process;
        let _turn = agent.turn().await;
        let connections = Connections::new(&process.paths, &self.next_stream)
            .map_err(|error| TaskError::Failed(error.to_string()))?;
        let [stdin, stdout, stderr] = connections.uris();
        let request = ExecProcessRequest {
            id: container.guest_id.clone(),
            exec_id: process.guest_id.clone(),
            terminal: process.paths.terminal,
            stdin,
            stdout,
            stderr,
            spec: Some(exec.spec.clone()).into(),
            ..ExecProcessRequest::default()
        };
        let created = async { agent.exec(&request).await.map_err(TaskError::from) };
        match tokio::try_join!(created, connect_streams(vmm, connections)) {
            Ok((_, streams)) => {
                *exec.lock_streams() = Some(streams);
                Ok(())
            }
            Err(error) => Err(self.explain(vmm, error).await),
        }
    }

    /// Start an exec. Returns the pid that is reported for it.
    pub(super) async fn start_exec(
        self: Arc<Self>,
        container: Arc<Container>,
        exec_id: &str,
    ) -> Result<u32, TaskError> {
        let exec = container.exec(exec_id)?;
        let process = &exec.process;
        let _starting = process.starting.lock().await;
        if process.life() != Life::Created {
            let text = format!(
                "exec {exec_id} of container {} was started before",
                container.id
            );
            return Err(TaskError::FailedPrecondition(text));
        }
        container.begin_exec(&exec)?;
        let request = StartRequest {
            id: container.guest_id.clone(),
            exec_id: process.guest_id.clone(),
            ..StartRequest::default()
        };
        let (vmm, agent) = (self.vmm()?.clone(), container.agent()?.clone());
        let started = async {
            // Not before: a client whose start does not come here lets go of its FIFOs only while nobody
            // has opened them.
            let stdio = self.open_stdio(&process.exec_id, &process.paths);
            let (stdio, ()) = tokio::try_join!(stdio, exec.wait_prepared())?;
            if let Some(streams) = exec.lock_streams().take() {
                process.run_streams(streams, stdio);
            }
            let _turn = agent.turn().await;
            // Asked for its end beside its start: one round trip less for what ends at once. What
            // comes of it is told after the start, which is what `starting` is for.
            tokio::spawn(self.clone().watch_exec(container.clone(), exec.clone()));
            agent.start(&request).await.map_err(TaskError::from)
        };
        if let Err(error) = started.await {
            exec.start_failed();
            // As a process that ended at once: whoever waits for it must be told.
            process.set_stopped(Exit::now(START_FAILED));
            drop(process.take_streams());
            return Err(self.explain(&vmm, error).await);
        }
        point("shim-exec-started");
        process.set_running();
        let event = TaskExecStarted {
            container_id: container.id.clone(),
            exec_id: exec_id.to_owned(),
            pid: container.pid(),
            ..TaskExecStarted::default()
        };
        self.publisher
            .publish(TASK_EXEC_STARTED_EVENT_TOPIC, &event);
        Ok(container.pid())
    }

    /// Forget an exec that has ended or was never started.
    pub(super) async fn delete_exec(
        &self,
        container: &Arc<Container>,
        exec_id: &str,
    ) -> Result<Exit, TaskError> {
        let exec = container.exec(exec_id)?;
        let process = &exec.process;
        let running = || {
            let text = format!("exec {exec_id} of container {} is running", container.id);
            TaskError::FailedPrecondition(text)
        };
        let exit = match process.life() {
            Life::Stopped(exit) => {
                container.remove_exec(exec_id);
                self.release_streams(process).await;
                exit
            }
            Life::Created => {
                // Held by a start that is under way.
                let _starting = process.starting.try_lock().map_err(|_| running())?;
                container.remove_exec(exec_id);
                let exit = Exit::now(0);
                // Whoever waits for it is told; its streams end with it in the guest.
                process.set_stopped(exit);
                exit
            }
            Life::Running | Life::Paused => return Err(running()),
        };
        // Its id is never used again, so nothing waits for this.
        tokio::spawn(forget(container.clone(), exec));
        Ok(exit)
    }
}

/// Have the guest forget an exec, whose creation there may still be under way.
async fn forget(container: Arc<Container>, exec: Arc<Exec>) {
    let _ = exec.wait_prepared().await;
    let process = &exec.process;
    if let Ok(agent) = container.agent() {
        let request = DeleteRequest {
            id: container.guest_id.clone(),
            exec_id: process.guest_id.clone(),
            ..DeleteRequest::default()
        };
        if let Err(error) = agent.delete(&request).await {
            tracing::debug!(%error, "forgetting an exec in the guest");
        }
    }
    if let Some(streams) = process.take_streams() {
        streams.finish_logger().await;
    }
}

/// The status of an exec that could not be started, as runc's shim has it.
const START_FAILED: u32 = 255;
