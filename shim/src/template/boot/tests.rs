//! The builder's part of the conversation, with a thread that plays the VMM and the guest.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Arc;
use std::thread;

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use thaw_agent_api::agent::{InfoRequest, InfoResponse, QuiesceResponse};
use thaw_agent_api::agent_ttrpc::{Sandbox, create_sandbox};
use thaw_vmm_control::{Channel, FromVmm, GuestExit, Owner, Statistics, TouchedPages};

use super::super::key::tests::inputs;
use super::*;

#[test]
fn test_ready_line_is_found_however_it_is_cut() {
    let text = "[    0.1] x\r\nlong line ".repeat(50) + "\n[1.0] " + READY_LINE;
    for size in [1, 2, 7, 64, text.len()] {
        let mut line = Vec::new();
        let mut chunks = text.as_bytes().chunks(size).peekable();
        while let Some(chunk) = chunks.next() {
            let found = found_line(&mut line, chunk, READY_LINE.as_bytes());
            assert_eq!(found, chunks.peek().is_none(), "chunks of {size}");
        }
    }
}

#[test]
fn test_ready_line_does_not_span_lines() {
    let mut line = Vec::new();
    let (a, b) = READY_LINE.split_at(5);
    let text = format!("{a}\n{b}\n");
    assert!(!found_line(
        &mut line,
        text.as_bytes(),
        READY_LINE.as_bytes()
    ));
}

/// How the played guest behaves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Plan {
    Good,
    PanicsAtBoot,
    VmmDiesAtBoot,
    RefusesConnection,
    RefusesQuiesce,
    SnapshotFails,
    CannotBeRestored,
    DoesNotAnswer,
    IsNotRecorded,
}

/// The VMM's end of a control channel.
struct Vmm {
    channel: Channel,
    plan: Plan,
}

struct Agent(Plan);

#[async_trait::async_trait]
impl Sandbox for Agent {
    async fn quiesce(
        &self,
        _: &ttrpc::r#async::TtrpcContext,
        _: QuiesceRequest,
    ) -> ttrpc::Result<QuiesceResponse> {
        match self.0 {
            Plan::RefusesQuiesce => Err(ttrpc::Error::RpcStatus(ttrpc::get_status(
                ttrpc::Code::INTERNAL,
                "caches stay",
            ))),
            _ => Ok(QuiesceResponse::new()),
        }
    }

    async fn info(
        &self,
        _: &ttrpc::r#async::TtrpcContext,
        _: InfoRequest,
    ) -> ttrpc::Result<InfoResponse> {
        Ok(InfoResponse::new())
    }
}

impl Vmm {
    fn expect(&self) -> (Request, Vec<OwnedFd>) {
        self.channel.receive().unwrap().unwrap()
    }

    fn send(&self, message: FromVmm) {
        self.channel.send(&message, &[]).unwrap();
    }

    fn say(&self, text: &str) {
        self.send(FromVmm::Event(Event::Console(text.as_bytes().to_vec())));
    }

    /// Counts exits until a guest that is still busy has come to rest; the request after that.
    fn come_to_rest(&self) -> (Request, Vec<OwnedFd>) {
        for exits in [5, 8, 9, 9] {
            let (request, _) = self.expect();
            assert_eq!(request, Request::Statistics, "at {exits} exits");
            let statistics = Statistics {
                kvm: vec![("pf_taken".to_owned(), 1), ("exits".to_owned(), exits)],
                ..Statistics::default()
            };
            self.send(FromVmm::Reply(Reply::Statistics(statistics)));
        }
        self.expect()
    }

    fn play(self) {
        let (request, images) = self.expect();
        assert!(matches!(&request, Request::Boot { shape, .. } if *shape == inputs().shape));
        assert_eq!(images.len(), 2);
        self.say("early words\n");
        self.send(FromVmm::Reply(Reply::Done));
        match self.plan {
            Plan::VmmDiesAtBoot => return,
            Plan::PanicsAtBoot => {
                self.say("Kernel panic - not syncing\n");
                self.send(FromVmm::Event(Event::GuestExit(GuestExit::Reset)));
                return;
            }
            _ => self.say(&format!("{READY_LINE}\n")),
        }

        let (request, mut descriptors) = self.expect();
        assert_eq!(request, Request::ConnectVsock { port: CONTROL_PORT });
        self.send(FromVmm::Reply(Reply::Done));
        let connection = UnixStream::from(descriptors.remove(0));
        if self.plan == Plan::RefusesConnection {
            drop(connection);
            // The owner goes away without another request.
            assert!(self.channel.receive::<Request>().unwrap().is_none());
            return;
        }
        // Ends when both sides have closed.
        serve(connection, self.plan);
        if self.plan == Plan::RefusesQuiesce {
            return;
        }

        let (request, files) = self.come_to_rest();
        assert_eq!(request, Request::Snapshot);
        if self.plan == Plan::SnapshotFails {
            let reason = "writing the memory file: No space left on device";
            self.send(FromVmm::Reply(Reply::Failed(reason.to_owned())));
            return;
        }
        for (file, text) in files.into_iter().zip(["state", "memory"]) {
            File::from(file).write_all_at(text.as_bytes(), 0).unwrap();
        }
        self.send(FromVmm::Reply(Reply::Done));
    }

    /// The other process, which restores the new template.
    fn play_rehearsal(self) {
        let (request, files) = self.expect();
        assert_eq!((request, files.len()), (Request::Rehearse, 3));
        for file in &files[..2] {
            let file = File::from(file.try_clone().unwrap());
            assert!(file.write_at(b"x", 0).is_err());
        }
        if self.plan == Plan::CannotBeRestored {
            let reason = "the template's memory is not a regular file";
            self.send(FromVmm::Reply(Reply::Failed(reason.to_owned())));
            return;
        }
        self.send(FromVmm::Reply(Reply::Done));
        assert_eq!(self.expect().0, Request::Run);
        self.send(FromVmm::Reply(Reply::Done));
        let (request, mut descriptors) = self.expect();
        assert_eq!(request, Request::ConnectVsock { port: CONTROL_PORT });
        self.send(FromVmm::Reply(Reply::Done));
        let connection = UnixStream::from(descriptors.remove(0));
        if self.plan == Plan::DoesNotAnswer {
            drop(connection);
            assert!(self.channel.receive::<Request>().unwrap().is_none());
            return;
        }
        serve(connection, self.plan);
        assert_eq!(self.expect().0, Request::WorkingSet);
        self.send(FromVmm::Reply(match self.plan {
            Plan::IsNotRecorded => Reply::Failed("userfaultfd: no".to_owned()),
            _ => Reply::WorkingSet(working_set()),
        }));
    }
}

/// What the played VMM has recorded.
fn working_set() -> WorkingSet {
    let pages = TouchedPages {
        first: 7,
        count: 2,
        written: false,
    };
    WorkingSet::new(vec![pages]).unwrap()
}

/// Serve the agent's interface on a connection until the peer closes it, then close it too.
fn serve(connection: UnixStream, plan: Plan) {
    let name = format!("thaw-test-{}-{}", std::process::id(), plan as u8);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let _guard = runtime.enter();
    let mut server = ttrpc::r#async::Server::new()
        .bind(&format!("unix://@{name}"))
        .unwrap()
        .register_service(create_sandbox(Arc::new(Agent(plan))));
    runtime.block_on(async {
        server.start().await.unwrap();
        let mut guest = tokio::net::UnixStream::connect(format!("\0{name}"))
            .await
            .unwrap();
        connection.set_nonblocking(true).unwrap();
        let mut host = tokio::net::UnixStream::from_std(connection).unwrap();
        // An error is the host's end closed without a half-close.
        let _ = tokio::io::copy_bidirectional(&mut host, &mut guest).await;
        drop((host, guest));
        server.shutdown().await.unwrap();
    });
}

/// A played VMM, watched as a real one; `use_it` ends it.
fn with_vmm<T>(
    plan: Plan,
    log: File,
    play: impl FnOnce(Vmm) + Send + 'static,
    use_it: impl FnOnce(Guest) -> T,
) -> T {
    let (ours, theirs) = Channel::pair().unwrap();
    // Stands for the VMM's process: it must be killed in the end.
    let mut process = Command::new("sleep").arg("60").spawn().unwrap();
    let pid = Pid::from_raw(process.id() as i32).unwrap();
    let launched = Launched {
        pid: process.id() as i32,
        pidfd: pidfd_open(pid, PidfdFlags::empty()).unwrap(),
        owner: Owner::new(ours),
    };
    let vmm = thread::spawn(move || {
        play(Vmm {
            channel: theirs,
            plan,
        })
    });
    let mut guest = Guest::watch(launched, inputs().shape, log).unwrap();
    guest.reporting = Duration::ZERO;
    let result = use_it(guest);
    vmm.join().unwrap();
    // Reaped already.
    assert!(process.try_wait().is_err());
    result
}

/// Build with a guest that behaves as planned; what came of it, and the two files' content.
fn build(plan: Plan) -> (Result<(), BuildError>, [String; 2]) {
    let mut log = tempfile::tempfile().unwrap();
    if plan == Plan::VmmDiesAtBoot {
        log.write_all(b"KVM_RUN: no\n").unwrap();
    }
    let (state, memory) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let image = tempfile::tempfile().unwrap();
    let result = with_vmm(plan, log, Vmm::play, |guest| {
        guest.become_template(&inputs(), [&image, &image], &state, &memory)
    });
    (
        result,
        [&state, &memory].map(|file| std::io::read_to_string(file).unwrap()),
    )
}

fn failure(plan: Plan) -> String {
    build(plan).0.unwrap_err().to_string()
}

#[test]
fn test_guest_boots_quiesces_and_is_snapshotted_without_a_connection() {
    let (result, files) = build(Plan::Good);
    result.unwrap();
    assert_eq!(files, ["state", "memory"]);
}

#[test]
fn test_guest_that_panics_is_told_with_its_last_words() {
    let error = failure(Plan::PanicsAtBoot);
    assert!(
        error.contains("booting the guest: the guest ended: Reset"),
        "{error}"
    );
    assert!(
        error.contains("early words | Kernel panic - not syncing"),
        "{error}"
    );
}

#[test]
fn test_vmm_that_dies_is_told_with_its_last_words() {
    let error = failure(Plan::VmmDiesAtBoot);
    assert!(
        error.contains("the VMM ended; the VMM says: KVM_RUN: no"),
        "{error}"
    );
}

#[test]
fn test_agent_that_does_not_listen_or_refuses_is_an_error() {
    let error = failure(Plan::RefusesConnection);
    assert!(
        error.starts_with("asking the guest's agent to quiesce"),
        "{error}"
    );
    let error = failure(Plan::RefusesQuiesce);
    assert!(error.contains("caches stay"), "{error}");
}

#[test]
fn test_snapshot_that_cannot_be_written_is_an_error_of_its_own() {
    assert!(matches!(
        build(Plan::SnapshotFails).0,
        Err(BuildError::Snapshot(reason)) if reason.contains("No space left")
    ));
}

/// Rehearse with a guest that behaves as planned.
fn rehearse(plan: Plan) -> Result<WorkingSet, BuildError> {
    let files = [(); 2].map(|()| {
        let file = tempfile::NamedTempFile::new().unwrap();
        File::open(file.path()).unwrap()
    });
    let log = tempfile::tempfile().unwrap();
    with_vmm(plan, log, Vmm::play_rehearsal, |guest| {
        guest.rehearse(&files)
    })
}

#[test]
fn test_rehearsal_finds_what_a_start_touches() {
    assert_eq!(rehearse(Plan::Good).unwrap(), working_set());
}

#[test]
fn test_host_that_cannot_record_has_an_empty_working_set() {
    assert!(rehearse(Plan::IsNotRecorded).unwrap().is_empty());
}

#[test]
fn test_template_whose_guest_does_not_come_back_is_an_error() {
    let error = rehearse(Plan::CannotBeRestored).unwrap_err().to_string();
    assert!(
        error.contains("restoring the new template: the template's memory"),
        "{error}"
    );
    let error = rehearse(Plan::DoesNotAnswer).unwrap_err().to_string();
    assert!(error.starts_with("restoring the new template"), "{error}");
}

#[test]
fn test_host_without_virtualisation_is_refused_at_once() {
    let mut inputs = inputs();
    inputs.host.kvm = KvmFlavour::None;
    let installation = Installation::expected_at(Path::new("/nonexistent"));
    let file = tempfile::tempfile().unwrap();
    let error = VmmBuilder::new(&installation, &Abandonment::default())
        .build(&inputs, &file, &file)
        .unwrap_err();
    assert!(error.to_string().contains("thaw doctor"), "{error}");
}
