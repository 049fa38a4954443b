//! The restore clock: `thaw-vmm` alone, from its execution to the agent's first answer.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use thaw_agent_api::CONTROL_PORT;
use thaw_agent_api::agent::InfoRequest;
use thaw_agent_api::agent_ttrpc::SandboxClient;
use thaw_shim::template::{Manifest, TemplateStore};
use thaw_shim::trace::monotonic_ns;
use thaw_tests::thaw;
use thaw_vmm_control::{Launch, ReadOnlyView, Reply, Request, WorkingSet};

use crate::samples::Samples;

/// Longest that an agent may take to answer.
const LIMIT: Duration = Duration::from_secs(30);

/// What a restore takes.
#[derive(Debug, Default, Serialize)]
pub struct Restore {
    /// vCPUs and memory of the template.
    pub shape: String,
    /// From just before the VMM's process is made to the first vCPU running.
    pub vcpus_run: Samples,
    /// To the answer that they run. By then the first one may still be getting its memory ready.
    pub run_answered: Samples,
    /// To the agent's answer to its first call.
    pub agent_answers: Samples,
    /// Pages that are made ready before that, and how many of them for writing.
    pub working_set_pages: (u64, u64),
    /// Bytes of guest memory that then differ from the template, at most.
    pub dirtied_bytes: u64,
    /// Exits to user space up to then, at most; absent where KVM does not count them.
    pub exits: Option<u64>,
}

/// The shape that is measured, whatever the host has: vCPUs, and memory in MiB.
const SHAPE: [&str; 2] = ["2", "2048"];

/// Has a template of the measured shape made, or finds it: its directory and its manifest.
fn template() -> Result<(PathBuf, Manifest)> {
    let [vcpus, memory] = SHAPE;
    thaw::thaw(&["template", "build", "--vcpus", vcpus, "--memory", memory]).succeeded();
    let wanted = format!("{vcpus}x{memory}M");
    let store = TemplateStore::new(Path::new(thaw::TEMPLATES));
    let mut stored = store.list()?.into_iter();
    let template = stored.find_map(|template| {
        let manifest = template.manifest.ok()?;
        let meant = manifest.shape().to_string() == wanted;
        meant.then(|| (store.directory().join(template.key.to_string()), manifest))
    });
    template.with_context(|| format!("no template of {wanted}"))
}

/// Restores a guest of the measured shape with the VMM of the installed tree, and ends it, `samples`
/// times.
pub fn restore(prefix: &Path, samples: usize) -> Result<Restore> {
    let program = prefix.join("libexec/thaw/thaw-vmm");
    // The other clocks use the template of the shape without limits.
    let _shapes = thaw::OtherShapes::allow();
    let (template, manifest) = template()?;
    let view = ReadOnlyView::new(&template).context("mounting the template")?;
    let working_set = manifest.working_set();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut measured = Restore {
        shape: manifest.shape().to_string(),
        working_set_pages: working_set.pages(),
        ..Restore::default()
    };
    for _ in 0..samples {
        once(&program, &view, working_set, &runtime, &mut measured)?;
    }
    Ok(measured)
}

fn once(
    program: &Path,
    template: &ReadOnlyView,
    working_set: &WorkingSet,
    runtime: &tokio::runtime::Runtime,
    measured: &mut Restore,
) -> Result<()> {
    let (state, memory) = (template.open("state")?, template.open("memory")?);
    let root = tempfile::tempdir()?;
    let log = std::io::stderr();
    let begun = Instant::now();
    let begun_ns = monotonic_ns();
    let launch = Launch {
        program,
        root: root.path(),
        network_namespace: None,
        log: Some(log.as_fd()),
    };
    let mut vmm = launch.start()?;
    let restore = Request::Restore {
        working_set: working_set.clone(),
    };
    vmm.owner
        .request(&restore, &[state.as_fd(), memory.as_fd()])?;
    vmm.owner.request(&Request::Run, &[])?;
    measured.run_answered.push(begun.elapsed());
    let (ours, guests) = UnixStream::pair()?;
    let guests = OwnedFd::from(guests);
    vmm.owner.request(
        &Request::ConnectVsock { port: CONTROL_PORT },
        &[guests.as_fd()],
    )?;
    drop(guests);
    runtime
        .block_on(first_answer(ours))
        .context("calling the agent")?;
    measured.agent_answers.push(begun.elapsed());

    if let Reply::Statistics(statistics) = vmm.owner.request(&Request::Statistics, &[])? {
        // The VMM answers before the working set is ready and the guest runs.
        let mut phases = statistics.phases.iter();
        let run = phases.find(|phase| phase.name == "run");
        let run = run.context("the guest has not run")?.monotonic_ns;
        let run = Duration::from_nanos(run.saturating_sub(begun_ns));
        measured.vcpus_run.push(run);
        measured.dirtied_bytes = measured.dirtied_bytes.max(statistics.guest_dirty_bytes);
        measured.exits = measured.exits.max(statistics.exits());
    }
    vmm.kill()?;
    vmm.wait()?;
    Ok(())
}

async fn first_answer(socket: UnixStream) -> Result<()> {
    socket.set_nonblocking(true)?;
    let socket =
        ttrpc::asynchronous::transport::Socket::new(tokio::net::UnixStream::from_std(socket)?);
    let agent = SandboxClient::new(ttrpc::r#async::Client::new(socket));
    let answer = agent
        .info(ttrpc::context::with_duration(LIMIT), &InfoRequest::new())
        .await?;
    ensure!(
        !answer.kernel_release.is_empty(),
        "the agent does not know its kernel"
    );
    Ok(())
}
