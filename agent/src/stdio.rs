//! Bytes between a process and its streams.
//!
//! The process gets pipes (or a terminal), not the sockets: `/dev/stdout` can then be opened anew,
//! and the end of a stream is the end of a pipe. A copying task stands between each pipe and its
//! socket.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use nix::unistd::pipe2;
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use crate::io::Stream;
use crate::streams::ProcessStreams;
use crate::sys;

/// How much is copied at once.
const CHUNK: usize = 64 << 10;

/// After how many chunks a task lets the others run.
const TURN: usize = 16;

/// How long the output of an ended process may stand still before its exit is reported all the same.
const STALL: Duration = Duration::from_secs(10);

thread_local! {
    /// One buffer for all copying: it is never held while a task waits.
    static BUFFER: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// The plumbing of a process that has been started.
#[derive(Debug)]
pub struct Stdio {
    terminal: Option<Arc<Stream>>,
    outputs: Vec<oneshot::Receiver<()>>,
    progress: Arc<AtomicU64>,
}

/// What the copying tasks are told about their process.
#[derive(Debug, Clone)]
pub struct Cues {
    /// True once the process has ended.
    pub ended: watch::Receiver<bool>,
    /// True once standard input is to be closed after what has arrived.
    pub close_stdin: watch::Receiver<bool>,
}

/// Pipes for a process that is about to be started: its ends, and ours with the sockets.
#[derive(Debug)]
pub struct Pipes {
    stdin: Option<(Stream, Stream)>,
    outputs: Vec<(Stream, Stream)>,
}

impl Pipes {
    /// Makes a pipe for each stream there is; `/dev/null` takes the place of the others.
    pub fn new(streams: ProcessStreams) -> io::Result<(Self, [OwnedFd; 3])> {
        let null = || open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty());
        let mut pipes = Self {
            stdin: None,
            outputs: Vec::new(),
        };
        let stdin = match streams.stdin {
            None => null()?,
            Some(socket) => {
                let (theirs, ours) = pipe2(OFlag::O_CLOEXEC)?;
                pipes.stdin = Some((socket, Stream::new(ours)?));
                theirs
            }
        };
        let mut output = |socket: Option<Stream>| -> io::Result<OwnedFd> {
            let Some(socket) = socket else {
                return Ok(null()?);
            };
            let (ours, theirs) = pipe2(OFlag::O_CLOEXEC)?;
            pipes.outputs.push((Stream::new(ours)?, socket));
            Ok(theirs)
        };
        let (stdout, stderr) = (output(streams.stdout)?, output(streams.stderr)?);
        Ok((pipes, [stdin, stdout, stderr]))
    }

    /// Starts copying.
    pub fn connect(self, cues: &Cues) -> Stdio {
        let progress = Arc::default();
        if let Some((socket, pipe)) = self.stdin {
            tokio::spawn(feed(socket, Arc::new(pipe), cues.clone()));
        }
        let copy = |(pipe, socket)| forward(Arc::new(pipe), socket, &progress, cues);
        let outputs = self.outputs.into_iter().map(copy).collect();
        Stdio {
            terminal: None,
            outputs,
            progress,
        }
    }
}

impl Stdio {
    /// Starts copying between a terminal's master and the streams.
    pub fn terminal(master: OwnedFd, streams: ProcessStreams, cues: &Cues) -> io::Result<Self> {
        let master = Arc::new(Stream::new(master)?);
        let progress = Arc::default();
        if let Some(socket) = streams.stdin {
            tokio::spawn(feed(socket, Arc::clone(&master), cues.clone()));
        }
        let outputs = match streams.stdout {
            Some(socket) => vec![forward(Arc::clone(&master), socket, &progress, cues)],
            // Nobody listens, but the process must be able to go on writing.
            None => {
                tokio::spawn(discard(Arc::clone(&master)));
                Vec::new()
            }
        };
        Ok(Self {
            terminal: Some(master),
            outputs,
            progress,
        })
    }

    /// Sets the size of the terminal, if there is one.
    pub fn resize(&self, rows: u16, columns: u16) -> io::Result<()> {
        match &self.terminal {
            Some(master) => sys::set_window_size(master.as_fd(), rows, columns),
            None => Ok(()),
        }
    }

    /// What [`Drain::wait`] waits for.
    pub fn drain(&mut self) -> Drain {
        Drain {
            outputs: std::mem::take(&mut self.outputs),
            progress: Arc::clone(&self.progress),
        }
    }
}

/// The output of a process, to be waited for once the process has ended.
#[derive(Debug)]
pub struct Drain {
    outputs: Vec<oneshot::Receiver<()>>,
    progress: Arc<AtomicU64>,
}

impl Drain {
    /// Returns when all that the process wrote has been handed to the host, or when the host has
    /// taken nothing for a while.
    pub async fn wait(self) {
        for mut output in self.outputs {
            loop {
                let before = self.progress.load(Ordering::Relaxed);
                match timeout(STALL, &mut output).await {
                    Ok(_) => break,
                    Err(_) if self.progress.load(Ordering::Relaxed) == before => return,
                    Err(_) => {}
                }
            }
        }
    }
}

/// What copying found at the end of a turn.
enum Copied {
    /// There may be more now.
    More,
    /// There is no more now.
    All,
    /// There will be no more.
    End,
    /// The other side takes no more.
    Refused,
}

/// Copies what is there, as far as the sink takes it without waiting for longer than it must.
/// With `past_reactor` the source is asked even if the reactor has not seen it readable.
async fn copy(
    source: &Stream,
    sink: Option<&Stream>,
    progress: &AtomicU64,
    past_reactor: bool,
) -> Copied {
    for _ in 0..TURN {
        let (found, rest) = BUFFER.with_borrow_mut(|buffer| {
            if buffer.is_empty() {
                // Zeroed by the kernel, so that only what is used takes memory.
                *buffer = vec![0; CHUNK];
            }
            let found = fill(source, buffer, past_reactor);
            let data = &buffer[..*found.as_ref().unwrap_or(&0)];
            let written = sink.map_or(Ok(data.len()), |sink| sink.try_write(data));
            let rest = match written {
                _ if data.is_empty() => Ok(Vec::new()),
                Ok(count) => Ok(data[count..].to_vec()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(data.to_vec()),
                Err(error) => Err(error),
            };
            (found, rest)
        });
        let count = match found {
            Ok(0) => return Copied::End,
            Ok(count) => count as u64,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Copied::All,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            // A terminal whose other side has been closed says EIO.
            Err(_) => return Copied::End,
        };
        let Ok(rest) = rest else {
            return Copied::Refused;
        };
        if let Some(sink) = sink
            && write_all(sink, &rest, progress).await.is_err()
        {
            return Copied::Refused;
        }
        progress.fetch_add(count, Ordering::Relaxed);
    }
    tokio::task::yield_now().await;
    Copied::More
}

/// Reads what is there now, as far as the buffer goes. A terminal gives at most 4 KiB in one read, and
/// each write to the host is a packet of its own.
fn fill(source: &Stream, buffer: &mut [u8], past_reactor: bool) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        let rest = &mut buffer[filled..];
        let read = if past_reactor {
            source.read_now(rest)
        } else {
            source.try_read(rest)
        };
        match read {
            Ok(0) => break,
            Ok(count) => filled += count,
            // What has been read comes first; the error is there again the next time.
            Err(_) if filled > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

async fn write_all(sink: &Stream, mut data: &[u8], progress: &AtomicU64) -> io::Result<()> {
    while !data.is_empty() {
        sink.writable().await?;
        match sink.try_write(data) {
            Ok(count) => {
                data = &data[count..];
                progress.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Copies a process's output until it ends. The receiver hears when everything that the process
/// itself wrote has been copied: at the end of the pipe, or, when others hold the pipe after the
/// process has ended, once it is empty. What those write later is discarded.
fn forward(
    source: Arc<Stream>,
    socket: Stream,
    progress: &Arc<AtomicU64>,
    cues: &Cues,
) -> oneshot::Receiver<()> {
    let (drained, receiver) = oneshot::channel();
    let (progress, mut ended) = (Arc::clone(progress), cues.ended.clone());
    tokio::spawn(async move {
        let mut sink = Some(socket);
        let mut after_end = false;
        let at_end = loop {
            match copy(&source, sink.as_ref(), &progress, after_end).await {
                Copied::More => {}
                // Without a reader the process goes on as before; nobody hears it.
                Copied::Refused => sink = None,
                Copied::End => break true,
                Copied::All if after_end => break false,
                Copied::All => tokio::select! {
                    result = source.readable() => if result.is_err() { break true },
                    _ = ended.wait_for(|ended| *ended) => after_end = true,
                },
            }
        };
        if let Some(sink) = sink {
            sink.end();
        }
        let _ = drained.send(());
        if !at_end {
            discard(source).await;
        }
    });
    receiver
}

/// Reads to the end, for nobody.
async fn discard(source: Arc<Stream>) {
    let progress = AtomicU64::new(0);
    loop {
        match copy(&source, None, &progress, false).await {
            Copied::End | Copied::Refused => return,
            Copied::More => {}
            Copied::All => {
                if source.readable().await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Copies a process's input until the host or the process ends it.
async fn feed(socket: Stream, sink: Arc<Stream>, cues: Cues) {
    let Cues {
        mut ended,
        mut close_stdin,
    } = cues;
    let progress = AtomicU64::new(0);
    loop {
        let copied = tokio::select! {
            copied = copy(&socket, Some(&sink), &progress, false) => copied,
            _ = ended.wait_for(|ended| *ended) => return,
        };
        match copied {
            Copied::End | Copied::Refused => return,
            Copied::More => {}
            Copied::All if *close_stdin.borrow() => {
                // Once more, as the reactor may lag behind the request to close.
                let copied = tokio::select! {
                    copied = copy(&socket, Some(&sink), &progress, true) => copied,
                    _ = ended.wait_for(|ended| *ended) => return,
                };
                if !matches!(copied, Copied::More) {
                    return;
                }
            }
            Copied::All => tokio::select! {
                result = socket.readable() => if result.is_err() { return },
                _ = close_stdin.wait_for(|close| *close) => {}
                _ = ended.wait_for(|ended| *ended) => return,
            },
        }
    }
}

#[cfg(test)]
#[path = "stdio_tests.rs"]
mod tests;
