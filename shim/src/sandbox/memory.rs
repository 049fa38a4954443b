//! Kills for want of memory, of which the guest tells and containerd is to hear.

use std::sync::Arc;
use std::time::{Duration, Instant};

use containerd_shim_protos::events::task::TaskOOM;
use containerd_shim_protos::topics::TASK_OOM_EVENT_TOPIC;
use tracing::debug;

use super::Sandbox;
use crate::agent::Events;
use crate::container::Container;

/// What comes sooner than this after the last event told is left out: containerd and its clients
/// want to know that it happens, and the guest may say anything as often as it likes.
const INTERVAL: Duration = Duration::from_millis(100);

impl Sandbox {
    /// Tell containerd of the kills that `events` has, until the guest ends. The agent tells of one
    /// before it tells of an exit that follows from it.
    pub(super) async fn tell_memory_kills(
        self: Arc<Self>,
        container: Arc<Container>,
        mut events: Events,
    ) {
        let mut last: Option<Instant> = None;
        loop {
            let event = match events.recv().await {
                Ok(Some(event)) => event,
                Ok(None) => return,
                Err(error) => {
                    debug!(%error, "the guest tells of no more events");
                    return;
                }
            };
            let meant =
                event.has_out_of_memory() && event.out_of_memory().container_id == container.id;
            if !meant || last.is_some_and(|last| last.elapsed() < INTERVAL) {
                continue;
            }
            last = Some(Instant::now());
            let event = TaskOOM {
                container_id: container.id.clone(),
                ..TaskOOM::default()
            };
            self.publisher.publish(TASK_OOM_EVENT_TOPIC, &event);
        }
    }
}
