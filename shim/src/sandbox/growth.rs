//! How far the guest's memory may grow beyond its class, and its growth.
//!
//! Up to the limits of its containers, as long as each has one; else up to the configured maximum. The
//! agent says when the containers have nearly all that there is, and the VMM plugs blocks. What may be had
//! never becomes less while the sandbox lives: the limits themselves are kept by the guest's kernel, and
//! what the guest does not use its host has back.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use containerd_shim_protos::protobuf::well_known_types::any::Any;
use thaw_agent_api::agent::MemoryWanted;
use thaw_vmm_control::{Request, Shape};
use tracing::{debug, warn};

use super::Sandbox;
use crate::agent::Agent;

/// What a guest is given at a time (the VMM's block).
const BLOCK: u64 = 128 << 20;

/// What settings and host say about the memory of a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryBounds {
    /// Bytes that a guest may have in all, its class included, while a container has no limit.
    pub most: u64,
    /// Bytes for the guest's kernel beside the limits of containers.
    pub overhead: u64,
    /// The limit of the container that the sandbox is started for.
    pub first: Option<u64>,
}

/// The state of one sandbox.
#[derive(Debug, Default)]
pub(super) struct Growth {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    bounds: MemoryBounds,
    class: u64,
    /// By container.
    limits: HashMap<String, Option<u64>>,
    allowed: u64,
}

impl State {
    /// Bytes that the guest may have beside its class.
    fn beside_class(&self) -> u64 {
        let limits: Option<u64> = self
            .limits
            .values()
            .try_fold(0u64, |sum, limit| Some(sum.saturating_add((*limit)?)));
        let all = match limits {
            // The kernel's tables are a sixty-fourth of the memory; and it needs some room.
            Some(limits) => limits
                .saturating_add(limits / 32)
                .saturating_add(self.bounds.overhead)
                .min(self.bounds.most.max(self.class)),
            None => self.bounds.most,
        };
        all.saturating_sub(self.class).next_multiple_of(BLOCK)
    }

    /// Take note of a limit. The new bound, if it has become more.
    fn set(&mut self, id: &str, limit: Option<u64>) -> Option<u64> {
        self.limits.insert(id.to_owned(), limit);
        let bytes = self.beside_class();
        let more = bytes > self.allowed;
        self.allowed = self.allowed.max(bytes);
        more.then_some(bytes)
    }
}

impl Growth {
    /// The sandbox has a guest of `shape`, for container `id`.
    pub fn begin(&self, shape: Shape, bounds: MemoryBounds, id: &str) {
        let mut state = self.lock();
        state.bounds = bounds;
        state.class = shape.memory_bytes();
        state.set(id, bounds.first);
    }

    /// Bytes that the guest may have beside its class.
    pub fn allowed(&self) -> u64 {
        self.lock().allowed
    }

    /// Container `id` is gone, and its limit with it.
    pub fn forget(&self, id: &str) {
        self.lock().limits.remove(id);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sandbox {
    /// Container `id` has this limit from now on: the guest may have more memory, if that is more.
    pub(super) async fn limit_memory(&self, agent: &Agent, id: &str, limit: Option<u64>) {
        let more = self.growth.lock().set(id, limit);
        if let Some(bytes) = more {
            debug!(bytes, "the guest may have more memory");
            if let Err(error) = agent.pluggable_memory(bytes).await {
                warn!(%error, "telling the guest that it may have more memory");
            }
        }
    }

    /// Give the guest what it wants, as far as it may have it.
    pub(super) async fn give_memory(&self, agent: &Agent, wanted: &MemoryWanted) {
        let Some(vmm) = self.vmm.get() else { return };
        let bytes = wanted.bytes.min(self.growth.allowed());
        debug!(bytes, "the guest wants memory");
        if let Err(error) = vmm.order(Request::Memory { bytes }, Vec::new()).await {
            warn!(%error, bytes, "giving the guest more memory");
            // What it has is all: its kernel has to kill, and nothing waits.
            if let Err(error) = agent.pluggable_memory(0).await {
                warn!(%error, "telling the guest that there is no more memory");
            }
        }
    }
}

/// The limit of memory that an update of resources sets: none where it says nothing about that, and no
/// limit where it takes it away.
pub(super) fn limit_of_update(resources: Option<&Any>) -> Option<Option<u64>> {
    let resources: serde_json::Value = serde_json::from_slice(&resources?.value).ok()?;
    let limit = resources.get("memory")?.get("limit")?.as_i64()?;
    Some(positive(limit))
}

/// A limit as specs have it, where zero and less are none.
pub fn positive(limit: i64) -> Option<u64> {
    u64::try_from(limit).ok().filter(|limit| *limit > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn growth(class: u32, most: u64, first: Option<u64>) -> Growth {
        let growth = Growth::default();
        let bounds = MemoryBounds {
            most: most * MIB,
            overhead: 64 * MIB,
            first: first.map(|limit| limit * MIB),
        };
        growth.begin(Shape::new(2, class).unwrap(), bounds, "a");
        growth
    }

    fn set(growth: &Growth, id: &str, limit: Option<u64>) -> Option<u64> {
        let bytes = growth.lock().set(id, limit.map(|limit| limit * MIB));
        bytes.map(|bytes| bytes / MIB)
    }

    #[test]
    fn test_without_a_limit_the_maximum_is_the_bound() {
        assert_eq!(growth(2048, 8000, None).allowed() / MIB, 6016);
        assert_eq!(growth(2048, 2048, None).allowed(), 0);
        assert_eq!(growth(2048, 1024, None).allowed(), 0);
    }

    #[test]
    fn test_a_limit_is_the_bound_and_a_higher_one_is_a_higher_bound() {
        let growth = growth(512, 8000, Some(256));
        assert_eq!(growth.allowed(), 0);
        assert_eq!(set(&growth, "a", Some(400)), None);
        assert_eq!(set(&growth, "a", Some(1024)), Some(640));
        assert_eq!(set(&growth, "a", Some(100)), None);
        assert_eq!(growth.allowed() / MIB, 640);
        assert_eq!(set(&growth, "a", None), Some(7552));
        assert_eq!(set(&growth, "a", Some(u64::MAX / MIB)), None);
    }

    #[test]
    fn test_a_limit_that_fills_its_class_leaves_room_for_the_kernel() {
        assert_eq!(growth(1024, 8000, Some(960)).allowed() / MIB, 128);
    }

    #[test]
    fn test_containers_of_a_group_add_up() {
        let growth = growth(512, 8000, Some(256));
        assert_eq!(set(&growth, "b", Some(256)), Some(128));
        growth.forget("b");
        assert_eq!(set(&growth, "c", Some(256)), None);
        assert_eq!(set(&growth, "d", None), Some(7552));
    }

    #[test]
    fn test_a_limit_above_the_maximum_is_the_maximum() {
        assert_eq!(growth(2048, 1024, Some(4096)).allowed(), 0);
        assert_eq!(growth(2048, 3072, Some(1 << 40)).allowed() / MIB, 1024);
    }

    #[test]
    fn test_an_update_says_a_limit_or_none() {
        let any = |text: &str| Any {
            value: text.as_bytes().to_vec(),
            ..Any::default()
        };
        let limit = |text| limit_of_update(Some(&any(text)));
        assert_eq!(limit(r#"{"memory": {"limit": 5}}"#), Some(Some(5)));
        assert_eq!(limit(r#"{"memory": {"limit": -1}}"#), Some(None));
        for text in [
            "{}",
            "x",
            r#"{"memory": {}}"#,
            r#"{"memory": {"limit": "5"}}"#,
        ] {
            assert_eq!(limit(text), None, "{text}");
        }
        assert_eq!(limit_of_update(None), None);
    }
}
