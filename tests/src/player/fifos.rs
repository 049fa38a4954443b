//! The FIFOs of a process, as a client of containerd makes and uses them.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::Player;
use crate::testbed::LIMIT;

/// The streams of a process: FIFOs, or none.
#[derive(Debug, Default)]
pub struct Fifos {
    /// Standard input.
    pub input: Option<Fifo>,
    /// Standard output.
    pub output: Option<Fifo>,
    /// Standard error.
    pub error: Option<Fifo>,
    /// Whether they are those of a terminal.
    pub terminal: bool,
    _directory: Option<tempfile::TempDir>,
}

impl Fifos {
    /// None.
    pub fn none() -> Self {
        Self::default()
    }

    /// All three.
    pub fn new(player: &Player) -> Self {
        let directory = player.directory();
        let fifo = |name: &str| Some(Fifo::new(&directory.path().join(name)));
        Self {
            input: fifo("stdin"),
            output: fifo("stdout"),
            error: fifo("stderr"),
            terminal: false,
            _directory: Some(directory),
        }
    }

    /// Outputs only.
    pub fn output(player: &Player) -> Self {
        Self {
            input: None,
            ..Self::new(player)
        }
    }

    /// Those of a terminal, which has no standard error of its own.
    pub fn terminal(player: &Player) -> Self {
        Self {
            error: None,
            terminal: true,
            ..Self::new(player)
        }
    }

    /// Standard input's path, as in a request.
    pub fn stdin(&self) -> String {
        uri(self.input.as_ref())
    }

    /// Standard output's path, as in a request.
    pub fn stdout(&self) -> String {
        uri(self.output.as_ref())
    }

    /// Standard error's path, as in a request.
    pub fn stderr(&self) -> String {
        uri(self.error.as_ref())
    }

    /// Begins to read standard output.
    ///
    /// # Panics
    ///
    /// When there is none.
    #[track_caller]
    pub fn read(&self) -> Collected {
        self.output.as_ref().expect("there is an output").read()
    }

    /// Opens standard input, which the shim must have open already.
    ///
    /// # Panics
    ///
    /// When there is none.
    #[track_caller]
    pub fn write(&self) -> File {
        self.input.as_ref().expect("there is an input").write()
    }

    /// Opens both ends of standard input, which waits for nobody.
    ///
    /// # Panics
    ///
    /// When there is none.
    #[track_caller]
    pub fn read_and_write(&self) -> File {
        let input = self.input.as_ref().expect("there is an input");
        input.open_with(OpenOptions::new().read(true).write(true))
    }
}

fn uri(fifo: Option<&Fifo>) -> String {
    fifo.map(|fifo| fifo.0.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// One FIFO.
#[derive(Debug)]
pub struct Fifo(PathBuf);

impl Fifo {
    /// Makes one.
    ///
    /// # Panics
    ///
    /// When that is not possible.
    pub fn new(path: &Path) -> Self {
        mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR)
            .unwrap_or_else(|error| panic!("making {}: {error}", path.display()));
        Self(path.to_owned())
    }

    /// Opens it to read, which waits for a writer.
    pub fn open(&self) -> File {
        File::open(&self.0).unwrap_or_else(|error| panic!("{}: {error}", self.0.display()))
    }

    /// Reads it in the background, to its end.
    pub fn read(&self) -> Collected {
        let (path, (sender, parts)) = (self.0.clone(), channel());
        thread::spawn(move || {
            let Ok(mut file) = File::open(path) else {
                return;
            };
            let mut buffer = vec![0; 64 << 10];
            while let Ok(count @ 1..) = file.read(&mut buffer) {
                if sender.send(buffer[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        Collected {
            parts,
            bytes: Vec::new(),
        }
    }

    /// Opens it to write, which waits for a reader.
    pub fn write(&self) -> File {
        self.open_with(OpenOptions::new().write(true))
    }

    fn open_with(&self, options: &OpenOptions) -> File {
        options
            .open(&self.0)
            .unwrap_or_else(|error| panic!("{}: {error}", self.0.display()))
    }
}

/// What comes out of a FIFO that is read in the background.
#[derive(Debug)]
pub struct Collected {
    parts: Receiver<Vec<u8>>,
    bytes: Vec<u8>,
}

impl Collected {
    /// All of it, at its end.
    ///
    /// # Panics
    ///
    /// When that does not come.
    #[track_caller]
    pub fn all(mut self) -> Vec<u8> {
        loop {
            match self.parts.recv_timeout(LIMIT) {
                Ok(part) => self.bytes.extend(part),
                Err(RecvTimeoutError::Disconnected) => return self.bytes,
                Err(RecvTimeoutError::Timeout) => {
                    panic!("no end after {} bytes", self.bytes.len())
                }
            }
        }
    }

    /// The same as text.
    #[track_caller]
    pub fn text(self) -> String {
        String::from_utf8_lossy(&self.all()).into_owned()
    }

    /// Waits until `text` has come.
    ///
    /// # Panics
    ///
    /// When it does not.
    #[track_caller]
    pub fn wait_for(&mut self, text: &str) {
        while !String::from_utf8_lossy(&self.bytes).contains(text) {
            match self.parts.recv_timeout(LIMIT) {
                Ok(part) => self.bytes.extend(part),
                Err(error) => panic!(
                    "no {text:?} in {:?}: {error}",
                    String::from_utf8_lossy(&self.bytes)
                ),
            }
        }
    }

    /// Whether the end has not come yet.
    pub fn goes_on(&mut self) -> bool {
        loop {
            match self.parts.try_recv() {
                Ok(part) => self.bytes.extend(part),
                Err(error) => return error == std::sync::mpsc::TryRecvError::Empty,
            }
        }
    }
}
