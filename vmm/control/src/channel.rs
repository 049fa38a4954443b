//! One end of the control channel: typed messages over a `SOCK_SEQPACKET` socket, with descriptors
//! beside them (`unix(7)`, `SCM_RIGHTS`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, ioctl_fionbio, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// The largest message in bytes, as encoded.
pub const MAX_MESSAGE: usize = 32 << 10;

/// The most descriptors beside one message.
pub const MAX_DESCRIPTORS: usize = 8;

/// Why a message could not be sent or received.
#[derive(Debug, Error)]
pub enum ChannelError {
    /// A non-blocking call would have to wait.
    #[error("the control channel has nothing to give yet")]
    WouldBlock,
    /// The message to be sent is larger than [`MAX_MESSAGE`], or encodes to nothing (an empty packet
    /// cannot be told from end of file).
    #[error("a control message of {0} bytes: 1 to {MAX_MESSAGE} fit in a packet")]
    Size(usize),
    /// More than [`MAX_DESCRIPTORS`] beside one message.
    #[error("{0} descriptors beside a control message: at most {MAX_DESCRIPTORS} are passed")]
    Descriptors(usize),
    /// The peer sent more bytes or more descriptors than a message may have.
    #[error("the peer of the control channel sent more {0} than a message may have")]
    Truncated(&'static str),
    /// The bytes are not a message of the expected type.
    #[error("the peer of the control channel sent bytes that are no message: {0}")]
    Malformed(postcard::Error),
    /// A value that cannot be encoded.
    #[error("encoding a control message: {0}")]
    Encode(postcard::Error),
    /// The peer closed its end before it answered.
    #[error("the peer of the control channel went away before it answered")]
    Closed,
    /// A packet that the protocol does not allow at this place.
    #[error("the peer of the control channel sent {0} out of turn")]
    OutOfTurn(&'static str),
    /// The VMM could not do what was asked; its own words.
    #[error("{0}")]
    Refused(String),
    /// A system call failed.
    #[error("{doing} the control channel: {source}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// One end of a control channel. Sending and receiving take `&self`: a packet is never torn.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl Channel {
    /// Two connected ends, both blocking and close-on-exec.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Self::from_fd(a), Self::from_fd(b)))
    }

    /// The end that somebody else made, for instance the inherited [`crate::CONTROL_DESCRIPTOR`].
    pub fn from_fd(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Choose whether [`Channel::send`] and [`Channel::receive`] wait or return
    /// [`ChannelError::WouldBlock`].
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        Ok(ioctl_fionbio(&self.socket, nonblocking)?)
    }

    /// Send `message` with `descriptors` beside it. The receiver gets duplicates; the caller keeps
    /// its own.
    pub fn send<T: Serialize>(
        &self,
        message: &T,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), ChannelError> {
        let bytes = postcard::to_stdvec(message).map_err(ChannelError::Encode)?;
        if bytes.is_empty() || bytes.len() > MAX_MESSAGE {
            return Err(ChannelError::Size(bytes.len()));
        }
        if descriptors.len() > MAX_DESCRIPTORS {
            return Err(ChannelError::Descriptors(descriptors.len()));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(ChannelError::Descriptors(descriptors.len()));
        }
        // MSG_NOSIGNAL: a peer that went away is an error to the caller, not a SIGPIPE.
        retry_on_intr(|| {
            sendmsg(
                &self.socket,
                &[IoSlice::new(&bytes)],
                &mut control,
                SendFlags::NOSIGNAL,
            )
        })
        .map_err(|errno| match errno {
            Errno::PIPE | Errno::CONNRESET => ChannelError::Closed,
            errno => system("sending on", errno),
        })?;
        Ok(())
    }

    /// The next message and the descriptors beside it, which are close-on-exec. `None` when the peer
    /// has closed its end.
    pub fn receive<T: DeserializeOwned>(&self) -> Result<Option<(T, Vec<OwnedFd>)>, ChannelError> {
        self.receive_with(RecvFlags::empty())
    }

    /// As [`Channel::receive`], but [`ChannelError::WouldBlock`] when no message is there.
    pub fn try_receive<T: DeserializeOwned>(
        &self,
    ) -> Result<Option<(T, Vec<OwnedFd>)>, ChannelError> {
        self.receive_with(RecvFlags::DONTWAIT)
    }

    fn receive_with<T: DeserializeOwned>(
        &self,
        flags: RecvFlags,
    ) -> Result<Option<(T, Vec<OwnedFd>)>, ChannelError> {
        let mut bytes = vec![0; MAX_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let result = recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut control,
                flags | RecvFlags::CMSG_CLOEXEC,
            );
            match result {
                // A peer that closes with packets unread resets the connection: said once, and
                // before what it had sent itself.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                Ok(received) => break received,
                Err(errno) => return Err(system("receiving from", errno)),
            }
        };
        // Taken before any check, so that whatever came is closed when a check fails.
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(ChannelError::Truncated("bytes"));
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || descriptors.len() > MAX_DESCRIPTORS {
            return Err(ChannelError::Truncated("descriptors"));
        }
        if received.bytes == 0 {
            return Ok(None);
        }
        match postcard::take_from_bytes(&bytes[..received.bytes]) {
            Ok((message, [])) => Ok(Some((message, descriptors))),
            Ok(_) => Err(ChannelError::Truncated("bytes")),
            Err(error) => Err(ChannelError::Malformed(error)),
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn system(doing: &'static str, errno: Errno) -> ChannelError {
    match errno {
        Errno::AGAIN => ChannelError::WouldBlock,
        errno => ChannelError::System {
            doing,
            source: errno.into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, SeekFrom, Write};

    use rustix::io::{FdFlags, fcntl_getfd};
    use rustix::net::{recv, send};

    use super::*;
    use crate::{Event, FromVmm, Request, Shape};

    fn boot() -> Request {
        Request::Boot {
            shape: Shape::new(2, 256).unwrap(),
            command_line: "quiet".into(),
        }
    }

    #[test]
    fn test_a_message_and_its_descriptors_arrive_close_on_exec() {
        let (a, b) = Channel::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"kernel").unwrap();
        a.send(&boot(), &[file.as_fd(), a.as_fd()]).unwrap();

        let (request, descriptors) = b.receive::<Request>().unwrap().unwrap();
        assert_eq!(request, boot());
        assert_eq!(descriptors.len(), 2);
        for descriptor in &descriptors {
            assert!(fcntl_getfd(descriptor).unwrap().contains(FdFlags::CLOEXEC));
        }
        let mut received = std::fs::File::from(descriptors.into_iter().next().unwrap());
        let mut text = String::new();
        received.seek(SeekFrom::Start(0)).unwrap();
        received.read_to_string(&mut text).unwrap();
        assert_eq!(text, "kernel");
    }

    #[test]
    fn test_a_closed_peer_is_none_for_the_reader_and_closed_for_the_writer() {
        let (a, b) = Channel::pair().unwrap();
        drop(b);
        assert!(a.receive::<Request>().unwrap().is_none());
        assert!(matches!(a.send(&boot(), &[]), Err(ChannelError::Closed)));
    }

    #[test]
    fn test_messages_sent_before_the_close_are_still_read() {
        let (a, b) = Channel::pair().unwrap();
        a.send(&boot(), &[]).unwrap();
        b.send(&Request::Run, &[]).unwrap();
        drop(a);
        assert_eq!(b.receive::<Request>().unwrap().unwrap().0, boot());
        assert!(b.receive::<Request>().unwrap().is_none());
    }

    #[test]
    fn test_an_empty_channel_would_block_when_asked_not_to_wait() {
        let (a, _b) = Channel::pair().unwrap();
        assert!(matches!(
            a.try_receive::<Request>(),
            Err(ChannelError::WouldBlock)
        ));
        a.set_nonblocking(true).unwrap();
        assert!(matches!(
            a.receive::<Request>(),
            Err(ChannelError::WouldBlock)
        ));
    }

    #[test]
    fn test_a_full_channel_would_block_when_asked_not_to_wait() {
        let (a, _b) = Channel::pair().unwrap();
        a.set_nonblocking(true).unwrap();
        let event = FromVmm::Event(Event::Console(vec![b'x'; 16 << 10]));
        let error = (0..1000).find_map(|_| a.send(&event, &[]).err()).unwrap();
        assert!(matches!(error, ChannelError::WouldBlock));
    }

    #[test]
    fn test_a_message_over_the_bound_is_refused_before_it_is_sent() {
        let (a, b) = Channel::pair().unwrap();
        let event = FromVmm::Event(Event::Console(vec![0; MAX_MESSAGE]));
        assert!(matches!(a.send(&event, &[]), Err(ChannelError::Size(_))));
        assert!(matches!(a.send(&(), &[]), Err(ChannelError::Size(0))));
        let many = [a.as_fd(); MAX_DESCRIPTORS + 1];
        assert!(matches!(
            a.send(&boot(), &many),
            Err(ChannelError::Descriptors(9))
        ));
        assert!(matches!(
            b.try_receive::<Request>(),
            Err(ChannelError::WouldBlock)
        ));
    }

    #[test]
    fn test_a_packet_over_the_bound_is_an_error_and_leaks_no_descriptor() {
        let (a, b) = Channel::pair().unwrap();
        send(&a, &vec![0; MAX_MESSAGE + 1], SendFlags::empty()).unwrap();
        assert!(matches!(
            b.receive::<Request>(),
            Err(ChannelError::Truncated("bytes"))
        ));

        let (mut reader, writer) = std::io::pipe().unwrap();
        let many = [writer.as_fd(); 40];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        sendmsg(&a, &[IoSlice::new(&[1])], &mut control, SendFlags::empty()).unwrap();
        assert!(matches!(
            b.receive::<Request>(),
            Err(ChannelError::Truncated("descriptors"))
        ));
        drop(writer);
        // End of file: no copy of the writer is left.
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn test_bytes_that_are_no_message_are_an_error() {
        let (a, b) = Channel::pair().unwrap();
        send(&a, &[0xff; 16], SendFlags::empty()).unwrap();
        assert!(matches!(
            b.receive::<Request>(),
            Err(ChannelError::Malformed(_))
        ));
        // A whole message with something behind it.
        let mut bytes = postcard::to_stdvec(&Request::Run).unwrap();
        bytes.push(0);
        send(&a, &bytes, SendFlags::empty()).unwrap();
        assert!(matches!(
            b.receive::<Request>(),
            Err(ChannelError::Truncated("bytes"))
        ));
    }

    #[test]
    fn test_an_invalid_shape_is_no_message() {
        let (a, b) = Channel::pair().unwrap();
        a.send(&Request::Run, &[]).unwrap();
        let mut bytes = [0; 64];
        let (length, _) = recv(&b, &mut bytes[..], RecvFlags::empty()).unwrap();
        assert_eq!(length, 1);
        // Boot with 200 vCPUs.
        send(&a, &[0, 200, 128, 2, 0], SendFlags::empty()).unwrap();
        assert!(matches!(
            b.receive::<Request>(),
            Err(ChannelError::Malformed(_))
        ));
    }
}
