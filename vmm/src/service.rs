//! The control loop: requests of the owner, one at a time, and the end of the guest.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use thaw_vmm_control::{
    Channel, ChannelError, Event, FromVmm, Reply, Request, Statistics, WorkingSet,
};
use thiserror::Error;

use crate::kvm::Hypervisor;
use crate::machine::{BootSource, Environment, Machine, MachineError, RestoreSource};
use crate::phase::Phases;
use crate::serial::ConsoleOutput;
use crate::statistics::anonymous_bytes;
use crate::virtio::fs::FileServerRoot;

/// Why the VMM cannot go on. The owner sees it exit.
#[derive(Debug, Error)]
pub enum ServiceError {
    /// The control channel.
    #[error("the control channel: {0}")]
    Channel(#[from] ChannelError),
    /// Waiting for something to happen.
    #[error("waiting for a request: {0}")]
    Poll(Errno),
}

/// Why a request is refused.
#[derive(Debug, Error)]
enum Refusal {
    #[error(transparent)]
    Machine(#[from] MachineError),
    #[error("there is no machine yet")]
    NoMachine,
    #[error("this process has had its machine: start another")]
    HadMachine,
    #[error("the request needs {needed} descriptors and came with {found}")]
    Descriptors { needed: usize, found: usize },
    #[error("reading KVM's counters: {0}")]
    Counters(std::io::Error),
}

/// One VMM process: it serves its owner, and has one machine in its life.
pub struct Service {
    channel: Arc<Channel>,
    hypervisor: Hypervisor,
    /// Taken by the machine.
    files: Option<FileServerRoot>,
    /// `/proc/self/smaps`, if it could be opened.
    smaps: Option<File>,
    phases: Phases,
    machine: Option<Machine>,
}

impl Service {
    /// A service without a machine.
    pub fn new(
        channel: Channel,
        hypervisor: Hypervisor,
        files: FileServerRoot,
        smaps: Option<File>,
        phases: Phases,
    ) -> Self {
        let channel = Arc::new(channel);
        Self {
            channel,
            hypervisor,
            files: Some(files),
            smaps,
            phases,
            machine: None,
        }
    }

    /// Serve until the owner closes its end or the guest ends.
    pub fn serve(mut self) -> Result<(), ServiceError> {
        loop {
            let Ready { request, exit } = self.wait()?;
            if exit && let Some(exit) = self.machine.as_ref().and_then(|m| m.notice().exit()) {
                return self.say(&FromVmm::Event(Event::GuestExit(exit)));
            }
            if request && !self.answer()? {
                return Ok(());
            }
        }
    }

    /// Wait until there is a request or the guest has ended.
    fn wait(&self) -> Result<Ready, ServiceError> {
        let mut events = vec![PollFd::new(self.channel.as_ref(), PollFlags::IN)];
        let event = self
            .machine
            .as_ref()
            .map(|machine| machine.notice().event());
        events.extend(event.map(|event| PollFd::from_borrowed_fd(event, PollFlags::IN)));
        loop {
            match poll(&mut events, None) {
                Err(Errno::INTR) => {}
                Err(errno) => return Err(ServiceError::Poll(errno)),
                Ok(_) => break,
            }
        }
        let ready = |index: usize| events.get(index).is_some_and(|e| !e.revents().is_empty());
        Ok(Ready {
            request: ready(0),
            exit: ready(1),
        })
    }

    /// Take one request and answer it. False when the owner has closed its end.
    fn answer(&mut self) -> Result<bool, ServiceError> {
        let Some((request, descriptors)) = self.channel.receive()? else {
            return Ok(false);
        };
        let after = fault_point(&request);
        let reply = self.handle(request, descriptors);
        thaw_fault_points::point(after);
        self.say(&FromVmm::Reply(
            reply.unwrap_or_else(|error| Reply::Failed(error.to_string())),
        ))?;
        Ok(true)
    }

    /// Send a message. An owner that has closed its end is noticed by the next wait.
    fn say(&self, message: &FromVmm) -> Result<(), ServiceError> {
        match self.channel.send(message, &[]) {
            Err(ChannelError::Closed) => Ok(()),
            result => Ok(result?),
        }
    }

    fn handle(&mut self, request: Request, descriptors: Vec<OwnedFd>) -> Result<Reply, Refusal> {
        match request {
            Request::Boot {
                shape,
                command_line,
            } => {
                let [kernel, initramfs] = exactly(descriptors)?;
                let (kernel, initramfs) = (kernel.into(), initramfs.into());
                let source = BootSource {
                    shape,
                    command_line,
                    kernel,
                    initramfs,
                };
                let environment = self.environment()?;
                let (hypervisor, phases) = (&self.hypervisor, &mut self.phases);
                let machine = Machine::boot(hypervisor, source, environment, phases)?;
                self.machine.insert(machine).run()?;
            }
            Request::Restore { working_set } => {
                let [state, memory] = exactly(descriptors)?;
                self.restore(RestoreSource {
                    state: state.into(),
                    memory: memory.into(),
                    working_set,
                    pagemap: None,
                })?;
            }
            Request::Rehearse => {
                let [state, memory, pagemap] = exactly(descriptors)?;
                self.restore(RestoreSource {
                    state: state.into(),
                    memory: memory.into(),
                    working_set: WorkingSet::default(),
                    pagemap: Some(pagemap.into()),
                })?;
            }
            Request::AttachBlock { slot, read_only } => {
                let [file] = exactly(descriptors)?;
                let attachments = self.machine()?.attachments();
                attachments.attach_block(slot, file.into(), read_only)?;
            }
            Request::Populate => {
                let [] = exactly(descriptors)?;
                self.machine()?.populate();
                self.phases.mark("populated");
            }
            Request::Run => {
                let [] = exactly(descriptors)?;
                self.machine()?.run()?;
            }
            Request::Memory { bytes } => {
                let [] = exactly(descriptors)?;
                self.machine()?.request_memory(bytes)?;
            }
            Request::ConnectVsock { port } => {
                let [socket] = exactly(descriptors)?;
                self.machine()?.attachments().connect_vsock(port, socket);
            }
            Request::Snapshot => {
                let [state, memory] = exactly(descriptors)?;
                let machine = self.machine.as_mut().ok_or(Refusal::NoMachine)?;
                machine.snapshot(&self.hypervisor, &state.into(), &memory.into())?;
            }
            Request::WorkingSet => return Ok(Reply::WorkingSet(self.machine()?.touched()?)),
            Request::Statistics => return Ok(Reply::Statistics(self.statistics()?)),
        }
        Ok(Reply::Done)
    }

    fn restore(&mut self, source: RestoreSource) -> Result<(), Refusal> {
        let environment = self.environment()?;
        let (hypervisor, phases) = (&self.hypervisor, &mut self.phases);
        let machine = Machine::restore(hypervisor, source, environment, phases)?;
        self.machine = Some(machine);
        Ok(())
    }

    fn machine(&mut self) -> Result<&mut Machine, Refusal> {
        self.machine.as_mut().ok_or(Refusal::NoMachine)
    }

    /// The surroundings of the one machine.
    fn environment(&mut self) -> Result<Environment, Refusal> {
        let files = self.files.take().ok_or(Refusal::HadMachine)?;
        let channel = self.channel.clone();
        let console: ConsoleOutput = Arc::new(move |bytes: &[u8]| {
            let event = FromVmm::Event(Event::Console(bytes.to_vec()));
            // The owner is gone, and this process will be at once.
            if let Err(error) = channel.send(&event, &[]) {
                tracing::debug!("console output: {error}");
            }
        });
        Ok(Environment { console, files })
    }

    fn statistics(&mut self) -> Result<Statistics, Refusal> {
        let machine = self.machine.as_ref().ok_or(Refusal::NoMachine)?;
        let mut phases = Phases::clone(&self.phases);
        if let Some(time) = machine.notice().first_run() {
            phases.mark_at("run", time);
        }
        let ranges = machine.memory_ranges();
        let smaps = self.smaps.as_mut();
        Ok(Statistics {
            phases: phases.into_vec(),
            kvm: machine.counters().map_err(Refusal::Counters)?,
            file_requests: machine.attachments().file_counts().requests(),
            file_releases: machine.attachments().file_counts().releases(),
            reports: machine.attachments().reported().reports(),
            reported_bytes: machine.attachments().reported().bytes(),
            plugged_bytes: machine.attachments().plugged_memory(),
            guest_dirty_bytes: smaps.map_or(0, |smaps| anonymous_bytes(smaps, &ranges)),
        })
    }
}

/// The point at which a test ends this process after `request` was done, before it is answered.
fn fault_point(request: &Request) -> &'static str {
    match request {
        Request::Restore { .. } => "vmm-restored",
        Request::Populate => "vmm-populated",
        Request::Run => "vmm-run",
        Request::ConnectVsock { .. } => "vmm-connected",
        Request::Statistics => "vmm-asked",
        _ => "vmm-other",
    }
}

/// What has happened.
struct Ready {
    request: bool,
    exit: bool,
}

/// The descriptors of a request, when there are as many as it needs. Others are closed.
fn exactly<const N: usize>(descriptors: Vec<OwnedFd>) -> Result<[OwnedFd; N], Refusal> {
    let found = descriptors.len();
    descriptors
        .try_into()
        .map_err(|_| Refusal::Descriptors { needed: N, found })
}
