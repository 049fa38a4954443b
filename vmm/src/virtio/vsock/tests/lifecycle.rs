//! Activation, deactivation, snapshot and restore.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use virtio_queue::QueueT;

use super::super::packet::Operation;
use super::super::table::FIRST_PORT;
use super::super::{State, Vsock};
use super::guest::Guest;
use crate::virtio::Device;
use crate::virtio::test_driver::PATIENCE;

fn state(vsock: &Vsock) -> State {
    postcard::from_bytes(&vsock.save().unwrap()).unwrap()
}

#[test]
fn the_driver_reads_its_address() {
    let (vsock, _) = Vsock::new(0x1_0000_0003);
    let mut config = [0xff; 12];
    vsock.read_config(0, &mut config);
    assert_eq!(config, [3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_connection_waits_for_the_device() {
    let mut guest = Guest::inactive();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    guest.host.connect(77, OwnedFd::from(theirs));
    ours.write_all(b"x").unwrap();
    let queues = guest.device_sides();
    guest.activate(queues);
    guest.fill_receive();
    let (header, _) = guest.receive();
    assert_eq!(header.operation, Operation::Request as u16);
    assert_eq!(header.dst_port, 77);
}

#[test]
fn all_three_queues_are_needed() {
    let mut guest = Guest::inactive();
    for missing in 0..3 {
        let mut queues = guest.device_sides();
        queues.remove(missing);
        let activation = crate::virtio::test_driver::activation(
            &guest.memory,
            &guest.interrupt,
            queues,
            guest.features,
        );
        assert!(matches!(
            guest.vsock.activate(activation),
            Err(crate::virtio::DeviceError::MissingQueue(index)) if index as usize == missing
        ));
        assert_eq!(guest.vsock.deactivate().len(), 0);
    }
}

#[test]
fn a_template_without_streams_owes_nothing() {
    let mut guest = Guest::running();
    let (connection, socket) = guest.open(1);
    drop(socket);
    guest.expect(&connection, Operation::Shutdown);
    guest.send(&connection, Operation::Reset, 0, &[]);
    guest.open(2);
    // The second is open; the guest closes it.
    let second = super::guest::Connection {
        host_port: FIRST_PORT + 1,
        guest_port: 2,
        window: 0,
        forwarded: 0,
    };
    guest.expect(&second, Operation::Shutdown);
    guest.send(&second, Operation::Reset, 0, &[]);
    guest.expect_silence();
    let queues = guest.vsock.deactivate();
    assert_eq!(queues.len(), 3);
    let state = state(&guest.vsock);
    assert!(!state.reset_owed);
    assert_eq!(state.next_port, FIRST_PORT + 2);
}

#[test]
fn streams_end_with_the_device_and_a_restored_driver_is_told() {
    let mut guest = Guest::running();
    let (_connection, mut socket) = guest.open(1);
    let queues = guest.vsock.deactivate();
    assert_eq!(socket.read(&mut [0]).unwrap(), 0);
    assert_eq!(queues[2].queue.next_avail(), 0);
    assert!(state(&guest.vsock).reset_owed);

    // Another process, the same guest memory.
    let saved = guest.vsock.save().unwrap();
    let (mut vsock, host) = Vsock::new(guest.cid);
    vsock.restore(&saved).unwrap();
    (guest.vsock, guest.host) = (vsock, host);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    guest.host.connect(1, OwnedFd::from(theirs));
    guest.activate(queues);
    let (head, len) = guest.event.wait_used();
    assert_eq!(len, 4);
    // Nothing is opened before the driver has reset what it had, whatever else it does.
    guest.expect_silence();
    assert_eq!(guest.event.take_used(), None);
    guest
        .event
        .submit(&[(0xf_0000 + 8 * u64::from(head), 8, true)]);
    let (header, _) = guest.receive();
    assert_eq!(header.operation, Operation::Request as u16);
    assert_eq!(header.src_port, FIRST_PORT + 1);
    let connection = super::guest::Connection {
        host_port: header.src_port,
        guest_port: 1,
        window: 4096,
        forwarded: 0,
    };
    guest.send(&connection, Operation::Response, 0, &[]);
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    ours.write_all(b"works").unwrap();
    assert_eq!(guest.expect(&connection, Operation::Data).1, b"works");
    guest.expect_idle();

    // And the event queue has lost nothing.
    guest.send(&connection, Operation::Reset, 0, &[]);
    assert_eq!(ours.read(&mut [0]).unwrap(), 0);
    let queues = guest.vsock.deactivate();
    assert_eq!(queues[2].queue.next_avail(), 1);
    assert!(!state(&guest.vsock).reset_owed);
}

#[test]
fn a_reset_that_the_driver_has_not_handled_is_told_again() {
    let mut guest = Guest::running();
    let (_connection, _socket) = guest.open(1);
    let queues = guest.vsock.deactivate();
    guest.activate(queues);
    guest.event.wait_used();
    let queues = guest.vsock.deactivate();
    assert_eq!(queues[2].queue.next_avail(), 1);
    assert!(state(&guest.vsock).reset_owed);
    guest.activate(queues);
    guest.event.wait_used();
}

#[test]
fn an_event_waits_for_a_buffer() {
    let mut guest = Guest::inactive();
    let saved = postcard::to_stdvec(&State {
        next_port: FIRST_PORT,
        reset_owed: true,
    })
    .unwrap();
    guest.vsock.restore(&saved).unwrap();
    let queues = guest.device_sides();
    guest.activate(queues);
    guest.expect_idle();
    for _ in 0..2 {
        guest.event.submit(&[(0xf_0000, 8, true)]);
    }
    assert_eq!(guest.event.wait_used().1, 4);
    guest.event.submit(&[(0xf_0000, 8, true)]);
    guest.fill_receive();
    guest.open(3);
}

#[test]
fn packets_that_came_while_the_device_was_stopped_are_served() {
    let mut guest = Guest::running();
    let queues = guest.vsock.deactivate();
    let connection = super::guest::Connection {
        host_port: 1,
        guest_port: 2,
        window: 0,
        forwarded: 0,
    };
    guest.send(&connection, Operation::Request, 0, &[]);
    guest.activate(queues);
    guest.expect(&connection, Operation::Reset);
}

#[test]
fn damaged_state_is_refused() {
    let (mut vsock, _) = Vsock::new(3);
    assert!(vsock.restore(&[]).is_err());
    assert!(vsock.restore(&[0xff; 7]).is_err());
    // A port that is not ours to give.
    assert!(vsock.restore(&[5, 0]).is_err());
}
