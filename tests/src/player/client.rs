//! containerd as the client of a shim: the task service of either version, over its socket.

use std::fmt;
use std::net::Shutdown;
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest,
    PauseRequest, PidsRequest, PidsResponse, ResizePtyRequest, ResumeRequest, ShutdownRequest,
    StartRequest, StartResponse, StateRequest, StateResponse, StatsRequest, StatsResponse,
    UpdateTaskRequest, WaitRequest, WaitResponse,
};
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use ttrpc::{Client, Code, Error};

use crate::testbed::LIMIT;

/// A version of the task service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// Of containerd 1.6 and 1.7, and of a bare address.
    V2,
    /// Of containerd 2.0 and later.
    V3,
}

impl Api {
    fn service(self) -> &'static str {
        match self {
            Self::V2 => "containerd.task.v2.Task",
            Self::V3 => "containerd.task.v3.Task",
        }
    }
}

/// Why a call has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallError {
    /// The shim has refused it.
    Refused {
        /// The code that containerd acts on.
        code: Code,
        /// What the user reads.
        text: String,
    },
    /// The connection broke, or nothing came in time.
    Broken(String),
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { code, text } => write!(f, "{code:?}: {text}"),
            Self::Broken(reason) => write!(f, "no answer: {reason}"),
        }
    }
}

impl CallError {
    /// The code of a refusal.
    ///
    /// # Panics
    ///
    /// When it is none.
    #[track_caller]
    pub fn code(&self) -> Code {
        match self {
            Self::Refused { code, .. } => *code,
            Self::Broken(reason) => panic!("not refused, but {reason}"),
        }
    }
}

impl From<Error> for CallError {
    fn from(error: Error) -> Self {
        match error {
            Error::RpcStatus(status) => Self::Refused {
                code: status.code(),
                text: status.message,
            },
            other => Self::Broken(other.to_string()),
        }
    }
}

/// The answer to a call.
pub type Called<Answer> = Result<Answer, CallError>;

/// A connection to a shim. Clones share it; calls may be made at the same time.
#[derive(Clone)]
pub struct Task {
    client: Client,
    /// The connection itself, to break it.
    stream: Arc<UnixStream>,
    api: Api,
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task")
            .field("api", &self.api)
            .finish_non_exhaustive()
    }
}

impl Task {
    /// Connects to the shim that serves at `socket`.
    ///
    /// # Panics
    ///
    /// When nobody serves there.
    #[track_caller]
    pub fn connect_to(socket: &Path, api: Api) -> Self {
        let failed = |error: &dyn fmt::Display| -> ! {
            panic!("connecting to {}: {error}", socket.display())
        };
        let stream = UnixStream::connect(socket).unwrap_or_else(|error| failed(&error));
        let own = stream.try_clone().unwrap_or_else(|error| failed(&error));
        // The client closes what it is given.
        match Client::new(own.into_raw_fd()) {
            Ok(client) => Self {
                client,
                stream: Arc::new(stream),
                api,
            },
            Err(error) => failed(&error),
        }
    }

    /// Breaks the connection, with all calls that wait for an answer on it.
    pub fn hang_up(&self) {
        // Broken already where this fails.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// The same connection, speaking another version.
    pub fn with(&self, api: Api) -> Self {
        Self {
            api,
            ..self.clone()
        }
    }

    /// Calls `method` of the task service.
    pub fn call<Answer: Message>(&self, method: &str, request: &impl Message) -> Called<Answer> {
        self.call_service(self.api.service(), method, request)
    }

    /// Calls `method` of any `service`.
    pub fn call_service<Answer: Message>(
        &self,
        service: &str,
        method: &str,
        request: &impl Message,
    ) -> Called<Answer> {
        let mut envelope = ttrpc::Request::new();
        service.clone_into(&mut envelope.service);
        method.clone_into(&mut envelope.method);
        envelope.timeout_nano = LIMIT.as_nanos() as i64;
        let broken = |error: containerd_shim_protos::protobuf::Error| {
            CallError::Broken(format!("{method}: {error}"))
        };
        envelope.payload = request.write_to_bytes().map_err(broken)?;
        let response = self.client.request(envelope)?;
        Answer::parse_from_bytes(&response.payload).map_err(broken)
    }

    /// Create.
    pub fn create(&self, request: &CreateTaskRequest) -> Called<CreateTaskResponse> {
        self.call("Create", request)
    }

    /// Start, of the container without an `exec_id`.
    pub fn start(&self, id: &str, exec_id: &str) -> Called<StartResponse> {
        let request = StartRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..StartRequest::default()
        };
        self.call("Start", &request)
    }

    /// Exec.
    pub fn exec(&self, request: &ExecProcessRequest) -> Called<Empty> {
        self.call("Exec", request)
    }

    /// Kill, of one process.
    pub fn kill(&self, id: &str, exec_id: &str, signal: u32) -> Called<Empty> {
        let request = KillRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            signal,
            ..KillRequest::default()
        };
        self.call("Kill", &request)
    }

    /// Kill, of all processes of a container.
    pub fn kill_all(&self, id: &str, signal: u32) -> Called<Empty> {
        let request = KillRequest {
            id: id.to_owned(),
            signal,
            all: true,
            ..KillRequest::default()
        };
        self.call("Kill", &request)
    }

    /// Wait, until it has ended.
    pub fn wait(&self, id: &str, exec_id: &str) -> Called<WaitResponse> {
        let request = WaitRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..WaitRequest::default()
        };
        self.call("Wait", &request)
    }

    /// State.
    pub fn state(&self, id: &str, exec_id: &str) -> Called<StateResponse> {
        let request = StateRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..StateRequest::default()
        };
        self.call("State", &request)
    }

    /// Delete.
    pub fn delete(&self, id: &str, exec_id: &str) -> Called<DeleteResponse> {
        let request = DeleteRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..DeleteRequest::default()
        };
        self.call("Delete", &request)
    }

    /// Pids.
    pub fn pids(&self, id: &str) -> Called<PidsResponse> {
        let request = PidsRequest {
            id: id.to_owned(),
            ..PidsRequest::default()
        };
        self.call("Pids", &request)
    }

    /// Connect.
    pub fn connect(&self, id: &str) -> Called<ConnectResponse> {
        let request = ConnectRequest {
            id: id.to_owned(),
            ..ConnectRequest::default()
        };
        self.call("Connect", &request)
    }

    /// Shutdown.
    pub fn shutdown(&self, id: &str) -> Called<Empty> {
        let request = ShutdownRequest {
            id: id.to_owned(),
            ..ShutdownRequest::default()
        };
        self.call("Shutdown", &request)
    }

    /// Pause.
    pub fn pause(&self, id: &str) -> Called<Empty> {
        let request = PauseRequest {
            id: id.to_owned(),
            ..PauseRequest::default()
        };
        self.call("Pause", &request)
    }

    /// Resume.
    pub fn resume(&self, id: &str) -> Called<Empty> {
        let request = ResumeRequest {
            id: id.to_owned(),
            ..ResumeRequest::default()
        };
        self.call("Resume", &request)
    }

    /// CloseIO, of standard input.
    pub fn close_stdin(&self, id: &str, exec_id: &str) -> Called<Empty> {
        let request = CloseIORequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            stdin: true,
            ..CloseIORequest::default()
        };
        self.call("CloseIO", &request)
    }

    /// ResizePty.
    pub fn resize(&self, id: &str, exec_id: &str, (width, height): (u32, u32)) -> Called<Empty> {
        let request = ResizePtyRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            width,
            height,
            ..ResizePtyRequest::default()
        };
        self.call("ResizePty", &request)
    }

    /// Update.
    pub fn update(&self, id: &str, resources: Any) -> Called<Empty> {
        let request = UpdateTaskRequest {
            id: id.to_owned(),
            resources: Some(resources).into(),
            ..UpdateTaskRequest::default()
        };
        self.call("Update", &request)
    }

    /// Stats.
    pub fn stats(&self, id: &str) -> Called<StatsResponse> {
        let request = StatsRequest {
            id: id.to_owned(),
            ..StatsRequest::default()
        };
        self.call("Stats", &request)
    }

    /// Checkpoint.
    pub fn checkpoint(&self, id: &str) -> Called<Empty> {
        let request = CheckpointTaskRequest {
            id: id.to_owned(),
            path: "/tmp/checkpoint".to_owned(),
            ..CheckpointTaskRequest::default()
        };
        self.call("Checkpoint", &request)
    }
}

/// JSON of a type of the runtime specification, `opencontainers/runtime-spec/1/NAME`, as containerd
/// packs it.
pub fn any(name: &str, value: &serde_json::Value) -> Any {
    Any {
        type_url: format!("types.containerd.io/opencontainers/runtime-spec/1/{name}"),
        value: value.to_string().into_bytes(),
        ..Any::default()
    }
}
