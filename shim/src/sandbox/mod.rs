//! The sandbox: one VM and what is around it, and the containers in it.
//!
//! A sandbox is there, and its VM is being restored, before containerd asks for a container
//! ([`guest`]). [`create`] puts a container into it, [`exec`] runs more processes in that,
//! [`exit`] watches for ends, [`memory`] for kills for want of memory, [`growth`] gives the guest more of
//! it, and [`requests`] answers the rest. [`containers`] says which there are, and how long the sandbox lives for them.
//!
//! What the task service is asked is answered from memory. Locks are held for the moment in which a
//! field is read or changed and never over an await, but for [`Process::starting`], which only
//! orders a start and its exit, and for the one under which hooks of deleted containers run.
//!
//! [`Process::starting`]: crate::process::Process::starting

mod containers;
mod create;
mod exec;
mod exit;
mod growth;
mod guest;
mod hooks;
mod memory;
mod operator;
mod requests;
mod shutdown;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use thaw_fault_points::point;
use tokio::sync::{Mutex as AsyncMutex, Notify, OnceCell};
use tracing::{debug, error, warn};

use crate::anchor::Anchor;
use crate::cgroup;
use crate::consoles;
use crate::error::TaskError;
use crate::events::Publisher;
use crate::facts::{self, FactsFile};
use crate::mounts::Volumes;
use crate::settings::RuntimeOptions;
use crate::spec::BundleSpec;
use crate::template::Abandonment;
use crate::trace::Recorder;
use crate::vmm::Vmm;

use containers::Containers;
use growth::Growth;
pub use growth::{MemoryBounds, positive};
use guest::Awakening;
pub use guest::Plan;
pub use hooks::ContainerHooks;
use shutdown::Deletions;

/// How long the events may take that are still queued at the end.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// A sandbox.
#[derive(Debug)]
pub struct Sandbox {
    facts: Arc<FactsFile>,
    publisher: Publisher,
    /// Of the start of the VM and of the container that it is started for.
    trace: Arc<Recorder>,
    home: Home,
    /// Whether it was started for a group of containers.
    grouped: bool,
    /// What the Create of the container that it is started for consumes.
    prepared: Mutex<Option<Prepared>>,
    /// The VMM, as soon as it has been started.
    vmm: Arc<OnceLock<Arc<Vmm>>>,
    awakening: Awakening,
    growth: Growth,
    containers: Mutex<Containers>,
    /// What its containers bind of the host.
    volumes: Arc<Volumes>,
    next_stream: std::sync::atomic::AtomicU64,
    /// Kills for want of memory, where those of the VMM are counted, before there was one.
    memory_kills_before: OnceLock<u64>,
    torn_down: OnceCell<()>,
    /// Held while hooks run of a container that is gone.
    poststop: AsyncMutex<()>,
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
    /// The empty directory that becomes the root of anchors.
    pub empty: PathBuf,
    /// Directory of the counters of all sandboxes.
    pub counters: PathBuf,
    /// The runtime options that the sandbox was started with.
    pub options: Option<RuntimeOptions>,
}

/// What the container that a sandbox is started for needs, before containerd asks for it.
#[derive(Debug)]
pub struct Seed {
    /// The container's part.
    pub ingredients: Ingredients,
    /// How to make its guest.
    pub plan: Plan,
}

/// What one container is made of.
#[derive(Debug)]
pub struct Ingredients {
    /// Its bundle.
    pub bundle: PathBuf,
    /// Its spec.
    pub spec: BundleSpec,
    /// Its anchor.
    pub anchor: Anchor,
}

/// The container that a sandbox is started for, in the making.
#[derive(Debug)]
struct Prepared {
    id: String,
    /// Or the reason for which there cannot be one.
    ingredients: Result<Ingredients, String>,
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
        let volumes = Arc::new(Volumes::new(facts.export()));
        let sandbox = Arc::new(Self {
            volumes,
            facts: Arc::new(facts),
            publisher,
            trace: Arc::new(trace),
            home,
            grouped: seed.as_ref().is_ok_and(|seed| {
                let spec = &seed.ingredients.spec;
                spec.view.group().is_some()
            }),
            prepared: Mutex::new(None),
            vmm: Arc::default(),
            awakening: Awakening::default(),
            growth: Growth::default(),
            containers: Mutex::default(),
            next_stream: 1.into(),
            memory_kills_before: OnceLock::new(),
            torn_down: OnceCell::new(),
            poststop: AsyncMutex::default(),
            abandonment: Abandonment::default(),
            deletions: Deletions::default(),
            finished: Notify::new(),
        });
        let ingredients = match seed {
            Ok(Seed { ingredients, plan }) => {
                let hostname = ingredients.spec.view.hostname.clone();
                sandbox.growth.begin(plan.shape, plan.memory, &id);
                sandbox.bring_up(sandbox.clone().restore(plan), hostname);
                Ok(ingredients)
            }
            Err(reason) => {
                sandbox.awakening.fail(TaskError::Failed(reason.clone()));
                Err(reason)
            }
        };
        *sandbox.lock_prepared() = Some(Prepared { id, ingredients });
        sandbox
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
        self.close();
        // A container that was never asked for: its anchor ends when this is dropped.
        drop(self.lock_prepared().take());
        self.awakening.end().await;
        self.write_back().await;
        if let Some(vmm) = self.vmm.get() {
            vmm.kill();
            vmm.wait_for_end().await;
            debug!("the VMM is gone");
            point("shim-vmm-ended");
        }
        for container in self.all_containers() {
            container.release().await;
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
        self.run_all_poststop_hooks().await;
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
        if let Err(error) = consoles::keep(self.facts.directory(), &facts) {
            warn!(%error, "keeping what the guest's console has said");
        }
        if let Err(error) = facts::remove_directory(self.facts.directory()) {
            warn!(%error, "removing the sandbox's directory");
        }
    }

    fn lock_prepared(&self) -> MutexGuard<'_, Option<Prepared>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
