//! What the helper and a process that it makes say to each other while the process becomes a container's.
//!
//! The process waits; the helper does what only it can (mappings, cgroup) and says to go on; the process
//! is set up and says so, or why not; the helper sets its limits and says to go on.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, socketpair};
use serde::{Deserialize, Serialize};
use ttrpc::Code;

use crate::status::Refusal;
use crate::sys;

/// Longest message.
const LIMIT: usize = 16 << 10;

/// One end.
#[derive(Debug)]
pub struct Channel(OwnedFd);

/// What a process says.
#[derive(Debug, Serialize, Deserialize)]
enum Report {
    /// It waits, as a container's process, for its limits. With the terminal's master where it has one.
    Ready,
    /// It ends.
    Failed { code: i32, message: String },
}

impl Channel {
    /// Both ends.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )?;
        Ok((Self(one), Self(other)))
    }

    /// Lets the other side go on.
    pub fn go_on(&self) -> io::Result<()> {
        sys::send(&self.0, b"go on", &[])?;
        Ok(())
    }

    /// Waits for that.
    pub fn wait(&self) -> io::Result<()> {
        let length = recv(self.0.as_raw_fd(), &mut [0; 16], MsgFlags::empty())?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    /// Says that the process is ready.
    pub fn ready(&self, terminal: Option<&OwnedFd>) -> io::Result<()> {
        self.report(&Report::Ready, terminal)
    }

    /// Says why it will never be.
    pub fn failed(&self, refusal: &Refusal) -> io::Result<()> {
        let mut message = refusal.message.clone();
        let most = (0..=LIMIT / 8)
            .rev()
            .find(|at| message.is_char_boundary(*at));
        message.truncate(most.unwrap_or(0));
        self.report(
            &Report::Failed {
                code: refusal.code as i32,
                message,
            },
            None,
        )
    }

    fn report(&self, report: &Report, terminal: Option<&OwnedFd>) -> io::Result<()> {
        let message = serde_json::to_vec(report)?;
        let terminal = terminal.map(AsFd::as_fd);
        sys::send(&self.0, &message, terminal.as_slice())?;
        Ok(())
    }

    /// What the process has to say: its terminal, or a refusal.
    pub fn outcome(&self) -> Result<Option<OwnedFd>, Refusal> {
        let ended = || Refusal::failed("the container's process has ended while it was made");
        self.next()?.ok_or_else(ended)
    }

    /// Waits for the process's exec, or its refusal.
    pub fn executed(&self) -> Result<(), Refusal> {
        self.next().map(drop)
    }

    /// The next report; `None` when the process has become its program, or has ended.
    fn next(&self) -> Result<Option<Option<OwnedFd>>, Refusal> {
        let mut buffer = vec![0; LIMIT];
        let received = sys::receive(&self.0, &mut buffer);
        let (length, mut descriptors) = received.map_err(|error| {
            Refusal::failed(format!("hear of the container's process: {error}"))
        })?;
        if length == 0 {
            return Ok(None);
        }
        match serde_json::from_slice(&buffer[..length]) {
            Ok(Report::Ready) => Ok(Some(descriptors.pop())),
            Ok(Report::Failed { code, message }) => Err(Refusal::new(code_of(code), message)),
            Err(error) => Err(Refusal::new(
                Code::INTERNAL,
                format!("the container's process: {error}"),
            )),
        }
    }
}

fn code_of(code: i32) -> Code {
    let known = [
        Code::INVALID_ARGUMENT,
        Code::FAILED_PRECONDITION,
        Code::INTERNAL,
    ];
    known
        .into_iter()
        .find(|known| *known as i32 == code)
        .unwrap_or(Code::UNKNOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_refusal_arrives_with_its_code() {
        let (ours, theirs) = Channel::pair().unwrap();
        let refusal = Refusal::invalid("x".repeat(LIMIT));
        theirs.failed(&refusal).unwrap();
        let arrived = ours.outcome().unwrap_err();
        assert_eq!(
            (arrived.code, arrived.message.len()),
            (Code::INVALID_ARGUMENT, LIMIT / 8)
        );
    }

    #[test]
    fn test_the_end_of_a_process_is_a_refusal() {
        let (ours, theirs) = Channel::pair().unwrap();
        drop(theirs);
        assert!(ours.outcome().unwrap_err().message.contains("has ended"));
        assert!(ours.wait().is_err());
    }

    #[test]
    fn test_a_terminal_comes_along() {
        let (ours, theirs) = Channel::pair().unwrap();
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        theirs.ready(Some(&file)).unwrap();
        assert!(ours.outcome().unwrap().is_some());
        theirs.ready(None).unwrap();
        assert!(ours.outcome().unwrap().is_none());
        ours.go_on().unwrap();
        theirs.wait().unwrap();
    }
}
