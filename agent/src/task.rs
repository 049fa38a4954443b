//! containerd's Task service on top of the engine.

use std::collections::HashMap;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use containerd_shim_protos::api;
use containerd_shim_protos::shim_async::{Task, create_task};
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::timestamp::Timestamp;
use protobuf::{EnumOrUnknown, MessageField};
use thaw_agent_api::{SHARE, SPEC_TYPE_URL};
use ttrpc::Code;
use ttrpc::asynchronous::{Service, TtrpcContext};

use crate::container::Container;
use crate::engine::{Engine, ProcessRequest};
use crate::process::{Outcome, Phase, Process};
use crate::stats;
use crate::status::Refusal;
use crate::volumes;

/// The second name under which the service is reached: the messages of version 3, whose name the
/// generated code uses, are those of version 2.
const NAME_V2: &str = "containerd.task.v2.Task";

/// Name of the interface's version, for Connect.
const VERSION: &str = "v2";

/// The service.
#[derive(Debug)]
pub struct TaskService {
    engine: Arc<Engine>,
}

impl TaskService {
    /// For registration with the server.
    pub fn register(engine: Arc<Engine>) -> HashMap<String, Service> {
        let service = Arc::new(Self { engine });
        let mut services = create_task(service.clone());
        let again = create_task(service).into_values();
        services.extend(again.map(|service| (NAME_V2.to_owned(), service)));
        services
    }

    /// Runs something to its end even if the client goes away: the server drops the handlers of a
    /// connection with it, and half a container helps nobody.
    async fn complete<T, F>(&self, work: impl FnOnce(Arc<Engine>) -> F) -> ttrpc::Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Refusal>> + Send + 'static,
    {
        match tokio::spawn(work(Arc::clone(&self.engine))).await {
            Ok(result) => Ok(result?),
            Err(error) => Err(Refusal::new(Code::INTERNAL, error.to_string()).into()),
        }
    }
}

#[async_trait]
impl Task for TaskService {
    async fn state(
        &self,
        _: &TtrpcContext,
        request: api::StateRequest,
    ) -> ttrpc::Result<api::StateResponse> {
        let container = self.engine.container(&request.id)?;
        let process = container.process(&request.exec_id)?;
        Ok(state(&container, &process))
    }

    async fn create(
        &self,
        _: &TtrpcContext,
        request: api::CreateTaskRequest,
    ) -> ttrpc::Result<api::CreateTaskResponse> {
        if !request.checkpoint.is_empty() || !request.parent_checkpoint.is_empty() {
            return Err(Refusal::invalid("checkpoint: not supported").into());
        }
        if !request.rootfs.is_empty() {
            return Err(Refusal::invalid("rootfs: the root is to be mounted by the host").into());
        }
        let options = request.options.into_option();
        let options = options.filter(|options| options.type_url == SPEC_TYPE_URL);
        let Some(Any { value: spec, .. }) = options else {
            return Err(Refusal::invalid(format!("options: not a {SPEC_TYPE_URL}")).into());
        };
        let uris = [request.stdin, request.stdout, request.stderr];
        let process = ProcessRequest {
            spec,
            terminal: request.terminal,
            uris,
        };
        let (id, bundle) = (request.id, request.bundle);
        let pid = self
            .complete(|engine| async move { engine.create(&id, bundle, process).await })
            .await?;
        Ok(api::CreateTaskResponse {
            pid: pid.unsigned_abs(),
            ..Default::default()
        })
    }

    async fn start(
        &self,
        _: &TtrpcContext,
        request: api::StartRequest,
    ) -> ttrpc::Result<api::StartResponse> {
        let pid = self
            .complete(|engine| async move { engine.start(&request.id, &request.exec_id).await })
            .await?;
        Ok(api::StartResponse {
            pid: pid.unsigned_abs(),
            ..Default::default()
        })
    }

    async fn delete(
        &self,
        _: &TtrpcContext,
        request: api::DeleteRequest,
    ) -> ttrpc::Result<api::DeleteResponse> {
        let outcome = self
            .complete(|engine| async move {
                let outcome = engine.delete(&request.id, &request.exec_id).await?;
                if request.exec_id.is_empty() {
                    let files = Path::new(SHARE).join("containers").join(request.id);
                    tokio::spawn(volumes::forget(vec![files]));
                }
                Ok(outcome)
            })
            .await?;
        Ok(api::DeleteResponse {
            pid: outcome.pid.unsigned_abs(),
            exit_status: outcome.status,
            exited_at: timestamp(outcome.at),
            ..Default::default()
        })
    }

    async fn pids(
        &self,
        _: &TtrpcContext,
        request: api::PidsRequest,
    ) -> ttrpc::Result<api::PidsResponse> {
        let container = self.engine.container(&request.id)?;
        let pids = container
            .cgroup
            .pids()
            .map_err(|error| Refusal::failed(format!("pids of {}: {error}", request.id)))?;
        let process = |pid: i32| api::ProcessInfo {
            pid: pid.unsigned_abs(),
            ..Default::default()
        };
        Ok(api::PidsResponse {
            processes: pids.into_iter().map(process).collect(),
            ..Default::default()
        })
    }

    async fn pause(
        &self,
        _: &TtrpcContext,
        request: api::PauseRequest,
    ) -> ttrpc::Result<api::Empty> {
        self.complete(|engine| async move { engine.pause(&request.id).await })
            .await?;
        Ok(api::Empty::new())
    }

    async fn resume(
        &self,
        _: &TtrpcContext,
        request: api::ResumeRequest,
    ) -> ttrpc::Result<api::Empty> {
        self.complete(|engine| async move { engine.resume(&request.id).await })
            .await?;
        Ok(api::Empty::new())
    }

    async fn checkpoint(
        &self,
        _: &TtrpcContext,
        _: api::CheckpointTaskRequest,
    ) -> ttrpc::Result<api::Empty> {
        Err(Refusal::new(Code::UNIMPLEMENTED, "checkpoint: not supported").into())
    }

    async fn kill(&self, _: &TtrpcContext, request: api::KillRequest) -> ttrpc::Result<api::Empty> {
        self.engine
            .kill(&request.id, &request.exec_id, request.signal, request.all)?;
        Ok(api::Empty::new())
    }

    async fn exec(
        &self,
        _: &TtrpcContext,
        request: api::ExecProcessRequest,
    ) -> ttrpc::Result<api::Empty> {
        let Some(Any { value: spec, .. }) = request.spec.into_option() else {
            return Err(Refusal::invalid("spec: missing").into());
        };
        let uris = [request.stdin, request.stdout, request.stderr];
        let process = ProcessRequest {
            spec,
            terminal: request.terminal,
            uris,
        };
        let (id, exec_id) = (request.id, request.exec_id);
        self.complete(|engine| async move { engine.exec(&id, &exec_id, process).await })
            .await?;
        Ok(api::Empty::new())
    }

    async fn resize_pty(
        &self,
        _: &TtrpcContext,
        request: api::ResizePtyRequest,
    ) -> ttrpc::Result<api::Empty> {
        let process = self
            .engine
            .container(&request.id)?
            .process(&request.exec_id)?;
        let side = |field: &str, side: u32| {
            u16::try_from(side)
                .map_err(|_| Refusal::invalid(format!("{field}: {side} is too large")))
        };
        process.resize(
            side("height", request.height)?,
            side("width", request.width)?,
        )?;
        Ok(api::Empty::new())
    }

    async fn close_io(
        &self,
        _: &TtrpcContext,
        request: api::CloseIORequest,
    ) -> ttrpc::Result<api::Empty> {
        let process = self
            .engine
            .container(&request.id)?
            .process(&request.exec_id)?;
        if request.stdin {
            process.close_stdin();
        }
        Ok(api::Empty::new())
    }

    async fn update(
        &self,
        _: &TtrpcContext,
        request: api::UpdateTaskRequest,
    ) -> ttrpc::Result<api::Empty> {
        let Some(Any {
            value: resources, ..
        }) = request.resources.into_option()
        else {
            return Err(Refusal::invalid("resources: missing").into());
        };
        self.complete(|engine| async move { engine.update(&request.id, resources).await })
            .await?;
        Ok(api::Empty::new())
    }

    async fn wait(
        &self,
        _: &TtrpcContext,
        request: api::WaitRequest,
    ) -> ttrpc::Result<api::WaitResponse> {
        let process = self
            .engine
            .container(&request.id)?
            .process(&request.exec_id)?;
        let outcome = process.stopped().await;
        Ok(api::WaitResponse {
            exit_status: outcome.status,
            exited_at: timestamp(outcome.at),
            ..Default::default()
        })
    }

    async fn stats(
        &self,
        _: &TtrpcContext,
        request: api::StatsRequest,
    ) -> ttrpc::Result<api::StatsResponse> {
        let container = self.engine.container(&request.id)?;
        let metrics = Any {
            type_url: stats::TYPE_URL.to_owned(),
            value: stats::read(&container.cgroup),
            ..Default::default()
        };
        Ok(api::StatsResponse {
            stats: MessageField::some(metrics),
            ..Default::default()
        })
    }

    async fn connect(
        &self,
        _: &TtrpcContext,
        request: api::ConnectRequest,
    ) -> ttrpc::Result<api::ConnectResponse> {
        let container = self.engine.container(&request.id);
        let pid = container
            .ok()
            .and_then(|container| container.init.pid())
            .unwrap_or(0);
        Ok(api::ConnectResponse {
            shim_pid: std::process::id(),
            task_pid: pid.unsigned_abs(),
            version: VERSION.to_owned(),
            ..Default::default()
        })
    }

    /// The guest ends with its VMM; all there is to do here is to leave nothing unwritten.
    async fn shutdown(
        &self,
        _: &TtrpcContext,
        _: api::ShutdownRequest,
    ) -> ttrpc::Result<api::Empty> {
        nix::unistd::sync();
        Ok(api::Empty::new())
    }
}

fn state(container: &Container, process: &Process) -> api::StateResponse {
    let (status, pid, outcome) = match process.phase() {
        Phase::Added | Phase::Starting => (api::Status::CREATED, 0, None),
        Phase::Created(pid) => (api::Status::CREATED, pid, None),
        Phase::Running(pid) if container.is_paused() => (api::Status::PAUSED, pid, None),
        Phase::Running(pid) | Phase::Ended(pid) => (api::Status::RUNNING, pid, None),
        Phase::Stopped(outcome) => (api::Status::STOPPED, outcome.pid, Some(outcome)),
    };
    let [stdin, stdout, stderr] = process.uris.clone();
    api::StateResponse {
        id: container.place.id.clone(),
        bundle: container.client_bundle.clone(),
        pid: pid.unsigned_abs(),
        status: EnumOrUnknown::new(status),
        stdin,
        stdout,
        stderr,
        terminal: process.terminal,
        exit_status: outcome.map_or(0, |outcome: Outcome| outcome.status),
        exited_at: outcome.map_or(MessageField::none(), |outcome| timestamp(outcome.at)),
        exec_id: process.exec_id.clone(),
        ..Default::default()
    }
}

fn timestamp(time: SystemTime) -> MessageField<Timestamp> {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    MessageField::some(Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since.subsec_nanos()).unwrap_or(0),
        ..Default::default()
    })
}
