//! Opening of streams, and plain data.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use super::super::packet::{HOST_CID, Header, Operation, STREAM};
use super::super::stream::WINDOW;
use super::super::table::{FIRST_PORT, MAX_STREAMS};
use super::guest::{Connection, Guest, pattern};
use crate::virtio::Device;

#[test]
fn bytes_go_both_ways() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.open(1024);
    assert_eq!(connection.host_port, FIRST_PORT);
    socket.write_all(b"to the guest").unwrap();
    let (header, payload) = guest.expect(&connection, Operation::Data);
    assert_eq!(payload, b"to the guest");
    assert_eq!((header.buf_alloc, header.fwd_cnt), (WINDOW, 0));
    guest.send_data(&connection, b"to the host");
    let mut buffer = [0; 11];
    socket.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"to the host");
    guest.expect_idle();
}

#[test]
fn bytes_go_both_ways_without_event_indices() {
    let mut guest = Guest::inactive();
    guest.features = 1 << 32;
    for queue in [&mut guest.receive, &mut guest.transmit, &mut guest.event] {
        queue.event_idx = false;
    }
    let queues = guest.device_sides();
    guest.activate(queues);
    guest.fill_receive();
    let (connection, mut socket) = guest.open(1024);
    for _ in 0..300 {
        socket.write_all(b"ping").unwrap();
        assert_eq!(guest.expect(&connection, Operation::Data).1, b"ping");
        guest.send_data(&connection, b"pong");
        let mut buffer = [0; 4];
        socket.read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, b"pong");
    }
}

#[test]
fn bytes_written_before_the_stream_is_open_arrive() {
    let mut guest = Guest::running();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.write_all(b"early").unwrap();
    drop(ours);
    guest.host.connect(7, OwnedFd::from(theirs));
    let (request, _) = guest.receive();
    guest.expect_silence();
    let connection = Connection {
        host_port: request.src_port,
        guest_port: 7,
        window: 4096,
        forwarded: 0,
    };
    guest.send(&connection, Operation::Response, 0, &[]);
    assert_eq!(guest.expect(&connection, Operation::Data).1, b"early");
    assert_eq!(guest.expect(&connection, Operation::Shutdown).0.flags, 3);
}

#[test]
fn a_refused_connection_is_closed() {
    let mut guest = Guest::running();
    let (connection, mut socket) = guest.requested(9, 0);
    socket.write_all(b"never read").unwrap();
    guest.send(&connection, Operation::Reset, 0, &[]);
    // The end of data, not an error.
    assert_eq!(socket.read(&mut [0]).unwrap(), 0);
    guest.expect_silence();
}

#[test]
fn a_connection_given_up_before_the_answer_is_reset() {
    let mut guest = Guest::running();
    let (connection, socket) = guest.requested(9, 0);
    drop(socket);
    guest.expect(&connection, Operation::Reset);
    // An answer that was under way finds nothing.
    guest.send(&connection, Operation::Response, 0, &[]);
    guest.expect(&connection, Operation::Reset);
}

#[test]
fn requests_by_the_guest_are_refused() {
    let mut guest = Guest::running();
    let connection = Connection {
        host_port: 1024,
        guest_port: 5555,
        window: 4096,
        forwarded: 0,
    };
    guest.send(&connection, Operation::Request, 0, &[]);
    let (header, _) = guest.expect(&connection, Operation::Reset);
    assert_eq!((header.kind, header.len), (STREAM, 0));
}

#[test]
fn packets_of_no_stream_are_reset_and_resets_are_not_answered() {
    let mut guest = Guest::running();
    let (open, _socket) = guest.open(1);
    let other_port = Connection {
        guest_port: 2,
        ..open.clone()
    };
    guest.send_data(&other_port, b"lost");
    guest.expect(&other_port, Operation::Reset);
    guest.send(&other_port, Operation::Reset, 0, &[]);
    let datagram = Header {
        kind: 3,
        ..guest.header(&open, Operation::Data as u16, 0, 0)
    };
    guest.send_raw(datagram, &[]);
    assert_eq!(guest.expect(&open, Operation::Reset).0.kind, 3);
    // Not from this guest, not for the host.
    let header = guest.header(&open, Operation::Data as u16, 0, 0);
    for (src_cid, dst_cid) in [(guest.cid + 1, HOST_CID), (guest.cid, 3)] {
        let header = Header {
            src_cid,
            dst_cid,
            ..header
        };
        guest.send_raw(header, &[]);
    }
    guest.expect_silence();
}

#[test]
fn what_is_no_unix_socket_is_refused() {
    let mut guest = Guest::running();
    let (reader, mut writer) = std::io::pipe().unwrap();
    guest.host.connect(1, OwnedFd::from(reader));
    guest
        .host
        .connect(1, OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
    // Also shows that the pipe has been looked at.
    guest.open(2);
    assert!(writer.write(b"x").is_err());
}

#[test]
fn two_hundred_streams_carry_their_own_bytes() {
    const STREAMS: usize = 200;
    const BYTES: usize = 20_000;
    let mut guest = Guest::running();
    let mut connections = Vec::new();
    let mut sockets = Vec::new();
    for number in 0..STREAMS {
        let (connection, socket) = guest.open(number as u32);
        assert_eq!(connection.host_port as usize, FIRST_PORT as usize + number);
        connections.push((connection, Vec::new()));
        sockets.push(socket);
    }
    let mut hosts = Vec::new();
    for (number, mut socket) in sockets.into_iter().enumerate() {
        hosts.push(std::thread::spawn(move || {
            let mut text = pattern(BYTES);
            text[0] = number as u8;
            socket.write_all(&text).unwrap();
            socket.shutdown(std::net::Shutdown::Write).unwrap();
            let mut echo = Vec::new();
            socket.read_to_end(&mut echo).unwrap();
            assert!(echo == text, "stream {number}");
        }));
    }
    let mut ended = 0;
    while ended < STREAMS {
        let (header, payload) = guest.receive();
        let number = (header.src_port - FIRST_PORT) as usize;
        let (connection, received) = &mut connections[number];
        if header.operation == Operation::Shutdown as u16 {
            assert_eq!(received.len(), BYTES);
            let (connection, received) = (connection.clone(), std::mem::take(received));
            guest.send_data(&connection, &received);
            guest.send(&connection, Operation::Shutdown, 3, &[]);
        } else if header.operation == Operation::Data as u16 {
            received.extend(payload);
        } else {
            assert_eq!(header.operation, Operation::Reset as u16);
            ended += 1;
        }
    }
    for host in hosts {
        host.join().unwrap();
    }
    guest.expect_idle();
}

#[test]
fn a_busy_stream_does_not_starve_the_others() {
    let mut guest = Guest::running();
    guest.keep_buffers = true;
    let (_busy, socket) = guest.open_with(1, 1 << 30);
    let (quiet, mut quiet_socket) = guest.open_with(2, 4096);
    socket.set_write_timeout(None).unwrap();
    let flood = std::thread::spawn(move || {
        let mut socket = socket;
        while socket.write_all(&[0; 65536]).is_ok() {}
    });
    // All buffers are full of the busy stream's data by now.
    guest.keep_buffers = false;
    while guest.receive().1.len() < 4000 {}
    quiet_socket.write_all(b"me too").unwrap();
    // At most what was in the buffers already, and one packet in turn.
    let mut before = 0;
    loop {
        let (header, payload) = guest.receive();
        if header.src_port == quiet.host_port {
            assert_eq!(payload, b"me too");
            break;
        }
        before += 1;
    }
    assert!(before <= 2 * 128, "{before} packets came first");
    guest.vsock.deactivate();
    flood.join().unwrap();
}

#[test]
fn streams_beyond_the_limit_are_refused() {
    let mut guest = Guest::running();
    let mut open = Vec::new();
    // Descriptors of this process are another limit.
    let limit = MAX_STREAMS;
    for number in 0..limit {
        let (ours, theirs) = match UnixStream::pair() {
            Ok(pair) => pair,
            Err(_) => return,
        };
        guest.host.connect(number as u32, OwnedFd::from(theirs));
        guest.receive();
        open.push(ours);
    }
    let Ok((mut ours, theirs)) = UnixStream::pair() else {
        return;
    };
    guest.host.connect(9, OwnedFd::from(theirs));
    assert_eq!(ours.read(&mut [0]).unwrap(), 0);
}
