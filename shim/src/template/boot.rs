//! The real builder: boot a guest in a VMM, wait for its agent, snapshot it, and see what a start
//! from the snapshot touches.

mod rehearsal;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use thaw_agent_api::agent::QuiesceRequest;
use thaw_agent_api::agent_ttrpc::SandboxClient;
use thaw_agent_api::{CONTROL_PORT, READY_LINE};
use thaw_vmm_control::{
    ChannelError, Event, Launch, Launched, Reply, Request, Shape, Statistics, WorkingSet,
};
use ttrpc::context::Context;

use super::abandonment::Abandonment;
use super::build::{BuildError, Builder};
use super::host::KvmFlavour;
use super::key::KeyInputs;
use super::lock::ScratchDirectory;
use super::watchdog::{Step, Watchdog};
use crate::paths::{Installation, RUNTIME_DIRECTORY};

// The limits are far above what the slowest host takes: emulated machines boot in under 10 s.
const BOOT: Step = Step {
    doing: "booting the guest",
    limit: Duration::from_secs(120),
};
const QUIESCE: Step = Step {
    doing: "asking the guest's agent to quiesce",
    limit: Duration::from_secs(60),
};
const SNAPSHOT: Step = Step {
    doing: "writing the snapshot",
    limit: Duration::from_secs(120),
};

/// How long a guest must do nothing before it is snapshotted, and for how long that is waited for.
const STILL: Duration = Duration::from_millis(30);
const SETTLING: Duration = Duration::from_secs(12);

/// How long after it has freed something, or reported some of it, a guest may still report memory that it
/// does not use: its kernel waits for two seconds (mm/page_reporting.c, `PAGE_REPORTING_DELAY`).
const REPORTING: Duration = Duration::from_millis(2500);

/// Bytes of console output that are kept for an error.
const CONSOLE_TAIL: usize = 2048;

/// Builds templates with the VMM, kernel and initramfs of an installation.
pub(super) struct VmmBuilder<'a> {
    installation: &'a Installation,
    abandonment: &'a Abandonment,
}

impl<'a> VmmBuilder<'a> {
    /// A builder that uses the files of `installation`, until `abandonment`.
    pub fn new(installation: &'a Installation, abandonment: &'a Abandonment) -> Self {
        Self {
            installation,
            abandonment,
        }
    }
}

impl Builder for VmmBuilder<'_> {
    fn build(
        &self,
        inputs: &KeyInputs,
        state: &File,
        memory: &File,
    ) -> Result<WorkingSet, BuildError> {
        if inputs.host.kvm == KvmFlavour::None {
            return Err(BuildError::NoVirtualisation);
        }
        let begin = Instant::now();
        tracing::info!(shape = %inputs.shape, "building a template");
        let open =
            |path: &Path| File::open(path).map_err(host(format!("opening {}", path.display())));
        let kernel = open(&self.installation.kernel)?;
        let initramfs = open(&self.installation.initramfs)?;
        // The guest sees an empty tree for now; what a sandbox exports comes with its own VMM.
        let runtime = Path::new(RUNTIME_DIRECTORY);
        std::fs::create_dir_all(runtime).map_err(host(format!("making {RUNTIME_DIRECTORY}")))?;
        ScratchDirectory::remove_stale(runtime);
        let root = ScratchDirectory::create(runtime)
            .map_err(host(format!("making a directory in {RUNTIME_DIRECTORY}")))?;
        let launch = || self.launch(root.path(), inputs.shape);
        launch()?.become_template(inputs, [&kernel, &initramfs], state, memory)?;
        let files = rehearsal::reopen([state, memory])?;
        let working_set = launch()?.rehearse(&files)?;
        self.abandonment.is_over();
        let seconds = begin.elapsed().as_secs_f32();
        tracing::info!(shape = %inputs.shape, seconds, "built a template");
        Ok(working_set)
    }
}

impl VmmBuilder<'_> {
    fn launch(&self, root: &Path, shape: Shape) -> Result<Guest, BuildError> {
        let guest = Guest::launch(&self.installation.vmm, root, shape)?;
        let concerned = self.abandonment.concerns(&guest.launched);
        concerned.map_err(|error| {
            end(&guest.launched);
            host("duplicating a descriptor")(error)
        })?;
        Ok(guest)
    }
}

/// A guest that is to become a template.
struct Guest {
    launched: Launched,
    watchdog: Watchdog,
    /// The end of what the guest's console has said.
    console: Vec<u8>,
    /// What the VMM writes to its standard error.
    log: File,
    /// How long it must have reported no free memory before it is snapshotted.
    reporting: Duration,
}

impl Guest {
    fn launch(program: &Path, root: &Path, shape: Shape) -> Result<Self, BuildError> {
        let log = memfd_create("thaw-vmm-log", MFdFlags::MFD_CLOEXEC)
            .map(File::from)
            .map_err(|errno| host("making a file in memory")(errno.into()))?;
        let launch = Launch {
            program,
            root,
            network_namespace: None,
            log: Some(log.as_fd()),
        };
        let launched = launch.start().map_err(|source| BuildError::Host {
            doing: "starting the VMM".to_owned(),
            source: Box::new(source),
        })?;
        Self::watch(launched, shape, log)
    }

    /// Put a VMM under a watchdog, which expects a boot.
    fn watch(launched: Launched, shape: Shape, log: File) -> Result<Self, BuildError> {
        let watchdog = launched
            .pidfd
            .try_clone()
            .and_then(|pidfd| Watchdog::start(pidfd, shape, BOOT));
        match watchdog {
            Ok(watchdog) => Ok(Self {
                launched,
                watchdog,
                console: Vec::new(),
                log,
                reporting: REPORTING,
            }),
            Err(error) => {
                end(&launched);
                Err(host("starting a thread")(error))
            }
        }
    }

    /// All steps, and the VMM's end.
    fn become_template(
        mut self,
        inputs: &KeyInputs,
        images: [&File; 2],
        state: &File,
        memory: &File,
    ) -> Result<(), BuildError> {
        let result = self
            .boot(inputs, images)
            .and_then(|()| self.quiesce())
            .and_then(|()| self.settle())
            .and_then(|()| self.snapshot(state, memory));
        end(&self.launched);
        result
    }

    /// Boot until the agent says that it listens.
    fn boot(&mut self, inputs: &KeyInputs, images: [&File; 2]) -> Result<(), BuildError> {
        let request = Request::Boot {
            shape: inputs.shape,
            command_line: inputs.command_line.clone(),
        };
        self.launched
            .owner
            .request(&request, &images.map(|image| image.as_fd()))
            .map_err(|error| self.channel_failed(BOOT, error))?;
        let mut line = Vec::new();
        loop {
            match self.launched.owner.next_event() {
                Ok(Some(Event::Console(bytes))) => {
                    self.keep_console(&bytes);
                    if found_line(&mut line, &bytes, READY_LINE.as_bytes()) {
                        return Ok(());
                    }
                }
                Ok(Some(Event::GuestExit(exit))) => {
                    return Err(self.failed(BOOT, format!("the guest ended: {exit:?}")));
                }
                Ok(None) => return Err(self.failed(BOOT, "the VMM ended".to_owned())),
                Err(error) => return Err(self.channel_failed(BOOT, error)),
            }
        }
    }

    /// Let the agent prepare the guest, and leave no connection to it.
    fn quiesce(&mut self) -> Result<(), BuildError> {
        self.watchdog.step(QUIESCE);
        let ours = self.call_agent(QUIESCE, async |client, context| {
            client
                .quiesce(context, &QuiesceRequest::new())
                .await
                .map(drop)
        })?;
        // The snapshot must not hold the connection: wait until the agent has closed its end too.
        let closed = ours.shutdown(Shutdown::Write).and_then(|()| {
            let mut rest = Vec::new();
            (&ours).take(1 << 16).read_to_end(&mut rest)
        });
        match closed {
            Err(error) if error.kind() != io::ErrorKind::ConnectionReset => {
                Err(self.failed(QUIESCE, format!("closing the connection: {error}")))
            }
            _ if self.watchdog.expired() => {
                Err(self.failed(QUIESCE, "closing the connection".to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Make one call to the agent, as part of `step`. Returns the connection.
    fn call_agent<C>(&mut self, step: Step, call: C) -> Result<UnixStream, BuildError>
    where
        C: AsyncFnOnce(SandboxClient, Context) -> ttrpc::Result<()> + Send,
    {
        let result = UnixStream::pair().map_err(host("making a socket pair"));
        let (ours, theirs) = result?;
        self.launched
            .owner
            .request(
                &Request::ConnectVsock { port: CONTROL_PORT },
                &[theirs.as_fd()],
            )
            .map_err(|error| self.channel_failed(step, error))?;
        drop(theirs);
        // On a thread of its own: the caller's may belong to a runtime already.
        let outcome = std::thread::scope(|scope| {
            let call = scope.spawn(|| call_on(&ours, call));
            call.join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        outcome.map_err(|reason| self.failed(step, reason))?;
        Ok(ours)
    }

    /// Wait until the guest has done what the end of the connection left it to do, and has reported all
    /// memory that it does not use. Every guest that is restored would do it again: before it could do
    /// anything of its own, and, in the notes that it makes of what is reported, with memory of its own.
    fn settle(&mut self) -> Result<(), BuildError> {
        let begin = Instant::now();
        let (mut reports, mut reported) = (0, begin);
        let mut before = None;
        while begin.elapsed() < SETTLING {
            let reply = self.launched.owner.request(&Request::Statistics, &[]);
            let statistics = match reply.map_err(|error| self.channel_failed(QUIESCE, error))? {
                Reply::Statistics(statistics) => statistics,
                _ => Statistics::default(),
            };
            if std::mem::replace(&mut reports, statistics.reports) != statistics.reports {
                reported = Instant::now();
            }
            let exits = statistics.exits();
            // Where KVM does not count, one pause has to do.
            if before == Some(exits) && reported.elapsed() >= self.reporting {
                return Ok(());
            }
            before = Some(exits);
            std::thread::sleep(STILL);
        }
        tracing::debug!("the guest does not come to rest");
        Ok(())
    }

    fn snapshot(&mut self, state: &File, memory: &File) -> Result<(), BuildError> {
        self.watchdog.step(SNAPSHOT);
        match self
            .launched
            .owner
            .request(&Request::Snapshot, &[state.as_fd(), memory.as_fd()])
        {
            Ok(_) => Ok(()),
            Err(ChannelError::Refused(reason)) => Err(BuildError::Snapshot(reason)),
            Err(error) => Err(self.channel_failed(SNAPSHOT, error)),
        }
    }

    fn channel_failed(&mut self, step: Step, error: ChannelError) -> BuildError {
        self.failed(step, error.to_string())
    }

    /// What went wrong in `step`, with all that may explain it.
    fn failed(&mut self, step: Step, reason: String) -> BuildError {
        // What the console said before the end is still in the channel.
        while let Ok(Some(Event::Console(bytes))) = self.launched.owner.try_next_event() {
            self.keep_console(&bytes);
        }
        let console = String::from_utf8_lossy(&self.console).into_owned();
        if self.watchdog.expired() {
            return BuildError::Timeout {
                doing: step.doing,
                seconds: step.limit.as_secs(),
                console,
            };
        }
        let mut log = Vec::new();
        let read = self
            .log
            .seek(SeekFrom::Start(0))
            .and_then(|_| (&self.log).take(CONSOLE_TAIL as u64).read_to_end(&mut log));
        let reason = match read {
            Ok(length) if length > 0 => {
                let log = String::from_utf8_lossy(&log);
                format!(
                    "{reason}; the VMM says: {}",
                    log.trim().replace('\n', " | ")
                )
            }
            _ => reason,
        };
        BuildError::Guest {
            doing: step.doing,
            reason,
            console,
        }
    }

    fn keep_console(&mut self, bytes: &[u8]) {
        tracing::debug!(target: "thaw::guest", "{}", String::from_utf8_lossy(bytes).trim_end());
        self.console.extend_from_slice(bytes);
        let excess = self.console.len().saturating_sub(CONSOLE_TAIL);
        self.console.drain(..excess);
    }
}

/// Kill and reap a VMM.
fn end(launched: &Launched) {
    if let Err(error) = launched.kill().and_then(|()| launched.wait().map(drop)) {
        tracing::debug!(%error, pid = launched.pid, "ending a VMM");
    }
}

fn host(doing: impl Into<String>) -> impl FnOnce(io::Error) -> BuildError {
    let doing = doing.into();
    move |source| BuildError::Host {
        doing,
        source: Box::new(source),
    }
}

/// Make one call to the agent on the other end of `connection`.
fn call_on<C>(connection: &UnixStream, call: C) -> Result<(), String>
where
    C: AsyncFnOnce(SandboxClient, Context) -> ttrpc::Result<()>,
{
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("making a runtime: {error}"))?;
    runtime.block_on(async {
        let connection = connection.try_clone().and_then(|connection| {
            connection.set_nonblocking(true)?;
            tokio::net::UnixStream::from_std(connection)
        });
        let connection = connection.map_err(|error| format!("using a socket: {error}"))?;
        let socket = ttrpc::r#async::transport::Socket::new(connection);
        let client = SandboxClient::new(ttrpc::r#async::Client::new(socket));
        call(client, Context::default())
            .await
            .map_err(|error| error.to_string())
    })?;
    drop(runtime);
    // The flag belongs to the socket, which the caller still reads from.
    connection
        .set_nonblocking(false)
        .map_err(|error| format!("using a socket: {error}"))
}

/// Whether `wanted` is in one of the lines of which `bytes` is the next part. `line` keeps the line
/// that is not complete yet, but no more of it than matters.
fn found_line(line: &mut Vec<u8>, bytes: &[u8], wanted: &[u8]) -> bool {
    for byte in bytes {
        if *byte == b'\n' {
            line.clear();
            continue;
        }
        if line.len() == 4 * wanted.len() {
            line.drain(..3 * wanted.len());
        }
        line.push(*byte);
        if line.ends_with(wanted) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests;
