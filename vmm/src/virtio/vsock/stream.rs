//! One stream between a socket on the host and a socket in the guest.
//!
//! Both directions are independent: each has its flow control, its end, and a side that may no
//! longer listen. Towards the guest nothing is buffered here: bytes are read from the host's socket
//! straight into the guest's receive buffers when the guest has credit. From the guest, bytes go
//! straight to the socket; what it does not take waits here, at most [`WINDOW`] bytes, which is the
//! credit that the guest is given.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::net::Shutdown;
use std::num::Wrapping;
use std::os::unix::net::UnixStream;

use thiserror::Error;
use vmm_sys_util::epoll::EventSet;

use super::packet::{Header, Operation, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use crate::virtio::buffers::Segments;
use crate::virtio::guest_io;

/// The most bytes that wait here for the host's socket: the receive buffer that we announce.
pub const WINDOW: u32 = 256 << 10;

/// The most payload of one packet to the guest (Linux sends no more either).
pub const MAX_PAYLOAD: usize = 64 << 10;

/// New credit that is worth a packet of its own while the guest is running short.
const WORTHWHILE: u32 = 16 << 10;

/// A buffer larger than this is given back to the allocator when it is empty.
const KEPT: usize = 4 << 10;

/// What the guest did wrong with a stream.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Violation {
    /// In the wrong moment, or unknown.
    #[error("operation {0} at the wrong time")]
    Operation(u16),
    /// More data than the chain holds.
    #[error("{0} bytes announced in a chain that holds less")]
    Length(u32),
    /// More data than we had room for.
    #[error("{0} bytes beyond the announced credit")]
    Overrun(u32),
}

/// What a packet from the guest means for the stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Go on.
    Stay,
    /// The guest has finished: answer with a reset. Data for the host may still be under way.
    Finished,
    /// The guest has forgotten the stream: say nothing more.
    Forgotten,
}

/// A packet to be sent, without what the stream's table knows.
#[derive(Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// What it is for.
    pub operation: Operation,
    /// Flags of a shutdown.
    pub flags: u32,
    /// Bytes of payload.
    pub len: u32,
    /// Our [`Header::fwd_cnt`].
    pub fwd_cnt: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// To be requested from the guest.
    New,
    /// Requested and not answered.
    Requested,
    /// Open.
    Open,
    /// The guest has no such stream any more; only data for the host is left.
    Draining,
}

/// See the [module](self).
#[derive(Debug)]
pub struct Stream {
    /// `None` when both directions of it are finished.
    socket: Option<UnixStream>,
    /// The guest's port.
    pub guest_port: u32,
    phase: Phase,
    /// Whether the stream is in the table's list of streams with something to send.
    pub queued: bool,
    /// Whether its socket is watched for becoming writable.
    pub watched_for_writing: bool,

    // From the guest to the host.
    pending: VecDeque<u8>,
    /// Bytes that the guest has sent.
    received: Wrapping<u32>,
    /// Bytes that have been passed on or dropped.
    forwarded: Wrapping<u32>,
    /// `forwarded` as the guest knows it.
    announced: Wrapping<u32>,
    /// The socket took all that it was offered last.
    writable: bool,
    /// The guest sends no more.
    guest_done: bool,
    /// The socket has been told so.
    write_shut: bool,
    /// The socket's peer reads no more: data is dropped.
    host_deaf: bool,

    // From the host to the guest.
    /// Bytes sent to the guest.
    sent: Wrapping<u32>,
    /// Size of the guest's receive buffer.
    guest_window: u32,
    /// What has left that buffer.
    guest_forwarded: Wrapping<u32>,
    /// The socket may have bytes, or its end, to be read.
    readable: bool,
    /// The socket is at its end.
    host_done: bool,
    /// The guest receives no more.
    guest_deaf: bool,

    // Owed to the guest.
    shutdown_told: u32,
    credit_owed: bool,
    credit_asked: bool,
}

impl Stream {
    /// A stream to be opened to `guest_port`.
    pub fn new(socket: UnixStream, guest_port: u32) -> Self {
        Stream {
            socket: Some(socket),
            guest_port,
            phase: Phase::New,
            queued: false,
            watched_for_writing: false,
            pending: VecDeque::new(),
            received: Wrapping(0),
            forwarded: Wrapping(0),
            announced: Wrapping(0),
            writable: true,
            guest_done: false,
            write_shut: false,
            host_deaf: false,
            sent: Wrapping(0),
            guest_window: 0,
            guest_forwarded: Wrapping(0),
            readable: false,
            host_done: false,
            guest_deaf: false,
            shutdown_told: 0,
            credit_owed: false,
            credit_asked: false,
        }
    }

    /// The host's socket, as long as it is in use.
    pub fn socket(&self) -> Option<&UnixStream> {
        self.socket.as_ref()
    }

    /// Whether the guest has (or is getting) the other end.
    pub fn is_known_to_guest(&self) -> bool {
        !matches!(self.phase, Phase::New | Phase::Draining)
    }

    /// Whether data waits for the socket to become writable.
    pub fn is_blocked(&self) -> bool {
        self.socket.is_some() && !self.pending.is_empty()
    }

    /// Whether nothing is left to be done for either side.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Draining && (self.pending.is_empty() || self.host_deaf)
    }

    /// Whether [`Stream::next_packet`] is worth calling.
    pub fn has_output(&self) -> bool {
        match self.phase {
            Phase::New => true,
            Phase::Requested | Phase::Draining => false,
            Phase::Open => {
                self.can_read()
                    || self.owed_shutdown() & !self.shutdown_told != 0
                    || self.wants_to_announce()
                    || self.wants_credit()
            }
        }
    }

    /// Handle a packet from the guest, whose payload may be longer than it says.
    pub fn on_packet(
        &mut self,
        header: &Header,
        payload: Segments<'_>,
    ) -> Result<Outcome, Violation> {
        let operation = Operation::new(header.operation);
        let wrong = Violation::Operation(header.operation);
        if operation == Some(Operation::Reset) {
            return Ok(Outcome::Forgotten);
        }
        self.guest_window = header.buf_alloc;
        self.guest_forwarded = Wrapping(header.fwd_cnt);
        if self.credit() >= self.guest_window / 2 && self.credit() > 0 {
            self.credit_asked = false;
        }
        match (self.phase, operation.ok_or(wrong)?) {
            (Phase::Requested, Operation::Response) => self.phase = Phase::Open,
            (Phase::Open, Operation::Data) => self.on_data(header.len, payload)?,
            (Phase::Open, Operation::Shutdown) => return Ok(self.on_shutdown(header.flags)),
            (Phase::Open, Operation::CreditUpdate) => {}
            (Phase::Open, Operation::CreditRequest) => self.credit_owed = true,
            _ => return Err(Violation::Operation(header.operation)),
        }
        Ok(Outcome::Stay)
    }

    fn on_data(&mut self, len: u32, mut payload: Segments<'_>) -> Result<(), Violation> {
        if self.guest_done {
            return Err(Violation::Operation(Operation::Data as u16));
        }
        if payload.len() < len as usize {
            return Err(Violation::Length(len));
        }
        let room = WINDOW - (self.received - self.forwarded).0;
        if len > room {
            return Err(Violation::Overrun(len - room));
        }
        payload.truncate(len as usize);
        self.received += len;
        self.send_directly(&mut payload);
        if self.host_deaf {
            self.drop_pending();
            return Ok(());
        }
        // Whatever the socket did not take. All of it fits, or the guest would have overrun.
        for part in payload.parts() {
            let mut bytes = vec![0; part.len()];
            part.copy_to(&mut bytes);
            self.pending.extend(bytes);
        }
        Ok(())
    }

    fn send_directly(&mut self, payload: &mut Segments<'_>) {
        if !self.pending.is_empty() {
            return;
        }
        while !payload.is_empty() && self.writable && !self.host_deaf {
            let Some(socket) = &self.socket else { return };
            let sent = guest_io::send(socket, payload.parts());
            if let Some(count) = self.after_sending(sent) {
                payload.advance(count);
            }
        }
    }

    /// Pass on what waits for the socket, then the guest's end of data.
    pub fn flush(&mut self) {
        while !self.pending.is_empty() && self.writable && !self.host_deaf {
            let Some(socket) = &self.socket else { break };
            let sent = guest_io::send_bytes(socket, self.pending.as_slices());
            if let Some(count) = self.after_sending(sent) {
                self.pending.drain(..count);
            }
        }
        if self.host_deaf {
            self.drop_pending();
        }
        if !self.pending.is_empty() {
            return;
        }
        if self.pending.capacity() > KEPT {
            self.pending = VecDeque::new();
        }
        if self.guest_done && !std::mem::replace(&mut self.write_shut, true) {
            self.shut(Shutdown::Write);
        }
    }

    /// Account for a call that sent to the socket. How many bytes it took, if any.
    fn after_sending(&mut self, sent: io::Result<usize>) -> Option<usize> {
        match sent {
            Ok(count) => {
                // At most WINDOW.
                self.forwarded += count as u32;
                Some(count)
            }
            Err(error) => {
                match error.kind() {
                    ErrorKind::WouldBlock => self.writable = false,
                    ErrorKind::Interrupted => {}
                    // Closed, or shut down for reading.
                    _ => self.host_deaf = true,
                }
                None
            }
        }
    }

    fn drop_pending(&mut self) {
        self.forwarded = self.received;
        self.pending = VecDeque::new();
    }

    fn on_shutdown(&mut self, flags: u32) -> Outcome {
        if flags & SHUTDOWN_RECEIVE != 0 && !std::mem::replace(&mut self.guest_deaf, true) {
            // Who writes to the socket learns that nobody will read it.
            self.shut(Shutdown::Read);
        }
        self.guest_done |= flags & SHUTDOWN_SEND != 0;
        self.flush();
        if self.guest_done && self.guest_deaf {
            Outcome::Finished
        } else {
            Outcome::Stay
        }
    }

    /// The guest has no such stream any more: only pass on what it has sent.
    pub fn forget_guest(&mut self) {
        self.phase = Phase::Draining;
        self.guest_done = true;
        self.guest_deaf = true;
        self.flush();
    }

    /// The socket is ready for something. False when the stream is not worth opening any more.
    pub fn on_ready(&mut self, ready: EventSet) -> bool {
        let ended = EventSet::HANG_UP | EventSet::ERROR;
        self.readable |= ready.intersects(EventSet::IN | EventSet::READ_HANG_UP | ended);
        self.writable |= ready.intersects(EventSet::OUT | ended);
        if ready.contains(EventSet::HANG_UP) && !self.write_shut {
            // Not merely the end of both directions: the peer has closed its socket, or shut down
            // its reading side as well.
            self.host_deaf = true;
        }
        self.flush();
        !(self.host_deaf
            && matches!(self.phase, Phase::New | Phase::Requested)
            && self
                .socket
                .as_ref()
                .is_none_or(|socket| !guest_io::has_bytes(socket)))
    }

    /// The next packet for the guest, whose payload is written to `room`.
    pub fn next_packet(&mut self, room: &Segments<'_>) -> Option<Outgoing> {
        let (operation, flags, len) = match self.phase {
            Phase::New => {
                self.phase = Phase::Requested;
                (Operation::Request, 0, 0)
            }
            Phase::Open => self.next_of_open(room)?,
            Phase::Requested | Phase::Draining => return None,
        };
        self.announced = self.forwarded;
        self.credit_owed = false;
        Some(Outgoing {
            operation,
            flags,
            len,
            fwd_cnt: self.forwarded.0,
        })
    }

    fn next_of_open(&mut self, room: &Segments<'_>) -> Option<(Operation, u32, u32)> {
        if let Some(len) = self.read(room) {
            return Some((Operation::Data, 0, len));
        }
        let owed = self.owed_shutdown();
        if owed & !self.shutdown_told != 0 {
            self.shutdown_told |= owed;
            return Some((Operation::Shutdown, owed, 0));
        }
        if self.wants_to_announce() {
            return Some((Operation::CreditUpdate, 0, 0));
        }
        if self.wants_credit() {
            self.credit_asked = true;
            return Some((Operation::CreditRequest, 0, 0));
        }
        None
    }

    /// Read from the socket into guest memory. `None` when there is nothing, or the end.
    fn read(&mut self, room: &Segments<'_>) -> Option<u32> {
        let limit = MAX_PAYLOAD.min(self.credit() as usize);
        while self.can_read() {
            let mut room = room.clone();
            room.truncate(limit);
            match guest_io::receive(self.socket.as_ref()?, room.parts()) {
                Ok(0) => self.host_done = true,
                Ok(count) => {
                    // At most MAX_PAYLOAD.
                    let count = count as u32;
                    self.sent += count;
                    return Some(count);
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => self.readable = false,
                    ErrorKind::Interrupted => {}
                    // The peer is gone, and what it sent has been read.
                    _ => self.host_done = true,
                },
            }
        }
        None
    }

    fn can_read(&self) -> bool {
        self.wants_to_read() && self.credit() > 0
    }

    fn wants_to_read(&self) -> bool {
        self.readable && !self.host_done && !self.guest_deaf && self.socket.is_some()
    }

    /// Bytes that the guest has room for.
    fn credit(&self) -> u32 {
        self.guest_window
            .saturating_sub((self.sent - self.guest_forwarded).0)
    }

    /// Ask for credit once when it is used up, then not before half of the guest's buffer was free:
    /// a guest that reads slowly would otherwise be asked after every few bytes.
    fn wants_credit(&self) -> bool {
        self.wants_to_read() && self.credit() == 0 && !self.credit_asked
    }

    /// Whether the guest should learn how much has left our buffer: when it asks, and while it
    /// sends when that is much, or the guest is running short and it is worth a packet. One of them
    /// holds at the latest when the guest has no credit left and the buffer is empty.
    fn wants_to_announce(&self) -> bool {
        let news = (self.forwarded - self.announced).0;
        let credit = WINDOW.saturating_sub((self.received - self.announced).0);
        let short = credit < WINDOW / 2 && news >= WORTHWHILE;
        self.credit_owed || (!self.guest_done && (short || news >= WINDOW / 2))
    }

    fn owed_shutdown(&self) -> u32 {
        let mut flags = 0;
        if self.host_done {
            flags |= SHUTDOWN_SEND;
        }
        if self.host_deaf {
            flags |= SHUTDOWN_RECEIVE;
        }
        flags & SHUTDOWN_BOTH
    }

    /// Take the socket when neither direction needs it any more.
    pub fn take_finished_socket(&mut self) -> Option<UnixStream> {
        let read = self.host_done || self.guest_deaf;
        let written = self.write_shut || self.host_deaf;
        if read && written {
            self.take_socket()
        } else {
            None
        }
    }

    /// Take the socket to [close](close) it.
    pub fn take_socket(&mut self) -> Option<UnixStream> {
        self.socket.take()
    }

    fn shut(&self, how: Shutdown) {
        if let Some(socket) = &self.socket {
            // Fails when the peer is gone, and then it needs no telling.
            let _ = socket.shutdown(how);
        }
    }
}

/// Close a socket so that its peer sees the end of data after all that was sent to it, and not a
/// reset: that is what the kernel makes of bytes that nobody has read (`unix_release_sock`).
pub fn close(mut socket: UnixStream) {
    let _ = socket.shutdown(Shutdown::Both);
    let mut unread = [0; 4096];
    // Nothing can be added any more, so the socket's buffer is the limit.
    while matches!(socket.read(&mut unread), Ok(1..)) {}
}
