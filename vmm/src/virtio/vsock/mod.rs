//! Socket device (virtio 1.2, section 5.10) in user space: streams between Unix sockets of the host
//! and `AF_VSOCK` sockets of the guest.
//!
//! The host opens streams, by [`VsockHost::connect`]; the guest listens. A stream is opened from a
//! socket that its peer may use at once. A request by the guest is refused with a reset.
//!
//! | part | what it does |
//! |---|---|
//! | `packet` | the header of a packet |
//! | `stream` | one stream: flow control, half-close, the bytes that the host has not taken yet |
//! | `table` | all streams: who gets a packet, whose turn it is to send one |
//! | `reset` | telling a restored driver that its old connections are gone |
//! | `engine` | the worker thread: rings, sockets, notifications |
//! | `host` | the way in |
//!
//! Bounds: 1024 streams, opened by the host only; for each at most 256 KiB from the guest that its
//! socket has not taken, and nothing buffered towards the guest; 256 resets in waiting. A guest that
//! sends more than it has credit for is reset. Both directions take turns after 64 packets.
//!
//! A snapshot holds no stream: the sockets are closed when the device is deactivated. When the
//! guest had some open it is told so before anything is opened to it again.

mod engine;
mod host;
mod packet;
mod reset;
mod stream;
mod table;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use self::engine::{CONNECT, EVENT, Engine, RECEIVE, Remains, TRANSMIT};
use self::host::Requests;
pub use self::host::VsockHost;
use self::reset::TransportReset;
use self::table::{FIRST_PORT, Table};
use super::config_space;
use super::queue::DeviceQueue;
use super::worker::{Poll, Worker, system};
use super::{Activation, ActiveQueue, Device, DeviceError, DeviceType};

/// Descriptors of the queues. Linux keeps the receive queue full of buffers of one page, so its size
/// is memory of every guest.
const QUEUE_SIZE: u16 = 128;
const EVENT_QUEUE_SIZE: u16 = 8;

/// The device's own part of a snapshot.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    /// A host port that a lingering socket of the guest does not know.
    next_port: u32,
    /// The driver had streams open, which are gone.
    reset_owed: bool,
}

/// A virtio socket device.
pub struct Vsock {
    guest_cid: u64,
    requests: Arc<Requests>,
    next_port: u32,
    reset_owed: bool,
    worker: Option<Worker<Remains>>,
}

impl Vsock {
    /// The device of a guest with address `guest_cid` (3 or more), and the host's way to connect
    /// to that guest. All guests may have the same address, since each has its own device.
    pub fn new(guest_cid: u64) -> (Self, VsockHost) {
        let requests = Arc::new(Requests::default());
        let host = VsockHost::new(requests.clone());
        let vsock = Vsock {
            guest_cid,
            requests,
            next_port: FIRST_PORT,
            reset_owed: false,
            worker: None,
        };
        (vsock, host)
    }
}

impl Device for Vsock {
    fn device_type(&self) -> DeviceType {
        DeviceType::Vsock
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE, QUEUE_SIZE, EVENT_QUEUE_SIZE]
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        config_space::read(&self.guest_cid.to_le_bytes(), offset, data);
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), DeviceError> {
        let mut take = |token: u64| DeviceQueue::take(&mut activation, token as u16, "vsock");
        let (receive, transmit, event) = (take(RECEIVE)?, take(TRANSMIT)?, take(EVENT)?);
        let wake = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(system("create an eventfd"))?;
        let poll = Poll::new()?;
        poll.add(receive.notify(), RECEIVE, EventSet::IN)?;
        poll.add(transmit.notify(), TRANSMIT, EventSet::IN)?;
        poll.add(event.notify(), EVENT, EventSet::IN)?;
        poll.add(&wake, CONNECT, EventSet::IN)?;
        let signal = wake.try_clone().map_err(system("duplicate an eventfd"))?;
        self.requests.set_wake(Some(signal));
        let (memory, requests) = (activation.memory, self.requests.clone());
        let (guest_cid, next_port, reset_owed) = (self.guest_cid, self.next_port, self.reset_owed);
        let name = format!("thaw-vsock-{guest_cid}");
        self.worker = Some(Worker::start(&name, poll, move |poll| {
            let engine = Engine {
                memory,
                receive,
                transmit,
                reset: TransportReset::new(event, reset_owed),
                table: Table::new(poll, guest_cid, next_port),
                requests,
                wake,
                held: Vec::new(),
            };
            engine.run()
        })?);
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        self.requests.set_wake(None);
        let Some(remains) = self.worker.take().and_then(Worker::stop) else {
            return Vec::new();
        };
        self.next_port = remains.next_port;
        self.reset_owed = remains.reset_owed;
        remains.queues
    }

    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        let state = State {
            next_port: self.next_port,
            reset_owed: self.reset_owed,
        };
        postcard::to_stdvec(&state).map_err(|error| DeviceError::State(error.to_string()))
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        let state: State =
            postcard::from_bytes(state).map_err(|error| DeviceError::State(error.to_string()))?;
        if state.next_port < FIRST_PORT {
            return Err(DeviceError::State(format!(
                "{} is no port of the host",
                state.next_port
            )));
        }
        self.next_port = state.next_port;
        self.reset_owed = state.reset_owed;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
