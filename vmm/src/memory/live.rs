//! Guest memory as the devices see it, which may change while they work.
//!
//! The RAM that a machine is made with stays. What is plugged and unplugged beside it ([`super::pluggable`])
//! makes another collection of regions each time, and each device goes over to it where no buffer of
//! the guest's is in its hands: [`MemoryView::refresh`]. A buffer in memory that was plugged while the
//! device was at work is not taken before: [`MemoryView::is_stale`].

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_memory::{GuestMemoryMmap, MmapRegion};

/// The memory that there is now.
#[derive(Clone)]
struct Mapped {
    memory: GuestMemoryMmap,
    /// Holds the regions of `memory` that do not hold themselves.
    _reservation: Option<Arc<MmapRegion>>,
}

struct Shared {
    /// Changes with `current`.
    generation: AtomicU64,
    current: Mutex<Mapped>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Mapped> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory of a machine, for whoever changes it or makes views of it. Clones are the same.
#[derive(Clone)]
pub struct LiveMemory {
    shared: Arc<Shared>,
}

impl LiveMemory {
    /// `memory`, until [`LiveMemory::publish`].
    pub fn new(memory: GuestMemoryMmap) -> Self {
        let current = Mapped {
            memory,
            _reservation: None,
        };
        Self {
            shared: Arc::new(Shared {
                generation: AtomicU64::new(0),
                current: Mutex::new(current),
            }),
        }
    }

    /// From now on the memory is `memory`, parts of which lie in `reservation`.
    pub fn publish(&self, memory: GuestMemoryMmap, reservation: Arc<MmapRegion>) {
        let mut current = self.shared.lock();
        *current = Mapped {
            memory,
            _reservation: Some(reservation),
        };
        // After the memory, and before the guest hears that it has it: who sees a buffer in it sees
        // the new generation.
        self.shared.generation.fetch_add(1, Ordering::Release);
    }

    /// The memory as it is now.
    pub fn view(&self) -> MemoryView {
        let current = self.shared.lock();
        MemoryView {
            seen: self.shared.generation.load(Ordering::Acquire),
            mapped: current.clone(),
            shared: self.shared.clone(),
        }
    }
}

/// The memory as one device knows it.
pub struct MemoryView {
    shared: Arc<Shared>,
    seen: u64,
    mapped: Mapped,
}

impl MemoryView {
    /// Whether the memory has changed since the last [`MemoryView::refresh`].
    pub fn is_stale(&self) -> bool {
        self.shared.generation.load(Ordering::Acquire) != self.seen
    }

    /// See the memory as it is now. Whether that is another than before.
    pub fn refresh(&mut self) -> bool {
        let stale = self.is_stale();
        if stale {
            let current = self.shared.lock();
            self.seen = self.shared.generation.load(Ordering::Acquire);
            self.mapped = current.clone();
        }
        stale
    }
}

impl Deref for MemoryView {
    type Target = GuestMemoryMmap;

    fn deref(&self) -> &GuestMemoryMmap {
        &self.mapped.memory
    }
}

impl From<GuestMemoryMmap> for MemoryView {
    /// Memory that never changes.
    fn from(memory: GuestMemoryMmap) -> Self {
        LiveMemory::new(memory).view()
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{GuestAddress, GuestMemory};

    use super::*;

    #[test]
    fn test_a_view_stays_as_it_is_until_it_is_refreshed() {
        let memory = |size| GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)]).unwrap();
        let live = LiveMemory::new(memory(0x1000));
        let mut view = live.view();
        assert!(!view.refresh());
        live.publish(memory(0x2000), Arc::new(MmapRegion::new(0x1000).unwrap()));
        assert!(view.is_stale());
        assert!(!view.check_range(GuestAddress(0x1000), 1));
        assert!(view.refresh());
        assert!(!view.is_stale());
        assert!(view.check_range(GuestAddress(0x1000), 1));
        assert!(!live.view().is_stale());
    }
}
