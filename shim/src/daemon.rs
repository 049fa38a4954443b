//! The process that `start` leaves behind: it serves the task API of one sandbox until that is gone.
//!
//! It has one thread; others exist only while something blocks (a mount, the template) and end soon
//! after.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use thaw_fault_points::point;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tracing::{Level, error, warn};
use ttrpc::asynchronous::{Server, transport::Listener};

use crate::anchor::Anchor;
use crate::bootstrap::Confirmation;
use crate::cgroup;
use crate::descriptors;
use crate::events::{PublishProgram, Publisher, Route};
use crate::facts::FactsFile;
use crate::mounts;
use crate::operator;
use crate::paths::{Installation, RUNTIME_DIRECTORY};
use crate::process_identity::ProcessIdentity;
use crate::sandbox::{Home, Ingredients, MemoryBounds, Plan, Sandbox, Seed, positive};
use crate::settings::{RuntimeOptions, Settings};
use crate::spec::{self, BundleSpec};
use crate::task;
use crate::trace::Recorder;

/// How long the last answers may take to be written.
const ANSWER_LIMIT: Duration = Duration::from_millis(500);

/// How long a thread that blocks may take to end, at the shim's end: a build that was given up removes
/// its files.
const THREADS_LIMIT: Duration = Duration::from_secs(3);

/// Threads that block at the same time: mounting, starting the VMM, opening the template, and some
/// to spare.
const BLOCKING_THREADS: usize = 8;

/// What a shim is started with.
#[derive(Debug)]
pub struct Start {
    /// containerd's namespace.
    pub namespace: String,
    /// Id of the container.
    pub id: String,
    /// Its bundle.
    pub bundle: PathBuf,
    /// Its spec, checked.
    pub spec: BundleSpec,
    /// What the sandbox has on the host so far.
    pub facts: FactsFile,
    /// The bound socket.
    pub listener: UnixListener,
    /// The network namespace for the VMM; a new one without.
    pub vmm_network: Option<OwnedFd>,
    /// containerd's ttrpc socket, for events.
    pub events_address: Option<String>,
    /// What is set for it.
    pub settings: Settings,
    /// The runtime options among that.
    pub options: Option<RuntimeOptions>,
    /// What is logged where nothing is set.
    pub log_level: Level,
    /// containerd's program for events, where it has no such socket, and its gRPC address.
    pub publish_program: Option<(PathBuf, String)>,
    /// Times so far.
    pub trace: Recorder,
}

impl Start {
    /// Its descriptors, which a fork must keep.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let network = self.vmm_network.as_ref().map(AsFd::as_fd);
        network.into_iter().chain([self.listener.as_fd()]).collect()
    }

    /// Become the shim: from now on it is this process that the facts name. On an error the caller
    /// still has the standard streams that it was started with.
    pub fn take_over(&self) -> io::Result<()> {
        rustix::process::setsid()?;
        let identity = ProcessIdentity::current()?;
        self.facts.update(|facts| facts.shim = Some(identity))
    }

    /// Serve until the sandbox is gone, or `confirmation` says that containerd does not know of it. The
    /// process must have one thread only, and be nobody's but the caller's.
    pub fn serve(self, confirmation: Confirmation) -> ExitCode {
        if let Err(error) = leave_standard_streams(&self.bundle) {
            // Where to say so is what could not be opened.
            error!(%error, "leaving the standard streams");
        }
        crate::log::install(self.settings.log_level.unwrap_or(self.log_level));
        keep_memory_small();
        descriptors::raise_limit();
        if let Err(error) = be_spared_less() {
            warn!(%error, "setting the shim's readiness to be killed");
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_keep_alive(Duration::from_secs(1))
            .thread_stack_size(512 << 10)
            .build();
        // Namespaces and anchor before the first other thread exists.
        let Self {
            namespace,
            id,
            bundle,
            spec,
            facts,
            listener,
            vmm_network,
            events_address,
            settings,
            options,
            publish_program,
            trace,
            ..
        } = self;
        let route = events_route(events_address.as_deref(), publish_program);
        let home = File::open("/proc/self/ns/mnt").map(|mount_namespace| Home {
            namespace: namespace.clone(),
            mount_namespace: mount_namespace.into(),
            traces: crate::trace::directory(),
            empty: empty_directory(),
            counters: crate::counters::directory(),
            options,
        });
        let seed = prepare(&id, bundle, spec, vmm_network, &settings, &facts, &trace);
        match runtime.and_then(|runtime| Ok((runtime, home?))) {
            Ok((runtime, home)) => {
                runtime.block_on(async {
                    let publisher = Publisher::new(&namespace, route);
                    let sandbox = Sandbox::new(facts, publisher, trace, home, id, seed);
                    tokio::spawn(end_unless_confirmed(confirmation, sandbox.clone()));
                    if let Err(error) = serve_task(listener, &sandbox).await {
                        error!(%error, "serving the task API");
                    }
                    sandbox.clean_up().await;
                });
                // Whoever waits for another's template has nothing to clean up.
                runtime.shutdown_timeout(THREADS_LIMIT);
            }
            Err(error) => error!(%error, "starting the shim"),
        }
        ExitCode::SUCCESS
    }
}

/// Have the shim end when `start` has ended without giving containerd its answer: nobody would ever ask
/// anything of it.
async fn end_unless_confirmed(confirmation: Confirmation, sandbox: Arc<Sandbox>) {
    let confirmed = async {
        let mut reader = pipe::Receiver::from_owned_fd(confirmation.into())?;
        reader.read_u8().await
    };
    if let Err(error) = confirmed.await
        && sandbox.close_unless_used()
    {
        warn!(%error, "containerd does not know of this shim");
        sandbox.finish();
    }
}

/// The way of events to containerd: its socket, else its program. Asked for while this process is
/// still in the host's mount namespace.
fn events_route(socket: Option<&str>, program: Option<(PathBuf, String)>) -> Route {
    let (Route::Nowhere, Some((path, address))) = (Route::to_socket(socket), program) else {
        return Route::to_socket(socket);
    };
    match File::open("/proc/self/ns/mnt") {
        Ok(mount_namespace) => Route::Program(PublishProgram {
            path,
            address,
            mount_namespace: mount_namespace.into(),
        }),
        Err(error) => {
            warn!(%error, "containerd gets no events: opening the mount namespace");
            Route::Nowhere
        }
    }
}

/// Make what the container needs that can be made before it is asked for.
fn prepare(
    id: &str,
    bundle: PathBuf,
    spec: BundleSpec,
    network: Option<OwnedFd>,
    settings: &Settings,
    facts: &FactsFile,
    trace: &Recorder,
) -> Result<Seed, String> {
    let words = |error: io::Error| error.to_string();
    let installation = Installation::find().map_err(|error| error.to_string())?;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let shape = spec::shape(&spec.view, settings, cpus, host_memory())
        .map_err(|error| error.to_string())?;
    mounts::enter_own_namespace().map_err(words)?;
    mounts::make_export(&facts.export()).map_err(words)?;
    point("shim-exported");
    trace.mark("file tree made");
    let anchor = Anchor::start(&empty_directory(), spec.view.network_namespace())
        .map_err(|error| format!("starting the anchor of {id}: {error}"))?;
    point("shim-anchored");
    trace.mark("anchor started");
    let cgroup = cgroup::choose(&spec.view.linux.cgroups_path, id);
    let oom_score_adj = spec
        .view
        .process
        .oom_score_adj
        .unwrap_or(0)
        .clamp(-1000, 1000);
    let plan = Plan {
        installation,
        shape,
        network,
        cgroup,
        oom_score_adj,
        console: settings.console,
        template_budget_mib: settings.template_budget_mib,
        memory: MemoryBounds {
            most: settings
                .max_memory_mib
                .map_or_else(host_memory, |mib| u64::from(mib) << 20),
            overhead: u64::from(settings.memory_overhead_mib) << 20,
            first: spec.view.linux.resources.memory.limit.and_then(positive),
        },
    };
    let ingredients = Ingredients {
        bundle,
        spec,
        anchor,
    };
    Ok(Seed { ingredients, plan })
}

/// The root of all anchors.
fn empty_directory() -> PathBuf {
    Path::new(RUNTIME_DIRECTORY).join(".empty")
}

/// Bytes of memory that the host has.
pub fn host_memory() -> u64 {
    let information = rustix::system::sysinfo();
    information
        .totalram
        .saturating_mul(u64::from(information.mem_unit))
}

/// Serve until the sandbox is finished and its last answers are out.
async fn serve_task(
    listener: UnixListener,
    sandbox: &Arc<Sandbox>,
) -> Result<(), Box<dyn std::error::Error>> {
    listener.set_nonblocking(true)?;
    let listener = Listener::try_from(listener)?;
    let mut server = Server::new()
        .add_listener(listener)
        .register_service(task::services(sandbox))
        .register_service(operator::service(sandbox));
    server.start().await?;
    sandbox.wait_until_finished().await;
    match tokio::time::timeout(ANSWER_LIMIT, server.shutdown()).await {
        Ok(result) => Ok(result?),
        // A client that waits for something that no longer comes.
        Err(_) => Ok(()),
    }
}

/// Standard input and output become `/dev/null`: containerd waits for their end. Standard error
/// becomes the bundle's `log`, which containerd reads.
fn leave_standard_streams(bundle: &Path) -> io::Result<()> {
    let null: OwnedFd = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/null")?
        .into();
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    // Never waited for: neither for a reader to open it nor for one to read.
    let log: io::Result<File> = OpenOptions::new()
        .write(true)
        .custom_flags(OFlags::NONBLOCK.bits() as i32)
        .open(bundle.join("log"));
    match log {
        Ok(log) => dup2_stderr(&log)?,
        Err(_) => dup2_stderr(&null)?,
    }
    // The bundle is not to be kept busy.
    std::env::set_current_dir("/")
}

/// One above what it was started with, as runc's shim: the containers' own score is the spec's.
fn be_spared_less() -> io::Result<()> {
    let path = "/proc/self/oom_score_adj";
    let score: i32 = fs::read_to_string(path)?
        .trim()
        .parse()
        .map_err(io::Error::other)?;
    fs::write(path, (score + 1).min(1000).to_string())
}

/// One heap for all threads: each of its own would stay behind when the thread is gone.
#[allow(unsafe_code)]
fn keep_memory_small() {
    // SAFETY: sets parameters of the allocator, while there is one thread.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 64 << 10);
    }
}

/// Give the kernel back what the heap does not need any more, after a start.
#[allow(unsafe_code)]
pub fn give_memory_back() {
    // SAFETY: the allocator's own, for any state of it.
    unsafe { libc::malloc_trim(0) };
}
