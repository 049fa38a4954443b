//! What the guest tells unasked: kills for want of memory, of which containerd is to hear, and that it
//! wants more.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use containerd_shim_protos::events::task::TaskOOM;
use containerd_shim_protos::topics::TASK_OOM_EVENT_TOPIC;
use tracing::{debug, warn};

use super::Sandbox;
use crate::agent::{Agent, Events};
use crate::cgroup;
use crate::container::Container;
use crate::error::TaskError;

/// What comes sooner than this after the last event told of a container is left out: containerd and
/// its clients want to know that it happens, and the guest may say anything as often as it likes.
const INTERVAL: Duration = Duration::from_millis(100);

impl Sandbox {
    /// Listen to what the agent says unasked, from before any program runs.
    pub(super) async fn listen(self: Arc<Self>, agent: &Agent) {
        match agent.events().await {
            Ok(events) => drop(tokio::spawn(self.follow_events(events, agent.clone()))),
            Err(error) => warn!(%error, "the guest will not tell what it does about memory"),
        }
    }

    /// Tell containerd of the kills that `events` has, and give the guest the memory that it wants, until
    /// it ends. The agent tells of a kill before it tells of an exit that follows from it.
    async fn follow_events(self: Arc<Self>, mut events: Events, agent: Agent) {
        let mut told: HashMap<String, Instant> = HashMap::new();
        loop {
            let event = match events.recv().await {
                Ok(Some(event)) => event,
                Ok(None) => return,
                Err(error) => {
                    debug!(%error, "the guest tells of no more events");
                    return;
                }
            };
            if event.has_memory_wanted() {
                self.give_memory(&agent, event.memory_wanted()).await;
            }
            if !event.has_out_of_memory() {
                continue;
            }
            let Some(container) = self.container_in_guest(&event.out_of_memory().container_id)
            else {
                continue;
            };
            // No more than were just told of: a guest cannot make it grow.
            told.retain(|_, last| last.elapsed() < INTERVAL);
            if told.contains_key(&container.id) {
                continue;
            }
            told.insert(container.id.clone(), Instant::now());
            self.tell_memory_kill(&container);
        }
    }

    fn tell_memory_kill(&self, container: &Container) {
        let event = TaskOOM {
            container_id: container.id.clone(),
            ..TaskOOM::default()
        };
        self.publisher.publish(TASK_OOM_EVENT_TOPIC, &event);
    }

    /// Why the host's kernel has killed the VMM, if that was for want of memory. To be asked while the
    /// sandbox's cgroup is there.
    fn memory_limit_reached(&self) -> Option<String> {
        let path = self.facts.get().cgroup?;
        let before = *self.memory_kills_before.get()?;
        let ended = self.vmm.get().is_some_and(|vmm| vmm.ended_by_itself());
        (ended && cgroup::memory_kills(&path) > before).then(|| {
            format!(
                "the host's kernel has killed the VM for want of memory: see the limits of cgroup {} and \
                 of those above it, and the host's free memory",
                path.display()
            )
        })
    }

    /// `error` of a creation, with its reason when it was want of memory.
    pub(super) fn with_memory_limit(&self, error: TaskError) -> TaskError {
        match (error, self.memory_limit_reached()) {
            (TaskError::Unavailable(text), Some(reason)) => {
                TaskError::Unavailable(format!("{text}: {reason}"))
            }
            (error, _) => error,
        }
    }

    /// Tell containerd, and the log, when the VM of `container` has ended for want of memory.
    pub(super) fn tell_memory_limit(&self, container: &Container) {
        if let Some(reason) = self.memory_limit_reached() {
            warn!(container = container.id, "{reason}");
            self.tell_memory_kill(container);
        }
    }
}
