//! The others that a sandbox has to do with, played: the VMM, the agent in the guest, and containerd.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use containerd_shim_protos::api::{
    CreateTaskRequest, CreateTaskResponse, DeleteRequest, DeleteResponse, Empty,
    ExecProcessRequest, KillRequest, PauseRequest, ResumeRequest, StartRequest, StartResponse,
    StatsRequest, StatsResponse, WaitRequest, WaitResponse,
};
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::shim_async::{Events, Task, create_events, create_task};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use thaw_agent_api::agent::{
    ConfigureRequest, ConfigureResponse, Disk, DiskNumbers, Event, EventsRequest, InfoRequest,
    InfoResponse, OutOfMemory, QuiesceRequest, QuiesceResponse,
};
use thaw_agent_api::agent_ttrpc::{self, create_sandbox};
use thaw_agent_api::{CONTROL_PORT, StreamHeader, parse_stream_uri};
use thaw_vmm_control::{Channel, FromVmm, Launched, Owner, Phase, Reply, Request, Statistics};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use ttrpc::asynchronous::{Server, TtrpcContext};
use ttrpc::{Code, get_status};

/// The type of the counters that the played agent tells.
pub const COUNTERS: &str = "played.Counters";

/// A connection that the VMM was told to make, by port.
type Connection = (u32, OwnedFd);

/// What a played VMM was asked for.
pub type Requests = Arc<Mutex<Vec<Request>>>;

/// A VMM that does as it is told, as a process that only sleeps. It closes its end of the channel
/// when that process ends.
pub fn vmm() -> (Launched, mpsc::UnboundedReceiver<Connection>, Requests) {
    let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
    let pid = child.id() as i32;
    let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    let (ours, theirs) = Channel::pair().unwrap();
    let theirs = Arc::new(theirs);
    let (connections, connected) = mpsc::unbounded_channel();
    let serving = theirs.clone();
    let requests = Requests::default();
    let noted = requests.clone();
    std::thread::spawn(move || serve_control(&serving, &connections, &noted));
    std::thread::spawn(move || {
        // Reaped by its owner: here only the end is waited for.
        let descriptor = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        let mut poll = [rustix::event::PollFd::new(
            &descriptor,
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut poll, None).unwrap();
        rustix::net::shutdown(&*theirs, rustix::net::Shutdown::Both).unwrap();
        let _ = child.try_wait();
    });
    (
        Launched {
            pid,
            pidfd,
            owner: Owner::new(ours),
        },
        connected,
        requests,
    )
}

fn serve_control(
    channel: &Channel,
    connections: &mpsc::UnboundedSender<Connection>,
    requests: &Requests,
) {
    while let Ok(Some((request, mut descriptors))) = channel.receive::<Request>() {
        requests.lock().unwrap().push(request.clone());
        let reply = match request {
            Request::ConnectVsock { port } => {
                let _ = connections.send((port, descriptors.remove(0)));
                Reply::Done
            }
            Request::Statistics => Reply::Statistics(Statistics {
                phases: vec![Phase {
                    name: "first vCPU".into(),
                    monotonic_ns: 1,
                }],
                ..Statistics::default()
            }),
            _ => Reply::Done,
        };
        if channel.send(&FromVmm::Reply(reply), &[]).is_err() {
            return;
        }
    }
}

/// What the played agent has been told, and what it is to do.
#[derive(Default)]
pub struct Agent {
    /// Received requests, by name, in order.
    pub calls: Mutex<Vec<String>>,
    /// The options of Create: the spec.
    pub spec: Mutex<serde_json::Value>,
    /// What Configure said.
    pub configured: Mutex<Option<ConfigureRequest>>,
    /// The answer to Create when it is not to succeed.
    pub refuse_create: Mutex<Option<(Code, &'static str)>>,
    /// The process ends before its Start is answered.
    pub ends_at_once: Mutex<bool>,
    /// Kill is answered and not done.
    pub spares: Mutex<bool>,
    /// Containers in which the kernel kills for memory, told to whoever listens.
    pub memory_kills: watch::Sender<Vec<&'static str>>,
    /// By container and exec.
    processes: Mutex<HashMap<(String, String), Arc<PlayedProcess>>>,
    streams: Mutex<HashMap<u64, StdUnixStream>>,
    arrived: watch::Sender<usize>,
}

struct PlayedProcess {
    uris: [String; 3],
    status: watch::Sender<Option<u32>>,
}

impl Agent {
    /// Serve on the connections that the VMM makes.
    pub fn serve(
        self: &Arc<Self>,
        directory: &Path,
        mut made: mpsc::UnboundedReceiver<Connection>,
    ) {
        let path = directory.join("agent");
        let mut server = Server::new()
            .bind(&format!("unix://{}", path.display()))
            .unwrap()
            .register_service(create_sandbox(Arc::new(Service(self.clone()))))
            .register_service(named_v2(create_task(Arc::new(Service(self.clone())))));
        let agent = self.clone();
        tokio::spawn(async move {
            server.start().await.unwrap();
            while let Some((port, descriptor)) = made.recv().await {
                let stream = StdUnixStream::from(descriptor);
                if port == CONTROL_PORT {
                    stream.set_nonblocking(true).unwrap();
                    let mut stream = UnixStream::from_std(stream).unwrap();
                    let mut inner = UnixStream::connect(&path).await.unwrap();
                    tokio::spawn(async move {
                        let _ = tokio::io::copy_bidirectional(&mut stream, &mut inner).await;
                    });
                } else {
                    agent.take_stream(stream);
                }
            }
        });
    }

    fn take_stream(&self, mut stream: StdUnixStream) {
        let mut header = [0; StreamHeader::LENGTH];
        std::io::Read::read_exact(&mut stream, &mut header).unwrap();
        let id = StreamHeader::decode(header).unwrap().id;
        let mut streams = self.streams.lock().unwrap();
        streams.insert(id, stream);
        self.arrived.send_replace(streams.len());
    }

    /// Stream `index` of a process of the first container, 0 to 2, once it is connected.
    pub async fn stream(&self, exec_id: &str, index: usize) -> UnixStream {
        self.stream_in("web", exec_id, index).await
    }

    async fn stream_in(&self, id: &str, exec_id: &str, index: usize) -> UnixStream {
        let uri = self.process(id, exec_id).uris[index].clone();
        let id = parse_stream_uri(&uri).unwrap().unwrap();
        let mut arrived = self.arrived.subscribe();
        loop {
            if let Some(stream) = self.streams.lock().unwrap().remove(&id) {
                stream.set_nonblocking(true).unwrap();
                return UnixStream::from_std(stream).unwrap();
            }
            arrived.changed().await.unwrap();
        }
    }

    /// A process of the first container writes its last words and ends, as the real agent does it:
    /// streams first.
    pub async fn end(&self, exec_id: &str, words: &str, status: u32) {
        self.end_in("web", exec_id, words, status).await;
    }

    /// The same of any container, by its name in the guest.
    pub async fn end_in(&self, id: &str, exec_id: &str, words: &str, status: u32) {
        for index in [1, 2] {
            if !self.process(id, exec_id).uris[index].is_empty() {
                let mut stream = self.stream_in(id, exec_id, index).await;
                stream.write_all(words.as_bytes()).await.unwrap();
                stream.shutdown().await.unwrap();
            }
        }
        let process = self.process(id, exec_id);
        process.status.send_replace(Some(status));
    }

    /// The VM is gone, and with it its ends of all connections.
    pub fn vanish(&self) {
        self.streams.lock().unwrap().clear();
    }

    /// What a process has got on its standard input, up to the end of it.
    pub async fn input(&self, exec_id: &str) -> String {
        let mut text = String::new();
        self.stream(exec_id, 0)
            .await
            .read_to_string(&mut text)
            .await
            .unwrap();
        text
    }

    fn process(&self, id: &str, exec_id: &str) -> Arc<PlayedProcess> {
        self.processes.lock().unwrap()[&(id.to_owned(), exec_id.to_owned())].clone()
    }

    fn add(&self, id: &str, exec_id: &str, uris: [String; 3]) {
        let process = PlayedProcess {
            uris,
            status: watch::Sender::new(None),
        };
        self.processes
            .lock()
            .unwrap()
            .insert((id.to_owned(), exec_id.to_owned()), Arc::new(process));
    }

    fn note(&self, call: impl Into<String>) {
        self.calls.lock().unwrap().push(call.into());
    }
}

/// The agent serves the Task service under the name of version 2.
fn named_v2(
    services: HashMap<String, ttrpc::asynchronous::Service>,
) -> HashMap<String, ttrpc::asynchronous::Service> {
    services
        .into_values()
        .map(|service| ("containerd.task.v2.Task".to_owned(), service))
        .collect()
}

struct Service(Arc<Agent>);

#[async_trait]
impl agent_ttrpc::Sandbox for Service {
    async fn configure(
        &self,
        _: &TtrpcContext,
        request: ConfigureRequest,
    ) -> ttrpc::Result<ConfigureResponse> {
        self.0.note("Configure");
        let numbers = |disk: &Disk| DiskNumbers {
            major: 254,
            minor: 16 * disk.slot,
            ..DiskNumbers::default()
        };
        let disks = request.disks.iter().map(numbers).collect();
        *self.0.configured.lock().unwrap() = Some(request);
        Ok(ConfigureResponse {
            disks,
            ..ConfigureResponse::default()
        })
    }

    async fn info(&self, _: &TtrpcContext, _: InfoRequest) -> ttrpc::Result<InfoResponse> {
        Ok(InfoResponse::new())
    }

    async fn quiesce(&self, _: &TtrpcContext, _: QuiesceRequest) -> ttrpc::Result<QuiesceResponse> {
        Ok(QuiesceResponse::new())
    }

    async fn events(
        &self,
        _: &TtrpcContext,
        _: EventsRequest,
        stream: ttrpc::r#async::ServerStreamSender<Event>,
    ) -> ttrpc::Result<()> {
        let mut kills = self.0.memory_kills.subscribe();
        while kills.changed().await.is_ok() {
            let ids = kills.borrow_and_update().clone();
            for id in ids {
                let mut event = Event::new();
                event.set_out_of_memory(OutOfMemory {
                    container_id: id.into(),
                    ..OutOfMemory::default()
                });
                stream.send(&event).await?;
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Task for Service {
    async fn create(
        &self,
        _: &TtrpcContext,
        request: CreateTaskRequest,
    ) -> ttrpc::Result<CreateTaskResponse> {
        self.0.note("Create");
        if let Some((code, text)) = *self.0.refuse_create.lock().unwrap() {
            return Err(ttrpc::Error::RpcStatus(get_status(code, text)));
        }
        *self.0.spec.lock().unwrap() = serde_json::from_slice(&request.options.value).unwrap();
        let uris = [request.stdin, request.stdout, request.stderr];
        self.0.add(&request.id, "", uris);
        Ok(CreateTaskResponse {
            pid: 40,
            ..CreateTaskResponse::default()
        })
    }

    async fn exec(&self, _: &TtrpcContext, request: ExecProcessRequest) -> ttrpc::Result<Empty> {
        self.0.note("Exec");
        let uris = [request.stdin, request.stdout, request.stderr];
        self.0.add(&request.id, &request.exec_id, uris);
        Ok(Empty::new())
    }

    async fn start(&self, _: &TtrpcContext, request: StartRequest) -> ttrpc::Result<StartResponse> {
        self.0.note("Start");
        let at_once = *self.0.ends_at_once.lock().unwrap();
        if at_once {
            self.0
                .end_in(&request.id, &request.exec_id, "gone", 7)
                .await;
            // Long enough for whoever waits to have been told.
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        Ok(StartResponse {
            pid: 41,
            ..StartResponse::default()
        })
    }

    async fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> ttrpc::Result<WaitResponse> {
        let process = self.0.process(&request.id, &request.exec_id);
        let mut status = process.status.subscribe();
        let status = status.wait_for(Option::is_some).await.unwrap().unwrap();
        Ok(WaitResponse {
            exit_status: status,
            ..WaitResponse::default()
        })
    }

    async fn kill(&self, _: &TtrpcContext, request: KillRequest) -> ttrpc::Result<Empty> {
        self.0
            .note(format!("Kill {} all={}", request.signal, request.all));
        if !*self.0.spares.lock().unwrap() {
            let agent = self.0.clone();
            let status = 128 + request.signal;
            tokio::spawn(async move {
                agent
                    .end_in(&request.id, &request.exec_id, "", status)
                    .await;
            });
        }
        Ok(Empty::new())
    }

    async fn pause(&self, _: &TtrpcContext, _: PauseRequest) -> ttrpc::Result<Empty> {
        self.0.note("Pause");
        Ok(Empty::new())
    }

    async fn resume(&self, _: &TtrpcContext, _: ResumeRequest) -> ttrpc::Result<Empty> {
        self.0.note("Resume");
        Ok(Empty::new())
    }

    async fn stats(&self, _: &TtrpcContext, _: StatsRequest) -> ttrpc::Result<StatsResponse> {
        self.0.note("Stats");
        let mut counters = StatsResponse::new();
        counters.stats.mut_or_insert_default().type_url = COUNTERS.into();
        Ok(counters)
    }

    async fn delete(
        &self,
        _: &TtrpcContext,
        request: DeleteRequest,
    ) -> ttrpc::Result<DeleteResponse> {
        self.0.note(match request.exec_id.as_str() {
            "" => format!("Delete {}", request.id),
            _ => "Delete".to_owned(),
        });
        Ok(DeleteResponse::new())
    }
}

/// containerd's events service: keeps `topic id` of what arrives.
pub struct Containerd {
    received: Arc<Mutex<Vec<String>>>,
    _server: Server,
}

struct EventsService(Arc<Mutex<Vec<String>>>);

#[async_trait]
impl Events for EventsService {
    async fn forward(&self, _: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
        use containerd_shim_protos::events::task::{TaskExit, TaskOOM};
        let envelope = request.envelope.unwrap();
        let mut text = envelope.topic.trim_start_matches("/tasks/").to_owned();
        if text == "oom" {
            let oom = TaskOOM::parse_from_bytes(&envelope.event.value).unwrap();
            text.push_str(&format!(" {}", oom.container_id));
        }
        if text == "exit" {
            let exit = TaskExit::parse_from_bytes(&envelope.event.value).unwrap();
            text.push_str(&format!(" {} {}", exit.id, exit.exit_status));
        }
        self.0.lock().unwrap().push(text);
        Ok(Empty::new())
    }
}

impl Containerd {
    /// Serve at `path`.
    pub async fn serve(path: &Path) -> Self {
        let received = Arc::new(Mutex::new(Vec::new()));
        let mut server = Server::new()
            .bind(&format!("unix://{}", path.display()))
            .unwrap()
            .register_service(create_events(Arc::new(EventsService(received.clone()))));
        server.start().await.unwrap();
        Self {
            received,
            _server: server,
        }
    }

    /// What has arrived so far.
    pub fn events(&self) -> Vec<String> {
        self.received.lock().unwrap().clone()
    }
}
