//! The agent in the guest, as the shim calls it: one ttrpc connection over vsock.

use std::io;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::api::{
    CreateTaskRequest, CreateTaskResponse, DeleteRequest, DeleteResponse, ExecProcessRequest,
    KillRequest, PauseRequest, ResizePtyRequest, ResumeRequest, StartRequest, StartResponse,
    StatsRequest, StatsResponse, UpdateTaskRequest, WaitRequest, WaitResponse,
};
use protobuf::Message;
use protobuf::well_known_types::empty::Empty;
use thaw_agent_api::agent::{
    ConfigureRequest, ConfigureResponse, Event, EventsRequest, InfoRequest, InfoResponse,
    PluggableMemoryRequest, ProcessesRequest, ProcessesResponse,
};
use thaw_agent_api::agent_ttrpc::{OperatorClient, SandboxClient};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use ttrpc::asynchronous::{Client, ClientStreamReceiver, transport::Socket};

/// The name under which the agent serves containerd's Task service.
const TASK_SERVICE: &str = "containerd.task.v2.Task";

/// How long the agent may take to come up and configure the guest. Far more than it needs: a host
/// under load must not look like a broken guest.
const CONFIGURE_LIMIT: Duration = Duration::from_secs(30);

/// How long it may take to create a container or an exec, to the point before the program runs.
const CREATE_LIMIT: Duration = Duration::from_secs(60);

/// How long a signal may take to be sent. A guest that cannot do that is killed from outside.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// How long any other call may take.
const CALL_LIMIT: Duration = Duration::from_secs(10);

/// How many processes a guest makes at a time. Each takes a program of its own in there to be made: with
/// all of many at once, none would be ready within the limits above, and the streams of those that come
/// last would wait for longer than the agent keeps them.
const AT_ONCE: usize = 16;

/// What the agent says unasked.
pub type Events = ClientStreamReceiver<Event>;

/// A connection to the agent. Clones share it.
#[derive(Clone)]
pub struct Agent {
    client: Client,
    turns: Arc<Semaphore>,
}

/// Leave to have the guest make a process, until it is dropped.
#[derive(Debug)]
pub struct Turn {
    _permit: Option<OwnedSemaphorePermit>,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent").finish_non_exhaustive()
    }
}

impl Agent {
    /// The agent at the other end of `stream`.
    pub fn new(stream: StdUnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let stream = UnixStream::from_std(stream)?;
        Ok(Self {
            client: Client::new(Socket::new(stream)),
            turns: Arc::new(Semaphore::new(AT_ONCE)),
        })
    }

    /// Wait for a turn to register or start an exec. In the order in which they are asked for.
    pub async fn turn(&self) -> Turn {
        Turn {
            // Never closed.
            _permit: self.turns.clone().acquire_owned().await.ok(),
        }
    }

    /// Make the guest itself.
    pub async fn configure(&self, request: &ConfigureRequest) -> ttrpc::Result<ConfigureResponse> {
        let context = ttrpc::context::with_duration(CONFIGURE_LIMIT);
        SandboxClient::new(self.client.clone())
            .configure(context, request)
            .await
    }

    /// Ask what the guest is: whether it answers.
    pub async fn info(&self) -> ttrpc::Result<InfoResponse> {
        let context = ttrpc::context::with_duration(KILL_LIMIT);
        SandboxClient::new(self.client.clone())
            .info(context, &InfoRequest::new())
            .await
    }

    /// Say how much memory the guest may be given beside its class.
    pub async fn pluggable_memory(&self, bytes: u64) -> ttrpc::Result<()> {
        let context = ttrpc::context::with_duration(CALL_LIMIT);
        let request = PluggableMemoryRequest {
            bytes,
            ..Default::default()
        };
        SandboxClient::new(self.client.clone())
            .pluggable_memory(context, &request)
            .await
            .map(drop)
    }

    /// Listen to what the agent says unasked from now on.
    pub async fn events(&self) -> ttrpc::Result<Events> {
        let context = ttrpc::context::Context::default();
        SandboxClient::new(self.client.clone())
            .events(context, &EventsRequest::new())
            .await
    }

    /// The guest's processes, as it says.
    pub async fn processes(&self) -> ttrpc::Result<ProcessesResponse> {
        let context = ttrpc::context::with_duration(CALL_LIMIT);
        OperatorClient::new(self.client.clone())
            .processes(context, &ProcessesRequest::new())
            .await
    }

    /// Create a container.
    pub async fn create(&self, request: &CreateTaskRequest) -> ttrpc::Result<CreateTaskResponse> {
        self.call("Create", request, Some(CREATE_LIMIT)).await
    }

    /// Create an exec.
    pub async fn exec(&self, request: &ExecProcessRequest) -> ttrpc::Result<Empty> {
        self.call("Exec", request, Some(CREATE_LIMIT)).await
    }

    /// Start a container or an exec.
    pub async fn start(&self, request: &StartRequest) -> ttrpc::Result<StartResponse> {
        self.call("Start", request, Some(CREATE_LIMIT)).await
    }

    /// Wait for the end of a container or an exec, for as long as it takes.
    pub async fn wait(&self, request: &WaitRequest) -> ttrpc::Result<WaitResponse> {
        self.call("Wait", request, None).await
    }

    /// Send a signal.
    pub async fn kill(&self, request: &KillRequest) -> ttrpc::Result<Empty> {
        self.call("Kill", request, Some(KILL_LIMIT)).await
    }

    /// Forget an exec that has ended.
    pub async fn delete(&self, request: &DeleteRequest) -> ttrpc::Result<DeleteResponse> {
        self.call("Delete", request, Some(CALL_LIMIT)).await
    }

    /// Freeze a container.
    pub async fn pause(&self, request: &PauseRequest) -> ttrpc::Result<Empty> {
        self.call("Pause", request, Some(CALL_LIMIT)).await
    }

    /// Thaw a container.
    pub async fn resume(&self, request: &ResumeRequest) -> ttrpc::Result<Empty> {
        self.call("Resume", request, Some(CALL_LIMIT)).await
    }

    /// Set the size of a terminal.
    pub async fn resize_pty(&self, request: &ResizePtyRequest) -> ttrpc::Result<Empty> {
        self.call("ResizePty", request, Some(CALL_LIMIT)).await
    }

    /// Change limits.
    pub async fn update(&self, request: &UpdateTaskRequest) -> ttrpc::Result<Empty> {
        self.call("Update", request, Some(CALL_LIMIT)).await
    }

    /// Read counters.
    pub async fn stats(&self, request: &StatsRequest) -> ttrpc::Result<StatsResponse> {
        self.call("Stats", request, Some(CALL_LIMIT)).await
    }

    /// One call of the Task service. The generated client is not used because it has the v3 name
    /// built in; the messages are those of both.
    async fn call<Answer: Message>(
        &self,
        method: &str,
        request: &impl Message,
        limit: Option<Duration>,
    ) -> ttrpc::Result<Answer> {
        let encoding = |error: protobuf::Error| ttrpc::Error::Others(format!("{method}: {error}"));
        let mut envelope = ttrpc::Request::new();
        envelope.service = TASK_SERVICE.to_owned();
        envelope.method = method.to_owned();
        envelope.timeout_nano = limit.map_or(0, |limit| limit.as_nanos() as i64);
        envelope.payload = request.write_to_bytes().map_err(encoding)?;
        let answer = self.client.request(envelope).await?;
        Answer::parse_from_bytes(&answer.payload).map_err(encoding)
    }
}
