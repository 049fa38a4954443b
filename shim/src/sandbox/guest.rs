//! From a template to a guest that is itself and answers.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::rand::{GetRandomFlags, getrandom};
use thaw_agent_api::agent::{ConfigureRequest, Mount};
use thaw_agent_api::{CONTROL_PORT, ROOT_DISK, SHARE, disk_path};
use thaw_fault_points::point;
use thaw_vmm_control::{FILE_SYSTEM_TAG, Launch, Launched, Request, Shape};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::create::forget;
use super::{MemoryBounds, Sandbox};
use crate::agent::Agent;
use crate::cgroup;
use crate::console::Console;
use crate::disks::{Disk, RootDisk};
use crate::error::TaskError;
use crate::paths::{Installation, TEMPLATE_DIRECTORY};
use crate::room;
use crate::settings::ConsoleLog;
use crate::template::{Template, TemplateStore};
use crate::trace::step;
use crate::vmm::{Vmm, VmmError};

/// Bytes of entropy that a guest is given.
const ENTROPY: usize = 64;

/// Bytes of a clone's nonce.
const NONCE: usize = 16;

/// How long a guest may take to write to its disks what it has in memory.
const WRITE_BACK_LIMIT: Duration = Duration::from_secs(30);

/// How to make the guest of a sandbox.
#[derive(Debug)]
pub struct Plan {
    /// thaw's files.
    pub installation: Installation,
    /// vCPUs and memory.
    pub shape: Shape,
    /// The VMM's network namespace; a new one without.
    pub network: Option<OwnedFd>,
    /// The cgroup for the VMM, if it is to be moved.
    pub cgroup: Option<PathBuf>,
    /// The kernel's readiness to kill the VMM for memory.
    pub oom_score_adj: i32,
    /// What becomes of the guest's console.
    pub console: ConsoleLog,
    /// Disk space that all templates may take, in MiB.
    pub template_budget_mib: u32,
    /// How far its memory may grow.
    pub memory: MemoryBounds,
}

/// A guest that is itself and answers.
#[derive(Debug, Clone)]
pub(super) struct Awake {
    pub vmm: Arc<Vmm>,
    pub agent: Agent,
    /// The guest's numbers of its disks, by slot.
    pub disks: Arc<[(u32, u32)]>,
}

/// What a guest is given before it runs.
#[derive(Debug, Default)]
pub(super) struct Backing {
    /// Its disks, by slot.
    pub disks: Vec<Disk>,
    /// The one that is mounted as a container's root.
    pub root: Option<RootDisk>,
}

/// What a guest is given, up to when it runs.
#[derive(Debug, Default)]
struct Given {
    backing: Backing,
    /// It is too late.
    taken: bool,
}

/// The way of a guest from its template to the first answer of its agent.
#[derive(Debug, Default)]
pub(super) struct Awakening {
    task: Mutex<Option<JoinHandle<()>>>,
    /// Somebody wants it to run.
    wanted: Notify,
    given: Mutex<Given>,
    pub(super) outcome: watch::Sender<Option<Result<Awake, TaskError>>>,
}

impl Awakening {
    /// There will be no guest.
    pub fn fail(&self, reason: TaskError) {
        self.outcome.send_if_modified(|outcome| {
            let open = outcome.is_none();
            if open {
                *outcome = Some(Err(reason));
            }
            open
        });
    }

    /// Have the guest be given `backing`. Refused when it runs already.
    pub fn give(&self, backing: Backing) -> Result<(), TaskError> {
        let mut given = self.lock_given();
        if given.taken {
            let text = "a disk can only be given to a VM before it runs, and another container of this \
                        sandbox was quicker: use files, or a sandbox of its own";
            return Err(TaskError::FailedPrecondition(text.to_owned()));
        }
        given.backing = backing;
        Ok(())
    }

    fn take_backing(&self) -> Backing {
        let mut given = self.lock_given();
        given.taken = true;
        std::mem::take(&mut given.backing)
    }

    fn lock_given(&self) -> std::sync::MutexGuard<'_, Given> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody wants the guest any more. When this returns nothing more is made for it.
    pub async fn end(&self) {
        let task = self.lock_task().take();
        if let Some(task) = task {
            task.abort();
            let _ = task.await;
        }
        let reason = "the sandbox has ended".to_owned();
        self.fail(TaskError::FailedPrecondition(reason));
    }

    fn lock_task(&self) -> std::sync::MutexGuard<'_, Option<JoinHandle<()>>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl From<VmmError> for TaskError {
    fn from(error: VmmError) -> Self {
        match error {
            VmmError::Refused(words) => Self::Failed(words),
            VmmError::Ended(_) | VmmError::OutOfTurn => Self::Unavailable(error.to_string()),
        }
    }
}

fn failed(error: impl std::fmt::Display) -> TaskError {
    TaskError::Failed(error.to_string())
}

impl Sandbox {
    /// Begin to get a guest: `restored`, and once somebody wants it, awake, under the name `hostname`.
    pub(super) fn bring_up(
        self: &Arc<Self>,
        restored: impl Future<Output = Result<Arc<Vmm>, TaskError>> + Send + 'static,
        hostname: String,
    ) {
        let sandbox = self.clone();
        let awakening = async move {
            let outcome = async {
                let vmm = restored.await?;
                sandbox.awakening.wanted.notified().await;
                let (agent, disks) = sandbox.wake(&vmm, hostname).await?;
                sandbox.clone().listen(&agent).await;
                Ok(Awake { vmm, agent, disks })
            };
            let outcome = outcome.await;
            sandbox.awakening.outcome.send_replace(Some(outcome));
        };
        let before = self.awakening.lock_task().replace(tokio::spawn(awakening));
        if let Some(before) = before {
            before.abort();
        }
    }

    /// Have the guest write what it has not yet written to its disks, where it has any: its VM is going to be
    /// killed. Its containers have ended.
    pub(super) async fn write_back(&self) {
        let awake = match self.awakening.outcome.borrow().as_ref() {
            Some(Ok(awake)) if !awake.disks.is_empty() && awake.vmm.end().is_none() => {
                awake.clone()
            }
            _ => return,
        };
        for container in self.all_containers() {
            let written = forget(&awake.agent, &container.guest_id);
            if tokio::time::timeout(WRITE_BACK_LIMIT, written)
                .await
                .is_err()
            {
                warn!(
                    container = container.id,
                    "the guest does not write its disks in time"
                );
            }
        }
    }

    /// The guest, which runs from when this is first asked for.
    pub(super) async fn guest(&self) -> Result<Awake, TaskError> {
        self.awakening.wanted.notify_one();
        let mut outcome = self.awakening.outcome.subscribe();
        let guest = match outcome.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(outcome)) => outcome.clone()?,
            // The sender is this sandbox's, and it was waited for something.
            _ => return Err(TaskError::Failed("the guest's start was lost".to_owned())),
        };
        match guest.vmm.end() {
            Some(reason) => Err(vm_ended(&reason)),
            None => Ok(guest),
        }
    }

    /// Start the VMM and restore its guest from a template, vCPUs stopped. The two things that it
    /// takes, the process and the template, are got at the same time.
    pub(super) async fn restore(self: Arc<Self>, plan: Plan) -> Result<Arc<Vmm>, TaskError> {
        let Plan {
            installation,
            shape,
            network,
            cgroup,
            oom_score_adj,
            console,
            template_budget_mib,
            memory: _,
        } = plan;
        room::check(cgroup.as_deref()).map_err(failed)?;
        self.trace.change(|trace| trace.shape = shape.to_string());
        self.note(|facts| facts.shape = Some(shape));
        let (program, root) = (installation.vmm.clone(), self.facts.export());
        let launched = tokio::task::spawn_blocking(move || {
            let log = std::io::stderr();
            let launch = Launch {
                program: &program,
                root: &root,
                network_namespace: network.as_ref().map(AsFd::as_fd),
                log: Some(log.as_fd()),
            };
            launch.start()
        });
        let abandonment = self.abandonment.clone();
        let template = tokio::task::spawn_blocking(move || {
            TemplateStore::new(TEMPLATE_DIRECTORY)
                .with_budget_mib(template_budget_mib)
                .obtain(&installation, shape, &abandonment)
        });
        let cgroup = match cgroup {
            Some(path) => Some(self.make_cgroup(path).await?),
            None => None,
        };
        let launched = launched.await.map_err(failed)?.map_err(failed)?;
        point("shim-launched");
        self.trace.mark("VMM started");
        let vmm = self.adopt(launched, oom_score_adj, console)?;
        let template = template.await.map_err(failed)?.map_err(failed)?;
        self.trace.mark("template open");
        let Template {
            state,
            memory,
            working_set,
            ..
        } = template;
        let request = Request::Restore { working_set };
        vmm.order(request, vec![state.into(), memory.into()])
            .await?;
        self.trace.mark("guest restored");
        if let Some(path) = cgroup {
            self.join_cgroup(path, vmm.identity().pid).await?;
            point("shim-joined");
            self.trace.mark("in cgroup");
        }
        // Charged to the right cgroup from here on. Not left for when the guest is to run: where the
        // rest of the creation takes longer, this costs it nothing.
        vmm.order(Request::Populate, Vec::new()).await?;
        self.trace.mark("working set ready");
        Ok(vmm)
    }

    /// Take over the VMM that was started.
    fn adopt(
        &self,
        launched: Launched,
        oom_score_adj: i32,
        console: ConsoleLog,
    ) -> Result<Arc<Vmm>, TaskError> {
        let file = (console != ConsoleLog::Off).then(|| self.facts.console());
        let vmm = Arc::new(Vmm::new(launched, Console::new(file)).map_err(failed)?);
        let identity = vmm.identity();
        // Set once: a sandbox has one VMM.
        let _ = self.vmm.set(vmm.clone());
        self.note(|facts| facts.vmm = Some(identity));
        point("shim-vmm-noted");
        let path = format!("/proc/{}/oom_score_adj", identity.pid);
        if let Err(error) = std::fs::write(&path, oom_score_adj.to_string()) {
            warn!(path, %error, "setting the VMM's readiness to be killed");
        }
        Ok(vmm)
    }

    async fn make_cgroup(&self, path: PathBuf) -> Result<PathBuf, TaskError> {
        self.facts
            .update(|facts| facts.cgroup = Some(path.clone()))
            .map_err(failed)?;
        point("shim-cgroup-noted");
        let made = move || cgroup::make(&path).map(|()| path);
        let path = tokio::task::spawn_blocking(made)
            .await
            .map_err(failed)?
            .map_err(failed)?;
        // Set once: a sandbox has one VMM.
        let _ = self.memory_kills_before.set(cgroup::memory_kills(&path));
        Ok(path)
    }

    /// After the VM was made, which is slow in a cgroup, and before its memory is touched, which is
    /// charged where it is touched and never moved.
    async fn join_cgroup(&self, path: PathBuf, pid: u32) -> Result<(), TaskError> {
        let joined = move || cgroup::join(&path, pid);
        tokio::task::spawn_blocking(joined)
            .await
            .map_err(failed)?
            .map_err(failed)
    }

    /// Let the guest run, connect to its agent, and make it itself. Returns the guest's numbers of its disks
    /// too.
    async fn wake(
        &self,
        vmm: &Vmm,
        hostname: String,
    ) -> Result<(Agent, Arc<[(u32, u32)]>), TaskError> {
        let backing = self.awakening.take_backing();
        let mut request = identity(hostname).map_err(failed)?;
        describe(&backing, &mut request);
        for (slot, disk) in (0..).zip(backing.disks) {
            let Disk {
                file, read_only, ..
            } = disk;
            let attach = Request::AttachBlock { slot, read_only };
            vmm.order(attach, vec![file.into()]).await?;
        }
        vmm.order(Request::Run, Vec::new()).await?;
        self.trace.mark(step::VCPUS_RUN);
        let (ours, guests) = UnixStream::pair().map_err(failed)?;
        let connect = Request::ConnectVsock { port: CONTROL_PORT };
        vmm.order(connect, vec![OwnedFd::from(guests)]).await?;
        let agent = Agent::new(ours).map_err(failed)?;
        request.wall_time_ns = wall_time_ns();
        request.pluggable_memory_bytes = self.growth.allowed();
        let configured = match agent.configure(&request).await {
            Ok(configured) => configured,
            Err(error) => return Err(self.explain(vmm, error.into()).await),
        };
        point("shim-configured");
        self.trace.mark(step::CONFIGURED);
        let numbers = configured.disks.iter().map(|disk| (disk.major, disk.minor));
        Ok((agent, numbers.collect()))
    }

    /// `error` of a call to the agent: when the VM ended, that is the reason to tell.
    pub(super) async fn explain(&self, vmm: &Vmm, error: TaskError) -> TaskError {
        if !matches!(error, TaskError::Unavailable(_)) {
            return error;
        }
        // A closed connection is seen before the end of the process that closed it.
        let soon = std::time::Duration::from_millis(500);
        let error = match tokio::time::timeout(soon, vmm.wait_for_end()).await {
            Ok(reason) => vm_ended(&reason),
            Err(_) => error,
        };
        let console = vmm.last_words();
        info!(%error, console, "the guest's agent does not answer");
        error
    }
}

/// The VM has ended, for this reason.
fn vm_ended(reason: &str) -> TaskError {
    TaskError::Unavailable(format!("the VM has ended: {reason}"))
}

/// What makes a guest another than all others of its template.
fn identity(hostname: String) -> std::io::Result<ConfigureRequest> {
    let mut request = ConfigureRequest::new();
    request.nonce = random(NONCE)?;
    request.entropy = random(ENTROPY)?;
    request.hostname = if hostname.is_empty() {
        host_name()
    } else {
        hostname
    };
    let mut share = Mount::new();
    share.source = FILE_SYSTEM_TAG.to_owned();
    share.target = SHARE.to_owned();
    share.type_ = "virtiofs".to_owned();
    request.mounts.push(share);
    request.wall_time_ns = wall_time_ns();
    Ok(request)
}

/// The host's time. To be asked for last, since it is that of sending.
fn wall_time_ns() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as i64)
}

/// Tell the guest of its disks.
fn describe(backing: &Backing, request: &mut ConfigureRequest) {
    for (slot, disk) in (0..).zip(&backing.disks) {
        let mut described = thaw_agent_api::agent::Disk::new();
        described.slot = slot;
        described.sectors = disk.sectors;
        described.read_only = disk.read_only;
        request.disks.push(described);
    }
    if let Some(root) = &backing.root {
        let mut mount = Mount::new();
        mount.source = disk_path(root.slot.into());
        mount.target = ROOT_DISK.to_owned();
        mount.type_.clone_from(&root.kind);
        mount.options.clone_from(&root.options);
        request.mounts.push(mount);
    }
}

fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

fn random(length: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    // Up to 256 bytes come whole once the kernel's generator is ready.
    let count = getrandom(&mut bytes[..], GetRandomFlags::empty())?;
    if count < length {
        return Err(std::io::Error::other("the kernel gave too little entropy"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_no_two_guests_are_told_the_same() {
        let (one, two) = (
            identity("web".into()).unwrap(),
            identity(String::new()).unwrap(),
        );
        assert_ne!(one.nonce, two.nonce);
        assert_ne!(one.entropy, two.entropy);
        assert_eq!(one.entropy.len(), 64);
        assert_eq!(one.hostname, "web");
        assert_eq!(two.hostname, host_name());
        assert!(one.wall_time_ns > 1_600_000_000_000_000_000);
        assert_eq!(one.mounts[0].target, SHARE);
    }
}
