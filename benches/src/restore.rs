//! The restore clock: `thaw-vmm` alone, from its execution to the agent's first answer.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::time::{ClockId, clock_gettime};
use serde::Serialize;
use thaw_agent_api::CONTROL_PORT;
use thaw_agent_api::agent::InfoRequest;
use thaw_agent_api::agent_ttrpc::SandboxClient;
use thaw_shim::template::{Manifest, TemplateStore};
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

/// Has a template of the measured shape made, or finds it.
pub fn template() -> Result<PathBuf> {
    let [vcpus, memory] = SHAPE;
    thaw::thaw(&["template", "build", "--vcpus", vcpus, "--memory", memory]).succeeded();
    let wanted = format!("{vcpus}x{memory}M");
    let mut templates = thaw::templates().into_iter();
    let template = templates.find(|template| {
        manifest(template).is_ok_and(|manifest| manifest.shape().to_string() == wanted)
    });
    template.with_context(|| format!("no template of {wanted}"))
}

/// Removes `template`, unless it was there `before`.
pub fn remove(template: &Path, before: &[PathBuf]) -> Result<()> {
    if !before.iter().any(|one| one == template) {
        fs::remove_dir_all(template).context("removing a template")?;
    }
    Ok(())
}

/// Restores a guest from `template` with the VMM of the installed tree, and ends it, `samples` times.
pub fn restore(prefix: &Path, template: &Path, samples: usize) -> Result<Restore> {
    let program = prefix.join("libexec/thaw/thaw-vmm");
    let view = ReadOnlyView::new(template).context("mounting the template")?;
    let manifest = manifest(template)?;
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

/// The manifest of `template`, as the shim reads it.
fn manifest(template: &Path) -> Result<Manifest> {
    let directory = template.parent().context("a template without a store")?;
    let name = template.file_name().unwrap_or_default().to_string_lossy();
    let stored = TemplateStore::new(directory).list()?;
    let template = stored
        .into_iter()
        .find(|template| template.key.to_string() == name)
        .with_context(|| format!("{name} is no template's key"))?;
    template.manifest.map_err(anyhow::Error::msg)
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
    let begun_ns = monotonic_ns()?;
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
        let exits = statistics.kvm.iter().find(|(name, _)| name == "exits");
        measured.exits = measured.exits.max(exits.map(|(_, count)| *count));
    }
    vmm.kill()?;
    vmm.wait()?;
    Ok(())
}

fn monotonic_ns() -> Result<u64> {
    let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    Ok(now.as_nanos().try_into()?)
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
