//! Creating the container.

use std::sync::Arc;

use containerd_shim_protos::api::{CreateTaskRequest, Mount as ApiMount};
use containerd_shim_protos::events::task::{TaskCreate, TaskIO};
use containerd_shim_protos::topics::TASK_CREATE_EVENT_TOPIC;
use protobuf::well_known_types::any::Any;
use thaw_agent_api::{SPEC_TYPE_URL, STREAM_PORT};
use thaw_fault_points::point;
use thaw_vmm_control::Request;
use tokio::task::JoinHandle;
use tracing::warn;

use super::{Parts, Sandbox};
use crate::agent::Agent;
use crate::container::Container;
use crate::error::TaskError;
use crate::facts::{ContainerFacts, Exit, KILLED};
use crate::mounts::ContainerMounts;
use crate::process::Process;
use crate::spec::{BundleSpec, guest_spec};
use crate::stdio::{Connections, Context, Paths, Stdio, Streams};
use crate::vmm::Vmm;

/// What a creation needs beside the container.
struct Making {
    spec: BundleSpec,
    rootfs: Vec<ApiMount>,
    guest: JoinHandle<Result<Arc<Vmm>, TaskError>>,
}

impl Sandbox {
    /// Create the container, up to the moment before its program is executed. Returns its pid. When
    /// it fails nothing of the container or its VM is left.
    pub async fn create(self: Arc<Self>, request: CreateTaskRequest) -> Result<u32, TaskError> {
        self.trace.mark("Create received");
        let (container, making) = self.admit(&request)?;
        point("shim-admitted");
        let restoring = making.guest.abort_handle();
        match self.make(&container, making).await {
            Ok(agent) => {
                self.trace.mark("container created");
                point("shim-created");
                // Asked for before the program can run.
                let events = agent.events().await;
                container.set_created(agent);
                self.publish_create(&container, &request);
                match events {
                    Ok(events) => {
                        let telling = self.clone().tell_memory_kills(container.clone(), events);
                        tokio::spawn(telling);
                    }
                    Err(error) => warn!(%error, "the guest will not tell of kills for memory"),
                }
                tokio::spawn(self.clone().watch(container.clone()));
                Ok(container.pid())
            }
            Err(error) => {
                restoring.abort();
                let error = self.with_memory_limit(error);
                self.tear_down().await;
                self.lock_container().take();
                self.note(|facts| drop(facts.containers.remove(&container.id)));
                // Whoever has asked for its end before is told of it.
                container.init.set_stopped(Exit::now(KILLED));
                container.set_failed();
                Err(error)
            }
        }
    }

    /// Check a request and make the place for its container.
    fn admit(&self, request: &CreateTaskRequest) -> Result<(Arc<Container>, Making), TaskError> {
        let id = &request.id;
        if !request.checkpoint.is_empty() {
            let text = "restoring a container from a checkpoint is not supported".to_owned();
            return Err(TaskError::InvalidArgument(text));
        }
        let mut place = self.lock_container();
        if let Some(other) = &*place {
            return Err(if other.id == *id {
                TaskError::AlreadyExists(format!("container {id} already exists"))
            } else {
                only_one(id, &other.id)
            });
        }
        let Parts {
            bundle,
            spec,
            anchor,
            guest,
        } = self.take_parts(id)?;
        let paths = Paths {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
        };
        let mounts = ContainerMounts::new(&self.facts.export(), id);
        let init = Process::new("", String::new(), paths);
        let container = Container::new(id.clone(), bundle, anchor, mounts, init)
            .map_err(|error| TaskError::Failed(format!("watching the anchor: {error}")))?;
        let container = Arc::new(container);
        let facts = ContainerFacts {
            bundle: container.bundle.clone(),
            anchor: Some(container.anchor.identity()),
            exit: None,
        };
        self.facts
            .update(|all| drop(all.containers.insert(id.clone(), facts)))
            .map_err(|error| TaskError::Failed(format!("writing the sandbox's facts: {error}")))?;
        *place = Some(container.clone());
        Ok((
            container,
            Making {
                spec,
                rootfs: request.rootfs.clone(),
                guest,
            },
        ))
    }

    /// What was prepared for container `id`.
    fn take_parts(&self, id: &str) -> Result<Parts, TaskError> {
        let mut prepared = self.lock_prepared();
        if let Some(other) = prepared.as_ref().filter(|prepared| prepared.id != id) {
            return Err(only_one(id, &other.id));
        }
        match prepared.take() {
            Some(prepared) => prepared.parts.map_err(TaskError::Failed),
            None => {
                let text = format!("container {id}: its sandbox has ended");
                Err(TaskError::FailedPrecondition(text))
            }
        }
    }

    /// Everything that a creation is, all at the same time where it can be.
    async fn make(&self, container: &Arc<Container>, making: Making) -> Result<Agent, TaskError> {
        let Making {
            spec,
            rootfs,
            guest,
        } = making;
        let BundleSpec { json, view } = spec;
        let failed = |error: std::io::Error| TaskError::Failed(error.to_string());
        let context = self.logger_context(&container.id);
        let stdio = Stdio::open(&container.init.paths, context)
            .await
            .map_err(failed)?;

        let root = container.bundle.join(&view.root.path);
        let mounting = container.clone();
        let mut mounts = tokio::task::spawn_blocking(move || {
            mounting.mounts.mount_root(&rootfs, &root)?;
            mounting.mounts.bind_sources(&view.mounts, &mounting.bundle)
        });
        let parts = tokio::try_join!(
            async {
                let bound = (&mut mounts).await.map_err(|error| failed(error.into()))?;
                point("shim-mounted");
                self.trace.mark("mounts made");
                bound.map_err(failed)
            },
            async {
                container.anchor_ready().await.map_err(failed)?;
                self.trace.mark("anchor ready");
                Ok(())
            },
            async {
                let awake = async {
                    let vmm = guest.await.map_err(|error| failed(error.into()))??;
                    let agent = self.wake(&vmm, view.hostname).await?;
                    Ok((vmm, agent))
                };
                // A template may have to be built first, which takes longer than clients wait.
                tokio::select! {
                    awake = awake => awake,
                    error = container.abandoned() => Err(error),
                }
            },
        );
        let (bound, (), (vmm, agent)) = match parts {
            Ok(parts) => parts,
            Err(error) => {
                // What is being mounted must be there before it can be taken away.
                if !mounts.is_finished() {
                    let _ = mounts.await;
                }
                return Err(error);
            }
        };

        let json = guest_spec(json, &container.id, &bound);
        let connections = stdio.connect(&self.next_stream).map_err(failed)?;
        let request = create_request(container, &json, connections.uris());
        let created = async { agent.create(&request).await.map_err(TaskError::from) };
        match tokio::try_join!(created, connect_streams(&vmm, connections)) {
            Ok((_, streams)) => container.init.set_streams(streams),
            Err(error) => return Err(self.explain(&vmm, error).await),
        }
        Ok(agent)
    }

    fn publish_create(&self, container: &Container, request: &CreateTaskRequest) {
        let paths = &container.init.paths;
        let io = TaskIO {
            stdin: paths.stdin.clone(),
            stdout: paths.stdout.clone(),
            stderr: paths.stderr.clone(),
            terminal: paths.terminal,
            ..TaskIO::default()
        };
        let event = TaskCreate {
            container_id: container.id.clone(),
            bundle: request.bundle.clone(),
            rootfs: request.rootfs.clone(),
            io: Some(io).into(),
            pid: container.pid(),
            ..TaskCreate::default()
        };
        self.publisher.publish(TASK_CREATE_EVENT_TOPIC, &event);
    }

    fn logger_context<'a>(&'a self, id: &'a str) -> Context<'a> {
        Context {
            id,
            namespace: &self.home.namespace,
            mount_namespace: &self.home.mount_namespace,
        }
    }

    /// Open and connect the streams of the exec `id`.
    pub(super) async fn open_streams(
        &self,
        id: &str,
        paths: &Paths,
    ) -> Result<Connections, TaskError> {
        let stdio = Stdio::open(paths, self.logger_context(id)).await;
        let connections = stdio.and_then(|stdio| stdio.connect(&self.next_stream));
        connections.map_err(|error| TaskError::Failed(error.to_string()))
    }
}

/// Container `id` does not go into the sandbox that `other` is in.
fn only_one(id: &str, other: &str) -> TaskError {
    TaskError::FailedPrecondition(format!(
        "container {id} cannot be added to the sandbox of {other}: this version of thaw runs one \
         container in a sandbox"
    ))
}

/// The request to the agent.
fn create_request(
    container: &Container,
    spec: &serde_json::Value,
    [stdin, stdout, stderr]: [String; 3],
) -> CreateTaskRequest {
    let options = Any {
        type_url: SPEC_TYPE_URL.to_owned(),
        value: spec.to_string().into_bytes(),
        ..Any::default()
    };
    CreateTaskRequest {
        id: container.id.clone(),
        terminal: container.init.paths.terminal,
        stdin,
        stdout,
        stderr,
        options: Some(options).into(),
        ..CreateTaskRequest::default()
    }
}

/// Connect the guest's ends of streams to the agent.
pub(super) async fn connect_streams(
    vmm: &Vmm,
    connections: Connections,
) -> Result<Arc<Streams>, TaskError> {
    let Connections {
        streams,
        guest_ends,
        ..
    } = connections;
    for end in guest_ends {
        vmm.order(Request::ConnectVsock { port: STREAM_PORT }, vec![end])
            .await?;
    }
    Ok(streams)
}
