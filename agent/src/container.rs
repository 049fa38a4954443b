//! A container and its processes.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{RwLock, oneshot};
use tokio::time::timeout;
use tracing::warn;
use ttrpc::Code;

use crate::cgroup::Cgroup;
use crate::disks;
use crate::exits::Exit;
use crate::process::{Phase, Process};
use crate::protocol::{Place, process_file};
use crate::status::Refusal;
use crate::volumes::Held;

/// How long the last processes of a container may take to die after they have been killed.
const DYING: Duration = Duration::from_secs(2);

/// A container.
#[derive(Debug)]
pub struct Container {
    /// Where it is kept.
    pub place: Place,
    /// The directory that the client knows as its bundle.
    pub client_bundle: String,
    /// Its first process.
    pub init: Arc<Process>,
    /// Its cgroup.
    pub cgroup: Cgroup,
    /// What it binds of the host.
    volumes: Held,
    execs: Mutex<HashMap<String, Arc<Process>>>,
    /// Held shared by what makes a process join, exclusively by a pause: one that is frozen half-way in
    /// would hold its helper until the container is resumed.
    pub joining: RwLock<()>,
    paused: AtomicBool,
    deleting: AtomicBool,
    /// Whether its root is a disk.
    pub on_disk: AtomicBool,
}

impl Container {
    /// A container whose first process is being made.
    pub fn new(
        place: Place,
        client_bundle: String,
        init: Process,
        cgroup: Cgroup,
        volumes: Held,
    ) -> Self {
        Self {
            place,
            client_bundle,
            init: Arc::new(init),
            cgroup,
            volumes,
            execs: Mutex::default(),
            joining: RwLock::default(),
            paused: AtomicBool::new(false),
            deleting: AtomicBool::new(false),
            on_disk: AtomicBool::new(false),
        }
    }

    /// Its first process for an empty id, an exec's otherwise.
    pub fn process(&self, exec_id: &str) -> Result<Arc<Process>, Refusal> {
        if exec_id.is_empty() {
            return Ok(Arc::clone(&self.init));
        }
        let execs = self.execs();
        let process = execs.get(exec_id).cloned();
        process.ok_or_else(|| Refusal::missing(format!("exec {exec_id} in {}", self.place.id)))
    }

    /// Registers an exec.
    pub fn add_exec(&self, process: Process) -> Result<Arc<Process>, Refusal> {
        let mut execs = self.execs();
        let id = process.exec_id.clone();
        if execs.contains_key(&id) {
            let message = format!("exec {id} in {} exists already", self.place.id);
            return Err(Refusal::new(Code::ALREADY_EXISTS, message));
        }
        let process = Arc::new(process);
        execs.insert(id, Arc::clone(&process));
        Ok(process)
    }

    /// Forgets an exec.
    pub fn remove_exec(&self, process: &Process) {
        let _ = std::fs::remove_file(self.exec_file(&process.exec_id));
        self.execs().remove(&process.exec_id);
    }

    /// Where an exec's process is described.
    pub fn exec_file(&self, exec_id: &str) -> PathBuf {
        self.place.bundle.join(process_file(exec_id))
    }

    /// Says that it goes; false if somebody else has said so.
    pub fn begin_delete(&self) -> bool {
        !self.deleting.swap(true, Ordering::Relaxed)
    }

    /// Ends the waiting for execs that were never started.
    pub fn fail_execs(&self) {
        for exec in self.execs().values() {
            if exec.phase() == Phase::Added {
                exec.set_failed();
            }
        }
    }

    /// How often the kernel has killed in it for want of memory.
    pub fn memory_kills(&self) -> u64 {
        self.cgroup.value("memory.events", "oom_kill").unwrap_or(0)
    }

    /// Whether it is paused.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// Says whether it is paused.
    pub fn set_paused(&self, paused: bool) {
        self.paused.store(paused, Ordering::Relaxed);
    }

    /// Follows the first process to its end: nothing else of the container outlives it, and its
    /// exit is reported after all others.
    pub async fn follow_init(self: Arc<Self>, pid: i32, exit: oneshot::Receiver<Exit>) {
        let Ok(exit) = exit.await else { return };
        self.init.set_ended(pid);
        // Also thaws it: a frozen process dies of this (kernel/cgroup/cgroup.c, cgroup_kill).
        if let Err(error) = self.cgroup.kill() {
            warn!("kill what is left of {}: {error}", self.place.id);
        }
        self.set_paused(false);
        let execs: Vec<_> = self.execs().values().cloned().collect();
        for exec in execs {
            exec.idle().await;
        }
        if let Some(drain) = self.init.drain() {
            drain.wait().await;
        }
        self.init.set_stopped(pid, exit);
    }

    /// Follows an exec's process to its end.
    pub async fn follow_exec(process: Arc<Process>, pid: i32, exit: oneshot::Receiver<Exit>) {
        let Ok(exit) = exit.await else { return };
        process.set_ended(pid);
        if let Some(drain) = process.drain() {
            drain.wait().await;
        }
        process.set_stopped(pid, exit);
    }

    /// Whether processes may still be started in it.
    pub fn is_alive(&self) -> bool {
        matches!(
            self.init.phase(),
            Phase::Starting | Phase::Created(_) | Phase::Running(_)
        )
    }

    /// Removes all that the guest keeps of it. Its processes are dead or dying.
    pub async fn clean_up(&self) {
        let _ = self.cgroup.kill();
        match timeout(DYING, self.cgroup.emptied()).await {
            Ok(_) => {}
            Err(_) => warn!("processes of {} do not die", self.place.id),
        }
        if self.on_disk.load(Ordering::Relaxed) {
            disks::settle_root();
        }
        disks::write_back();
        self.volumes.release();
        if let Err(error) = self.cgroup.remove() {
            warn!("remove the cgroup of {}: {error}", self.place.id);
        }
        for directory in [
            self.place.bundle.clone(),
            self.place.states.join(&self.place.id),
        ] {
            match std::fs::remove_dir_all(&directory) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    warn!("remove {}: {error}", directory.display());
                }
                _ => {}
            }
        }
    }

    fn execs(&self) -> MutexGuard<'_, HashMap<String, Arc<Process>>> {
        self.execs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
