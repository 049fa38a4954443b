//! The shim's end of a running `thaw-vmm`: requests, its events and its end, without a thread.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};
use thaw_vmm_control::{
    ChannelError, Event, FromVmm, GuestExit, Launched, Owner, Reply, Request, Statistics,
};
use thiserror::Error;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, warn};

use crate::console::Console;
use crate::process_identity::ProcessIdentity;
use crate::readiness::{OneDescriptor, register};

/// Lines of the console that go to the log when a guest dies.
const LAST_WORDS: usize = 20;

/// A running VMM.
#[derive(Debug)]
pub struct Vmm {
    identity: ProcessIdentity,
    pidfd: Arc<OwnedFd>,
    calls: mpsc::UnboundedSender<Call>,
    ended: watch::Receiver<Option<String>>,
    console: Arc<Mutex<Console>>,
    /// By this shim.
    killed: AtomicBool,
}

/// Why a request was not done.
#[derive(Debug, Clone, Error)]
pub enum VmmError {
    /// The VMM's own words.
    #[error("{0}")]
    Refused(String),
    /// The VMM has ended, and why.
    #[error("the VM has ended: {0}")]
    Ended(String),
    /// It answered something else.
    #[error("the VMM gave an answer to another question")]
    OutOfTurn,
}

#[derive(Debug)]
struct Call {
    request: Request,
    descriptors: Vec<OwnedFd>,
    answer: oneshot::Sender<Result<Reply, VmmError>>,
}

impl Vmm {
    /// Take over a launched VMM, whose console output goes to `console`.
    pub fn new(launched: Launched, console: Console) -> io::Result<Self> {
        let Launched { pid, pidfd, owner } = launched;
        let identity = ProcessIdentity::of(pid.unsigned_abs())?;
        let pidfd = Arc::new(pidfd);
        let (calls, receive_calls) = mpsc::unbounded_channel();
        let (tell_ended, ended) = watch::channel(None);
        let console = Arc::new(Mutex::new(console));
        let channel = register(Source(owner), Interest::READABLE)?;
        let driver = Driver {
            channel,
            calls: receive_calls,
            waiting: None,
            exit: None,
            console: console.clone(),
        };
        tokio::spawn(driver.run(pidfd.clone(), tell_ended));
        Ok(Self {
            identity,
            pidfd,
            calls,
            ended,
            console,
            killed: AtomicBool::new(false),
        })
    }

    /// Which process it is.
    pub fn identity(&self) -> ProcessIdentity {
        self.identity
    }

    /// Ask for `request` with the descriptors that its text names, and wait for the answer. Calls
    /// are done in the order in which they are made.
    pub async fn request(
        &self,
        request: Request,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Reply, VmmError> {
        let (answer, answered) = oneshot::channel();
        let call = Call {
            request,
            descriptors,
            answer,
        };
        if self.calls.send(call).is_err() {
            return Err(VmmError::Ended(self.wait_for_end().await));
        }
        match answered.await {
            Ok(answer) => answer,
            Err(_) => Err(VmmError::Ended(self.wait_for_end().await)),
        }
    }

    /// As [`Vmm::request`], for requests that are only [`Reply::Done`].
    pub async fn order(&self, request: Request, descriptors: Vec<OwnedFd>) -> Result<(), VmmError> {
        match self.request(request, descriptors).await? {
            Reply::Done => Ok(()),
            _ => Err(VmmError::OutOfTurn),
        }
    }

    /// Its counters.
    pub async fn statistics(&self) -> Result<Statistics, VmmError> {
        match self.request(Request::Statistics, Vec::new()).await? {
            Reply::Statistics(statistics) => Ok(statistics),
            _ => Err(VmmError::OutOfTurn),
        }
    }

    /// Kill it. [`Vmm::wait_for_end`] tells when that is done.
    pub fn kill(&self) {
        self.killed.store(true, Ordering::Relaxed);
        // Fails only when it has ended.
        let _ = pidfd_send_signal(&*self.pidfd, Signal::KILL);
    }

    /// Whether it has ended and this shim has not killed it.
    pub fn ended_by_itself(&self) -> bool {
        self.ended.borrow().is_some() && !self.killed.load(Ordering::Relaxed)
    }

    /// Why it has ended, if it has.
    pub fn end(&self) -> Option<String> {
        self.ended.borrow().clone()
    }

    /// Wait until the process has ended and been reaped; returns why, in words.
    pub async fn wait_for_end(&self) -> String {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            Err(_) => "its driver was dropped".to_owned(),
        }
    }

    /// The last lines that the guest has printed on its console.
    pub fn last_words(&self) -> String {
        self.console
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .last_lines(LAST_WORDS)
    }
}

/// The channel as something to poll.
struct Source(Owner);

#[allow(unsafe_code)]
// SAFETY: the owner keeps its channel, and the channel its socket, until it is dropped.
unsafe impl OneDescriptor for Source {}

impl AsRawFd for Source {
    fn as_raw_fd(&self) -> RawFd {
        self.0.channel().as_fd().as_raw_fd()
    }
}

/// Moves messages between the channel and whoever asks. One request is outstanding at most.
struct Driver {
    channel: AsyncFd<Source>,
    calls: mpsc::UnboundedReceiver<Call>,
    waiting: Option<oneshot::Sender<Result<Reply, VmmError>>>,
    exit: Option<GuestExit>,
    console: Arc<Mutex<Console>>,
}

impl Driver {
    async fn run(mut self, pidfd: Arc<OwnedFd>, ended: watch::Sender<Option<String>>) {
        let broken = self.serve().await;
        // What does not speak any more must not go on either.
        let _ = pidfd_send_signal(&*pidfd, Signal::KILL);
        let status = match reap(&pidfd).await {
            Ok(status) => status,
            Err(error) => format!("waiting for it: {error}"),
        };
        // A panic ends a guest by a reset or a triple fault, whichever way its kernel takes.
        let panic = self.console.lock();
        let panic = panic.unwrap_or_else(PoisonError::into_inner).panic();
        let reason = match (self.exit.take(), panic, broken) {
            (Some(GuestExit::Reset | GuestExit::Shutdown), Some(words), _) => {
                format!("kernel panic in the guest: {words}")
            }
            (Some(GuestExit::Reset), None, _) => "the guest reset itself".to_owned(),
            (Some(GuestExit::Shutdown), None, _) => "triple fault of the guest".to_owned(),
            (Some(GuestExit::Failed(words)), _, _) => words,
            (None, _, Some(error)) => error.to_string(),
            (None, _, None) => format!("thaw-vmm {status}"),
        };
        // Nobody listens any more when the sandbox is gone.
        let _ = ended.send(Some(reason));
    }

    /// Until the VMM closes its end, or says what is no message.
    async fn serve(&mut self) -> Option<ChannelError> {
        loop {
            tokio::select! {
                ready = self.channel.readable() => match ready {
                    Ok(mut ready) => match receive(
                        &ready.get_inner().0,
                        &mut self.waiting,
                        &mut self.exit,
                        &self.console,
                    ) {
                        Ok(Round::Drained) => ready.clear_ready(),
                        Ok(Round::Share) => tokio::task::yield_now().await,
                        Ok(Round::Closed) => return None,
                        Err(error) => return Some(error),
                    },
                    Err(source) => return Some(ChannelError::System { doing: "polling", source }),
                },
                Some(call) = self.calls.recv(), if self.waiting.is_none() => {
                    let descriptors: Vec<_> = call.descriptors.iter().map(AsFd::as_fd).collect();
                    match self.channel.get_ref().0.channel().send(&call.request, &descriptors) {
                        Ok(()) => self.waiting = Some(call.answer),
                        Err(ChannelError::Closed) => {}
                        Err(error) => {
                            // Nobody waits any more where this fails.
                            let _ = call.answer.send(Err(VmmError::Refused(error.to_string())));
                        }
                    }
                }
            }
        }
    }
}

/// Most messages that are taken before others get their turn: a guest that floods its console must
/// not keep the shim from answering containerd.
const SHARE: usize = 64;

/// How taking messages has ended.
#[derive(Debug, PartialEq, Eq)]
enum Round {
    /// There are no more now.
    Drained,
    /// There may be more.
    Share,
    /// The other end is closed.
    Closed,
}

/// Take the messages that are there, up to a share.
fn receive(
    owner: &Owner,
    waiting: &mut Option<oneshot::Sender<Result<Reply, VmmError>>>,
    exit: &mut Option<GuestExit>,
    console: &Mutex<Console>,
) -> Result<Round, ChannelError> {
    for _ in 0..SHARE {
        match owner.channel().try_receive::<FromVmm>() {
            Ok(Some((FromVmm::Reply(reply), _))) => {
                let Some(answer) = waiting.take() else {
                    return Err(ChannelError::OutOfTurn("a reply"));
                };
                let result = match reply {
                    Reply::Failed(words) => Err(VmmError::Refused(words)),
                    reply => Ok(reply),
                };
                let _ = answer.send(result);
            }
            Ok(Some((FromVmm::Event(Event::Console(bytes)), _))) => {
                console
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(&bytes);
            }
            Ok(Some((FromVmm::Event(Event::GuestExit(how)), _))) => {
                let last = console.lock().unwrap_or_else(PoisonError::into_inner);
                error!(
                    ?how,
                    console = last.last_lines(LAST_WORDS),
                    "the guest is gone"
                );
                *exit = Some(how);
            }
            Ok(None) => return Ok(Round::Closed),
            Err(ChannelError::WouldBlock) => return Ok(Round::Drained),
            Err(error) => {
                warn!(%error, "the VMM is given up");
                return Err(error);
            }
        }
    }
    Ok(Round::Share)
}

/// Wait until the process of `pidfd`, a child, has ended; take its status, and say it in words.
pub async fn reap(pidfd: &OwnedFd) -> io::Result<String> {
    register(pidfd.as_fd(), Interest::READABLE)?
        .readable()
        .await?
        .retain_ready();
    let status = waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED)?;
    Ok(match status {
        Some(status) => match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => format!("exited with status {code}"),
            (_, Some(signal)) => format!("was killed by signal {signal}"),
            _ => "ended".to_owned(),
        },
        None => "ended".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::process::{Child, Command};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use thaw_vmm_control::Channel;

    use super::*;

    /// A process in a VMM's place, with the VMM's end of the channel in the test's hands.
    fn launched() -> (Launched, Channel, Child) {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id() as i32;
        let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        let (ours, theirs) = Channel::pair().unwrap();
        (
            Launched {
                pid,
                pidfd,
                owner: Owner::new(ours),
            },
            theirs,
            child,
        )
    }

    fn restoring() -> Request {
        Request::Restore {
            working_set: thaw_vmm_control::WorkingSet::default(),
        }
    }

    fn console(directory: &tempfile::TempDir) -> Console {
        Console::new(Some(directory.path().join("console.log")))
    }

    fn answer(vmm: &Channel, reply: Reply) -> Request {
        let (request, _) = vmm.receive::<Request>().unwrap().unwrap();
        vmm.send(&FromVmm::Reply(reply), &[]).unwrap();
        request
    }

    #[tokio::test]
    async fn test_requests_are_answered_in_order_between_events() {
        let directory = tempfile::tempdir().unwrap();
        let (launched, channel, _child) = launched();
        let vmm = Vmm::new(launched, console(&directory)).unwrap();
        let other = std::thread::spawn(move || {
            let hello = FromVmm::Event(Event::Console(b"hello\n".to_vec()));
            channel.send(&hello, &[]).unwrap();
            let first = answer(&channel, Reply::Done);
            let second = answer(&channel, Reply::Failed("no snapshot".into()));
            let third = answer(&channel, Reply::Statistics(Statistics::default()));
            (first, second, third, channel)
        });
        let file = tempfile::tempfile().unwrap();
        let (run, restore, statistics) = tokio::join!(
            vmm.order(Request::Run, Vec::new()),
            vmm.order(restoring(), vec![file.into()]),
            vmm.statistics(),
        );
        run.unwrap();
        assert_eq!(restore.unwrap_err().to_string(), "no snapshot");
        assert_eq!(statistics.unwrap(), Statistics::default());
        assert_eq!(vmm.last_words(), "hello");
        let (first, second, third, channel) = other.join().unwrap();
        assert_eq!(
            (first, second, third),
            (Request::Run, restoring(), Request::Statistics)
        );
        // A process that dies closes its end.
        vmm.kill();
        drop(channel);
        assert_eq!(vmm.wait_for_end().await, "thaw-vmm was killed by signal 9");
    }

    #[tokio::test]
    async fn test_a_dead_guest_answers_nothing_and_tells_why() {
        let directory = tempfile::tempdir().unwrap();
        let (launched, channel, _child) = launched();
        let vmm = Vmm::new(launched, console(&directory)).unwrap();
        let identity = vmm.identity();
        let pending = vmm.order(Request::Run, Vec::new());
        let end = async {
            let exit = FromVmm::Event(Event::GuestExit(GuestExit::Failed("KVM: no".into())));
            channel.send(&exit, &[]).unwrap();
            drop(channel);
        };
        let (result, ()) = tokio::join!(pending, end);
        assert_eq!(result.unwrap_err().to_string(), "the VM has ended: KVM: no");
        assert!(!identity.is_alive());
        let later = vmm.order(Request::Run, Vec::new()).await.unwrap_err();
        assert!(matches!(later, VmmError::Ended(_)));
    }

    #[test]
    fn test_a_flooded_console_leaves_others_their_turn() {
        let directory = tempfile::tempdir().unwrap();
        let (ours, theirs) = Channel::pair().unwrap();
        let (owner, console) = (Owner::new(ours), Mutex::new(console(&directory)));
        for _ in 0..SHARE + 1 {
            let line = FromVmm::Event(Event::Console(b"line\n".to_vec()));
            theirs.send(&line, &[]).unwrap();
        }
        let round = || receive(&owner, &mut None, &mut None, &console).unwrap();
        assert_eq!(round(), Round::Share);
        assert_eq!(round(), Round::Drained);
        drop(theirs);
        assert_eq!(round(), Round::Closed);
    }

    #[tokio::test]
    async fn test_a_vmm_that_talks_nonsense_is_killed() {
        let directory = tempfile::tempdir().unwrap();
        let (launched, channel, _child) = launched();
        let vmm = Vmm::new(launched, console(&directory)).unwrap();
        rustix::io::write(channel.as_fd(), &[0xff; 9]).unwrap();
        let reason = vmm.wait_for_end().await;
        assert!(reason.contains("no message"), "{reason}");
        assert!(!vmm.identity().is_alive());
    }
}
