//! The driver's side of a device, for the devices' tests: rings in guest memory, notifications and
//! interrupts with `VIRTIO_F_EVENT_IDX` as a real driver uses it, so that a lost wakeup on either
//! side shows as a test that times out.

use std::collections::HashMap;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Activation, ActiveQueue, Interrupt};

/// How long a test waits for what must come.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Descriptor flags (virtio 1.2, 2.7.5).
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// Everything that the devices under test offer.
pub const FEATURES: u64 = 1 << 32 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

#[derive(Default)]
struct Raised {
    queues: HashMap<u16, u64>,
    config: u64,
}

/// Counts interrupts and lets the driver wait for them.
#[derive(Default)]
pub struct TestInterrupt {
    raised: Mutex<Raised>,
    changed: Condvar,
}

impl Interrupt for TestInterrupt {
    fn queue(&self, queue: u16) {
        *self.raised.lock().unwrap().queues.entry(queue).or_default() += 1;
        self.changed.notify_all();
    }

    fn config(&self) {
        self.raised.lock().unwrap().config += 1;
        self.changed.notify_all();
    }
}

impl TestInterrupt {
    pub fn of_queue(&self, queue: u16) -> u64 {
        let raised = self.raised.lock().unwrap();
        raised.queues.get(&queue).copied().unwrap_or_default()
    }

    pub fn of_config(&self) -> u64 {
        self.raised.lock().unwrap().config
    }

    /// Wait until queue `queue` has had more than `seen` interrupts. False: the time is over.
    fn wait(&self, queue: u16, seen: u64, time: Duration) -> bool {
        let raised = self.raised.lock().unwrap();
        let (raised, _) = self
            .changed
            .wait_timeout_while(raised, time, |raised| {
                raised.queues.get(&queue).copied().unwrap_or_default() <= seen
            })
            .unwrap();
        raised.queues.get(&queue).copied().unwrap_or_default() > seen
    }
}

/// Guest memory of `size` bytes from address 0.
pub fn memory(size: usize) -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)]).unwrap()
}

/// What a device gets for `queues`.
pub fn activation(
    memory: &GuestMemoryMmap,
    interrupt: &Arc<TestInterrupt>,
    queues: Vec<ActiveQueue>,
    features: u64,
) -> Activation {
    Activation {
        memory: memory.clone().into(),
        queues,
        interrupt: interrupt.clone(),
        features,
    }
}

/// The driver's side of one queue.
pub struct DriverQueue {
    memory: GuestMemoryMmap,
    interrupt: Arc<TestInterrupt>,
    pub index: u16,
    size: u16,
    base: u64,
    next_avail: u16,
    last_used: u16,
    free: Vec<u16>,
    /// Descriptors of each chain under way, by head.
    chains: HashMap<u16, Vec<u16>>,
    pub notify: EventFd,
    /// Notifications that the device wanted.
    pub kicks: u64,
    /// `VIRTIO_F_EVENT_IDX` is in use.
    pub event_idx: bool,
}

impl DriverQueue {
    /// A queue whose rings lie at `base`, a multiple of 4096, and take up to 16 KiB.
    pub fn new(
        memory: &GuestMemoryMmap,
        interrupt: &Arc<TestInterrupt>,
        index: u16,
        size: u16,
        base: u64,
    ) -> Self {
        DriverQueue {
            memory: memory.clone(),
            interrupt: interrupt.clone(),
            index,
            size,
            base,
            next_avail: 0,
            last_used: 0,
            free: (0..size).rev().collect(),
            chains: HashMap::new(),
            notify: EventFd::new(EFD_NONBLOCK).unwrap(),
            kicks: 0,
            event_idx: true,
        }
    }

    fn avail(&self) -> u64 {
        self.base + 16 * u64::from(self.size)
    }

    fn used(&self) -> u64 {
        (self.avail() + 6 + 2 * u64::from(self.size)).next_multiple_of(4)
    }

    fn load(&self, address: u64) -> u16 {
        self.memory
            .load(GuestAddress(address), Ordering::Acquire)
            .unwrap()
    }

    fn store(&self, address: u64, value: u16) {
        self.memory
            .store(value, GuestAddress(address), Ordering::Release)
            .unwrap();
    }

    /// The device's side, as of a queue that has just been set up.
    pub fn device_side(&self) -> ActiveQueue {
        let mut queue = Queue::new(self.size).unwrap();
        let halves = |address: u64| (Some(address as u32), Some((address >> 32) as u32));
        let (low, high) = halves(self.base);
        queue.set_desc_table_address(low, high);
        let (low, high) = halves(self.avail());
        queue.set_avail_ring_address(low, high);
        let (low, high) = halves(self.used());
        queue.set_used_ring_address(low, high);
        queue.set_ready(true);
        assert!(queue.is_valid(&self.memory));
        ActiveQueue {
            index: self.index,
            queue,
            notify: self.notify.try_clone().unwrap(),
        }
    }

    /// Write a raw descriptor into the table.
    pub fn set_descriptor(&self, at: u16, address: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[0..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..16].copy_from_slice(&next.to_le_bytes());
        self.memory
            .write_slice(&bytes, GuestAddress(self.base + 16 * u64::from(at)))
            .unwrap();
    }

    /// Make head `head` available without looking at it.
    pub fn offer(&mut self, head: u16) {
        let slot = self.avail() + 4 + 2 * u64::from(self.next_avail % self.size);
        self.store(slot, head);
        self.next_avail = self.next_avail.wrapping_add(1);
        self.store(self.avail() + 2, self.next_avail);
    }

    /// Pretend that the available index is `index`.
    pub fn set_avail_index(&mut self, index: u16) {
        self.store(self.avail() + 2, index);
    }

    /// Free descriptors.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Make a chain of `(address, length, device writes)` available and return its head.
    pub fn add(&mut self, parts: &[(u64, u32, bool)]) -> u16 {
        let descriptors: Vec<u16> = parts.iter().map(|_| self.free.pop().unwrap()).collect();
        for (position, &(address, len, write)) in parts.iter().enumerate() {
            let next = descriptors.get(position + 1).copied();
            let flags = if write { WRITE } else { 0 } | if next.is_some() { NEXT } else { 0 };
            self.set_descriptor(
                descriptors[position],
                address,
                len,
                flags,
                next.unwrap_or(0),
            );
        }
        let head = descriptors[0];
        self.chains.insert(head, descriptors);
        self.offer(head);
        head
    }

    /// Notify the device of what was added since index `before`, if it wants to know.
    fn kick_since(&mut self, before: u16) {
        fence(Ordering::SeqCst);
        if !self.event_idx {
            if self.load(self.used()) & 1 == 0 {
                self.kick();
            }
            return;
        }
        let event = self.load(self.used() + 4 + 8 * u64::from(self.size));
        let (new, old) = (self.next_avail, before);
        // vring_need_event of virtio 1.2, 2.7.10.
        if new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old) {
            self.kick();
        }
    }

    /// Add one chain and notify, if the device wants to know.
    pub fn submit(&mut self, parts: &[(u64, u32, bool)]) -> u16 {
        let before = self.next_avail;
        let head = self.add(parts);
        self.kick_since(before);
        head
    }

    /// Notify the device in any case.
    pub fn kick(&mut self) {
        self.kicks += 1;
        self.notify.write(1).unwrap();
    }

    /// A used chain (head, bytes written), if there is one.
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        if self.load(self.used() + 2) == self.last_used {
            return None;
        }
        let entry = self.used() + 4 + 8 * u64::from(self.last_used % self.size);
        let head: u32 = self.memory.read_obj(GuestAddress(entry)).unwrap();
        let len: u32 = self.memory.read_obj(GuestAddress(entry + 4)).unwrap();
        self.last_used = self.last_used.wrapping_add(1);
        let head = head as u16;
        if let Some(descriptors) = self.chains.remove(&head) {
            self.free.extend(descriptors.into_iter().rev());
        }
        Some((head, len))
    }

    /// Wait for a used chain by interrupt, as a driver that sleeps does.
    pub fn wait_used_for(&mut self, time: Duration) -> Option<(u16, u32)> {
        let end = Instant::now() + time;
        loop {
            let seen = self.interrupt.of_queue(self.index);
            // Ask for an interrupt at the next used buffer, then look again.
            self.store(self.avail() + 4 + 2 * u64::from(self.size), self.last_used);
            fence(Ordering::SeqCst);
            if let Some(used) = self.take_used() {
                return Some(used);
            }
            let left = end.saturating_duration_since(Instant::now());
            if !self.interrupt.wait(self.index, seen, left) {
                // The time is over.
                return self.take_used();
            }
        }
    }

    /// Wait for a used chain that must come.
    pub fn wait_used(&mut self) -> (u16, u32) {
        self.wait_used_for(PATIENCE)
            .expect("no used buffer and no interrupt")
    }
}
