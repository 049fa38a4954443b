//! Commands that end in time.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A command that has ended.
#[derive(Debug)]
pub struct Finished {
    /// What was run.
    pub command: String,
    /// Its exit code; 128 and the signal's number for one that was ended by a signal.
    pub code: i32,
    /// All that it wrote to its standard output.
    pub out: Vec<u8>,
    /// All that it wrote to its standard error.
    pub err: Vec<u8>,
    /// From start to end.
    pub took: Duration,
}

impl Finished {
    /// Standard output as text.
    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }

    /// Standard error as text.
    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.err).into_owned()
    }

    /// This, when the exit code is 0.
    ///
    /// # Panics
    ///
    /// With the command and its output, when it is not.
    #[track_caller]
    pub fn succeeded(self) -> Self {
        self.ended_with(0)
    }

    /// This, when the exit code is `code`.
    ///
    /// # Panics
    ///
    /// With the command and its output, when it is not.
    #[track_caller]
    pub fn ended_with(self, code: i32) -> Self {
        assert!(self.code == code, "{self} instead of {code}");
        self
    }
}

impl std::fmt::Display for Finished {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let excerpt = |bytes: &[u8]| {
            let end = bytes.len().min(2000);
            let more = if end < bytes.len() {
                format!("… ({} bytes)", bytes.len())
            } else {
                String::new()
            };
            format!("{}{more}", String::from_utf8_lossy(&bytes[..end]))
        };
        let Self {
            command,
            code,
            out,
            err,
            took,
        } = self;
        let (out, err) = (excerpt(out), excerpt(err));
        write!(
            f,
            "`{command}` ended with {code} after {took:?}; stdout:\n{out}\nstderr:\n{err}\nthat is {code}"
        )
    }
}

/// Runs `command` with nothing to read, for at most [`crate::LIMIT`].
#[track_caller]
pub fn finish(command: &mut Command) -> Finished {
    finish_within(command, b"", crate::LIMIT)
}

/// Runs `command` with `input` to read, and waits for it and for the ends of its output.
///
/// # Panics
///
/// When it cannot be started, or is not done after `limit`.
#[track_caller]
pub fn finish_within(command: &mut Command, input: &[u8], limit: Duration) -> Finished {
    let shown = show(command);
    let begun = Instant::now();
    let stdin = if input.is_empty() {
        Stdio::null()
    } else {
        Stdio::piped()
    };
    command
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .unwrap_or_else(|error| panic!("starting `{shown}`: {error}"));
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let late = Alarm::set(&child, limit);
    let (status, out, err) = thread::scope(|scope| {
        if let Some(mut stdin) = stdin {
            // A command may end without having read everything.
            scope.spawn(move || stdin.write_all(input));
        }
        let out = scope.spawn(|| read_all(stdout));
        let err = scope.spawn(|| read_all(stderr));
        let status = child.wait();
        (
            status,
            out.join().unwrap_or_default(),
            err.join().unwrap_or_default(),
        )
    });
    let late = late.stop();
    let status = status.unwrap_or_else(|error| panic!("waiting for `{shown}`: {error}"));
    let finished = Finished {
        command: shown,
        code: code(status),
        out,
        err,
        took: begun.elapsed(),
    };
    assert!(
        !late,
        "not done after {limit:?}, so it was killed: {finished}"
    );
    finished
}

/// Runs `command`, which says `ready` in a line of its own first, and gives it `input` and the end of it
/// only then. ctr tells containerd of the end of its own input only when it comes after the task was
/// made, with any runtime; a program that has spoken shows that it was.
///
/// # Panics
///
/// When it cannot be started, says anything else first, or is not done after [`crate::LIMIT`].
#[track_caller]
pub fn finish_when_ready(command: &mut Command, input: &[u8]) -> Finished {
    let shown = show(command);
    let begun = Instant::now();
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .unwrap_or_else(|error| panic!("starting `{shown}`: {error}"));
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let late = Alarm::set(&child, crate::LIMIT);
    let mut stdout = BufReader::new(stdout.expect("it was piped"));
    let mut first = String::new();
    let (status, out, err) = thread::scope(|scope| {
        let err = scope.spawn(|| read_all(stderr));
        // Nothing but the expected line is an answer; the error below says so.
        let _ = stdout.read_line(&mut first);
        let writer = scope.spawn(move || stdin.map(|mut stdin| stdin.write_all(input)));
        let out = read_all(Some(stdout));
        drop(writer.join());
        (child.wait(), out, err.join().unwrap_or_default())
    });
    let late = late.stop();
    let status = status.unwrap_or_else(|error| panic!("waiting for `{shown}`: {error}"));
    let finished = Finished {
        command: shown,
        code: code(status),
        out,
        err,
        took: begun.elapsed(),
    };
    assert!(!late, "not done in time, so it was killed: {finished}");
    assert!(first == "ready\n", "{first:?} came first: {finished}");
    finished
}

fn read_all(stream: Option<impl Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(mut stream) = stream {
        // What came before an error is what there is.
        let _ = stream.read_to_end(&mut bytes);
    }
    bytes
}

/// The command as one would type it.
pub fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

/// As a shell counts.
pub fn code(status: ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// How long a process that is late has to say what it waits for: a program written in Go prints that at
/// SIGQUIT.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Kills a process that does not end in time.
pub struct Alarm {
    done: mpsc::Sender<()>,
    thread: thread::JoinHandle<bool>,
}

impl Alarm {
    /// For a child that the caller will wait for.
    pub fn set(child: &Child, limit: Duration) -> Self {
        let (done, stopped) = mpsc::channel();
        let pid = Pid::from_raw(child.id().cast_signed());
        let thread = thread::spawn(move || {
            let still_runs =
                |limit| stopped.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout);
            let late = still_runs(limit);
            // Not waited for yet, since the alarm is stopped after that: the pid is still its own.
            if late {
                let _ = kill(pid, Signal::SIGQUIT);
                if still_runs(LAST_WORDS) {
                    let _ = kill(pid, Signal::SIGKILL);
                }
            }
            late
        });
        Self { done, thread }
    }

    /// Whether it has killed.
    pub fn stop(self) -> bool {
        drop(self.done);
        self.thread.join().unwrap_or(false)
    }
}
