//! One container of a sandbox: its first process, its execs, its anchor, its mounts.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use containerd_shim_protos::api::StatsResponse;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use thaw_fault_points::point;
use tokio::io::AsyncReadExt;
use tokio::sync::{Mutex as AsyncMutex, OnceCell, watch};
use tokio::task::JoinHandle;
use tracing::{debug, warn};

use crate::agent::Agent;
use crate::anchor::{Anchor, REPORT_LENGTH};
use crate::error::TaskError;
use crate::facts::{Exit, KILLED};
use crate::mounts::ContainerMounts;
use crate::process::{Life, Process};
use crate::sandbox::ContainerHooks;
use crate::stdio::Streams;
use crate::trace::Recorder;

/// A container, from the moment its creation begins.
#[derive(Debug)]
pub struct Container {
    /// Its id.
    pub id: String,
    /// Its id for the agent and in the export, which is never used twice in a sandbox.
    pub guest_id: String,
    /// Its bundle.
    pub bundle: PathBuf,
    /// The host process whose pid is the container's.
    pub anchor: Anchor,
    /// Its mounts in the export.
    pub mounts: ContainerMounts,
    /// Its hooks.
    pub hooks: ContainerHooks,
    /// Its first process.
    pub init: Arc<Process>,
    /// The agent, once the container has been created in the guest.
    pub agent: OnceLock<Agent>,
    /// What its counters were when it ended.
    pub last_counters: OnceLock<StatsResponse>,
    /// When the steps of its start were done.
    pub trace: Arc<Recorder>,
    released: OnceCell<()>,
    given_up: watch::Sender<bool>,
    execs: Mutex<Execs>,
    anchor_ended: watch::Receiver<bool>,
    creation: watch::Sender<Creation>,
}

/// How far the creation of a container has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Creation {
    UnderWay,
    /// Nobody wants it any more.
    Unwanted,
    Done,
    /// Nothing of the container is left.
    Failed,
}

#[derive(Debug, Default)]
struct Execs {
    by_id: HashMap<String, Arc<Exec>>,
    /// The first process has ended: nothing new may start.
    closed: bool,
    last_number: u64,
}

/// An exec, from its registration to its deletion.
#[derive(Debug)]
pub struct Exec {
    /// The process.
    pub process: Arc<Process>,
    /// What it runs, an OCI process in JSON.
    pub spec: Any,
    /// Its creation in the guest, under way since it was registered.
    pub prepared: AsyncMutex<Option<JoinHandle<Result<(), TaskError>>>>,
    /// Its connections to the guest, from then until it is started.
    streams: Mutex<Option<Arc<Streams>>>,
    /// Whether it was started, and its exit will be told.
    started: Mutex<bool>,
}

/// What there is of a container before it is created.
#[derive(Debug)]
pub struct Parts {
    /// Its id.
    pub id: String,
    /// Its id for the agent and in the export.
    pub guest_id: String,
    /// Its bundle.
    pub bundle: PathBuf,
    /// Its anchor, started.
    pub anchor: Anchor,
    /// Its mounts, none of which is made.
    pub mounts: ContainerMounts,
    /// Its hooks, none of which has run.
    pub hooks: ContainerHooks,
    /// Its first process.
    pub init: Process,
    /// The trace of its start.
    pub trace: Arc<Recorder>,
}

impl Container {
    /// A container of these parts.
    pub fn new(parts: Parts) -> std::io::Result<Self> {
        let Parts {
            id,
            guest_id,
            bundle,
            anchor,
            mounts,
            hooks,
            init,
            trace,
        } = parts;
        let (ended, anchor_ended) = watch::channel(false);
        let pidfd = anchor.pidfd().try_clone_to_owned()?;
        tokio::spawn(async move {
            if let Err(error) = crate::vmm::reap(&pidfd).await {
                tracing::warn!(%error, "waiting for an anchor");
            }
            ended.send_replace(true);
        });
        Ok(Self {
            id,
            guest_id,
            bundle,
            anchor,
            mounts,
            hooks,
            init: Arc::new(init),
            agent: OnceLock::new(),
            last_counters: OnceLock::new(),
            trace,
            released: OnceCell::new(),
            given_up: watch::Sender::new(false),
            execs: Mutex::default(),
            anchor_ended,
            creation: watch::Sender::new(Creation::UnderWay),
        })
    }

    /// The pid that is reported.
    pub fn pid(&self) -> u32 {
        self.anchor.pid()
    }

    /// Wait until the anchor is in its namespaces.
    pub async fn anchor_ready(&self) -> std::io::Result<()> {
        let socket = self.anchor.socket()?;
        socket.set_nonblocking(true)?;
        let mut socket = tokio::net::UnixStream::from_std(socket)?;
        let mut report = [0; REPORT_LENGTH];
        socket
            .read_exact(&mut report)
            .await
            .map_err(|_| std::io::Error::other("the anchor was killed while it started"))?;
        self.anchor.explain(report)
    }

    /// Wait until the anchor has ended and been reaped.
    pub async fn anchor_ended(&self) {
        let mut ended = self.anchor_ended.clone();
        // The sender is dropped only after it has sent.
        let _ = ended.wait_for(|ended| *ended).await;
    }

    /// End the anchor, and wait until it is gone.
    pub async fn end_anchor(&self) {
        self.anchor.kill();
        self.anchor_ended().await;
    }

    /// End the anchor and take the container's mounts away. Done once; whoever calls it meanwhile
    /// or later waits until it is done.
    pub async fn release(self: &Arc<Self>) {
        let release = async {
            self.end_anchor().await;
            debug!(container = self.id, "the anchor is gone");
            point("shim-anchor-ended");
            let container = self.clone();
            let unmounted = tokio::task::spawn_blocking(move || container.mounts.unmount()).await;
            match unmounted.unwrap_or_else(|error| Err(error.into())) {
                Ok(()) => debug!(container = self.id, "the mounts are gone"),
                Err(error) => warn!(container = self.id, %error, "unmounting a container"),
            }
        };
        self.released.get_or_init(|| release).await;
    }

    /// The container does not end, and its guest is needed by others: count it as ended.
    pub fn give_up(&self) {
        self.given_up.send_replace(true);
    }

    /// Wait until the container has been given up.
    pub async fn given_up(&self) {
        let mut given_up = self.given_up.subscribe();
        // The sender is this container's.
        let _ = given_up.wait_for(|given_up| *given_up).await;
    }

    /// The agent, or why there is none to ask.
    pub fn agent(&self) -> Result<&Agent, TaskError> {
        self.agent.get().ok_or_else(|| {
            TaskError::FailedPrecondition(format!("container {} is still being created", self.id))
        })
    }

    /// The container is in the guest, with this agent.
    pub fn set_created(&self, agent: Agent) {
        // Set once, by the one creation.
        let _ = self.agent.set(agent);
        self.creation.send_replace(Creation::Done);
    }

    /// The creation has failed, and what there was of the container is gone.
    pub fn set_failed(&self) {
        self.creation.send_replace(Creation::Failed);
    }

    /// Have a creation that is under way given up.
    pub fn abandon(&self) {
        self.creation.send_if_modified(|creation| {
            let under_way = *creation == Creation::UnderWay;
            if under_way {
                *creation = Creation::Unwanted;
            }
            under_way
        });
    }

    /// Wait until the creation is to be given up, and return the reason.
    pub async fn abandoned(&self) -> TaskError {
        let mut creation = self.creation.subscribe();
        // The sender is this container's.
        let _ = creation.wait_for(|now| *now == Creation::Unwanted).await;
        TaskError::Unavailable(format!(
            "container {} was deleted while it was being created",
            self.id
        ))
    }

    /// Wait until the creation has ended, and return whether there is a container.
    pub async fn is_created(&self) -> bool {
        let mut creation = self.creation.subscribe();
        let ended = |now: &Creation| matches!(now, Creation::Done | Creation::Failed);
        creation
            .wait_for(ended)
            .await
            .is_ok_and(|creation| *creation == Creation::Done)
    }

    /// The process `exec_id`, the first one for the empty string.
    pub fn process(&self, exec_id: &str) -> Result<Arc<Process>, TaskError> {
        if exec_id.is_empty() {
            return Ok(self.init.clone());
        }
        Ok(self.exec(exec_id)?.process.clone())
    }

    /// The exec `exec_id`.
    pub fn exec(&self, exec_id: &str) -> Result<Arc<Exec>, TaskError> {
        let exec = self.lock_execs().by_id.get(exec_id).cloned();
        exec.ok_or_else(|| {
            TaskError::NotFound(format!("container {} has no exec {exec_id}", self.id))
        })
    }

    /// Register an exec. `make` gets the id that the agent is to know it by.
    pub fn add_exec(
        &self,
        exec_id: &str,
        make: impl FnOnce(String) -> Exec,
    ) -> Result<Arc<Exec>, TaskError> {
        let mut execs = self.lock_execs();
        match self.init.life() {
            Life::Created | Life::Running if !execs.closed => {}
            Life::Paused => {
                let text = format!("container {} is paused", self.id);
                return Err(TaskError::FailedPrecondition(text));
            }
            _ => {
                let text = format!("container {} is not running", self.id);
                return Err(TaskError::FailedPrecondition(text));
            }
        }
        if execs.by_id.contains_key(exec_id) {
            let text = format!("container {} already has an exec {exec_id}", self.id);
            return Err(TaskError::AlreadyExists(text));
        }
        execs.last_number += 1;
        let exec = Arc::new(make(format!("exec-{}", execs.last_number)));
        execs.by_id.insert(exec_id.to_owned(), exec.clone());
        Ok(exec)
    }

    /// Begin to start `exec`: from now on the exit of the first process waits for its exit. Refused
    /// when the first process has ended or is frozen.
    pub fn begin_exec(&self, exec: &Exec) -> Result<(), TaskError> {
        let execs = self.lock_execs();
        if execs.closed {
            let text = format!("container {} has ended", self.id);
            return Err(TaskError::FailedPrecondition(text));
        }
        if self.init.life() == Life::Paused {
            let text = format!("container {} is paused", self.id);
            return Err(TaskError::FailedPrecondition(text));
        }
        *exec.lock_started() = true;
        Ok(())
    }

    /// Forget the exec `exec_id`.
    pub fn remove_exec(&self, exec_id: &str) {
        self.lock_execs().by_id.remove(exec_id);
    }

    /// The first process has ended: no exec starts any more. Returns those that run.
    pub fn close_execs(&self) -> Vec<Arc<Exec>> {
        let mut execs = self.lock_execs();
        execs.closed = true;
        execs
            .by_id
            .values()
            .filter(|exec| exec.is_running())
            .cloned()
            .collect()
    }

    /// The container is deleted: who waits for an exec that was never started waits for nothing.
    pub fn end_execs(&self) {
        for exec in self.lock_execs().by_id.values() {
            if !matches!(exec.process.life(), Life::Stopped(_)) {
                exec.process.set_stopped(Exit::now(KILLED));
            }
        }
    }

    fn lock_execs(&self) -> MutexGuard<'_, Execs> {
        self.execs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Exec {
    /// An exec that is not started.
    pub fn new(process: Process, spec: Any) -> Self {
        Self {
            process: Arc::new(process),
            spec,
            prepared: AsyncMutex::new(None),
            streams: Mutex::new(None),
            started: Mutex::new(false),
        }
    }

    /// Whether it was started and has not ended.
    pub fn is_running(&self) -> bool {
        *self.lock_started() && !matches!(self.process.life(), Life::Stopped(_))
    }

    /// The start failed: nobody is to wait for its exit.
    pub fn start_failed(&self) {
        *self.lock_started() = false;
    }

    /// Wait until its creation in the guest is done. May be asked again.
    pub async fn wait_prepared(&self) -> Result<(), TaskError> {
        let mut prepared = self.prepared.lock().await;
        let Some(task) = prepared.as_mut() else {
            return Ok(());
        };
        let result = match task.await {
            Ok(result) => result,
            Err(error) => Err(TaskError::Failed(error.to_string())),
        };
        *prepared = match &result {
            Ok(()) => None,
            Err(error) => {
                let error = error.clone();
                Some(tokio::spawn(async move { Err(error) }))
            }
        };
        result
    }

    /// Its connections to the guest, while it is created there and not started.
    pub fn lock_streams(&self) -> MutexGuard<'_, Option<Arc<Streams>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_started(&self) -> MutexGuard<'_, bool> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
