//! The socket on which libcontainer hands over a terminal's master.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use crate::sys;

/// Listens in the bundle; gone when dropped.
#[derive(Debug)]
pub struct ConsoleSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl ConsoleSocket {
    /// Bound by its bare name, as a bundle's path may be too long for a socket address.
    pub fn listen(bundle: &Path) -> io::Result<Self> {
        let name = format!("console-{}", std::process::id());
        std::env::set_current_dir(bundle)?;
        let listener = UnixListener::bind(&name);
        std::env::set_current_dir("/")?;
        Ok(Self {
            listener: listener?,
            path: bundle.join(name),
        })
    }

    /// For libcontainer.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What has been sent; libcontainer has returned, so it is there.
    pub fn receive(self) -> io::Result<OwnedFd> {
        self.listener.set_nonblocking(true)?;
        let (socket, _) = self.listener.accept()?;
        let (_, descriptors) = sys::receive(&socket, &mut [0; 128])?;
        descriptors
            .into_iter()
            .next()
            .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

impl Drop for ConsoleSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
