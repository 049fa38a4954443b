//! The other requests of the task service: starting, signals, what is asked about a container, its
//! deletion.

use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::api::{
    CloseIORequest, DeleteRequest, DeleteResponse, KillRequest, PauseRequest, ProcessInfo,
    ResizePtyRequest, ResumeRequest, StartRequest, StateRequest, StateResponse, StatsRequest,
    StatsResponse, Status, UpdateTaskRequest, WaitRequest, WaitResponse,
};
use containerd_shim_protos::events::task::{TaskDelete, TaskPaused, TaskResumed, TaskStart};
use containerd_shim_protos::topics::{
    TASK_DELETE_EVENT_TOPIC, TASK_PAUSED_EVENT_TOPIC, TASK_RESUMED_EVENT_TOPIC,
    TASK_START_EVENT_TOPIC,
};
use rustix::process::Signal;
use thaw_fault_points::point;
use tracing::{debug, warn};

use super::Sandbox;
use super::create::forget;
use super::growth::limit_of_update;
use crate::container::Container;
use crate::error::TaskError;
use crate::facts::{Exit, KILLED};
use crate::process::{Life, Process, timestamp};
use crate::trace::{Recorder, step};

/// How long output may stand still before a deletion gives it up.
const DELETE_PATIENCE: Duration = Duration::from_secs(10);

/// How long a start may wait for the VMM's own times.
const STATISTICS_LIMIT: Duration = Duration::from_secs(2);

/// How long a container may take to end after SIGKILL, with the delivery of its output.
const STUCK_LIMIT: Duration = Duration::from_secs(30);

impl Sandbox {
    /// Start the container or an exec. Returns its pid.
    pub async fn start(self: Arc<Self>, request: StartRequest) -> Result<u32, TaskError> {
        let container = self.container(&request.id)?;
        if !request.exec_id.is_empty() {
            return self.start_exec(container, &request.exec_id).await;
        }
        let init = &container.init;
        let _starting = init.starting.lock().await;
        if init.life() != Life::Created {
            let text = format!("container {} was started before", container.id);
            return Err(TaskError::FailedPrecondition(text));
        }
        container.trace.mark(step::START_RECEIVED);
        let agent = container.agent()?;
        let inner = StartRequest {
            id: container.guest_id.clone(),
            ..StartRequest::default()
        };
        if let Err(error) = agent.start(&inner).await {
            let error = self.explain(self.vmm()?, error.into()).await;
            self.count_failure(&container.trace, &error);
            return Err(error);
        }
        point("shim-started");
        init.set_running();
        container.trace.mark(step::STARTED);
        if let Err(error) = self.run_poststart_hooks(&container).await {
            self.count_failure(&container.trace, &error);
            return Err(error);
        }
        let event = TaskStart {
            container_id: container.id.clone(),
            pid: container.pid(),
            ..TaskStart::default()
        };
        self.publisher.publish(TASK_START_EVENT_TOPIC, &event);
        point("shim-start-told");
        tokio::spawn(self.clone().finish_trace(container.trace.clone()));
        Ok(container.pid())
    }

    /// Write the trace of a start, with the VMM's part when it was started for that.
    async fn finish_trace(self: Arc<Self>, trace: Arc<Recorder>) {
        if let Some(vmm) = self.vmm.get()
            && Arc::ptr_eq(&trace, &self.trace)
        {
            match tokio::time::timeout(STATISTICS_LIMIT, vmm.statistics()).await {
                Ok(Ok(statistics)) => trace.change(|trace| {
                    trace.vmm = statistics.phases;
                    trace.kvm = statistics.kvm;
                    trace.file_requests = statistics.file_requests;
                }),
                // A container may end sooner than this.
                Ok(Err(error)) => debug!(%error, "no counters of the VMM"),
                Err(_) => debug!("no counters of the VMM in time"),
            }
        }
        if let Err(error) = trace.write(&self.home.traces) {
            warn!(%error, "writing the trace of a start");
        }
        self.count_start(&trace);
        crate::daemon::give_memory_back();
    }

    /// What a process is doing.
    pub fn state(&self, request: &StateRequest) -> Result<StateResponse, TaskError> {
        let container = self.container(&request.id)?;
        let process = container.process(&request.exec_id)?;
        let mut state = process.state();
        state.id.clone_from(&container.id);
        state.bundle = container.bundle.to_string_lossy().into_owned();
        // An exec that was not started has no pid yet.
        if request.exec_id.is_empty() || process.life() != Life::Created {
            state.pid = container.pid();
        }
        // Frozen with its container.
        if process.life() == Life::Running && container.init.life() == Life::Paused {
            state.status = Status::PAUSED.into();
        }
        Ok(state)
    }

    /// The pids of a container.
    pub fn pids(&self, id: &str) -> Result<Vec<ProcessInfo>, TaskError> {
        let container = self.container(id)?;
        Ok(vec![ProcessInfo {
            pid: container.pid(),
            ..ProcessInfo::default()
        }])
    }

    /// Wait until a process has ended.
    pub async fn wait(&self, request: &WaitRequest) -> Result<WaitResponse, TaskError> {
        let process = self.container(&request.id)?.process(&request.exec_id)?;
        let exit = process.wait().await;
        Ok(WaitResponse {
            exit_status: exit.status,
            exited_at: Some(timestamp(exit.at_ns)).into(),
            ..WaitResponse::default()
        })
    }

    /// Send a signal.
    pub async fn kill(self: &Arc<Self>, request: KillRequest) -> Result<(), TaskError> {
        let container = self.container(&request.id)?;
        let process = container.process(&request.exec_id)?;
        let finished = || TaskError::NotFound("process already finished".to_owned());
        let init = request.exec_id.is_empty();
        match process.life() {
            Life::Stopped(_) => return Err(finished()),
            Life::Created if !init => {
                let text = format!("exec {} was not started", request.exec_id);
                return Err(TaskError::FailedPrecondition(text));
            }
            _ => {}
        }
        let kill = request.signal == Signal::KILL.as_raw() as u32;
        let Some(agent) = container.agent.get() else {
            // It is being created: only an end to that makes sense.
            if kill {
                self.abandon(&container);
                return Ok(());
            }
            return container.agent().map(drop);
        };
        let guest = KillRequest {
            id: container.guest_id.clone(),
            exec_id: process.guest_id.clone(),
            signal: request.signal,
            all: request.all,
            ..KillRequest::default()
        };
        match agent.kill(&guest).await.map_err(TaskError::from) {
            Ok(_) if kill && init => {
                tokio::spawn(self.clone().insist(container.clone()));
                Ok(())
            }
            Ok(_) => Ok(()),
            // The guest is stuck, and all in it with it: what was asked for can be done from outside.
            Err(TaskError::Unavailable(reason)) if kill && init => {
                debug!(reason, "killing the VM of a guest that does not answer");
                self.vmm()?.kill();
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Delete the container, or an exec of it.
    pub async fn delete(
        self: Arc<Self>,
        request: DeleteRequest,
    ) -> Result<DeleteResponse, TaskError> {
        let container = self.container(&request.id)?;
        let exit = if request.exec_id.is_empty() {
            self.delete_container(&container).await?
        } else {
            self.delete_exec(&container, &request.exec_id).await?
        };
        Ok(DeleteResponse {
            pid: container.pid(),
            exit_status: exit.status,
            exited_at: Some(timestamp(exit.at_ns)).into(),
            ..DeleteResponse::default()
        })
    }

    /// Have a creation that is under way end.
    fn abandon(&self, container: &Container) {
        container.abandon();
        if !self.grouped
            && self.is_alone(container)
            && let Some(vmm) = self.vmm.get()
        {
            vmm.kill();
        }
    }

    /// See that a container ends to which SIGKILL was sent. The guest says that it has done so, and
    /// may say anything; or the process waits in its kernel for what does not come.
    async fn insist(self: Arc<Self>, container: Arc<Container>) {
        if tokio::time::timeout(STUCK_LIMIT, container.init.wait())
            .await
            .is_err()
        {
            self.end_by_force(&container).await;
        }
    }

    /// End a container that was never started.
    async fn end_unstarted(&self, container: &Container) -> Result<Exit, TaskError> {
        if self.grouped || !self.is_alone(container) {
            self.kill_all(container).await;
        } else {
            self.vmm()?.kill();
        }
        Ok(container.init.wait().await)
    }

    async fn delete_container(&self, container: &Arc<Container>) -> Result<Exit, TaskError> {
        let _deletion = self.begin_deletion();
        if container.agent.get().is_none() {
            // containerd asks for this when its client has gone away during the creation, and then
            // never again: whatever came of it would be nobody's.
            self.abandon(container);
            if !container.is_created().await {
                return Ok(Exit::now(KILLED));
            }
        }
        let init = &container.init;
        let exit = match init.life() {
            Life::Stopped(exit) => exit,
            Life::Created => self.end_unstarted(container).await?,
            Life::Running | Life::Paused => {
                return Err(TaskError::FailedPrecondition(format!(
                    "cannot delete a running process: container {} has not ended",
                    container.id
                )));
            }
        };
        self.release_streams(init).await;
        if !self.grouped && self.close_if_alone(container) {
            self.tear_down().await;
        } else {
            container.release().await;
            if let Some(agent) = container.agent.get() {
                forget(agent, &container.guest_id).await;
            }
        }
        // Of two deletions at the same time one finds it gone.
        if !self.remove(container) {
            return Err(TaskError::NotFound(format!(
                "container {} is deleted",
                container.id
            )));
        }
        container.end_execs();
        self.growth.forget(&container.id);
        self.run_poststop_hooks(&container.id).await;
        self.note(|facts| facts.forget(&container.id));
        let event = TaskDelete {
            container_id: container.id.clone(),
            pid: container.pid(),
            exit_status: exit.status,
            exited_at: Some(timestamp(exit.at_ns)).into(),
            ..TaskDelete::default()
        };
        self.publisher.publish(TASK_DELETE_EVENT_TOPIC, &event);
        point("shim-deleted");
        Ok(exit)
    }

    /// Deliver what output there still is, and let go of the streams.
    pub(super) async fn release_streams(&self, process: &Process) {
        if let Some(streams) = process.take_streams() {
            streams.drain(DELETE_PATIENCE).await;
            streams.finish_logger().await;
        }
    }

    /// No more input comes for a process.
    pub fn close_io(&self, request: &CloseIORequest) -> Result<(), TaskError> {
        let process = self.container(&request.id)?.process(&request.exec_id)?;
        if request.stdin {
            process.close_stdin();
        }
        Ok(())
    }

    /// Set the size of a process' terminal.
    pub async fn resize_pty(&self, mut request: ResizePtyRequest) -> Result<(), TaskError> {
        let container = self.container(&request.id)?;
        let process = container.process(&request.exec_id)?;
        if !process.paths.terminal {
            return Ok(());
        }
        if let Life::Stopped(_) = process.life() {
            return Err(TaskError::NotFound("process already finished".to_owned()));
        }
        if !request.exec_id.is_empty() {
            container.exec(&request.exec_id)?.wait_prepared().await?;
        }
        request.id.clone_from(&container.guest_id);
        request.exec_id.clone_from(&process.guest_id);
        Ok(container.agent()?.resize_pty(&request).await.map(drop)?)
    }

    /// Freeze the container.
    pub async fn pause(&self, id: &str) -> Result<(), TaskError> {
        let container = self.container(id)?;
        alive(&container)?;
        let request = PauseRequest {
            id: container.guest_id.clone(),
            ..PauseRequest::default()
        };
        container.agent()?.pause(&request).await?;
        container.init.set_paused();
        let event = TaskPaused {
            container_id: id.to_owned(),
            ..TaskPaused::default()
        };
        self.publisher.publish(TASK_PAUSED_EVENT_TOPIC, &event);
        Ok(())
    }

    /// Thaw the container.
    pub async fn resume(&self, id: &str) -> Result<(), TaskError> {
        let container = self.container(id)?;
        alive(&container)?;
        let request = ResumeRequest {
            id: container.guest_id.clone(),
            ..ResumeRequest::default()
        };
        container.agent()?.resume(&request).await?;
        container.init.set_running();
        let event = TaskResumed {
            container_id: id.to_owned(),
            ..TaskResumed::default()
        };
        self.publisher.publish(TASK_RESUMED_EVENT_TOPIC, &event);
        Ok(())
    }

    /// Change the container's limits.
    pub async fn update(&self, mut request: UpdateTaskRequest) -> Result<(), TaskError> {
        let container = self.container(&request.id)?;
        alive(&container)?;
        request.id.clone_from(&container.guest_id);
        let agent = container.agent()?;
        if let Some(limit) = limit_of_update(request.resources.as_ref()) {
            self.limit_memory(agent, &container.id, limit).await;
        }
        Ok(agent.update(&request).await.map(drop)?)
    }

    /// The container's counters.
    pub async fn stats(&self, mut request: StatsRequest) -> Result<StatsResponse, TaskError> {
        let container = self.container(&request.id)?;
        request.id.clone_from(&container.guest_id);
        if let Life::Stopped(_) = container.init.life() {
            let counters = container.last_counters.get().cloned();
            return counters.ok_or_else(|| {
                TaskError::NotFound(format!("container {} has ended", container.id))
            });
        }
        match container.agent()?.stats(&request).await {
            Ok(counters) => Ok(counters),
            // It may have ended meanwhile.
            Err(error) => container
                .last_counters
                .get()
                .cloned()
                .ok_or_else(|| error.into()),
        }
    }
}

/// Refuse what only makes sense while the container lives.
fn alive(container: &Container) -> Result<(), TaskError> {
    match container.init.life() {
        Life::Stopped(_) => {
            let text = format!("container {} has ended", container.id);
            Err(TaskError::FailedPrecondition(text))
        }
        _ => Ok(()),
    }
}
