//! A guest for the tests: the driver's side of the device, and just enough of a socket layer.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::super::packet::{HEADER, HOST_CID, Header, Operation, STREAM};
use super::super::{EVENT_QUEUE_SIZE, QUEUE_SIZE, Vsock, VsockHost};
use crate::virtio::test_driver::{
    DriverQueue, FEATURES, PATIENCE, TestInterrupt, activation, memory,
};
use crate::virtio::{ActiveQueue, Device};

/// Long enough for something that should not come to have come.
pub const MOMENT: Duration = Duration::from_millis(100);

const EVENT_BUFFERS: u64 = 0xf_0000;
const RECEIVE_BUFFERS: u64 = 0x10_0000;
const RECEIVE_BUFFER: u32 = 4096;
const TRANSMIT_BUFFERS: u64 = 0x20_0000;
const TRANSMIT_BUFFER: u64 = 0x1_8000;
const TRANSMIT_SLOTS: u64 = 48;

/// The next guest's address; different, so that each device's thread has its own name.
static CID: AtomicU64 = AtomicU64::new(100);

/// The guest's end of a stream.
#[derive(Debug, Clone)]
pub struct Connection {
    pub host_port: u32,
    pub guest_port: u32,
    /// What the guest says of its buffer.
    pub window: u32,
    pub forwarded: u32,
}

pub struct Guest {
    pub cid: u64,
    pub memory: GuestMemoryMmap,
    pub interrupt: Arc<TestInterrupt>,
    pub receive: DriverQueue,
    pub transmit: DriverQueue,
    pub event: DriverQueue,
    pub vsock: Vsock,
    pub host: VsockHost,
    pub features: u64,
    /// Where the buffer of each chain lies.
    receive_buffers: HashMap<u16, u64>,
    transmit_slots: HashMap<u16, u64>,
    free_slots: Vec<u64>,
    /// Receive buffers that were used are kept, not made available again.
    pub keep_buffers: bool,
    pub kept: Vec<u64>,
}

impl Guest {
    /// A guest whose device is not active.
    pub fn inactive() -> Self {
        let memory = memory(16 << 20);
        let interrupt = Arc::new(TestInterrupt::default());
        let cid = CID.fetch_add(1, Ordering::Relaxed);
        let (vsock, host) = Vsock::new(cid);
        Guest {
            cid,
            receive: DriverQueue::new(&memory, &interrupt, 0, QUEUE_SIZE, 0),
            transmit: DriverQueue::new(&memory, &interrupt, 1, QUEUE_SIZE, 0x4000),
            event: DriverQueue::new(&memory, &interrupt, 2, EVENT_QUEUE_SIZE, 0x8000),
            memory,
            interrupt,
            vsock,
            host,
            features: FEATURES,
            receive_buffers: HashMap::new(),
            transmit_slots: HashMap::new(),
            free_slots: (0..TRANSMIT_SLOTS)
                .map(|slot| TRANSMIT_BUFFERS + slot * TRANSMIT_BUFFER)
                .collect(),
            keep_buffers: false,
            kept: Vec::new(),
        }
    }

    /// A guest as its driver leaves it after probe.
    pub fn running() -> Self {
        let mut guest = Guest::inactive();
        guest.fill_events();
        let queues = guest.device_sides();
        guest.activate(queues);
        guest.fill_receive();
        guest
    }

    pub fn device_sides(&self) -> Vec<ActiveQueue> {
        vec![
            self.receive.device_side(),
            self.transmit.device_side(),
            self.event.device_side(),
        ]
    }

    pub fn activate(&mut self, queues: Vec<ActiveQueue>) {
        let activation = activation(&self.memory, &self.interrupt, queues, self.features);
        self.vsock.activate(activation).unwrap();
    }

    pub fn fill_events(&mut self) {
        for buffer in 0..u64::from(EVENT_QUEUE_SIZE) {
            self.event.add(&[(EVENT_BUFFERS + 8 * buffer, 8, true)]);
        }
    }

    pub fn fill_receive(&mut self) {
        for buffer in 0..u64::from(QUEUE_SIZE) {
            self.give_buffer(RECEIVE_BUFFERS + buffer * u64::from(RECEIVE_BUFFER));
        }
    }

    pub fn give_buffer(&mut self, address: u64) {
        let head = self.receive.submit(&[(address, RECEIVE_BUFFER, true)]);
        self.receive_buffers.insert(head, address);
    }

    /// The next packet, if one comes in this time.
    pub fn receive_for(&mut self, time: Duration) -> Option<(Header, Vec<u8>)> {
        let (head, len) = self.receive.wait_used_for(time)?;
        let address = self.receive_buffers.remove(&head).unwrap();
        let mut bytes = vec![0; len as usize];
        self.memory
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap();
        if self.keep_buffers {
            self.kept.push(address);
        } else {
            self.give_buffer(address);
        }
        let payload = bytes.split_off(HEADER);
        let header = Header::from_bytes(&bytes.try_into().unwrap());
        assert_eq!(header.src_cid, HOST_CID);
        assert_eq!(header.dst_cid, self.cid);
        assert_eq!(header.len as usize, payload.len());
        Some((header, payload))
    }

    /// The next packet, which must come.
    pub fn receive(&mut self) -> (Header, Vec<u8>) {
        self.receive_for(PATIENCE).expect("no packet")
    }

    /// The next packet, which must be this. Credit may come at any time before.
    pub fn expect(&mut self, connection: &Connection, operation: Operation) -> (Header, Vec<u8>) {
        let (mut header, mut payload) = self.receive();
        while header.operation == Operation::CreditUpdate as u16
            && operation != Operation::CreditUpdate
        {
            (header, payload) = self.receive();
        }
        assert_eq!(
            (header.operation, header.src_port, header.dst_port),
            (
                operation as u16,
                connection.host_port,
                connection.guest_port
            ),
            "{header:?}"
        );
        (header, payload)
    }

    /// No packet comes.
    pub fn expect_silence(&mut self) {
        let packet = self.receive_for(MOMENT);
        assert!(packet.is_none(), "{packet:?}");
    }

    /// Wait until the device has taken all that was sent on an open stream.
    pub fn settle(&mut self, connection: &Connection) {
        self.send(connection, Operation::CreditRequest, 0, &[]);
        self.expect(connection, Operation::CreditUpdate);
    }

    /// The device gave a packet's buffer back.
    pub fn reuse(&mut self, (head, len): (u16, u32)) {
        assert_eq!(len, 0);
        // Tests send malformed packets from elsewhere.
        self.free_slots.extend(self.transmit_slots.remove(&head));
    }

    /// Send any packet.
    pub fn send_raw(&mut self, header: Header, payload: &[u8]) {
        while let Some(used) = self.transmit.take_used() {
            self.reuse(used);
        }
        while self.free_slots.is_empty() {
            let used = self.transmit.wait_used();
            self.reuse(used);
        }
        let slot = self.free_slots.pop().unwrap();
        self.memory
            .write_slice(&header.to_bytes(), GuestAddress(slot))
            .unwrap();
        let data = slot + HEADER as u64;
        self.memory
            .write_slice(payload, GuestAddress(data))
            .unwrap();
        let head = match payload.len() as u32 {
            0 => self.transmit.submit(&[(slot, HEADER as u32, false)]),
            // In one buffer, as Linux does since 6.2, in two as before, or in several.
            len if len % 3 == 0 => self.transmit.submit(&[(slot, HEADER as u32 + len, false)]),
            len if len % 3 == 1 => self
                .transmit
                .submit(&[(slot, HEADER as u32, false), (data, len, false)]),
            len => self.transmit.submit(&[
                (slot, HEADER as u32, false),
                (data, len / 2, false),
                (data + u64::from(len / 2), len - len / 2, false),
            ]),
        };
        self.transmit_slots.insert(head, slot);
    }

    /// The header of a packet on a stream.
    pub fn header(&self, connection: &Connection, operation: u16, flags: u32, len: u32) -> Header {
        Header {
            src_cid: self.cid,
            dst_cid: HOST_CID,
            src_port: connection.guest_port,
            dst_port: connection.host_port,
            len,
            kind: STREAM,
            operation,
            flags,
            buf_alloc: connection.window,
            fwd_cnt: connection.forwarded,
        }
    }

    pub fn send(
        &mut self,
        connection: &Connection,
        operation: Operation,
        flags: u32,
        payload: &[u8],
    ) {
        let header = self.header(connection, operation as u16, flags, payload.len() as u32);
        self.send_raw(header, payload);
    }

    pub fn send_data(&mut self, connection: &Connection, payload: &[u8]) {
        self.send(connection, Operation::Data, 0, payload);
    }

    /// Connect from the host and take the request.
    pub fn requested(&mut self, guest_port: u32, window: u32) -> (Connection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.host.connect(guest_port, OwnedFd::from(theirs));
        let (header, _) = self.receive();
        assert_eq!(header.operation, Operation::Request as u16);
        assert_eq!(header.dst_port, guest_port);
        assert_eq!(header.kind, STREAM);
        let connection = Connection {
            host_port: header.src_port,
            guest_port,
            window,
            forwarded: 0,
        };
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        ours.set_write_timeout(Some(PATIENCE)).unwrap();
        (connection, ours)
    }

    /// An open stream; the guest's buffer has `window` bytes.
    pub fn open_with(&mut self, guest_port: u32, window: u32) -> (Connection, UnixStream) {
        let (connection, socket) = self.requested(guest_port, window);
        self.send(&connection, Operation::Response, 0, &[]);
        self.settle(&connection);
        (connection, socket)
    }

    /// An open stream with as much buffer as Linux has.
    pub fn open(&mut self, guest_port: u32) -> (Connection, UnixStream) {
        self.open_with(guest_port, 256 << 10)
    }

    /// Nanoseconds that the device's thread has run; `None` before it has given itself its name.
    fn worker_time(&self) -> Option<u64> {
        let name = format!("thaw-vsock-{}", self.cid);
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let worker = tasks.map(|task| task.unwrap().path()).find(|task| {
            let comm = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
            comm.trim_end() == name
        })?;
        let statistics = std::fs::read_to_string(worker.join("schedstat")).unwrap();
        Some(statistics.split(' ').next().unwrap().parse().unwrap())
    }

    /// The device's thread sleeps.
    pub fn expect_idle(&self) {
        let end = Instant::now() + PATIENCE;
        while self.worker_time().is_none() {
            assert!(Instant::now() < end, "the worker does not start");
            std::thread::sleep(Duration::from_millis(1));
        }
        // It may still be at what was asked of it last.
        std::thread::sleep(MOMENT / 2);
        let before = self.worker_time().unwrap();
        std::thread::sleep(2 * MOMENT);
        let spent = Duration::from_nanos(self.worker_time().unwrap() - before);
        assert!(spent < MOMENT / 20, "the worker ran for {spent:?}");
    }
}

/// Bytes that differ from their neighbours.
pub fn pattern(len: usize) -> Vec<u8> {
    static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| {
        (0..4usize << 20)
            .map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8)
            .collect()
    });
    PATTERN[..len].to_vec()
}
