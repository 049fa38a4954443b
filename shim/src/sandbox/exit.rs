//! The ends of processes, and what follows from them.
//!
//! The order in which containerd hears of them is fixed: a start before its exit, the exits of all
//! execs before that of the first process, and each only after the output has been delivered.

use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::api::{KillRequest, StatsRequest, WaitRequest};
use containerd_shim_protos::events::task::TaskExit;
use containerd_shim_protos::topics::TASK_EXIT_EVENT_TOPIC;
use rustix::process::Signal;
use thaw_fault_points::point;
use tracing::{debug, info, warn};

use super::Sandbox;
use crate::agent::Agent;
use crate::container::{Container, Exec};
use crate::facts::{Exit, KILLED};
use crate::process::{Process, timestamp};

/// For how long output may stand still after the end of a first process before its exit is told
/// all the same. The rest is delivered when somebody reads again.
const INIT_PATIENCE: Duration = Duration::from_secs(10);

/// The same for an exec, whose descendants may keep its streams open.
const EXEC_PATIENCE: Duration = Duration::from_secs(2);

/// How long the exits of execs may take after that of the first process, which has killed them.
const EXECS_LIMIT: Duration = Duration::from_secs(5);

/// How long a guest may take to kill a container.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// How long a guest may take to tell a container's last counters.
const COUNTERS_LIMIT: Duration = Duration::from_secs(2);

impl Sandbox {
    /// Watch a created container to its end.
    pub(super) async fn watch(self: Arc<Self>, container: Arc<Container>) {
        let init = &container.init;
        let exit = self.guest_exit(&container).await;
        point("shim-exit-heard");
        // At once: a shim that is killed while it delivers the output has told nobody yet.
        self.note(|facts| {
            if let Some(facts) = facts.containers.get_mut(&container.id) {
                facts.exit = Some(exit);
            }
        });
        point("shim-exit-noted");
        // A start that is under way tells of itself first.
        drop(init.starting.lock().await);
        let execs = container.close_execs();
        let all = async {
            for exec in &execs {
                exec.process.wait().await;
            }
        };
        if tokio::time::timeout(EXECS_LIMIT, all).await.is_err() {
            warn!(container = container.id, "an exec outlives its container");
            for exec in execs.iter().filter(|exec| exec.is_running()) {
                self.tell_exit(&container, &exec.process, Exit::now(KILLED));
            }
        }
        // Whoever hears of the exit finds the pid gone, as that of any process that has ended.
        tokio::join!(
            self.drain(init, INIT_PATIENCE),
            keep_counters(&container),
            container.end_anchor()
        );
        self.tell_memory_limit(&container);
        self.tell_exit(&container, init, exit);
        point("shim-exit-told");
        debug!(
            container = container.id,
            status = exit.status,
            "the container has ended"
        );
        // Nothing of it is needed any more; its end need not be waited for.
        if !self.grouped && self.close_if_alone(&container) {
            self.tear_down().await;
        } else {
            container.release().await;
        }
    }

    /// Wait until the first process has ended, in whichever way.
    async fn guest_exit(self: &Arc<Self>, container: &Arc<Container>) -> Exit {
        let (Some(vmm), Some(agent)) = (self.vmm.get(), container.agent.get()) else {
            return Exit::now(KILLED);
        };
        let waiting = wait(agent, &container.guest_id, "");
        tokio::pin!(waiting);
        let mut anchored = true;
        loop {
            tokio::select! {
                status = &mut waiting => return match status {
                    Ok(status) => Exit::now(status),
                    Err(error) => {
                        // Without an agent there is no telling what goes on in there.
                        let error = self.explain(vmm, error.into()).await;
                        warn!(container = container.id, %error, "giving up a container");
                        vmm.kill();
                        Exit::now(KILLED)
                    }
                },
                reason = vmm.wait_for_end() => {
                    warn!(container = container.id, reason, "the VM of a container has ended");
                    return Exit::now(KILLED);
                }
                () = container.given_up() => return Exit::now(KILLED),
                () = container.anchor_ended(), if anchored => {
                    anchored = false;
                    info!(container = container.id, "killed by the end of its anchor");
                    let (sandbox, container) = (self.clone(), container.clone());
                    tokio::spawn(async move { sandbox.kill_all(&container).await });
                }
            }
        }
    }

    /// Kill all processes of a container, by force when the guest does not do it.
    pub(super) async fn kill_all(&self, container: &Container) {
        // Without an agent it is not in the guest.
        let Some(agent) = container.agent.get() else {
            return;
        };
        let request = KillRequest {
            id: container.guest_id.clone(),
            signal: Signal::KILL.as_raw() as u32,
            all: true,
            ..KillRequest::default()
        };
        // A guest that is alive answers, and then reports the exit.
        let killed = async {
            agent.kill(&request).await.is_ok() && {
                container.init.wait().await;
                true
            }
        };
        if !tokio::time::timeout(KILL_LIMIT, killed)
            .await
            .unwrap_or(false)
        {
            self.end_by_force(container).await;
        }
    }

    /// End a container that the guest does not end. Its VM goes with it, unless that is needed by
    /// others and well but for this container.
    pub(super) async fn end_by_force(&self, container: &Container) {
        let (Some(vmm), Some(agent)) = (self.vmm.get(), container.agent.get()) else {
            return;
        };
        let needed = self.grouped || !self.is_alone(container);
        if needed && agent.info().await.is_ok() {
            warn!(
                container = container.id,
                "giving up a container that does not end, for the sake of the others in its VM"
            );
            container.give_up();
        } else {
            warn!(
                container = container.id,
                "killing the VM of a container that does not end"
            );
            vmm.kill();
        }
    }

    /// Watch a started exec to its end.
    pub(super) async fn watch_exec(self: Arc<Self>, container: Arc<Container>, exec: Arc<Exec>) {
        let (Some(vmm), Some(agent)) = (self.vmm.get(), container.agent.get()) else {
            return;
        };
        let process = &exec.process;
        let status = tokio::select! {
            status = wait(agent, &container.guest_id, &process.guest_id) => match status {
                Ok(status) => status,
                Err(error) => {
                    warn!(container = container.id, exec = process.exec_id, %error, "an exec is lost");
                    KILLED
                }
            },
            _ = vmm.wait_for_end() => KILLED,
        };
        let exit = Exit::now(status);
        drop(process.starting.lock().await);
        self.drain(process, EXEC_PATIENCE).await;
        // Told already when its container did not wait for it any longer.
        if exec.is_running() {
            self.tell_exit(&container, process, exit);
        }
    }

    /// Wait until the output of a process that has ended is delivered.
    async fn drain(&self, process: &Process, patience: Duration) {
        let Some(streams) = process.streams() else {
            return;
        };
        if !streams.drain(patience).await {
            info!(exec = process.exec_id, "output of a process is not read");
        }
    }

    fn tell_exit(&self, container: &Container, process: &Process, exit: Exit) {
        let id = if process.exec_id.is_empty() {
            &container.id
        } else {
            &process.exec_id
        };
        let event = TaskExit {
            container_id: container.id.clone(),
            id: id.clone(),
            pid: container.pid(),
            exit_status: exit.status,
            exited_at: Some(timestamp(exit.at_ns)).into(),
            ..TaskExit::default()
        };
        self.publisher.publish(TASK_EXIT_EVENT_TOPIC, &event);
        process.set_stopped(exit);
    }
}

/// Ask for a container's counters for the last time, which containerd may want to know until it is
/// deleted, and the guest does not live for as long.
async fn keep_counters(container: &Container) {
    let Some(agent) = container.agent.get() else {
        return;
    };
    let request = StatsRequest {
        id: container.guest_id.clone(),
        ..StatsRequest::default()
    };
    match tokio::time::timeout(COUNTERS_LIMIT, agent.stats(&request)).await {
        // Set once: a container ends once.
        Ok(Ok(counters)) => drop(container.last_counters.set(counters)),
        Ok(Err(error)) => debug!(%error, "no last counters of a container"),
        Err(_) => debug!("no last counters of a container in time"),
    }
}

/// The exit status of a process in the guest, once it has one.
async fn wait(agent: &Agent, id: &str, exec_id: &str) -> ttrpc::Result<u32> {
    let request = WaitRequest {
        id: id.to_owned(),
        exec_id: exec_id.to_owned(),
        ..WaitRequest::default()
    };
    // No more than a status has: the guest may say anything.
    agent
        .wait(&request)
        .await
        .map(|answer| answer.exit_status & 0xff)
}
