//! Guests that break the rules: errors, never a panic, never a hang, never more than bounded.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::super::engine::Engine;
use super::super::host::Requests;
use super::super::packet::{HEADER, HOST_CID, Header, Operation, STREAM};
use super::super::reset::TransportReset;
use super::super::table::{FIRST_PORT, Table};
use super::guest::{Connection, Guest, pattern};
use crate::virtio::Device;
use crate::virtio::queue::DeviceQueue;
use crate::virtio::test_driver::{
    DriverQueue, FEATURES, INDIRECT, NEXT, TestInterrupt, WRITE, activation, memory,
};
use crate::virtio::worker::Poll;

const SCRATCH: u64 = 0xe_0000;

#[test]
fn malformed_packets_are_given_back() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    let header = guest.header(&connection, Operation::Data as u16, 0, 100);
    guest
        .memory
        .write_slice(&header.to_bytes(), GuestAddress(SCRATCH))
        .unwrap();
    for chain in [
        // No header, half of one, none that may be read.
        &[(SCRATCH, 0, false)][..],
        &[(SCRATCH, HEADER as u32 - 1, false)],
        &[(SCRATCH, HEADER as u32, true)],
        // Not guest memory.
        &[(u64::MAX, HEADER as u32, false)],
        &[(0xff_ffff, HEADER as u32, false)],
        &[(SCRATCH, u32::MAX, false)],
        &[(SCRATCH, HEADER as u32, false), (1 << 40, 100, false)],
        // The wrong order.
        &[(SCRATCH, HEADER as u32, true), (SCRATCH, 100, false)],
    ] {
        guest.transmit.submit(chain);
        assert_eq!(guest.transmit.wait_used().1, 0);
    }
    guest.expect_silence();
    // Less payload than the header says.
    guest
        .transmit
        .submit(&[(SCRATCH, HEADER as u32 + 99, false)]);
    guest.expect(&connection, Operation::Reset);
    assert_eq!(socket.read(&mut [0]).unwrap(), 0);
}

#[test]
fn circles_and_bad_tables_are_given_back() {
    let mut guest = Guest::running();
    let queue = &mut guest.transmit;
    queue.set_descriptor(120, SCRATCH, 1, NEXT, 121);
    queue.set_descriptor(121, SCRATCH, 1, NEXT, 120);
    queue.set_descriptor(122, SCRATCH, 8, NEXT, 999);
    queue.set_descriptor(123, u64::MAX, 64, INDIRECT, 0);
    queue.set_descriptor(124, SCRATCH, 7, INDIRECT, 0);
    // A table that contains the descriptor itself.
    queue.set_descriptor(125, 0x4000 + 16 * 125, 16, INDIRECT, 0);
    queue.set_descriptor(126, SCRATCH, 0, NEXT | WRITE, 126);
    for head in 120..=126 {
        queue.offer(head);
        queue.kick();
        assert_eq!(queue.wait_used(), (head, 0));
    }
    guest.open(1);
}

#[test]
fn receive_buffers_that_cannot_be_used_are_given_back() {
    let mut guest = Guest::inactive();
    let queues = guest.device_sides();
    guest.activate(queues);
    for chain in [
        &[(SCRATCH, 4096, false)][..],
        &[(SCRATCH, HEADER as u32, true)],
        &[(SCRATCH, 0, true)],
        &[(u64::MAX - 4095, 4096, true)],
        &[(0xff_f000, 0x2000, true)],
        &[(SCRATCH, 4096, true), (SCRATCH, 4096, false)],
    ] {
        guest.receive.submit(chain);
    }
    let (_ours, theirs) = UnixStream::pair().unwrap();
    guest.host.connect(1, OwnedFd::from(theirs));
    for _ in 0..6 {
        assert_eq!(guest.receive.wait_used().1, 0);
    }
    guest.expect_idle();
    // A good one in pieces is as good as any.
    guest.receive.submit(&[
        (SCRATCH, 20, true),
        (SCRATCH + 20, 24, true),
        (SCRATCH + 44, 1, true),
    ]);
    assert_eq!(guest.receive.wait_used().1, HEADER as u32);
}

#[test]
fn a_broken_ring_stops_its_queue_and_not_the_thread() {
    for index in 0..3 {
        let mut guest = Guest::running();
        let queue = match index {
            0 => &mut guest.receive,
            1 => &mut guest.transmit,
            _ => &mut guest.event,
        };
        queue.set_avail_index(0x8000);
        queue.kick();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        guest.host.connect(1, OwnedFd::from(theirs));
        guest.expect_idle();
        assert_eq!(guest.vsock.deactivate().len(), 3);
        assert_eq!(ours.read(&mut [0]).unwrap(), 0);
    }
}

#[test]
fn wrong_operations_reset_the_stream() {
    for (state, operation) in [
        ("open", 0),
        ("open", Operation::Request as u16),
        ("open", Operation::Response as u16),
        ("open", 8),
        ("open", u16::MAX),
        ("requested", Operation::Data as u16),
        ("requested", Operation::Shutdown as u16),
        ("requested", Operation::CreditUpdate as u16),
    ] {
        let mut guest = Guest::running();
        let (connection, mut socket) = match state {
            "open" => guest.open(1),
            _ => guest.requested(1, 4096),
        };
        let header = guest.header(&connection, operation, 3, 0);
        guest.send_raw(header, &[]);
        guest.expect(&connection, Operation::Reset);
        assert_eq!(socket.read(&mut [0]).unwrap(), 0, "{state} {operation}");
    }
}

#[test]
fn lengths_beyond_any_chain_reset_the_stream() {
    for len in [1, 65537, WINDOW_AND_ONE, u32::MAX] {
        let mut guest = Guest::running();
        let (connection, _socket) = guest.open(1);
        let header = guest.header(&connection, Operation::Data as u16, 0, len);
        guest.send_raw(header, &[]);
        guest.expect(&connection, Operation::Reset);
    }
}

const WINDOW_AND_ONE: u32 = super::super::stream::WINDOW + 1;

#[test]
fn a_packet_larger_than_the_window_resets_the_stream() {
    let mut guest = Guest::running();
    let (connection, _socket) = guest.open(1);
    let header = guest.header(&connection, Operation::Data as u16, 0, WINDOW_AND_ONE);
    guest
        .memory
        .write_slice(&header.to_bytes(), GuestAddress(0x40_0000))
        .unwrap();
    guest
        .transmit
        .submit(&[(0x40_0000, HEADER as u32 + WINDOW_AND_ONE, false)]);
    guest.expect(&connection, Operation::Reset);
}

#[test]
fn requests_that_nobody_makes_room_to_refuse_wait_in_their_ring() {
    let mut guest = Guest::inactive();
    guest.fill_events();
    let queues = guest.device_sides();
    guest.activate(queues);
    let connection = Connection {
        host_port: 1,
        guest_port: 2,
        window: 0,
        forwarded: 0,
    };
    // 256 are taken in, and as many again as may be under way wait.
    for _ in 0..256 + 32 {
        guest.send(&connection, Operation::Request, 0, &[]);
    }
    guest.expect_idle();
    assert!(guest.transmit.take_used().is_none());
    guest.fill_receive();
    for _ in 0..256 + 32 {
        guest.expect(&connection, Operation::Reset);
    }
    guest.expect_idle();
}

/// A device without a thread, so that a test decides when it works.
struct Still {
    engine: Engine,
    receive: DriverQueue,
    transmit: DriverQueue,
    event: DriverQueue,
}

impl Still {
    fn new(memory: &GuestMemoryMmap, reset_owed: bool) -> Self {
        let interrupt = Arc::new(TestInterrupt::default());
        let driver = |index: u16, base| DriverQueue::new(memory, &interrupt, index, 16, base);
        let (receive, transmit, event) = (driver(0, 0), driver(1, 0x400), driver(2, 0x800));
        let sides = vec![
            receive.device_side(),
            transmit.device_side(),
            event.device_side(),
        ];
        let mut activation = activation(memory, &interrupt, sides, FEATURES);
        let mut take = |index| DeviceQueue::take(&mut activation, index, "vsock").unwrap();
        let (rx, tx, ev) = (take(0), take(1), take(2));
        let engine = Engine {
            memory: memory.clone().into(),
            receive: rx,
            transmit: tx,
            reset: TransportReset::new(ev, reset_owed),
            table: Table::new(Poll::new().unwrap(), 3, FIRST_PORT),
            requests: Arc::new(Requests::default()),
            wake: EventFd::new(0).unwrap(),
            held: Vec::new(),
        };
        Still {
            engine,
            receive,
            transmit,
            event,
        }
    }
}

/// Packets that are mostly about streams that exist.
fn packets() -> impl Strategy<Value = (Header, usize)> {
    let header = (
        prop_oneof![9 => Just(3u64), 1 => any::<u64>()],
        prop_oneof![9 => Just(HOST_CID), 1 => any::<u64>()],
        prop_oneof![9 => 0u32..3, 1 => any::<u32>()],
        prop_oneof![9 => FIRST_PORT..FIRST_PORT + 3, 1 => any::<u32>()],
        prop_oneof![4 => 0u32..3000, 1 => any::<u32>()],
        prop_oneof![9 => Just(STREAM), 1 => any::<u16>()],
        prop_oneof![9 => 0u16..9, 1 => any::<u16>()],
        any::<u32>(),
        prop_oneof![Just(0u32), 0u32..100_000, any::<u32>()],
        prop_oneof![Just(0u32), 0u32..100_000, any::<u32>()],
    );
    (header, 0usize..4000).prop_map(|(fields, payload)| {
        let (src_cid, dst_cid, src_port, dst_port, len, kind, operation, flags, buf_alloc, fwd_cnt) =
            fields;
        let header = Header {
            src_cid,
            dst_cid,
            src_port,
            dst_port,
            len,
            kind,
            operation,
            flags,
            buf_alloc,
            fwd_cnt,
        };
        (header, payload)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Any sequence of packets, on streams in any state, with hosts that write, read and close.
    #[test]
    fn random_packets_are_survived(
        packets in prop::collection::vec(packets(), 1..40),
        hosts in prop::collection::vec(0u8..8, 40),
    ) {
        let memory = memory(0x2_0000);
        let mut still = Still::new(&memory, false);
        let mut sockets = Vec::new();
        for port in 0..3 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            still.engine.table.connect(port, OwnedFd::from(theirs));
            sockets.push(Some(ours));
        }
        let mut events = Vec::new();
        for ((header, payload), host) in packets.iter().zip(&hosts) {
            let socket = &mut sockets[usize::from(*host) % 3];
            match host {
                0..3 => if let Some(socket) = socket {
                    let _ = std::io::Write::write(socket, &pattern(5000));
                },
                3..6 => if let Some(socket) = socket {
                    let _ = socket.read(&mut [0; 5000]);
                },
                6 => *socket = None,
                _ => {}
            }
            memory.write_slice(&header.to_bytes(), GuestAddress(0x8000)).unwrap();
            still.transmit.add(&[(0x8000, (HEADER + payload) as u32, false)]);
            if host % 2 == 0 && still.receive.room() > 0 {
                still.receive.add(&[(0x1_0000, 1000, true)]);
            }
            still.engine.table.poll().wait(&mut events, Some(std::time::Duration::ZERO));
            for event in &events {
                still.engine.table.on_ready(event.token as u32, event.ready);
            }
            while still.engine.round() {}
            while let Some((_, len)) = still.receive.take_used() {
                prop_assert!(len as usize >= HEADER && len <= 1000);
            }
            while still.transmit.take_used().is_some() {}
        }
    }

    /// Any descriptors and heads in all three rings.
    #[test]
    fn random_rings_are_survived(
        descriptors in prop::collection::vec(
            (0u64..0x5000, prop_oneof![0u32..1024, any::<u32>()], 0u16..8, 0u16..20), 1..16),
        heads in prop::collection::vec((0u8..3, 0u16..20), 1..16),
        bytes in prop::collection::vec(any::<u8>(), 64..1024),
        reset_owed in any::<bool>(),
    ) {
        let memory = memory(0x4000);
        memory.write_slice(&bytes, GuestAddress(0x1000)).unwrap();
        let mut still = Still::new(&memory, reset_owed);
        let (_ours, theirs) = UnixStream::pair().unwrap();
        still.engine.table.connect(1, OwnedFd::from(theirs));
        let drivers = [&mut still.receive, &mut still.transmit, &mut still.event];
        for (at, &(address, len, flags, next)) in descriptors.iter().enumerate() {
            for driver in &drivers {
                driver.set_descriptor(at as u16, address, len, flags, next);
            }
        }
        let [receive, transmit, event] = drivers;
        for &(queue, head) in &heads {
            match queue {
                0 => receive.offer(head),
                1 => transmit.offer(head),
                _ => event.offer(head),
            }
        }
        still.engine.reset.advance(&memory.clone().into());
        while still.engine.round() {}
        still.engine.reset.advance(&memory.clone().into());
        let _ = still.engine.reset.into_queue();
    }
}
