//! Moving bytes between a connection and a file, without blocking.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tracing::debug;

use crate::readiness::register;

/// As much as a pipe holds.
const BUFFER: usize = 64 << 10;

thread_local! {
    /// One for all streams: it holds nothing while a task waits.
    static SHARED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Do `work` with the shared buffer.
fn with_buffer<T>(work: impl FnOnce(&mut [u8]) -> T) -> T {
    SHARED.with_borrow_mut(|buffer| {
        buffer.resize(BUFFER, 0);
        work(buffer)
    })
}

/// Something to read from.
#[derive(Debug)]
pub enum Source {
    /// A FIFO, opened without blocking.
    Pipe(AsyncFd<File>),
    /// A file, which is always ready.
    File(File),
}

/// Something to write to.
#[derive(Debug)]
pub enum Sink {
    /// A FIFO, opened without blocking.
    Pipe(AsyncFd<File>),
    /// A file, which is always ready.
    File(File),
}

impl Source {
    /// A FIFO.
    pub fn pipe(file: File) -> io::Result<Self> {
        Ok(Self::Pipe(register(file, Interest::READABLE)?))
    }

    /// A file.
    pub fn file(file: File) -> Self {
        Self::File(file)
    }

    /// Read once, when there is something to read, and give it to `take`, which must not wait.
    async fn read<T>(&mut self, take: impl Fn(&[u8]) -> T) -> io::Result<T> {
        let read = |mut file: &File| {
            with_buffer(|buffer| {
                let count = file.read(buffer)?;
                Ok(take(&buffer[..count]))
            })
        };
        match self {
            Self::Pipe(file) => file.async_io(Interest::READABLE, |file| read(file)).await,
            Self::File(file) => {
                // As an awaited pipe would: let others have their turn.
                tokio::task::yield_now().await;
                read(file)
            }
        }
    }
}

impl Sink {
    /// A FIFO.
    pub fn pipe(file: File) -> io::Result<Self> {
        Ok(Self::Pipe(register(file, Interest::WRITABLE)?))
    }

    /// A file.
    pub fn file(file: File) -> Self {
        Self::File(file)
    }

    /// Write as much as goes without waiting.
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut file = match self {
            Self::Pipe(file) => file.get_ref(),
            Self::File(file) => file,
        };
        match file.write(bytes) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            other => other,
        }
    }

    async fn write_all(&self, mut bytes: &[u8], moved: &AtomicU64) -> io::Result<()> {
        while !bytes.is_empty() {
            let count = match self {
                Self::Pipe(file) => {
                    file.async_io(Interest::WRITABLE, |mut file| file.write(bytes))
                        .await?
                }
                Self::File(file) => (&*file).write(bytes)?,
            };
            if count == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
            moved.fetch_add(count as u64, Ordering::Relaxed);
            bytes = &bytes[count..];
        }
        Ok(())
    }
}

/// What one round of a copy left to do.
enum Round {
    /// End of file.
    End,
    /// These bytes, which the other side did not take.
    Rest(Vec<u8>),
}

/// What of `bytes` is left after `written` of them; end of file for none.
fn round(bytes: &[u8], written: io::Result<usize>) -> io::Result<Round> {
    if bytes.is_empty() {
        return Ok(Round::End);
    }
    Ok(Round::Rest(bytes[written?..].to_vec()))
}

/// Copy what the guest sends to `sink` until the guest's end of file; counts what arrived in `moved`.
pub async fn from_guest(guest: UnixStream, sink: Sink, moved: &AtomicU64) {
    let result: io::Result<()> = async {
        loop {
            guest.readable().await?;
            let step = with_buffer(|buffer| {
                let count = guest.try_read(buffer)?;
                let bytes = &buffer[..count];
                if bytes.is_empty() {
                    return Ok(Round::End);
                }
                let written = sink.try_write(bytes)?;
                moved.fetch_add(written as u64, Ordering::Relaxed);
                round(bytes, Ok(written))
            });
            match step {
                Ok(Round::End) => return Ok(()),
                Ok(Round::Rest(rest)) => sink.write_all(&rest, moved).await?,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
    .await;
    if let Err(error) = result {
        debug!(%error, "an output stream broke off");
    }
}

/// Copy `source` to the guest until its end of file, which becomes the guest's.
pub async fn to_guest(mut source: Source, mut guest: UnixStream) {
    let result: io::Result<()> = async {
        loop {
            let step = source
                .read(|bytes| {
                    let written = match guest.try_write(bytes) {
                        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
                        other => other,
                    };
                    round(bytes, written)
                })
                .await??;
            match step {
                Round::End => return Ok(()),
                Round::Rest(rest) => guest.write_all(&rest).await?,
            }
        }
    }
    .await;
    if let Err(error) = result {
        // A process that does not read its input to the end is nothing unusual.
        debug!(%error, "an input stream broke off");
    }
    let _ = guest.shutdown().await;
    // The guest's end of the connection stays open for as long as it wants.
    wait_until_closed(&guest).await;
}

/// The connection is kept until the guest closes it: closing it first would look like a reset to a
/// guest that has bytes unread.
async fn wait_until_closed(guest: &UnixStream) {
    let mut byte = [0; 16];
    while guest.readable().await.is_ok() {
        match guest.try_read(&mut byte) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}
