//! One process of a container, the first or an exec's: where it is in its life, and its stdio.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::watch;

use crate::exits::Exit;
use crate::io::Stream;
use crate::status::Refusal;
use crate::stdio::{Cues, Drain, Pipes, Stdio};
use crate::streams::ProcessStreams;
use crate::sys;

/// Where a process is in its life. It only moves downwards in this list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Announced, not there yet.
    Added,
    /// Being made.
    Starting,
    /// There, stopped before exec (a container's first process only).
    Created(i32),
    /// Released, or about to be.
    Running(i32),
    /// Reaped; its output is on the way.
    Ended(i32),
    /// Over, all of it.
    Stopped(Outcome),
}

/// The end of a process, as reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// The pid it had; 0 if it never was.
    pub pid: i32,
    /// Exit status, 128 and more for signals.
    pub status: u32,
    /// When.
    pub at: SystemTime,
}

/// Exit status of a process that could not be started.
const NEVER_STARTED: u32 = 255;

/// A process.
#[derive(Debug)]
pub struct Process {
    /// Empty for a container's first process.
    pub exec_id: String,
    /// Whether it has a terminal.
    pub terminal: bool,
    /// The URIs of its streams: stdin, stdout, stderr.
    pub uris: [String; 3],
    phase: watch::Sender<Phase>,
    ended: watch::Sender<bool>,
    close_stdin: watch::Sender<bool>,
    parts: Mutex<Parts>,
}

#[derive(Debug, Default)]
struct Parts {
    /// Until it is started.
    streams: ProcessStreams,
    /// From then on.
    stdio: Option<Stdio>,
    /// The size asked for before there was a terminal.
    window: Option<(u16, u16)>,
    /// Reads what the process says about its failure to exec, once.
    report: Option<Stream>,
}

impl Process {
    /// A process that is not there yet.
    pub fn new(exec_id: String, terminal: bool, uris: [String; 3], phase: Phase) -> Self {
        Self {
            exec_id,
            terminal,
            uris,
            phase: watch::Sender::new(phase),
            ended: watch::Sender::new(false),
            close_stdin: watch::Sender::new(false),
            parts: Mutex::default(),
        }
    }

    /// Now.
    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Its pid while it exists.
    pub fn pid(&self) -> Option<i32> {
        match self.phase() {
            Phase::Created(pid) | Phase::Running(pid) => Some(pid),
            _ => None,
        }
    }

    /// Moves from one phase to the next, unless it has moved already.
    pub fn advance(&self, from: Phase, to: Phase) -> bool {
        self.phase.send_if_modified(|phase| {
            let moves = *phase == from;
            if moves {
                *phase = to;
            }
            moves
        })
    }

    /// Moves on whatever it was.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    /// Says that it has been reaped: its pid is nobody's now.
    pub fn set_ended(&self, pid: i32) {
        self.set_phase(Phase::Ended(pid));
        self.ended.send_replace(true);
    }

    /// Says that all is over.
    pub fn set_stopped(&self, pid: i32, exit: Exit) {
        self.set_phase(Phase::Stopped(Outcome {
            pid,
            status: exit.ended.code(),
            at: exit.at,
        }));
    }

    /// Says that it never started; whoever waits for its end need not.
    pub fn set_failed(&self) {
        let outcome = Outcome {
            pid: 0,
            status: NEVER_STARTED,
            at: SystemTime::now(),
        };
        self.set_phase(Phase::Stopped(outcome));
        self.ended.send_replace(true);
        *self.parts() = Parts::default();
    }

    /// Waits until it is over.
    pub async fn stopped(&self) -> Outcome {
        loop {
            if let Ok(phase) = self
                .phase
                .subscribe()
                .wait_for(|phase| matches!(phase, Phase::Stopped(_)))
                .await
                && let Phase::Stopped(outcome) = *phase
            {
                return outcome;
            }
        }
    }

    /// Waits until it neither runs nor is about to.
    pub async fn idle(&self) {
        let idle = |phase: &Phase| matches!(phase, Phase::Added | Phase::Stopped(_));
        let _ = self.phase.subscribe().wait_for(idle).await;
    }

    /// Sends a signal, if it is there to be sent one.
    pub fn kill(&self, signal: i32) -> Result<(), Refusal> {
        match self.phase() {
            Phase::Created(pid) | Phase::Running(pid) => match sys::kill(pid, signal) {
                Ok(()) => Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Err(finished()),
                Err(error) => Err(Refusal::invalid(format!("signal {signal}: {error}"))),
            },
            Phase::Added | Phase::Starting => Err(Refusal::state("process not started")),
            Phase::Ended(_) | Phase::Stopped(_) => Err(finished()),
        }
    }

    /// Keeps the streams for later.
    pub fn set_streams(&self, streams: ProcessStreams) {
        self.parts().streams = streams;
    }

    /// The streams, to be plumbed now.
    pub fn take_streams(&self) -> ProcessStreams {
        std::mem::take(&mut self.parts().streams)
    }

    /// Where the process says why it cannot exec.
    pub fn set_report(&self, report: Stream) {
        self.parts().report = Some(report);
    }

    /// See [`Self::set_report`].
    pub fn take_report(&self) -> Option<Stream> {
        self.parts().report.take()
    }

    /// Connects the process's pipes with its streams.
    pub fn connect_pipes(&self, pipes: Pipes) {
        let stdio = pipes.connect(&self.cues());
        self.parts().stdio = Some(stdio);
    }

    /// Connects the process's terminal with its streams.
    pub fn connect_terminal(
        &self,
        master: OwnedFd,
        streams: ProcessStreams,
    ) -> std::io::Result<()> {
        let stdio = Stdio::terminal(master, streams, &self.cues())?;
        let mut parts = self.parts();
        if let Some((rows, columns)) = parts.window {
            let _ = stdio.resize(rows, columns);
        }
        parts.stdio = Some(stdio);
        Ok(())
    }

    /// Sets the size of its terminal, now or when it has one.
    pub fn resize(&self, rows: u16, columns: u16) -> Result<(), Refusal> {
        if !self.terminal {
            return Ok(());
        }
        if matches!(self.phase(), Phase::Ended(_) | Phase::Stopped(_)) {
            return Err(finished());
        }
        let mut parts = self.parts();
        parts.window = Some((rows, columns));
        let resized = parts
            .stdio
            .as_ref()
            .map_or(Ok(()), |stdio| stdio.resize(rows, columns));
        resized.map_err(|error| Refusal::failed(format!("resize: {error}")))
    }

    /// The size asked for so far.
    pub fn window(&self) -> Option<(u16, u16)> {
        self.parts().window
    }

    /// Ends its standard input after what has arrived.
    pub fn close_stdin(&self) {
        self.close_stdin.send_replace(true);
    }

    /// Its output that is on the way.
    pub fn drain(&self) -> Option<Drain> {
        self.parts().stdio.as_mut().map(Stdio::drain)
    }

    fn cues(&self) -> Cues {
        Cues {
            ended: self.ended.subscribe(),
            close_stdin: self.close_stdin.subscribe(),
        }
    }

    fn parts(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Clients recognise a dead process by these words.
fn finished() -> Refusal {
    Refusal::missing("process already finished")
}
