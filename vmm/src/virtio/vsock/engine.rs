//! The worker of the socket device: rings on one side, the table of streams on the other.

use std::sync::Arc;
use std::time::Duration;

use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use super::host::Requests;
use super::packet::{HEADER, Header};
use super::reset::TransportReset;
use super::table::Table;
use crate::memory::MemoryView;
use crate::virtio::ActiveQueue;
use crate::virtio::buffers::Buffers;
use crate::virtio::guest_error::GuestErrors;
use crate::virtio::queue::{Chain, DeviceQueue, Round};
use crate::virtio::worker::{Event, Wake};

/// Tokens; those of sockets are host ports, which are larger.
pub const RECEIVE: u64 = 0;
pub const TRANSMIT: u64 = 1;
pub const EVENT: u64 = 2;
pub const CONNECT: u64 = 3;

/// The most descriptors of a packet: header, 64 KiB in pages, and some.
const MAX_DESCRIPTORS: usize = 64;

/// Packets of one direction after which the other has its turn and the driver is interrupted.
const SHARE: usize = 64;

/// Packets without payload that are kept until the driver gets a buffer back anyway. It sends one
/// for nearly everything it reads, waits for none of them, and would be interrupted for each.
const HELD: usize = 16;

/// What the device keeps when it stops.
pub struct Remains {
    pub queues: Vec<ActiveQueue>,
    pub next_port: u32,
    /// The driver has to be told that its streams are gone.
    pub reset_owed: bool,
}

/// See the [module](self).
pub struct Engine {
    pub memory: MemoryView,
    pub receive: DeviceQueue,
    pub transmit: DeviceQueue,
    pub reset: TransportReset,
    pub table: Table,
    pub requests: Arc<Requests>,
    /// Signalled when there are new requests.
    pub wake: EventFd,
    /// Heads of the packets that are kept, at most [`HELD`].
    pub held: Vec<u16>,
}

impl Engine {
    /// Work until told to stop.
    pub fn run(mut self) -> Remains {
        let mut events = Vec::new();
        self.reset.advance(&self.memory);
        self.connect();
        // What was in the rings before activation is not notified again.
        let mut more = true;
        loop {
            let timeout = more.then_some(Duration::ZERO);
            if self.table.poll().wait(&mut events, timeout) == Wake::Stop {
                return self.stop();
            }
            if self.memory.refresh() {
                self.reset.advance(&self.memory);
                self.connect();
            }
            for &event in &events {
                self.on_event(event);
            }
            more = self.round() || self.memory.is_stale();
        }
    }

    fn on_event(&mut self, event: Event) {
        match event.token {
            RECEIVE => self.receive.acknowledge(),
            TRANSMIT => self.transmit.acknowledge(),
            EVENT => {
                self.reset.queue().acknowledge();
                self.reset.advance(&self.memory);
                self.connect();
            }
            CONNECT => {
                let _ = self.wake.read();
                self.connect();
            }
            token => {
                if let Ok(host_port) = u32::try_from(token) {
                    self.table.on_ready(host_port, event.ready);
                }
            }
        }
    }

    fn connect(&mut self) {
        if !self.reset.is_done() {
            return;
        }
        for (guest_port, socket) in self.requests.take() {
            self.table.connect(guest_port, socket);
        }
    }

    /// A share of work in both directions. True when there is more to be done.
    pub fn round(&mut self) -> bool {
        self.transmit.suppress(&self.memory);
        let mut more = self.take_packets() == Round::Share;
        let stalled = !self.table.can_accept();
        more |= self.give_packets() == Round::Share;
        // Packets that had to wait for resets to be sent are not notified again.
        more |= stalled && self.table.can_accept();
        self.transmit.signal(&self.memory);
        self.receive.signal(&self.memory);
        more
    }

    /// From the guest.
    fn take_packets(&mut self) -> Round {
        for _ in 0..SHARE {
            if !self.table.can_accept() {
                return Round::Drained;
            }
            let Some(chain) = self.transmit.pop(&self.memory) else {
                if self.transmit.listen(&self.memory) {
                    continue;
                }
                return Round::Drained;
            };
            self.held.push(chain.head_index());
            let keep = accept_packet(
                &self.memory,
                chain,
                &mut self.table,
                &mut self.transmit.errors,
            );
            // A driver with a small queue needs its buffers sooner.
            let most = HELD.min(usize::from(self.transmit.size()) / 8);
            if !keep || self.held.len() > most {
                self.give_back();
            }
        }
        Round::Share
    }

    fn give_back(&mut self) {
        for head in self.held.drain(..) {
            self.transmit.push_used(&self.memory, head, 0);
        }
    }

    /// To the guest.
    fn give_packets(&mut self) -> Round {
        // Until the driver has reset its streams, what it hears could be about new ones.
        if !self.reset.is_done() {
            return Round::Drained;
        }
        self.receive.suppress(&self.memory);
        for _ in 0..SHARE {
            if !self.table.has_output() {
                return Round::Drained;
            }
            let Some(chain) = self.receive.pop(&self.memory) else {
                // Only now does it matter when the driver adds buffers.
                if self.receive.listen(&self.memory) {
                    continue;
                }
                return Round::Drained;
            };
            let head = chain.head_index();
            let mut room = match Buffers::collect(&self.memory, chain, MAX_DESCRIPTORS) {
                Ok(buffers) if buffers.writable.len() > HEADER => buffers.writable,
                Ok(_) => {
                    self.receive.errors.report(&"a receive buffer without room");
                    self.receive.push_used(&self.memory, head, 0);
                    continue;
                }
                Err(error) => {
                    self.receive.errors.report(&error);
                    self.receive.push_used(&self.memory, head, 0);
                    continue;
                }
            };
            let mut header = room.split_front(HEADER);
            match self.table.next_packet(&mut header, &room) {
                Some(len) => self.receive.push_used(&self.memory, head, len),
                None => {
                    self.receive.unpop();
                    return Round::Drained;
                }
            }
        }
        Round::Share
    }

    fn stop(mut self) -> Remains {
        self.give_back();
        let (event, unfinished) = self.reset.into_queue();
        Remains {
            next_port: self.table.next_port(),
            reset_owed: unfinished || self.table.is_entangled(),
            queues: [self.receive, self.transmit, event]
                .map(|queue| queue.into_active(&self.memory))
                .into(),
        }
    }
}

/// Handle one packet from the guest. Whether its buffer may be kept for a while.
fn accept_packet<'m>(
    memory: &'m GuestMemoryMmap,
    chain: Chain<'m>,
    table: &mut Table,
    errors: &mut GuestErrors,
) -> bool {
    let mut readable = match Buffers::collect(memory, chain, MAX_DESCRIPTORS) {
        Ok(buffers) => buffers.readable,
        Err(error) => {
            errors.report(&error);
            return false;
        }
    };
    let Some(header) = readable.read_array() else {
        errors.report(&"a packet without header");
        return false;
    };
    let bare = readable.is_empty();
    table.accept(&Header::from_bytes(&header), readable);
    bare
}
