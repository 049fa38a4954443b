//! Standard streams of a process: between what containerd's client has opened, FIFOs as a rule, and a
//! vsock connection of the guest for each.
//!
//! * Of an output FIFO the shim keeps both ends open: a client that goes away and comes back (a
//!   restart of containerd) costs the container neither data nor an EPIPE, it only waits.
//! * Of the input FIFO the shim keeps a writing end until it is told that no input comes any more
//!   (`CloseIO`): the end of one writer is not the end of the stream. What was written before that
//!   is still delivered, then the connection is half closed, which is the guest's end of file.
//! * Data is moved when both sides are ready, through one buffer that all streams share; only what a
//!   side does not take is kept for it. Nothing here ever blocks the thread.

mod copy;
mod logger;

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::OFlags;
use thaw_agent_api::{StreamHeader, stream_uri};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use copy::{Sink, Source};
pub use logger::Context;
use logger::{Logger, Running};

/// Where a process' streams go, as containerd's request names them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Paths {
    /// Standard input; empty for none.
    pub stdin: String,
    /// Standard output; empty for none.
    pub stdout: String,
    /// Standard error; empty for none, and with a terminal.
    pub stderr: String,
    /// Whether the process has a terminal, which is input and output.
    pub terminal: bool,
}

impl Paths {
    /// Which streams there are: standard input, output, error.
    fn streams(&self) -> [bool; 3] {
        // One logger for both outputs, whether the second names it or not.
        let logger = matches!(Logger::parse(&self.stdout), Ok(Some(_)));
        let (stdin, stdout) = (!self.stdin.is_empty(), !self.stdout.is_empty());
        let stderr = !self.terminal && (!self.stderr.is_empty() || logger);
        [stdin, stdout, stderr]
    }
}

/// The host's side of a process' streams, opened.
#[derive(Debug)]
pub struct Stdio {
    stdin: Option<Input>,
    stdout: Option<Output>,
    stderr: Option<Output>,
    logger: Option<Running>,
}

#[derive(Debug)]
struct Input {
    source: Source,
    /// Keeps the FIFO from ending.
    hold: Option<File>,
}

#[derive(Debug)]
struct Output {
    sink: Sink,
    /// Keeps the FIFO from breaking.
    hold: Option<File>,
}

impl Stdio {
    /// Open the host's side. FIFOs exist already; nothing here waits for their other ends. A logger is
    /// started, and waited for until it is ready.
    pub async fn open(paths: &Paths, context: Context<'_>) -> io::Result<Self> {
        let stdin = place(&paths.stdin)?
            .map(|place| open_input(&place.path))
            .transpose();
        let stdin = stdin.map_err(|error| named(&paths.stdin, &error))?;
        let mut stdio = Self {
            stdin,
            stdout: None,
            stderr: None,
            logger: None,
        };
        // One logger for both outputs, which then name the same.
        if let Some(logger) = Logger::parse(&paths.stdout)? {
            if !paths.stderr.is_empty() && paths.stderr != paths.stdout {
                let text = format!(
                    "stream {:?}: not the logger that standard output has",
                    paths.stderr
                );
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            let started = logger.start(context).await?;
            let output = |file| {
                let sink = Sink::pipe(file)?;
                Ok::<_, io::Error>(Some(Output { sink, hold: None }))
            };
            stdio.stdout = output(started.stdout)?;
            if !paths.terminal {
                stdio.stderr = output(started.stderr)?;
            }
            stdio.logger = Some(started.process);
            return Ok(stdio);
        }
        let output = |uri: &str| -> io::Result<Option<Output>> {
            place(uri)?
                .map(|place| open_output(&place))
                .transpose()
                .map_err(|error| named(uri, &error))
        };
        stdio.stdout = output(&paths.stdout)?;
        if !paths.terminal {
            stdio.stderr = output(&paths.stderr)?;
        }
        Ok(stdio)
    }
}

/// The connections of a process' streams, nothing being copied yet.
#[derive(Debug)]
pub struct Connections {
    /// The host's side.
    pub streams: Arc<Streams>,
    /// One descriptor for each stream, to be connected to the agent's stream port.
    pub guest_ends: Vec<OwnedFd>,
    uris: [String; 3],
}

impl Connections {
    /// Give each stream of `paths` an id, from `next_id` on, and make its connection.
    pub fn new(paths: &Paths, next_id: &AtomicU64) -> io::Result<Self> {
        let (mut ends, mut uris) = (<[_; 3]>::default(), <[_; 3]>::default());
        let mut guest_ends = Vec::new();
        for (index, there) in paths.streams().into_iter().enumerate() {
            if there {
                let id = next_id.fetch_add(1, Ordering::Relaxed);
                let (mut host, guest) = StdUnixStream::pair()?;
                host.write_all(&StreamHeader { id }.encode())?;
                host.set_nonblocking(true)?;
                guest_ends.push(guest.into());
                uris[index] = stream_uri(id);
                ends[index] = Some(UnixStream::from_std(host)?);
            }
        }
        let streams = Streams::default();
        *streams.lock_ends() = ends;
        Ok(Self {
            streams: Arc::new(streams),
            guest_ends,
            uris,
        })
    }

    /// How a request to the agent names the streams: standard input, output, error.
    pub fn uris(&self) -> [String; 3] {
        self.uris.clone()
    }
}

/// The host's side of one process' streams. Dropping it ends them.
#[derive(Debug, Default)]
pub struct Streams {
    /// Of the connections to the guest, until they are copied: standard input, output, error.
    ends: Mutex<[Option<UnixStream>; 3]>,
    hold: Mutex<Option<OwnedFd>>,
    stdin: Mutex<Option<JoinHandle<()>>>,
    outputs: Mutex<Vec<JoinHandle<()>>>,
    /// Bytes of output moved so far.
    moved: Arc<AtomicU64>,
    logger: Mutex<Option<Running>>,
}

impl Streams {
    /// Copy between `stdio`, which was opened for the same paths, and the guest.
    pub fn run(&self, stdio: Stdio) {
        let [stdin, stdout, stderr] = std::mem::take(&mut *self.lock_ends());
        *self.lock_logger() = stdio.logger;
        if let (Some(Input { source, hold }), Some(stream)) = (stdio.stdin, stdin) {
            *self.lock_hold() = hold.map(OwnedFd::from);
            let task = tokio::spawn(copy::to_guest(source, stream));
            *self.stdin.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
        }
        for (output, stream) in [(stdio.stdout, stdout), (stdio.stderr, stderr)] {
            let (Some(Output { sink, hold }), Some(stream)) = (output, stream) else {
                continue;
            };
            let moved = self.moved.clone();
            let task = tokio::spawn(async move {
                copy::from_guest(stream, sink, &moved).await;
                // Until here, so that the FIFO has had a reader all the time.
                drop(hold);
            });
            let mut outputs = self.outputs.lock().unwrap_or_else(PoisonError::into_inner);
            outputs.push(task);
        }
    }

    /// No input comes any more: what is in the FIFO is delivered, then the guest sees end of file.
    pub fn close_stdin(&self) {
        drop(self.lock_hold().take());
    }

    /// Wait until all output has reached where it goes. `false` when nothing has moved for
    /// `patience` before that, which is how a reader that is gone looks.
    pub async fn drain(&self, patience: Duration) -> bool {
        // Nobody reads it any more, and its copy would hold the client's FIFO.
        self.close_stdin();
        if let Some(stdin) = self
            .stdin
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            stdin.abort();
        }
        loop {
            let before = self.moved.load(Ordering::Relaxed);
            if tokio::time::timeout(patience, self.outputs_done())
                .await
                .is_ok()
            {
                return true;
            }
            if self.moved.load(Ordering::Relaxed) == before {
                return false;
            }
        }
    }

    /// Wait until the logger, if the output goes to one, has done with it. Only after a drain, which
    /// ends the logger's input; whatever is not delivered then is lost.
    pub async fn finish_logger(&self) {
        let logger = self.lock_logger().take();
        if let Some(logger) = logger {
            self.end_outputs();
            logger.finish().await;
        }
    }

    /// May be dropped and called again.
    async fn outputs_done(&self) {
        std::future::poll_fn(|context| {
            let mut outputs = self.outputs.lock().unwrap_or_else(PoisonError::into_inner);
            outputs.retain_mut(|task| std::pin::Pin::new(task).poll(context).is_pending());
            if outputs.is_empty() {
                std::task::Poll::Ready(())
            } else {
                std::task::Poll::Pending
            }
        })
        .await;
    }

    fn end_outputs(&self) {
        let mut outputs = self.outputs.lock().unwrap_or_else(PoisonError::into_inner);
        for task in outputs.drain(..) {
            task.abort();
        }
    }

    fn lock_ends(&self) -> std::sync::MutexGuard<'_, [Option<UnixStream>; 3]> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_logger(&self) -> std::sync::MutexGuard<'_, Option<Running>> {
        self.logger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_hold(&self) -> std::sync::MutexGuard<'_, Option<OwnedFd>> {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        let stdin = self
            .stdin
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(task) = stdin {
            task.abort();
        }
        self.end_outputs();
    }
}

/// What a stream's URI means on the host's file system.
struct Place {
    path: PathBuf,
    /// Whether it is a file that is made where it is missing, with the directories above.
    make: bool,
}

/// The place that a stream's URI means; `None` for no stream.
fn place(uri: &str) -> io::Result<Option<Place>> {
    let place = |path: &str, make| {
        let path = PathBuf::from(path);
        Ok(Some(Place { path, make }))
    };
    match uri.split_once("://") {
        _ if uri.is_empty() => Ok(None),
        None | Some(("", _)) => place(uri.trim_start_matches("://"), false),
        Some(("fifo", path)) => place(path, false),
        Some(("file", path)) => {
            let path: Vec<u8> = percent_encoding::percent_decode_str(path).collect();
            let path = PathBuf::from(OsString::from_vec(path));
            if !path.is_absolute() {
                let text = format!("stream {uri:?}: the file's path must be absolute");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            Ok(Some(Place { path, make: true }))
        }
        Some((scheme, _)) => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!(
                "stream {uri:?}: {scheme}:// is not supported here, only FIFOs, file:// and, for output, binary://"
            ),
        )),
    }
}

fn open_input(path: &Path) -> io::Result<Input> {
    let file = open(path, OpenOptions::new().read(true))?;
    if !is_fifo(&file)? {
        return Ok(Input {
            source: Source::file(file),
            hold: None,
        });
    }
    let hold = open(path, OpenOptions::new().write(true))?;
    Ok(Input {
        source: Source::pipe(file)?,
        hold: Some(hold),
    })
}

fn open_output(Place { path, make }: &Place) -> io::Result<Output> {
    let fifo = std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo());
    if !fifo {
        if let Some(directory) = path.parent().filter(|_| *make) {
            std::fs::create_dir_all(directory)?;
        }
        let mut options = OpenOptions::new();
        let file = open(path, options.append(true).create(true).mode(0o644))?;
        return Ok(Output {
            sink: Sink::file(file),
            hold: None,
        });
    }
    // The reading end first: without a reader the other cannot be opened.
    let hold = open(path, OpenOptions::new().read(true))?;
    let file = open(path, OpenOptions::new().write(true))?;
    Ok(Output {
        sink: Sink::pipe(file)?,
        hold: Some(hold),
    })
}

fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    options
        .custom_flags(OFlags::NONBLOCK.bits() as i32)
        .open(path)
}

fn is_fifo(file: &File) -> io::Result<bool> {
    Ok(file.metadata()?.file_type().is_fifo())
}

fn named(uri: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("opening stream {uri:?}: {error}"))
}

#[cfg(test)]
mod tests;
