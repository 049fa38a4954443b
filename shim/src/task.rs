//! containerd's Task service, versions 2 and 3, over one [`Sandbox`].
//!
//! What changes something runs in a task of its own: a client that goes away in the middle, which
//! ends the handler, must not leave a container half made. What is only asked is answered at once.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;

use async_trait::async_trait;
use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest,
    PauseRequest, PidsRequest, PidsResponse, ResizePtyRequest, ResumeRequest, ShutdownRequest,
    StartRequest, StartResponse, StateRequest, StateResponse, StatsRequest, StatsResponse,
    UpdateTaskRequest, WaitRequest, WaitResponse,
};
use containerd_shim_protos::shim_async::{Task, create_task};
use tracing::{debug, info};
use ttrpc::asynchronous::{Service, TtrpcContext};

use crate::error::TaskError;
use crate::sandbox::Sandbox;

/// The services for a ttrpc server: the one Task service under the names of both versions, whose
/// messages are the same.
pub fn services(sandbox: &Arc<Sandbox>) -> HashMap<String, Service> {
    let named = |name: &str| {
        let service = Arc::new(TaskService {
            sandbox: sandbox.clone(),
        });
        create_task(service)
            .into_values()
            .map(move |service| (name.to_owned(), service))
            .next()
    };
    ["containerd.task.v2.Task", "containerd.task.v3.Task"]
        .into_iter()
        .filter_map(named)
        .collect()
}

struct TaskService {
    sandbox: Arc<Sandbox>,
}

/// Run `work` to its end, whatever becomes of the connection.
async fn to_the_end<T: Send + 'static>(
    call: &'static str,
    work: impl Future<Output = Result<T, TaskError>> + Send + 'static,
) -> ttrpc::Result<T> {
    let result = match tokio::spawn(work).await {
        Ok(result) => result,
        Err(error) => Err(TaskError::Failed(format!("{call}: {error}"))),
    };
    result.map_err(|error| refused(call, error))
}

fn refused(call: &'static str, error: TaskError) -> ttrpc::Error {
    match error {
        // An everyday answer: clients ask to find out.
        TaskError::NotFound(_) => debug!(call, %error, "refused"),
        _ => info!(call, %error, "refused"),
    }
    error.into()
}

#[async_trait]
impl Task for TaskService {
    async fn create(
        &self,
        _: &TtrpcContext,
        request: CreateTaskRequest,
    ) -> ttrpc::Result<CreateTaskResponse> {
        debug!(id = request.id, "Create");
        // Never UNIMPLEMENTED: containerd takes that for a shim of an older version.
        let created = to_the_end("Create", self.sandbox.clone().create(request)).await;
        let pid = created.map_err(|error| match error {
            ttrpc::Error::RpcStatus(status) if status.code() == ttrpc::Code::UNIMPLEMENTED => {
                TaskError::Failed(status.message).into()
            }
            other => other,
        })?;
        Ok(CreateTaskResponse {
            pid,
            ..CreateTaskResponse::default()
        })
    }

    async fn start(&self, _: &TtrpcContext, request: StartRequest) -> ttrpc::Result<StartResponse> {
        debug!(id = request.id, exec = request.exec_id, "Start");
        let pid = to_the_end("Start", self.sandbox.clone().start(request)).await?;
        Ok(StartResponse {
            pid,
            ..StartResponse::default()
        })
    }

    async fn delete(
        &self,
        _: &TtrpcContext,
        request: DeleteRequest,
    ) -> ttrpc::Result<DeleteResponse> {
        debug!(id = request.id, exec = request.exec_id, "Delete");
        to_the_end("Delete", self.sandbox.clone().delete(request)).await
    }

    async fn exec(&self, _: &TtrpcContext, request: ExecProcessRequest) -> ttrpc::Result<Empty> {
        debug!(id = request.id, exec = request.exec_id, "Exec");
        to_the_end("Exec", self.sandbox.clone().exec(request)).await?;
        Ok(Empty::new())
    }

    async fn kill(&self, _: &TtrpcContext, request: KillRequest) -> ttrpc::Result<Empty> {
        debug!(
            id = request.id,
            exec = request.exec_id,
            signal = request.signal,
            "Kill"
        );
        let sandbox = self.sandbox.clone();
        to_the_end("Kill", async move { sandbox.kill(request).await }).await?;
        Ok(Empty::new())
    }

    async fn state(&self, _: &TtrpcContext, request: StateRequest) -> ttrpc::Result<StateResponse> {
        self.sandbox
            .state(&request)
            .map_err(|error| refused("State", error))
    }

    async fn pids(&self, _: &TtrpcContext, request: PidsRequest) -> ttrpc::Result<PidsResponse> {
        let processes = self
            .sandbox
            .pids(&request.id)
            .map_err(|error| refused("Pids", error))?;
        Ok(PidsResponse {
            processes,
            ..PidsResponse::default()
        })
    }

    async fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> ttrpc::Result<WaitResponse> {
        self.sandbox
            .wait(&request)
            .await
            .map_err(|error| refused("Wait", error))
    }

    async fn connect(
        &self,
        _: &TtrpcContext,
        request: ConnectRequest,
    ) -> ttrpc::Result<ConnectResponse> {
        // Never NOT_FOUND: containerd asks this to see whether the shim lives.
        let container = self.sandbox.container(&request.id).ok();
        Ok(ConnectResponse {
            shim_pid: std::process::id(),
            task_pid: container.map_or(0, |container| container.pid()),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..ConnectResponse::default()
        })
    }

    async fn close_io(&self, _: &TtrpcContext, request: CloseIORequest) -> ttrpc::Result<Empty> {
        self.sandbox
            .close_io(&request)
            .map_err(|error| refused("CloseIO", error))?;
        Ok(Empty::new())
    }

    async fn resize_pty(
        &self,
        _: &TtrpcContext,
        request: ResizePtyRequest,
    ) -> ttrpc::Result<Empty> {
        let sandbox = self.sandbox.clone();
        to_the_end(
            "ResizePty",
            async move { sandbox.resize_pty(request).await },
        )
        .await?;
        Ok(Empty::new())
    }

    async fn pause(&self, _: &TtrpcContext, request: PauseRequest) -> ttrpc::Result<Empty> {
        let sandbox = self.sandbox.clone();
        to_the_end("Pause", async move { sandbox.pause(&request.id).await }).await?;
        Ok(Empty::new())
    }

    async fn resume(&self, _: &TtrpcContext, request: ResumeRequest) -> ttrpc::Result<Empty> {
        let sandbox = self.sandbox.clone();
        to_the_end("Resume", async move { sandbox.resume(&request.id).await }).await?;
        Ok(Empty::new())
    }

    async fn update(&self, _: &TtrpcContext, request: UpdateTaskRequest) -> ttrpc::Result<Empty> {
        let sandbox = self.sandbox.clone();
        to_the_end("Update", async move { sandbox.update(request).await }).await?;
        Ok(Empty::new())
    }

    async fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> ttrpc::Result<StatsResponse> {
        let sandbox = self.sandbox.clone();
        to_the_end("Stats", async move { sandbox.stats(request).await }).await
    }

    async fn checkpoint(
        &self,
        _: &TtrpcContext,
        request: CheckpointTaskRequest,
    ) -> ttrpc::Result<Empty> {
        let text = format!("container {}: checkpoints are not supported", request.id);
        Err(refused("Checkpoint", TaskError::Unimplemented(text)))
    }

    async fn shutdown(&self, _: &TtrpcContext, request: ShutdownRequest) -> ttrpc::Result<Empty> {
        debug!(id = request.id, "Shutdown");
        self.sandbox.shut_down();
        Ok(Empty::new())
    }
}
