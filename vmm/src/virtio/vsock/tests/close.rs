//! Ends of streams: half-close, close, reset, from both sides.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::super::packet::{Operation, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::super::stream::WINDOW;
use super::guest::{Connection, Guest, pattern};

/// Receive data until the guest has been told of all of `ends`; the data, and all it was told. The
/// device may read the end of data before it learns that the socket is closed, and then tells twice.
fn drain(guest: &mut Guest, connection: &Connection, ends: u32) -> (Vec<u8>, u32) {
    let mut received = Vec::new();
    let mut told = 0;
    while told & ends != ends {
        let (header, payload) = guest.receive();
        assert_eq!(header.src_port, connection.host_port);
        match Operation::new(header.operation) {
            Some(Operation::Data) => {
                assert_eq!(told & SHUTDOWN_SEND, 0, "data after its end");
                received.extend(payload);
            }
            Some(Operation::Shutdown) => told |= header.flags,
            Some(Operation::CreditUpdate) => {}
            other => panic!("{other:?}"),
        }
    }
    (received, told)
}

/// Fill the socket and the device until the guest has no credit.
fn fill(guest: &mut Guest, connection: &Connection) -> usize {
    let (mut sent, mut told) = (0u32, 0u32);
    loop {
        while WINDOW - (sent - told) >= 65536 {
            guest.send_data(connection, &pattern(65536));
            sent += 65536;
        }
        match guest.receive_for(Duration::from_millis(300)) {
            Some((header, _)) => told = header.fwd_cnt,
            None => return sent as usize,
        }
    }
}

fn read_all(socket: &mut UnixStream) -> usize {
    let mut received = Vec::new();
    socket.read_to_end(&mut received).unwrap();
    assert!(received.chunks(65536).all(|chunk| chunk == pattern(65536)));
    received.len()
}

#[test]
fn the_hosts_half_close_comes_after_its_data_and_leaves_the_other_way_open() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    socket.write_all(&pattern(50_000)).unwrap();
    socket.shutdown(Shutdown::Write).unwrap();
    let (received, told) = drain(&mut guest, &connection, SHUTDOWN_SEND);
    assert!(received == pattern(50_000));
    assert_eq!(told, SHUTDOWN_SEND);
    guest.expect_idle();
    guest.send_data(&connection, b"still here");
    let mut text = [0; 10];
    socket.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"still here");
    // The guest closes.
    guest.send(&connection, Operation::Shutdown, SHUTDOWN_BOTH, &[]);
    guest.expect(&connection, Operation::Reset);
    assert_eq!(socket.read(&mut text).unwrap(), 0);
}

#[test]
fn the_guests_half_close_comes_after_its_data_and_leaves_the_other_way_open() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    let sent = fill(&mut guest, &connection);
    guest.send(&connection, Operation::Shutdown, SHUTDOWN_SEND, &[]);
    assert_eq!(read_all(&mut socket), sent);
    socket.write_all(b"still here").unwrap();
    assert_eq!(guest.expect(&connection, Operation::Data).1, b"still here");
    guest.expect_idle();
    drop(socket);
    drain(&mut guest, &connection, SHUTDOWN_SEND);
    guest.send(&connection, Operation::Reset, 0, &[]);
    guest.expect_silence();
}

#[test]
fn both_half_closes_end_the_stream_when_the_guest_closes() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    socket.shutdown(Shutdown::Write).unwrap();
    guest.expect(&connection, Operation::Shutdown);
    guest.send(&connection, Operation::Shutdown, SHUTDOWN_SEND, &[]);
    assert_eq!(socket.read(&mut [0]).unwrap(), 0);
    drop(socket);
    guest.expect_silence();
    guest.expect_idle();
    guest.send(&connection, Operation::Shutdown, SHUTDOWN_BOTH, &[]);
    guest.expect(&connection, Operation::Reset);
}

#[test]
fn a_guest_that_closes_is_answered_at_once_and_its_data_still_arrives() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    let sent = fill(&mut guest, &connection);
    guest.send(&connection, Operation::Shutdown, SHUTDOWN_BOTH, &[]);
    guest.expect(&connection, Operation::Reset);
    guest.expect_idle();
    assert_eq!(read_all(&mut socket), sent);
    guest.expect_silence();
}

#[test]
fn a_reset_by_the_guest_ends_the_stream_after_its_data() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    let sent = fill(&mut guest, &connection);
    guest.send(&connection, Operation::Reset, 0, &[]);
    assert_eq!(read_all(&mut socket), sent);
    guest.expect_silence();
}

#[test]
fn the_end_is_no_error_for_a_host_whose_bytes_the_guest_did_not_read() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open_with(1, 0);
    guest.expect_silence();
    socket.write_all(&[1; 10_000]).unwrap();
    guest.expect(&connection, Operation::CreditRequest);
    guest.send_data(&connection, b"bye");
    guest.send(&connection, Operation::Shutdown, SHUTDOWN_BOTH, &[]);
    let mut text = Vec::new();
    socket.read_to_end(&mut text).unwrap();
    assert_eq!(text, b"bye");
}

#[test]
fn a_host_that_closes_has_its_last_bytes_delivered() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    socket.write_all(&pattern(100_000)).unwrap();
    drop(socket);
    let (received, _) = drain(&mut guest, &connection, SHUTDOWN_BOTH);
    assert!(received == pattern(100_000));
    // What the guest sends meanwhile is lost, but never stops it.
    for _ in 0..8 {
        guest.send_data(&connection, &[0; 65536]);
    }
    while let Some((header, _)) = guest.receive_for(Duration::from_millis(100)) {
        assert_eq!(header.operation, Operation::CreditUpdate as u16);
    }
    guest.send(&connection, Operation::Reset, 0, &[]);
    guest.expect_silence();
    guest.expect_idle();
}

#[test]
fn a_host_that_closes_frees_a_guest_that_waits_for_credit() {
    let mut guest = Guest::running();
    let (connection, socket) = guest.open(1);
    fill(&mut guest, &connection);
    drop(socket);
    drain(&mut guest, &connection, SHUTDOWN_BOTH);
}

#[test]
fn a_guest_that_reads_no_more_refuses_the_hosts_bytes() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    guest.send(&connection, Operation::Shutdown, SHUTDOWN_RECEIVE, &[]);
    guest.settle(&connection);
    assert_eq!(
        socket.write(b"x").unwrap_err().kind(),
        ErrorKind::BrokenPipe
    );
    // The other way is open.
    guest.send_data(&connection, b"more");
    socket.read_exact(&mut [0; 4]).unwrap();
    guest.expect_idle();
    guest.send(&connection, Operation::Shutdown, SHUTDOWN_SEND, &[]);
    guest.expect(&connection, Operation::Reset);
    assert_eq!(socket.read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_host_that_reads_no_more_is_told_to_a_guest_that_sends() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    socket.shutdown(Shutdown::Read).unwrap();
    guest.send_data(&connection, b"lost");
    assert_eq!(
        guest.expect(&connection, Operation::Shutdown).0.flags,
        SHUTDOWN_RECEIVE
    );
    socket.write_all(b"more").unwrap();
    assert_eq!(guest.expect(&connection, Operation::Data).1, b"more");
    guest.expect_idle();
}

#[test]
fn data_after_the_end_is_a_violation() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1);
    guest.send(&connection, Operation::Shutdown, SHUTDOWN_SEND, &[]);
    guest.send_data(&connection, b"ghost");
    guest.expect(&connection, Operation::Reset);
    assert_eq!(socket.read(&mut [0]).unwrap(), 0);
}
