//! The guest's memory, which grows when its containers want more than it has.
//!
//! The cgroups of all containers have one parent. What the guest can give them is its `memory.high`:
//! beyond that the kernel takes page cache back and slows them down, and says so in `memory.events`. That
//! is the event here. When it is not page cache that fills the memory, the host is asked for more, and
//! what has arrived by the next event raises the mark. When nothing more is to be had there is no mark:
//! then the kernel kills for want of memory, as on any machine.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::{debug, warn};

use crate::cgroup::Cgroup;

const MIB: u64 = 1 << 20;

/// What the host gives at least (virtio-mem's block).
const BLOCK: u64 = 128 * MIB;

/// What the kernel and the agent take that no container is charged for, beside the kernel's reserve.
const OWN: u64 = 24 * MIB;

/// How long the host may take to give what it has been asked for. Afterwards it is not counted on.
const PATIENCE: Duration = Duration::from_secs(20);

/// The growth of this guest.
#[derive(Debug)]
pub struct Growth {
    parent: Cgroup,
    state: Mutex<State>,
    wanted: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    /// Memory that the guest had when it was first told that it may grow; 0 before.
    initial: u64,
    /// Bytes that it may have beside that.
    pluggable: u64,
    /// Bytes that it has asked for, in all.
    asked: u64,
    asked_at: Option<Instant>,
}

/// What a guest finds at one moment. In bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    /// All memory.
    total: u64,
    /// What the kernel keeps free.
    reserve: u64,
    /// What the containers have.
    used: u64,
}

/// What follows.
#[derive(Debug, PartialEq, Eq)]
struct Decision {
    /// The mark; none where nothing more is to be had.
    high: Option<u64>,
    /// What to ask for, in all.
    ask: Option<u64>,
}

impl Growth {
    /// Of a guest whose containers' cgroups are in `parent`. It does not grow yet.
    pub fn new(parent: Cgroup) -> Self {
        Self {
            parent,
            state: Mutex::default(),
            wanted: watch::Sender::default(),
        }
    }

    /// How many bytes the host is asked for beside what it gave at first, from now on.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.wanted.subscribe()
    }

    /// The file that changes when [`Growth::check`] is to be called.
    pub fn events(&self) -> PathBuf {
        self.parent.file("memory.events")
    }

    /// The guest may have `bytes` beside what it had at first.
    pub fn allow(&self, bytes: u64) -> io::Result<()> {
        let seen = self.look()?;
        let mut state = self.lock();
        if state.initial == 0 {
            state.initial = seen.total;
        }
        state.pluggable = bytes / BLOCK * BLOCK;
        let decision = decide(&state, seen, Instant::now());
        self.mark(decision.high)
    }

    /// Ask for more if more is wanted, and use what has arrived.
    pub fn check(&self) {
        if let Err(error) = self.try_check() {
            warn!("looking at the memory of all containers: {error}");
        }
    }

    fn try_check(&self) -> io::Result<()> {
        let seen = self.look()?;
        let mut state = self.lock();
        let now = Instant::now();
        let decision = decide(&state, seen, now);
        debug!(?seen, ?decision, "the containers want memory");
        if let Some(bytes) = decision.ask {
            state.asked = bytes;
            state.asked_at = Some(now);
            // Nobody may be listening.
            self.wanted.send_replace(bytes);
        }
        self.mark(decision.high)
    }

    fn look(&self) -> io::Result<Seen> {
        let value = |text: &str, key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key));
            let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
            number.ok_or_else(|| io::Error::other(format!("no {key} where it should be")))
        };
        let total: u64 = value(&fs::read_to_string("/proc/meminfo")?, "MemTotal:")?;
        let reserve: u64 = value(&fs::read_to_string("/proc/sys/vm/min_free_kbytes")?, "")?;
        let current: u64 = value(&self.parent.read("memory.current")?, "")?;
        let stat = self.parent.read("memory.stat")?;
        let [file, shared, slab] =
            ["file ", "shmem ", "slab_reclaimable "].map(|key| value(&stat, key).unwrap_or(0));
        Ok(Seen {
            total: total * 1024,
            reserve: reserve * 1024,
            used: current.saturating_sub(file.saturating_sub(shared) + slab),
        })
    }

    fn mark(&self, high: Option<u64>) -> io::Result<()> {
        let text = high.map_or("max".to_owned(), |bytes| bytes.to_string());
        fs::write(self.parent.file("memory.high"), text)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What of `total` bytes the containers can have before the kernel runs short: it reclaims for all at
/// once when less is free than its low watermark, a quarter above the reserve, and has tables that grow
/// with the memory.
fn usable(total: u64, reserve: u64) -> u64 {
    let kept = reserve + reserve / 2 + total / 64 + OWN;
    total.saturating_sub(kept).max(total / 2)
}

fn decide(state: &State, seen: Seen, now: Instant) -> Decision {
    let usable = usable(seen.total, seen.reserve);
    let plugged = seen.total.saturating_sub(state.initial);
    // A block may have a few pages less.
    let arrived = |bytes: u64| plugged + BLOCK / 2 >= bytes;
    let late = state
        .asked_at
        .is_some_and(|at| now.saturating_duration_since(at) > PATIENCE);
    if arrived(state.pluggable) || (late && !arrived(state.asked)) {
        return Decision {
            high: None,
            ask: None,
        };
    }
    let wants = seen.used > usable / 8 * 7 && arrived(state.asked);
    let step = (seen.total / 4).max(2 * BLOCK);
    let ask = (plugged.max(state.asked) + step).next_multiple_of(BLOCK);
    Decision {
        high: Some(usable),
        ask: wants.then_some(ask.min(state.pluggable)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn seen(total: u64, used: u64) -> Seen {
        Seen {
            total,
            reserve: 64 * MIB,
            used,
        }
    }

    fn state(pluggable: u64, asked: u64) -> State {
        State {
            initial: 2 * GIB,
            pluggable,
            asked,
            asked_at: (asked > 0).then(Instant::now),
        }
    }

    fn decided(state: &State, seen: Seen) -> (Option<u64>, Option<u64>) {
        let Decision { high, ask } = decide(state, seen, Instant::now());
        (high.map(|bytes| bytes / MIB), ask.map(|bytes| bytes / MIB))
    }

    #[test]
    fn test_a_guest_that_cannot_grow_has_no_mark() {
        assert_eq!(decided(&state(0, 0), seen(2 * GIB, 2 * GIB)), (None, None));
    }

    #[test]
    fn test_more_is_asked_for_when_it_is_not_page_cache_that_fills_the_memory() {
        let state = state(8 * GIB, 0);
        assert_eq!(decided(&state, seen(2 * GIB, 0)), (Some(1896), None));
        assert_eq!(decided(&state, seen(2 * GIB, GIB)), (Some(1896), None));
        let full = seen(2 * GIB, 1800 * MIB);
        assert_eq!(decided(&state, full), (Some(1896), Some(512)));
    }

    #[test]
    fn test_it_is_asked_for_once_until_it_has_arrived() {
        let state = state(8 * GIB, 512 * MIB);
        let full = |total| seen(total, total - 100 * MIB);
        assert_eq!(decided(&state, full(2 * GIB)), (Some(1896), None));
        let half = 2 * GIB + 256 * MIB;
        assert_eq!(decided(&state, full(half)), (Some(2148), None));
        let all = 2 * GIB + 512 * MIB;
        assert_eq!(decided(&state, full(all)), (Some(2400), Some(1152)));
    }

    #[test]
    fn test_no_more_is_asked_for_than_may_be_had_and_then_there_is_no_mark() {
        let full = |total| seen(total, total);
        let before = state(384 * MIB, 0);
        assert_eq!(decided(&before, full(2 * GIB)), (Some(1896), Some(384)));
        let after = state(384 * MIB, 384 * MIB);
        assert_eq!(decided(&after, full(2 * GIB)), (Some(1896), None));
        assert_eq!(decided(&after, full(2 * GIB + 380 * MIB)), (None, None));
    }

    #[test]
    fn test_a_host_that_does_not_give_is_not_waited_for() {
        let state = state(8 * GIB, 512 * MIB);
        let later = Instant::now() + 2 * PATIENCE;
        let decision = decide(&state, seen(2 * GIB, 2 * GIB), later);
        assert_eq!((decision.high, decision.ask), (None, None));
        // And counted on again once it has.
        let arrived = seen(2 * GIB + 512 * MIB, GIB);
        assert!(decide(&state, arrived, later).high.is_some());
    }

    #[test]
    fn test_a_small_guest_keeps_half_of_its_memory_for_containers() {
        assert_eq!(usable(64 * MIB, 3 * MIB), 34 * MIB + MIB / 2);
        assert_eq!(usable(40 * MIB, 3 * MIB), 20 * MIB);
        assert_eq!(usable(0, 0), 0);
    }
}
