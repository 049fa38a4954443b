//! All streams, and the packets between them and the guest.
//!
//! The table knows nothing of rings: [`Table::accept`] takes one packet from the guest, and
//! [`Table::next_packet`] fills one buffer for it, in turn for every stream that has something to
//! send.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use vmm_sys_util::epoll::EventSet;

use super::packet::{HEADER, HOST_CID, Header, Operation, STREAM};
use super::stream::{Outcome, Outgoing, Stream, WINDOW, close};
use crate::virtio::buffers::Segments;
use crate::virtio::guest_error::GuestErrors;
use crate::virtio::worker::Poll;

/// The most streams at once.
pub const MAX_STREAMS: usize = 1024;

/// Host ports are taken from here on, far from those that mean something.
pub const FIRST_PORT: u32 = 1 << 30;
const LAST_PORT: u32 = (1 << 31) - 1;

/// Resets that may wait for a receive buffer. When there are more, the guest's packets wait in
/// their ring, as virtio 1.2, 5.10.6.1 has it for a device that runs out of resources.
const MAX_RESETS: usize = 256;

/// A reset of a stream that is not (or no longer) in the table.
#[derive(Debug)]
struct Reset {
    host_port: u32,
    guest_port: u32,
    kind: u16,
}

/// See the [module](self).
pub struct Table {
    poll: Poll,
    guest_cid: u64,
    /// By host port, which is also the token of the stream's socket.
    streams: HashMap<u32, Stream>,
    next_port: u32,
    /// Host ports of streams with something to send, each once.
    ready: VecDeque<u32>,
    resets: VecDeque<Reset>,
    errors: GuestErrors,
}

impl Table {
    /// An empty table. `poll` is where the sockets are watched; their tokens are host ports.
    pub fn new(poll: Poll, guest_cid: u64, next_port: u32) -> Self {
        Table {
            poll,
            guest_cid,
            streams: HashMap::new(),
            next_port,
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            errors: GuestErrors::new("vsock"),
        }
    }

    /// Where the sockets are watched.
    pub fn poll(&self) -> &Poll {
        &self.poll
    }

    /// The host port that the next stream gets, if it is free.
    pub fn next_port(&self) -> u32 {
        self.next_port
    }

    /// Whether the guest may hold something open, or wait for an answer.
    pub fn is_entangled(&self) -> bool {
        !self.resets.is_empty() || self.streams.values().any(Stream::is_known_to_guest)
    }

    /// Open a stream from `socket`, a connected Unix stream socket, to `guest_port`. Where that is
    /// not possible the socket is closed, as it is when the guest refuses.
    pub fn connect(&mut self, guest_port: u32, socket: OwnedFd) {
        let socket = UnixStream::from(socket);
        if let Err(error) = self.check(&socket) {
            tracing::warn!("vsock: connection to port {guest_port} refused: {error}");
            return;
        }
        let host_port = self.allocate_port();
        let added = self
            .poll
            .add(&socket, u64::from(host_port), interest(false));
        if let Err(error) = added {
            tracing::warn!("vsock: connection to port {guest_port} refused: {error}");
            close(socket);
            return;
        }
        self.streams
            .insert(host_port, Stream::new(socket, guest_port));
        self.settle(host_port);
    }

    fn check(&self, socket: &UnixStream) -> io::Result<()> {
        // Fails for anything that is not a Unix socket.
        socket.local_addr()?;
        socket.set_nonblocking(true)?;
        if self.streams.len() >= MAX_STREAMS {
            return Err(io::Error::other(format!("{MAX_STREAMS} are open")));
        }
        Ok(())
    }

    fn allocate_port(&mut self) -> u32 {
        // Ends, because there are many more ports than streams.
        loop {
            let port = self.next_port;
            self.next_port = if port >= LAST_PORT {
                FIRST_PORT
            } else {
                port + 1
            };
            if !self.streams.contains_key(&port) {
                return port;
            }
        }
    }

    /// The socket of `host_port` is ready for something.
    pub fn on_ready(&mut self, host_port: u32, ready: EventSet) {
        let Some(stream) = self.streams.get_mut(&host_port) else {
            return;
        };
        if !stream.on_ready(ready) {
            if stream.is_known_to_guest() {
                let guest_port = stream.guest_port;
                self.queue_reset(host_port, guest_port, STREAM);
            }
            self.remove(host_port);
        }
        self.settle(host_port);
    }

    /// Whether [`Table::accept`] may be called.
    pub fn can_accept(&self) -> bool {
        self.resets.len() < MAX_RESETS
    }

    /// Handle a packet from the guest.
    pub fn accept(&mut self, header: &Header, payload: Segments<'_>) {
        if header.src_cid != self.guest_cid || header.dst_cid != HOST_CID {
            self.errors.report(&format_args!(
                "a packet from {} to {}",
                header.src_cid, header.dst_cid
            ));
            return;
        }
        let (host_port, guest_port) = (header.dst_port, header.src_port);
        let stream = self.streams.get_mut(&host_port).filter(|stream| {
            header.kind == STREAM && stream.guest_port == guest_port && stream.is_known_to_guest()
        });
        let Some(stream) = stream else {
            // Streams are opened by the host only, so this refuses requests, too.
            if header.operation != Operation::Reset as u16 {
                self.queue_reset(host_port, guest_port, header.kind);
            }
            return;
        };
        match stream.on_packet(header, payload) {
            Ok(Outcome::Stay) => {}
            Ok(Outcome::Finished) => {
                stream.forget_guest();
                self.queue_reset(host_port, guest_port, STREAM);
            }
            Ok(Outcome::Forgotten) => stream.forget_guest(),
            Err(violation) => {
                self.errors.report(&violation);
                self.queue_reset(host_port, guest_port, STREAM);
                self.remove(host_port);
            }
        }
        self.settle(host_port);
    }

    /// Whether [`Table::next_packet`] may have something to send.
    pub fn has_output(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// Write the next packet for the guest: its header, of [`HEADER`] bytes, and its payload. Returns
    /// the length of both, or `None` when there is nothing to send after all.
    pub fn next_packet(&mut self, header: &mut Segments<'_>, room: &Segments<'_>) -> Option<u32> {
        if let Some(reset) = self.resets.pop_front() {
            let outgoing = Outgoing {
                operation: Operation::Reset,
                flags: 0,
                len: 0,
                fwd_cnt: 0,
            };
            let packet = self.header(reset.host_port, reset.guest_port, reset.kind, &outgoing);
            header.write(&packet.to_bytes());
            return Some(HEADER as u32);
        }
        while let Some(host_port) = self.ready.pop_front() {
            let Some(stream) = self.streams.get_mut(&host_port) else {
                continue;
            };
            stream.queued = false;
            let outgoing = stream.next_packet(room);
            let guest_port = stream.guest_port;
            self.settle(host_port);
            if let Some(outgoing) = outgoing {
                let packet = self.header(host_port, guest_port, STREAM, &outgoing);
                header.write(&packet.to_bytes());
                return Some(HEADER as u32 + outgoing.len);
            }
        }
        None
    }

    fn header(&self, host_port: u32, guest_port: u32, kind: u16, outgoing: &Outgoing) -> Header {
        Header {
            src_cid: HOST_CID,
            dst_cid: self.guest_cid,
            src_port: host_port,
            dst_port: guest_port,
            len: outgoing.len,
            kind,
            operation: outgoing.operation as u16,
            flags: outgoing.flags,
            buf_alloc: WINDOW,
            fwd_cnt: outgoing.fwd_cnt,
        }
    }

    fn queue_reset(&mut self, host_port: u32, guest_port: u32, kind: u16) {
        self.resets.push_back(Reset {
            host_port,
            guest_port,
            kind,
        });
    }

    /// Draw the conclusions from whatever has happened to a stream.
    fn settle(&mut self, host_port: u32) {
        let Some(stream) = self.streams.get_mut(&host_port) else {
            return;
        };
        if stream.is_over() {
            self.remove(host_port);
            return;
        }
        if let Some(socket) = stream.take_finished_socket() {
            let _ = self.poll.remove(&socket);
            close(socket);
        }
        let blocked = stream.is_blocked();
        if blocked != stream.watched_for_writing
            && let Some(socket) = stream.socket()
        {
            match self
                .poll
                .modify(socket, u64::from(host_port), interest(blocked))
            {
                Ok(()) => stream.watched_for_writing = blocked,
                Err(error) => tracing::error!("vsock: a stream may stall: {error}"),
            }
        }
        if stream.has_output() && !std::mem::replace(&mut stream.queued, true) {
            self.ready.push_back(host_port);
        }
    }

    fn remove(&mut self, host_port: u32) {
        let socket = self
            .streams
            .remove(&host_port)
            .and_then(|mut stream| stream.take_socket());
        if let Some(socket) = socket {
            let _ = self.poll.remove(&socket);
            close(socket);
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        for stream in self.streams.values_mut() {
            if let Some(socket) = stream.take_socket() {
                close(socket);
            }
        }
    }
}

/// Edge-triggered: a socket at its end, or full of bytes that the guest has no room for, does not
/// wake the worker again and again. Writability is watched only when something waits for it, because
/// every read by the peer reports it.
fn interest(blocked: bool) -> EventSet {
    let interest = EventSet::IN | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
    if blocked {
        interest | EventSet::OUT
    } else {
        interest
    }
}
