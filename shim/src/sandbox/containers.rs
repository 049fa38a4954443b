//! Which containers a sandbox has, and how long it lives for them.
//!
//! A sandbox that was started for one container ends with it: nothing of the VM is needed when its
//! only container has ended. One that was started for a group lives until containerd asks for its
//! end when no container is left, since more may be added at any time.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};

use super::Sandbox;
use crate::container::Container;
use crate::error::TaskError;
use crate::spec::Siblings;

/// The containers of a sandbox.
#[derive(Debug, Default)]
pub(super) struct Containers {
    by_id: BTreeMap<String, Arc<Container>>,
    /// The sandbox ends: nothing comes in any more.
    closed: bool,
    /// How many have been added to the one that the sandbox was started for.
    count: u64,
}

impl Containers {
    /// Whether `id` can be the next.
    pub fn check_free(&self, id: &str) -> Result<(), TaskError> {
        if self.by_id.contains_key(id) {
            let text = format!("container {id} already exists");
            return Err(TaskError::AlreadyExists(text));
        }
        if self.closed {
            return Err(ended(id));
        }
        Ok(())
    }

    /// The name in the guest of container `id`, which is not the one that the sandbox was started
    /// for: that has its id. No name is used twice, since the guest remembers those of files for a
    /// moment, and that of a container which was given up for good.
    pub fn next_guest_id(&mut self, id: &str) -> String {
        self.count += 1;
        let suffix = format!("+{}", self.count);
        let length = id.len().min(LONGEST_GUEST_ID.saturating_sub(suffix.len()));
        // No id has a '+', and none has other characters than those of ASCII.
        format!("{}{suffix}", id.get(..length).unwrap_or(id))
    }

    /// Add a container, whose id is free.
    pub fn add(&mut self, container: Arc<Container>) {
        self.by_id.insert(container.id.clone(), container);
    }
}

/// The longest id that the agent takes.
const LONGEST_GUEST_ID: usize = 76;

/// Container `id` cannot come into a sandbox that ends.
pub(super) fn ended(id: &str) -> TaskError {
    TaskError::FailedPrecondition(format!("container {id}: its sandbox has ended"))
}

impl Sandbox {
    /// The container `id`.
    pub fn container(&self, id: &str) -> Result<Arc<Container>, TaskError> {
        self.lock_containers()
            .by_id
            .get(id)
            .cloned()
            .ok_or_else(|| {
                TaskError::NotFound(format!("there is no container {id} in this sandbox"))
            })
    }

    /// All containers.
    pub(super) fn all_containers(&self) -> Vec<Arc<Container>> {
        self.lock_containers().by_id.values().cloned().collect()
    }

    /// The container that the agent calls `guest_id`.
    pub(super) fn container_in_guest(&self, guest_id: &str) -> Option<Arc<Container>> {
        let containers = self.lock_containers();
        let mut all = containers.by_id.values();
        all.find(|container| container.guest_id == guest_id)
            .cloned()
    }

    /// The names of the containers in the guest, by the pids that are reported for them.
    pub(super) fn siblings(&self) -> Siblings {
        let containers = self.lock_containers();
        let all = containers.by_id.values();
        all.map(|container| (container.pid(), container.guest_id.clone()))
            .collect()
    }

    /// Whether the sandbox has no other container than `container`: its VM is of no use to anybody
    /// else.
    pub(super) fn is_alone(&self, container: &Container) -> bool {
        let containers = self.lock_containers();
        containers.by_id.keys().all(|id| *id == container.id)
    }

    /// Close the sandbox if it has no other container than `container`. Whether it is closed.
    pub(super) fn close_if_alone(&self, container: &Container) -> bool {
        let expected = self.is_expecting();
        let mut containers = self.lock_containers();
        let alone = !expected && containers.by_id.keys().all(|id| *id == container.id);
        containers.closed |= alone;
        alone
    }

    /// Whether a group's first container is still to be created.
    fn is_expecting(&self) -> bool {
        self.grouped && self.lock_prepared().is_some()
    }

    /// Nothing comes in any more.
    pub(super) fn close(&self) {
        self.lock_containers().closed = true;
    }

    /// Forget a container. Whether it was there: of two deletions at the same time one finds it gone.
    pub(super) fn remove(&self, container: &Arc<Container>) -> bool {
        let mut containers = self.lock_containers();
        let same = containers
            .by_id
            .get(&container.id)
            .is_some_and(|found| Arc::ptr_eq(found, container));
        if same {
            containers.by_id.remove(&container.id);
        }
        same
    }

    /// Close the sandbox if it has no container: whether a Shutdown ends the shim. A group whose
    /// first container is still to be created is not without one.
    pub fn close_if_empty(&self) -> bool {
        let expected = self.is_expecting();
        let mut containers = self.lock_containers();
        let empty = containers.by_id.is_empty() && !expected;
        containers.closed |= empty;
        drop(containers);
        if empty {
            self.note(|facts| facts.ending = true);
        }
        empty
    }

    /// The container that the sandbox was started for will not come, if it has not yet. Close the
    /// sandbox if it has no other. Whether it is closed.
    pub fn close_unless_used(&self) -> bool {
        drop(self.lock_prepared().take());
        self.close_if_empty()
    }

    pub(super) fn lock_containers(&self) -> MutexGuard<'_, Containers> {
        self.containers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
