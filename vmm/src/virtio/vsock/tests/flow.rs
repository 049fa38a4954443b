//! Flow control in both directions.

use std::io::{Read, Write};
use std::time::Duration;

use super::super::packet::Operation;
use super::super::stream::WINDOW;
use super::guest::{Guest, pattern};

/// The packet with which the device gives the guest credit, counting what it gave before.
fn credit(guest: &mut Guest, sent: u32) -> u32 {
    let (header, _) = guest.receive();
    assert_eq!(header.operation, Operation::CreditUpdate as u16);
    header.buf_alloc - (sent - header.fwd_cnt)
}

#[test]
fn the_host_sends_no_more_than_the_guest_has_room_for() {
    const BYTES: usize = 1 << 20;
    const ROOM: u32 = 10_000;
    let mut guest = Guest::running();
    let (mut connection, mut socket) = guest.open_with(1, ROOM);
    let writer = std::thread::spawn(move || {
        socket.write_all(&pattern(BYTES)).unwrap();
        socket
    });
    let mut received = Vec::new();
    while received.len() < BYTES {
        let (header, payload) = guest.receive();
        if header.operation == Operation::CreditRequest as u16 {
            continue;
        }
        assert_eq!(header.operation, Operation::Data as u16);
        received.extend(payload);
        let used = received.len() as u32 - connection.forwarded;
        assert!(used <= ROOM);
        if used == ROOM || received.len() == BYTES {
            connection.forwarded = received.len() as u32;
            guest.send(&connection, Operation::CreditUpdate, 0, &[]);
        }
    }
    assert!(received == pattern(BYTES));
    writer.join().unwrap();
}

#[test]
fn a_guest_without_room_is_asked_once_and_not_waited_for() {
    let mut guest = Guest::running();
    let (mut connection, mut socket) = guest.open_with(1, 100);
    socket.write_all(&[1; 250]).unwrap();
    assert_eq!(guest.expect(&connection, Operation::Data).1.len(), 100);
    guest.expect(&connection, Operation::CreditRequest);
    guest.expect_silence();
    // More bytes and the end of data change nothing.
    socket.write_all(&[1; 50]).unwrap();
    drop(socket);
    // Except that nobody will read what the guest sends.
    assert_eq!(guest.expect(&connection, Operation::Shutdown).0.flags, 1);
    guest.expect_silence();
    guest.expect_idle();
    // A little room is used, but asking again would be once for every few bytes.
    connection.forwarded = 10;
    guest.send(&connection, Operation::CreditUpdate, 0, &[]);
    assert_eq!(guest.expect(&connection, Operation::Data).1.len(), 10);
    guest.expect_silence();
    connection.forwarded = 110;
    guest.send(&connection, Operation::CreditUpdate, 0, &[]);
    assert_eq!(guest.expect(&connection, Operation::Data).1.len(), 100);
    guest.expect(&connection, Operation::CreditRequest);
    connection.forwarded = 210;
    guest.send(&connection, Operation::CreditUpdate, 0, &[]);
    assert_eq!(guest.expect(&connection, Operation::Data).1.len(), 90);
    assert_eq!(guest.expect(&connection, Operation::Shutdown).0.flags, 3);
}

#[test]
fn a_guest_that_lies_about_its_room_gets_nothing_more() {
    let mut guest = Guest::running();
    let (mut connection, mut socket) = guest.open_with(1, 4096);
    // It claims to have passed on what it never got.
    connection.forwarded = 1 << 31;
    guest.send(&connection, Operation::CreditUpdate, 0, &[]);
    guest.expect_idle();
    socket.write_all(&[1; 100]).unwrap();
    guest.expect(&connection, Operation::CreditRequest);
    guest.expect_silence();
}

#[test]
fn the_guest_gets_new_credit_when_the_host_has_read() {
    const BYTES: usize = 4 << 20;
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    let reader = std::thread::spawn(move || {
        let mut bytes = vec![0; BYTES];
        socket.read_exact(&mut bytes).unwrap();
        assert!(bytes == pattern(BYTES));
        socket
    });
    let data = pattern(BYTES);
    let (mut sent, mut room) = (0, WINDOW);
    while sent < BYTES {
        if room == 0 {
            room = credit(&mut guest, sent as u32);
            continue;
        }
        let len = (room as usize).min(65536).min(BYTES - sent);
        guest.send_data(&connection, &data[sent..sent + len]);
        sent += len;
        room -= len as u32;
    }
    reader.join().unwrap();
}

#[test]
fn credit_is_told_when_asked_for() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    guest.send_data(&connection, &[1; 1000]);
    socket.read_exact(&mut [0; 1000]).unwrap();
    guest.expect_silence();
    guest.send(&connection, Operation::CreditRequest, 0, &[]);
    assert_eq!(credit(&mut guest, 1000), WINDOW);
}

#[test]
fn a_host_that_does_not_read_costs_the_guest_its_credit_and_no_more() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    let data = pattern(65536);
    // Until the device has told less than a packet's worth of credit.
    let (mut sent, mut told) = (0u32, 0u32);
    loop {
        while WINDOW - (sent - told) >= 65536 {
            guest.send_data(&connection, &data);
            sent += 65536;
        }
        match guest.receive_for(Duration::from_millis(300)) {
            Some((header, _)) => told = header.fwd_cnt,
            None => break,
        }
    }
    guest.expect_idle();
    // Everything is there, and then there is credit again.
    let mut received = vec![0; sent as usize];
    socket.read_exact(&mut received).unwrap();
    assert!(received.chunks(65536).all(|chunk| chunk == data));
    while told < sent - WINDOW / 2 {
        told = guest.receive().0.fwd_cnt;
    }
    guest.expect_idle();
}

#[test]
fn a_guest_that_overruns_its_credit_is_reset() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    let (other, mut other_socket) = guest.open(2);
    let data = [7; 65536];
    let mut sent = 0;
    loop {
        guest.send_data(&connection, &data);
        sent += data.len();
        if let Some((header, _)) = guest.receive_for(Duration::from_millis(20)) {
            if header.operation == Operation::Reset as u16 {
                break;
            }
            assert_eq!(header.operation, Operation::CreditUpdate as u16);
        }
        assert!(sent < 4 << 20, "nobody minds");
    }
    // The socket's own buffer was filled before ours.
    let mut received = Vec::new();
    socket.read_to_end(&mut received).unwrap();
    assert!(received.len() + (WINDOW as usize) < sent);
    // The others do not mind.
    guest.send_data(&other, b"fine");
    other_socket.read_exact(&mut [0; 4]).unwrap();
}

#[test]
fn packets_wait_for_receive_buffers() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open_with(1, 1 << 20);
    guest.keep_buffers = true;
    let writer = std::thread::spawn(move || {
        socket.write_all(&pattern(1 << 20)).unwrap();
        socket
    });
    let mut received = Vec::new();
    // Two were used for the request and the answer's buffer is back: all are given away.
    for _ in 0..128 {
        received.extend(guest.expect(&connection, Operation::Data).1);
    }
    guest.expect_silence();
    guest.expect_idle();
    guest.keep_buffers = false;
    for address in std::mem::take(&mut guest.kept) {
        guest.give_buffer(address);
    }
    while received.len() < 1 << 20 {
        received.extend(guest.expect(&connection, Operation::Data).1);
    }
    assert!(received == pattern(1 << 20));
    writer.join().unwrap();
}

#[test]
fn interrupts_and_notifications_are_fewer_than_packets() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open_with(1, 1 << 30);
    let kicks = guest.receive.kicks;
    let interrupts = guest.interrupt.of_queue(0);
    let writer = std::thread::spawn(move || {
        socket.write_all(&pattern(4 << 20)).unwrap();
        socket
    });
    let (mut received, mut packets) = (0, 0);
    while received < 4 << 20 {
        received += guest.expect(&connection, Operation::Data).1.len();
        packets += 1;
    }
    assert!(guest.receive.kicks - kicks < packets);
    assert!(guest.interrupt.of_queue(0) - interrupts < packets);
    writer.join().unwrap();
}

#[test]
fn packets_without_payload_cost_no_interrupt_each() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    let interrupts = guest.interrupt.of_queue(1);
    let mut buffer = [0; 4];
    for _ in 0..100 {
        // As Linux does: credit for each read, and the answer.
        guest.send(&connection, Operation::CreditUpdate, 0, &[]);
        guest.settle(&connection);
        guest.send_data(&connection, b"pong");
        socket.read_exact(&mut buffer).unwrap();
        let used = guest.transmit.wait_used();
        guest.reuse(used);
    }
    assert!(guest.interrupt.of_queue(1) - interrupts <= 110);
}
