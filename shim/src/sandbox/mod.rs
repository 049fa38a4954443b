//! The sandbox: one VM and what is around it, and the container in it.
//!
//! A sandbox is there, and its VM is being restored, before containerd asks for a container
//! ([`guest`]). [`create`] puts a container into it, [`exec`] runs more processes in that,
//! [`exit`] watches for ends, [`memory`] for kills for want of memory, and [`requests`] answers the rest.
//!
//! What the task service is asked is answered from memory. Locks are held for the moment in which a
//! field is read or changed and never over an await, but for [`Process::starting`], which only
//! orders a start and its exit.
//!
//! [`Process::starting`]: crate::process::Process::starting

mod create;
mod exec;
mod exit;
mod guest;
mod memory;
mod requests;
mod shutdown;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use thaw_fault_points::point;
use tokio::sync::{Notify, OnceCell};
use tokio::task::JoinHandle;
use tracing::{debug, error, warn};

use crate::anchor::Anchor;
use crate::cgroup;
use crate::container::Container;
use crate::error::TaskError;
use crate::events::Publisher;
use crate::facts::{self, FactsFile};
use crate::spec::BundleSpec;
use crate::template::Abandonment;
use crate::trace::Recorder;
use crate::vmm::Vmm;

pub use guest::Plan;
use shutdown::Deletions;

/// How long the events may take that are still queued at the end.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// A sandbox.
#[derive(Debug)]
pub struct Sandbox {
    facts: Arc<FactsFile>,
    publisher: Publisher,
    trace: Arc<Recorder>,
    home: Home,
    /// What the first Create consumes.
    prepared: Mutex<Option<Prepared>>,
    /// The VMM, as soon as it has been started.
    vmm: Arc<OnceLock<Arc<Vmm>>>,
    container: Mutex<Option<Arc<Container>>>,
    next_stream: std::sync::atomic::AtomicU64,
    /// Kills for want of memory, where those of the VMM are counted, before there was one.
    memory_kills_before: OnceLock<u64>,
    torn_down: OnceCell<()>,
    /// Declared when nobody needs the template any more that is being built.
    abandonment: Abandonment,
    deletions: Deletions,
    finished: Notify,
}

/// Where a sandbox was started from and is recorded.
#[derive(Debug)]
pub struct Home {
    /// containerd's namespace.
    pub namespace: String,
    /// containerd's mount namespace, where loggers belong; the shim has one of its own.
    pub mount_namespace: OwnedFd,
    /// Directory of the traces of starts.
    pub traces: PathBuf,
}

/// What the container that a sandbox is started for needs, before containerd asks for it.
#[derive(Debug)]
pub struct Seed {
    /// Its bundle.
    pub bundle: PathBuf,
    /// Its spec.
    pub spec: BundleSpec,
    /// Its anchor.
    pub anchor: Anchor,
    /// How to make its guest.
    pub plan: Plan,
}

/// The container that a sandbox is started for, in the making.
#[derive(Debug)]
struct Prepared {
    id: String,
    /// Or the reason for which there cannot be one.
    parts: Result<Parts, String>,
}

#[derive(Debug)]
struct Parts {
    bundle: PathBuf,
    spec: BundleSpec,
    anchor: Anchor,
    /// The restored VM.
    guest: JoinHandle<Result<Arc<Vmm>, TaskError>>,
}

impl Sandbox {
    /// A sandbox with `facts` on the host. `seed` is what its container `id` needs, or the reason
    /// for which there cannot be one; restoring the guest begins at once.
    pub fn new(
        facts: FactsFile,
        publisher: Publisher,
        trace: Recorder,
        home: Home,
        id: String,
        seed: Result<Seed, String>,
    ) -> Arc<Self> {
        let sandbox = Arc::new(Self {
            facts: Arc::new(facts),
            publisher,
            trace: Arc::new(trace),
            home,
            prepared: Mutex::new(None),
            vmm: Arc::default(),
            container: Mutex::new(None),
            next_stream: 1.into(),
            memory_kills_before: OnceLock::new(),
            torn_down: OnceCell::new(),
            abandonment: Abandonment::default(),
            deletions: Deletions::default(),
            finished: Notify::new(),
        });
        let parts = seed.map(|seed| {
            let Seed {
                bundle,
                spec,
                anchor,
                plan,
            } = seed;
            let guest = tokio::spawn(sandbox.clone().restore(plan));
            Parts {
                bundle,
                spec,
                anchor,
                guest,
            }
        });
        *sandbox.lock_prepared() = Some(Prepared { id, parts });
        sandbox
    }

    /// The container `id`.
    pub fn container(&self, id: &str) -> Result<Arc<Container>, TaskError> {
        let container = self.lock_container().clone();
        container
            .filter(|container| container.id == id)
            .ok_or_else(|| {
                TaskError::NotFound(format!("there is no container {id} in this sandbox"))
            })
    }

    /// The VMM, or that there is none.
    fn vmm(&self) -> Result<&Arc<Vmm>, TaskError> {
        let none = || TaskError::Unavailable("the sandbox has no VM".to_owned());
        self.vmm.get().ok_or_else(none)
    }

    /// Write down a change of the facts. A failure is logged: it must not keep a container from
    /// ending.
    fn note(&self, change: impl FnOnce(&mut facts::Facts)) {
        if let Err(error) = self.facts.update(change) {
            error!(directory = %self.facts.directory().display(), %error, "writing the facts");
        }
    }

    /// Take apart what the sandbox has on the host, but for its directory and socket. Done once;
    /// whoever calls it meanwhile or later waits until it is done.
    pub async fn tear_down(&self) {
        self.torn_down.get_or_init(|| self.tear_down_once()).await;
    }

    async fn tear_down_once(&self) {
        self.abandonment.declare();
        // A container that was never asked for: its anchor ends when this is dropped.
        let prepared = self.lock_prepared().take();
        if let Some(Ok(parts)) = prepared.map(|prepared| prepared.parts) {
            parts.guest.abort();
            let _ = parts.guest.await;
        }
        if let Some(vmm) = self.vmm.get() {
            vmm.kill();
            vmm.wait_for_end().await;
            debug!("the VMM is gone");
            point("shim-vmm-ended");
        }
        let container = self.lock_container().clone();
        if let Some(container) = container {
            container.anchor.kill();
            container.anchor_ended().await;
            debug!("the anchor is gone");
            point("shim-anchor-ended");
            let unmounted = tokio::task::spawn_blocking(move || container.mounts.unmount()).await;
            match unmounted {
                Ok(Ok(())) => debug!("the container's mounts are gone"),
                Ok(Err(error)) => warn!(%error, "unmounting a container"),
                Err(error) => warn!(%error, "unmounting a container"),
            }
        }
        point("shim-unmounted");
        if let Some(path) = self.facts.get().cgroup {
            match cgroup::remove(&path) {
                Ok(()) => {
                    debug!("the cgroup is gone");
                    self.note(|facts| facts.cgroup = None);
                }
                // `delete` tries again.
                Err(error) => warn!(%error, "removing the sandbox's cgroup"),
            }
        }
    }

    /// Whether a Shutdown ends the shim: there is no container.
    pub fn is_empty(&self) -> bool {
        self.lock_container().is_none()
    }

    /// Let [`Sandbox::wait_until_finished`] return.
    pub fn finish(&self) {
        self.finished.notify_one();
    }

    /// Wait until the shim is to end.
    pub async fn wait_until_finished(&self) {
        self.finished.notified().await;
    }

    /// The end: nothing of the sandbox is left on the host when this returns, if all goes well.
    pub async fn clean_up(&self) {
        self.tear_down().await;
        self.publisher.flush(FLUSH_LIMIT).await;
        let facts = self.facts.get();
        point("shim-ending");
        if let Err(error) = std::fs::remove_file(&facts.socket)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            warn!(socket = %facts.socket.display(), %error, "removing the shim's socket");
        }
        point("shim-unbound");
        let export = self.facts.export();
        if let Err(error) = crate::mounts::remove_export(&export) {
            warn!(%error, "unmounting the sandbox's file tree");
        }
        point("shim-unexported");
        if let Err(error) = facts::remove_directory(self.facts.directory()) {
            warn!(%error, "removing the sandbox's directory");
        }
    }

    /// Write the trace of the start.
    fn write_trace(&self) {
        if let Err(error) = self.trace.write(&self.home.traces) {
            warn!(%error, "writing the trace of a start");
        }
    }

    fn lock_prepared(&self) -> MutexGuard<'_, Option<Prepared>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_container(&self) -> MutexGuard<'_, Option<Arc<Container>>> {
        self.container
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
