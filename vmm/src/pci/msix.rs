//! MSI-X: the vector table, the pending bits, and the way from a device's event to the guest
//! (PCI Local Bus Specification 3.0, 6.8.2).
//!
//! Each vector has a GSI and an event descriptor of its own from the moment its device is given
//! something to do; a write to the descriptor raises the interrupt in the kernel.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::PciError;
use super::router::{InterruptRouter, MsiRoute};
use crate::virtio::Interrupt;

/// Bytes of one entry of the vector table.
pub const ENTRY_SIZE: u64 = 16;

/// Value by which the driver says that something has no vector (virtio 1.2, 4.1.5.1.2).
pub const NO_VECTOR: u16 = 0xffff;

const CONTROL_ENABLE: u16 = 1 << 15;
const CONTROL_FUNCTION_MASK: u16 = 1 << 14;
const VECTOR_MASKED: u32 = 1;

/// One entry of the table, as the guest wrote it.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Entry {
    address: u64,
    data: u32,
    control: u32,
    pending: bool,
}

/// What a snapshot keeps of MSI-X. Untrusted until [`Msix::restore`] has taken it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MsixState {
    control: u16,
    entries: Vec<Entry>,
    queue_vectors: Vec<u16>,
    config_vector: u16,
}

/// The vectors of one function.
pub struct Msix {
    router: Arc<InterruptRouter>,
    first_gsi: u32,
    table: Mutex<Table>,
}

struct Table {
    control: u16,
    entries: Vec<Entry>,
    queue_vectors: Vec<u16>,
    config_vector: u16,
    /// One a vector while connected; empty before and after.
    events: Vec<EventFd>,
}

impl Table {
    fn can_deliver(&self, vector: usize) -> bool {
        self.control & (CONTROL_ENABLE | CONTROL_FUNCTION_MASK) == CONTROL_ENABLE
            && self.entries[vector].control & VECTOR_MASKED == 0
    }

    /// Raise `vector`, or remember it while it is masked.
    fn raise(&mut self, vector: u16) {
        let vector = usize::from(vector);
        let Some(event) = self.events.get(vector) else {
            return;
        };
        if self.can_deliver(vector) {
            // The counter of an event descriptor that KVM consumes cannot overflow.
            let _ = event.write(1);
        } else if self.control & CONTROL_ENABLE != 0 {
            self.entries[vector].pending = true;
        }
    }

    fn deliver_pending(&mut self) {
        for vector in 0..self.entries.len() {
            if self.entries[vector].pending && self.can_deliver(vector) {
                self.entries[vector].pending = false;
                self.raise(vector as u16);
            }
        }
    }
}

impl Msix {
    /// The vectors of a function with `queues` queues: one each, and one for configuration changes.
    pub fn new(router: Arc<InterruptRouter>, queues: u16) -> Self {
        let vectors = queues + 1;
        let masked = Entry {
            address: 0,
            data: 0,
            control: VECTOR_MASKED,
            pending: false,
        };
        let table = Table {
            control: 0,
            entries: vec![masked; usize::from(vectors)],
            queue_vectors: vec![NO_VECTOR; usize::from(queues)],
            config_vector: NO_VECTOR,
            events: Vec::new(),
        };
        let first_gsi = router.allocate(u32::from(vectors));
        Self {
            router,
            first_gsi,
            table: Mutex::new(table),
        }
    }

    /// Number of vectors.
    pub fn vectors(&self) -> u16 {
        self.lock().entries.len() as u16
    }

    /// The message control word, without the table size.
    pub fn control(&self) -> u16 {
        self.lock().control
    }

    /// The guest wrote the message control word.
    pub fn set_control(&self, value: u16) {
        let mut table = self.lock();
        table.control = value & (CONTROL_ENABLE | CONTROL_FUNCTION_MASK);
        table.deliver_pending();
    }

    /// The guest reads four bytes of the vector table.
    pub fn read_table(&self, offset: u64) -> u32 {
        let table = self.lock();
        let Some(entry) = table.entries.get((offset / ENTRY_SIZE) as usize) else {
            return 0;
        };
        match offset % ENTRY_SIZE {
            0 => entry.address as u32,
            4 => (entry.address >> 32) as u32,
            8 => entry.data,
            12 => entry.control,
            _ => 0,
        }
    }

    /// The guest writes four bytes of the vector table.
    pub fn write_table(&self, offset: u64, value: u32) {
        let vector = (offset / ENTRY_SIZE) as usize;
        let mut table = self.lock();
        let Some(entry) = table.entries.get_mut(vector) else {
            return;
        };
        match offset % ENTRY_SIZE {
            0 => entry.address = entry.address & !0xffff_ffff | u64::from(value),
            4 => entry.address = entry.address & 0xffff_ffff | u64::from(value) << 32,
            8 => entry.data = value,
            12 => entry.control = value & VECTOR_MASKED,
            _ => return,
        }
        if entry.control & VECTOR_MASKED == 0 {
            let route = MsiRoute {
                address: entry.address,
                data: entry.data,
            };
            // A route that KVM refuses is the guest's own loss: it gets no interrupt.
            let _ = self.router.route([(self.first_gsi + vector as u32, route)]);
            table.deliver_pending();
        }
    }

    /// The guest reads four bytes of the pending bit array.
    pub fn read_pending(&self, offset: u64) -> u32 {
        let first = (offset as usize).saturating_mul(8);
        let table = self.lock();
        let bits = table.entries.iter().skip(first).take(32).enumerate();
        bits.fold(0, |word, (bit, entry)| {
            word | u32::from(entry.pending) << bit
        })
    }

    /// The vector of queue `queue`.
    pub fn queue_vector(&self, queue: u16) -> u16 {
        self.lock()
            .queue_vectors
            .get(usize::from(queue))
            .copied()
            .unwrap_or(NO_VECTOR)
    }

    /// The guest chooses the vector of queue `queue`; one that does not exist becomes none.
    pub fn set_queue_vector(&self, queue: u16, vector: u16) {
        let mut table = self.lock();
        let vector = existing(&table, vector);
        if let Some(slot) = table.queue_vectors.get_mut(usize::from(queue)) {
            *slot = vector;
        }
    }

    /// The vector of configuration changes.
    pub fn config_vector(&self) -> u16 {
        self.lock().config_vector
    }

    /// The guest chooses the vector of configuration changes; one that does not exist becomes none.
    pub fn set_config_vector(&self, vector: u16) {
        let mut table = self.lock();
        table.config_vector = existing(&table, vector);
    }

    /// Forget the choice of vectors, as a device reset does.
    pub fn reset_vectors(&self) {
        let mut table = self.lock();
        table.queue_vectors.fill(NO_VECTOR);
        table.config_vector = NO_VECTOR;
    }

    /// Make the event descriptors of the vectors that are in use and give them to KVM. Routes must
    /// have been set before ([`Msix::routes`]), or are set when the guest unmasks a vector.
    pub fn connect(&self) -> Result<(), PciError> {
        let mut table = self.lock();
        if !table.events.is_empty() {
            return Ok(());
        }
        let mut events = Vec::with_capacity(table.entries.len());
        for vector in 0..table.entries.len() as u32 {
            let event = EventFd::new(EFD_NONBLOCK).map_err(PciError::system("making an event"))?;
            self.router
                .wiring()
                .assign_interrupt(&event, self.first_gsi + vector)
                .map_err(PciError::system("connecting an interrupt"))?;
            events.push(event);
        }
        table.events = events;
        Ok(())
    }

    /// Take the event descriptors back from KVM.
    pub fn disconnect(&self) {
        for (vector, event) in (0..).zip(std::mem::take(&mut self.lock().events)) {
            // Closing the descriptor, which follows, releases it just as well.
            let _ = self
                .router
                .wiring()
                .release_interrupt(&event, self.first_gsi + vector);
        }
    }

    /// The routes of all vectors that the guest has unmasked.
    pub fn routes(&self) -> Vec<(u32, MsiRoute)> {
        let table = self.lock();
        let unmasked = (self.first_gsi..).zip(&table.entries);
        unmasked
            .filter(|(_, entry)| entry.control & VECTOR_MASKED == 0)
            .map(|(gsi, entry)| {
                (
                    gsi,
                    MsiRoute {
                        address: entry.address,
                        data: entry.data,
                    },
                )
            })
            .collect()
    }

    /// What a snapshot keeps.
    pub fn save(&self) -> MsixState {
        let table = self.lock();
        MsixState {
            control: table.control,
            entries: table.entries.clone(),
            queue_vectors: table.queue_vectors.clone(),
            config_vector: table.config_vector,
        }
    }

    /// Take back what a snapshot kept; refused when it is not of a function like this.
    pub fn restore(&self, state: MsixState) -> Result<(), PciError> {
        let mut table = self.lock();
        let vectors = table.entries.len();
        let exists = |vector: u16| vector == NO_VECTOR || usize::from(vector) < vectors;
        let fits = state.entries.len() == vectors
            && state.queue_vectors.len() == table.queue_vectors.len()
            && state.queue_vectors.iter().all(|vector| exists(*vector))
            && exists(state.config_vector);
        if !fits {
            return Err(PciError::State("MSI-X vectors"));
        }
        table.control = state.control & (CONTROL_ENABLE | CONTROL_FUNCTION_MASK);
        table.entries = state.entries;
        table.queue_vectors = state.queue_vectors;
        table.config_vector = state.config_vector;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn existing(table: &Table, vector: u16) -> u16 {
    if usize::from(vector) < table.entries.len() {
        vector
    } else {
        NO_VECTOR
    }
}

impl Interrupt for Msix {
    fn queue(&self, queue: u16) {
        let mut table = self.lock();
        if let Some(vector) = table.queue_vectors.get(usize::from(queue)).copied() {
            table.raise(vector);
        }
    }

    fn config(&self) {
        let mut table = self.lock();
        let vector = table.config_vector;
        table.raise(vector);
    }
}
