//! Descriptors in the reactor: sockets, pipes and terminals alike, and the listening sockets.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::sys::socket::{
    AddressFamily, Backlog, Shutdown, SockFlag, SockType, SockaddrLike, UnixAddr, VsockAddr,
    accept4, bind, listen, shutdown, socket,
};
use nix::unistd;
use tokio::io::unix::AsyncFd;

use crate::sys;

/// A descriptor that is read and written without blocking.
#[derive(Debug)]
pub struct Stream(AsyncFd<OwnedFd>);

impl Stream {
    /// Registers a socket, pipe or terminal; it becomes non-blocking.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        sys::set_nonblocking(&fd)?;
        Ok(Self(sys::register(fd)?))
    }

    /// Waits until a read would find something, or the end.
    pub async fn readable(&self) -> io::Result<()> {
        self.0
            .readable()
            .await
            .map(|mut guard| guard.retain_ready())
    }

    /// Reads what is there now; [`io::ErrorKind::WouldBlock`] when nothing is.
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.try_io(tokio::io::Interest::READABLE, |fd| {
            Ok(unistd::read(fd, buffer)?)
        })
    }

    /// Reads what is there now, past what the reactor believes about readiness.
    pub fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(unistd::read(self.0.get_ref(), buffer)?)
    }

    /// Writes what fits now; [`io::ErrorKind::WouldBlock`] when nothing does.
    pub fn try_write(&self, data: &[u8]) -> io::Result<usize> {
        self.0.try_io(tokio::io::Interest::WRITABLE, |fd| {
            Ok(unistd::write(fd, data)?)
        })
    }

    /// Reads at least one byte, or none at the end.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.readable().await?;
            match self.try_read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
        }
    }

    /// Fills the buffer; [`io::ErrorKind::UnexpectedEof`] when the peer ends before.
    pub async fn read_exact(&self, mut buffer: &mut [u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.read(buffer).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => buffer = &mut buffer[count..],
            }
        }
        Ok(())
    }

    /// Waits until a write would take something, or fail.
    pub async fn writable(&self) -> io::Result<()> {
        self.0
            .writable()
            .await
            .map(|mut guard| guard.retain_ready())
    }

    /// Says to the peer that no more will come.
    pub fn end(&self) {
        let _ = shutdown(self.0.as_raw_fd(), Shutdown::Write);
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}

/// A listening socket.
#[derive(Debug)]
pub struct Listener(AsyncFd<OwnedFd>);

impl Listener {
    /// Listens on a vsock port, whatever context id this guest has now or after a restore.
    pub fn vsock(port: u32) -> io::Result<Self> {
        Self::bind(
            AddressFamily::Vsock,
            &VsockAddr::new(libc::VMADDR_CID_ANY, port),
        )
    }

    /// Listens on a path.
    pub fn unix(path: &Path) -> io::Result<Self> {
        Self::bind(AddressFamily::Unix, &UnixAddr::new(path)?)
    }

    fn bind(family: AddressFamily, address: &dyn SockaddrLike) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(family, SockType::Stream, flags, None)?;
        bind(socket.as_raw_fd(), address)?;
        listen(&socket, Backlog::new(128)?)?;
        Ok(Self(sys::register(socket)?))
    }

    /// The next connection.
    pub async fn accept(&self) -> io::Result<Stream> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|listener| Ok(accept4(listener.as_raw_fd(), flags)?)) {
                Ok(fd) => return Stream::new(sys::own(fd?)),
                Err(_would_block) => {}
            }
        }
    }
}
