//! When the hooks of a container run that run on the host.

use std::os::fd::AsFd;
use std::sync::Arc;

use super::Sandbox;
use crate::container::Container;
use crate::error::TaskError;
use crate::facts::Poststop;
use crate::hooks::{self, HookError, Moment, Subject};
use crate::spec::{Hooks, Spec};

/// The hooks of a container, and what they are told of it.
#[derive(Debug, Default)]
pub struct ContainerHooks {
    hooks: Hooks,
    subject: Subject,
}

impl ContainerHooks {
    /// Those of container `id`, whose bundle is `bundle`.
    pub fn new(spec: &mut Spec, id: &str, bundle: &std::path::Path) -> Self {
        let hooks = std::mem::take(&mut spec.hooks);
        if hooks == Hooks::default() {
            return Self::default();
        }
        let subject = Subject {
            id: id.to_owned(),
            bundle: bundle.to_owned(),
            oci_version: spec.oci_version.clone(),
            annotations: spec.annotations.clone(),
        };
        Self { hooks, subject }
    }
}

impl From<HookError> for TaskError {
    fn from(error: HookError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl Sandbox {
    /// Run the hooks that come before a container is created. From here on its poststop hooks are due,
    /// whatever becomes of it.
    pub(super) async fn run_creation_hooks(&self, container: &Container) -> Result<(), TaskError> {
        let ContainerHooks { hooks, subject } = &container.hooks;
        if !hooks.poststop.is_empty() {
            let due = Poststop {
                hooks: hooks.poststop.clone(),
                subject: subject.clone(),
            };
            let note = |facts: &mut crate::facts::Facts| {
                if let Some(facts) = facts.containers.get_mut(&container.id) {
                    facts.poststop = Some(due);
                }
            };
            self.facts.update(note).map_err(|error| {
                TaskError::Failed(format!("writing the sandbox's facts: {error}"))
            })?;
        }
        let pid = container.pid();
        let namespace = self.home.mount_namespace.as_fd();
        let run = async {
            hooks::run(Moment::Prestart(pid), &hooks.prestart, subject, namespace).await?;
            let moment = Moment::CreateRuntime(pid);
            hooks::run(moment, &hooks.create_runtime, subject, namespace).await
        };
        tokio::select! {
            done = run => Ok(done?),
            error = container.abandoned() => Err(error),
        }
    }

    /// Run the hooks that come after a container was started. When one fails the container is ended, as
    /// the specification wants it.
    pub(super) async fn run_poststart_hooks(
        self: &Arc<Self>,
        container: &Arc<Container>,
    ) -> Result<(), TaskError> {
        let ContainerHooks { hooks, subject } = &container.hooks;
        let moment = Moment::Poststart(container.pid());
        let namespace = self.home.mount_namespace.as_fd();
        let run = hooks::run(moment, &hooks.poststart, subject, namespace);
        let Err(error) = run.await else {
            return Ok(());
        };
        // Not waited for: its exit is told only when its start has ended.
        let (sandbox, container) = (self.clone(), container.clone());
        tokio::spawn(async move { sandbox.kill_all(&container).await });
        Err(error.into())
    }

    /// Run the hooks that are due since container `id` is gone. Whoever calls it meanwhile or later waits
    /// until that is done.
    pub(super) async fn run_poststop_hooks(&self, id: &str) {
        let _one_at_a_time = self.poststop.lock().await;
        let due = self.facts.get().containers.remove(id);
        let Some(Poststop { hooks, subject }) = due.and_then(|facts| facts.poststop) else {
            return;
        };
        let namespace = self.home.mount_namespace.as_fd();
        hooks::run_poststop(&hooks, &subject, namespace).await;
        self.note(|facts| {
            if let Some(facts) = facts.containers.get_mut(id) {
                facts.poststop = None;
            }
        });
    }

    /// Run the hooks that are due of containers that were never deleted, or are being.
    pub(super) async fn run_all_poststop_hooks(&self) {
        for id in self.facts.get().containers.into_keys() {
            self.run_poststop_hooks(&id).await;
        }
    }
}
