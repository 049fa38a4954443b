//! Creating a container.

use std::path::PathBuf;
use std::sync::Arc;

use containerd_shim_protos::api::{CreateTaskRequest, DeleteRequest, Mount as ApiMount};
use containerd_shim_protos::events::task::{TaskCreate, TaskIO};
use containerd_shim_protos::topics::TASK_CREATE_EVENT_TOPIC;
use protobuf::well_known_types::any::Any;
use thaw_agent_api::{SPEC_TYPE_URL, STREAM_PORT};
use thaw_fault_points::point;
use thaw_vmm_control::Request;
use tokio::sync::oneshot;
use tracing::debug;

use super::growth::positive;
use super::guest::{Awake, Backing};
use super::{ContainerHooks, Ingredients, Sandbox};
use crate::agent::Agent;
use crate::anchor::Anchor;
use crate::container::{Container, Parts};
use crate::disks::Special;
use crate::error::TaskError;
use crate::facts::{ContainerFacts, Exit, KILLED};
use crate::mounts::ContainerMounts;
use crate::process::Process;
use crate::spec::{BundleSpec, GuestSide, guest_spec};
use crate::stdio::{Connections, Context, Paths, Stdio, Streams};
use crate::trace::{Recorder, monotonic_ns, step};
use crate::vmm::Vmm;

/// What a creation needs beside the container.
struct Making {
    spec: BundleSpec,
    rootfs: Vec<ApiMount>,
    /// Whether it is the one that the sandbox was started for, whose guest does not run yet.
    first: bool,
}

impl Sandbox {
    /// Create a container, up to the moment before its program is executed. Returns its pid. When
    /// it fails nothing of the container is left, nor of the VM when it is without one then.
    pub async fn create(self: Arc<Self>, request: CreateTaskRequest) -> Result<u32, TaskError> {
        let (container, making) = self.admit(&request).await?;
        point("shim-admitted");
        match self.make(&container, making).await {
            Ok(agent) => {
                container.trace.mark(step::CREATED);
                point("shim-created");
                container.set_created(agent);
                self.publish_create(&container, &request);
                tokio::spawn(self.clone().watch(container.clone()));
                Ok(container.pid())
            }
            Err(error) => {
                self.count_failure(&container.trace, &error);
                let error = self.with_memory_limit(error);
                if self.close_if_alone(&container) {
                    self.tear_down().await;
                } else {
                    container.release().await;
                }
                self.run_poststop_hooks(&container.id).await;
                self.remove(&container);
                self.note(|facts| drop(facts.containers.remove(&container.id)));
                // Whoever has asked for its end before is told of it.
                container.init.set_stopped(Exit::now(KILLED));
                container.set_failed();
                Err(error)
            }
        }
    }

    /// Check a request and make the place for its container.
    async fn admit(
        &self,
        request: &CreateTaskRequest,
    ) -> Result<(Arc<Container>, Making), TaskError> {
        let id = &request.id;
        if !request.checkpoint.is_empty() {
            let text = "restoring a container from a checkpoint is not supported".to_owned();
            return Err(TaskError::InvalidArgument(text));
        }
        self.check_options(request)?;
        self.lock_containers().check_free(id)?;
        let prepared = self.take_prepared(id);
        let first = prepared.is_some();
        let (ingredients, trace) = match prepared {
            Some(ingredients) => (ingredients?, self.trace.clone()),
            None => {
                let trace = Recorder::new(&self.home.namespace, id, monotonic_ns());
                (self.find_ingredients(request).await?, Arc::new(trace))
            }
        };
        trace.mark("Create received");
        let Ingredients {
            bundle,
            mut spec,
            anchor,
        } = ingredients;
        let paths = Paths {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
        };
        let mut containers = self.lock_containers();
        // Again: another request for it may have come in meanwhile.
        containers.check_free(id)?;
        let guest_id = match first {
            true => id.clone(),
            false => containers.next_guest_id(id),
        };
        let volumes = self.volumes.clone();
        let mounts = ContainerMounts::new(&self.facts.export(), &guest_id, volumes);
        let hooks = ContainerHooks::new(&mut spec.view, id, &bundle);
        let container = Container::new(Parts {
            id: id.clone(),
            guest_id,
            bundle,
            anchor,
            mounts,
            hooks,
            init: Process::new("", String::new(), paths),
            trace,
        })
        .map_err(|error| TaskError::Failed(format!("watching the anchor: {error}")))?;
        let container = Arc::new(container);
        let facts = ContainerFacts {
            bundle: container.bundle.clone(),
            anchor: Some(container.anchor.identity()),
            ..ContainerFacts::default()
        };
        self.facts
            .update(|all| drop(all.containers.insert(id.clone(), facts)))
            .map_err(|error| TaskError::Failed(format!("writing the sandbox's facts: {error}")))?;
        containers.add(container.clone());
        let rootfs = request.rootfs.clone();
        let making = Making {
            spec,
            rootfs,
            first,
        };
        Ok((container, making))
    }

    /// What was prepared for container `id`, if the sandbox was started for it.
    fn take_prepared(&self, id: &str) -> Option<Result<Ingredients, TaskError>> {
        let mut prepared = self.lock_prepared();
        let prepared = prepared.take_if(|prepared| prepared.id == *id)?;
        Some(prepared.ingredients.map_err(TaskError::Failed))
    }

    /// Make what a container needs for which the sandbox was not started.
    async fn find_ingredients(
        &self,
        request: &CreateTaskRequest,
    ) -> Result<Ingredients, TaskError> {
        let id = request.id.clone();
        let bundle = PathBuf::from(&request.bundle);
        let empty = self.home.empty.clone();
        let siblings = self.siblings();
        let find = move || {
            let spec = BundleSpec::read(&bundle)
                .map_err(|error| TaskError::InvalidArgument(error.to_string()))?;
            spec.view
                .check(&siblings)
                .map_err(|error| TaskError::InvalidArgument(error.to_string()))?;
            let anchor = Anchor::start(&empty, spec.view.network_namespace()).map_err(|error| {
                TaskError::Failed(format!("starting the anchor of {id}: {error}"))
            })?;
            Ok(Ingredients {
                bundle,
                spec,
                anchor,
            })
        };
        tokio::task::spawn_blocking(find)
            .await
            .map_err(|error| TaskError::Failed(error.to_string()))?
    }

    /// Everything that a creation is, all at the same time where it can be.
    async fn make(&self, container: &Arc<Container>, making: Making) -> Result<Agent, TaskError> {
        let (special, making) = self.find_special(container, making).await?;
        let Making { spec, rootfs, .. } = making;
        let BundleSpec { json, view } = spec;
        let failed = |error: std::io::Error| TaskError::Failed(error.to_string());
        let stdio = self
            .open_stdio(&container.id, &container.init.paths)
            .await?;

        let root = container.bundle.join(&view.root.path);
        let memory_limit = view.linux.resources.memory.limit.and_then(positive);
        let mounting = container.clone();
        let on_disk = special.root.is_some();
        let elsewhere: Vec<_> = special.mounts.iter().map(|(index, _)| *index).collect();
        let mut mounts = tokio::task::spawn_blocking(move || {
            let (mounts, bundle) = (&mounting.mounts, &mounting.bundle);
            if !on_disk {
                mounts.mount_root(&rootfs, &root)?;
            }
            mounts.bind_sources(&view.mounts, &elsewhere, bundle)
        });
        let parts = tokio::try_join!(
            async {
                let bound = (&mut mounts).await.map_err(|error| failed(error.into()))?;
                point("shim-mounted");
                container.trace.mark("mounts made");
                bound.map_err(failed)
            },
            async {
                container.anchor_ready().await.map_err(failed)?;
                container.trace.mark("anchor ready");
                self.run_creation_hooks(container).await
            },
            async {
                // A template may have to be built first, which takes longer than clients wait.
                tokio::select! {
                    guest = self.guest() => guest,
                    error = container.abandoned() => Err(error),
                }
            },
        );
        let (bound, (), guest) = match parts {
            Ok(parts) => parts,
            Err(error) => {
                // What is being mounted must be there before it can be taken away.
                if !mounts.is_finished() {
                    let _ = mounts.await;
                }
                return Err(error);
            }
        };

        let side = GuestSide {
            id: &container.guest_id,
            bind_mounts: &bound,
            siblings: &self.siblings(),
            special: &special,
            disks: &guest.disks,
        };
        let json = guest_spec(json, side);
        let connections =
            Connections::new(&container.init.paths, &self.next_stream).map_err(failed)?;
        let request = create_request(container, &json, connections.uris());
        let Awake { vmm, agent, .. } = guest;
        self.limit_memory(&agent, &container.id, memory_limit).await;
        let created = async {
            let created = create_in_guest(agent.clone(), request);
            tokio::try_join!(created, connect_streams(&vmm, connections))
        };
        let created = tokio::select! {
            created = created => match created {
                Ok(((), streams)) => Ok(streams),
                Err(error) => Err(self.explain(&vmm, error).await),
            },
            error = container.abandoned() => Err(error),
        };
        match created {
            Ok(streams) => {
                container.init.run_streams(streams, stdio);
                Ok(agent)
            }
            Err(error) => {
                let guest_id = container.guest_id.clone();
                tokio::spawn(async move { forget(&agent, &guest_id).await });
                Err(error)
            }
        }
    }

    /// Find what of a container is not files of the host's, and give the guest its disks.
    async fn find_special(
        &self,
        container: &Arc<Container>,
        making: Making,
    ) -> Result<(Special, Making), TaskError> {
        if !Special::is_possible(&making.rootfs, &making.spec.view) {
            return Ok((Special::default(), making));
        }
        let bundle = container.bundle.clone();
        let finding = tokio::task::spawn_blocking(move || {
            let Making {
                spec,
                rootfs,
                first,
            } = &making;
            let special = Special::find(rootfs, &spec.view, &bundle, *first)?;
            Ok((special, making))
        });
        // A source may be on a file system that does not answer.
        let (mut special, making) = tokio::select! {
            found = finding => found
                .map_err(|error| TaskError::Failed(error.to_string()))?
                .map_err(|error: std::io::Error| TaskError::InvalidArgument(error.to_string()))?,
            error = container.abandoned() => return Err(error),
        };
        if !special.disks.is_empty() {
            self.awakening.give(Backing {
                disks: std::mem::take(&mut special.disks),
                root: special.root.clone(),
            })?;
        }
        Ok((special, making))
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

    /// Open the host's side of the streams of the process `id`.
    pub(super) async fn open_stdio(&self, id: &str, paths: &Paths) -> Result<Stdio, TaskError> {
        let context = Context {
            id,
            namespace: &self.home.namespace,
            mount_namespace: &self.home.mount_namespace,
        };
        let stdio = Stdio::open(paths, context).await;
        stdio.map_err(|error| TaskError::Failed(error.to_string()))
    }
}

/// Create a container in the guest. If nobody waits for it any more when it is there, the guest
/// forgets it.
async fn create_in_guest(agent: Agent, request: CreateTaskRequest) -> Result<(), TaskError> {
    let (answer, answered) = oneshot::channel();
    tokio::spawn(async move {
        let created = agent.create(&request).await;
        if let Err(Ok(_)) = answer.send(created) {
            forget(&agent, &request.id).await;
        }
    });
    match answered.await {
        Ok(created) => Ok(created.map(drop)?),
        // The task always answers.
        Err(_) => Err(TaskError::Failed("the creation was lost".to_owned())),
    }
}

/// Have the guest end and forget a container.
pub(super) async fn forget(agent: &Agent, guest_id: &str) {
    let request = DeleteRequest {
        id: guest_id.to_owned(),
        ..DeleteRequest::default()
    };
    if let Err(error) = agent.delete(&request).await {
        debug!(guest_id, %error, "forgetting a container in the guest");
    }
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
        id: container.guest_id.clone(),
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
