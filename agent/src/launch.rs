//! The agent's side of the helper: executes it, sends the request, takes the reply.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use ttrpc::Code;

use crate::protocol::{HELPER_NAME, MESSAGE_LIMIT, Reply, Request};
use crate::status::Refusal;
use crate::sys;

/// Executes helpers.
#[derive(Debug)]
pub struct Launcher {
    program: PathBuf,
    /// Sockets of helpers that wait for their request.
    ready: Mutex<Vec<OwnedFd>>,
}

impl Launcher {
    /// With the program to execute: the agent itself.
    pub fn new(program: PathBuf) -> Self {
        Self {
            program,
            ready: Mutex::default(),
        }
    }

    /// Executes helpers ahead of their requests, until there are `count`. In a template this costs
    /// its clones nothing, and half the time of a request is that of executing the helper.
    pub fn prepare(&self, count: usize) -> Result<(), Refusal> {
        let mut ready = self.ready();
        while ready.len() < count {
            ready.push(self.execute().map_err(failed)?);
        }
        Ok(())
    }

    /// Has a helper carry out a request; descriptors both ways as [`Request`] says. A refusal by the
    /// helper is an error.
    pub async fn call(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), Refusal> {
        let socket = self.start(request, descriptors).map_err(failed)?;
        let socket = sys::register(socket).map_err(failed)?;
        let mut buffer = vec![0; MESSAGE_LIMIT];
        let (length, received) = loop {
            let mut ready = socket.readable().await.map_err(failed)?;
            match ready.try_io(|socket| Ok(sys::receive(socket, &mut buffer)?)) {
                Ok(result) => break result.map_err(failed)?,
                Err(_would_block) => {}
            }
        };
        if length == 0 {
            return Err(failed(io::Error::other("it ended without an answer")));
        }
        match serde_json::from_slice(&buffer[..length]) {
            Ok(Reply::Refused { code, message }) => Err(Refusal::new(known(code), message)),
            Ok(reply) => Ok((reply, received)),
            Err(error) => Err(failed(error.into())),
        }
    }

    fn start(&self, request: &Request, descriptors: &[BorrowedFd<'_>]) -> io::Result<OwnedFd> {
        let message = serde_json::to_vec(request)?;
        if message.len() > MESSAGE_LIMIT {
            return Err(io::Error::other("the request is too long"));
        }
        let send = |socket: &OwnedFd| sys::send(socket, &message, descriptors);
        // One that has died while it waited does not take the request.
        while let Some(socket) = self.take_ready() {
            if send(&socket).is_ok() {
                return Ok(socket);
            }
        }
        let socket = self.execute()?;
        send(&socket)?;
        Ok(socket)
    }

    /// Executes one, and returns our end of its socket. It is reaped with all other children.
    ///
    /// Not by way of the standard library, which forks: every page of the agent that is written
    /// afterwards would be copied.
    fn execute(&self) -> io::Result<OwnedFd> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        let mut actions = PosixSpawnFileActions::init()?;
        actions.add_dup2(theirs.as_raw_fd(), 0)?;
        let mut attributes = PosixSpawnAttr::init()?;
        let flags =
            PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK;
        attributes.set_flags(flags)?;
        attributes.set_sigdefault(&SigSet::from(Signal::SIGPIPE))?;
        attributes.set_sigmask(&SigSet::empty())?;
        let name = CString::new(HELPER_NAME)?;
        let environment: [&CString; 0] = [];
        posix_spawn(
            self.program.as_path(),
            &actions,
            &attributes,
            &[&name],
            &environment,
        )?;
        sys::set_nonblocking(&ours)?;
        Ok(ours)
    }

    fn take_ready(&self) -> Option<OwnedFd> {
        self.ready().pop()
    }

    fn ready(&self) -> MutexGuard<'_, Vec<OwnedFd>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(error: io::Error) -> Refusal {
    Refusal::new(Code::INTERNAL, format!("the container helper: {error}"))
}

/// The code that a helper gave, if it is one that helpers give.
fn known(code: i32) -> Code {
    const CODES: [Code; 4] = [
        Code::INVALID_ARGUMENT,
        Code::FAILED_PRECONDITION,
        Code::INTERNAL,
        Code::UNIMPLEMENTED,
    ];
    CODES
        .into_iter()
        .find(|known| *known as i32 == code)
        .unwrap_or(Code::UNKNOWN)
}
