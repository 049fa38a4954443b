//! One process of a container, its first or an exec, as containerd sees it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use containerd_shim_protos::api::{StateResponse, Status};
use containerd_shim_protos::protobuf::well_known_types::timestamp::Timestamp;
use tokio::sync::watch;

use crate::facts::Exit;
use crate::stdio::{Paths, Stdio, Streams};

/// Where in its life a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// It exists, its program does not run.
    Created,
    /// Its program runs.
    Running,
    /// Its container is frozen.
    Paused,
    /// It has ended and its output is delivered.
    Stopped(Exit),
}

/// A process.
#[derive(Debug)]
pub struct Process {
    /// The exec's id; empty for a container's first process.
    pub exec_id: String,
    /// The exec's id for the agent, which is never used twice.
    pub guest_id: String,
    /// Its streams.
    pub paths: Paths,
    life: Mutex<Life>,
    exit: watch::Sender<Option<Exit>>,
    streams: Mutex<Option<Arc<Streams>>>,
    stdin_closed: AtomicBool,
    /// Held while the process is started, so that its exit is not told before its start.
    pub starting: tokio::sync::Mutex<()>,
}

impl Process {
    /// A process that is about to be created.
    pub fn new(exec_id: &str, guest_id: String, paths: Paths) -> Self {
        Self {
            exec_id: exec_id.to_owned(),
            guest_id,
            paths,
            life: Mutex::new(Life::Created),
            exit: watch::Sender::new(None),
            streams: Mutex::new(None),
            stdin_closed: AtomicBool::new(false),
            starting: tokio::sync::Mutex::new(()),
        }
    }

    /// Where it is.
    pub fn life(&self) -> Life {
        *self.lock_life()
    }

    /// Its program runs (again). A process that has ended stays so.
    pub fn set_running(&self) {
        self.change(Life::Running);
    }

    /// It is frozen. A process that has ended stays so.
    pub fn set_paused(&self) {
        self.change(Life::Paused);
    }

    fn change(&self, to: Life) {
        let mut life = self.lock_life();
        if !matches!(*life, Life::Stopped(_)) {
            *life = to;
        }
    }

    /// It has ended. Whoever waits is told.
    pub fn set_stopped(&self, exit: Exit) {
        *self.lock_life() = Life::Stopped(exit);
        self.exit.send_replace(Some(exit));
    }

    /// Wait until it has ended.
    pub async fn wait(&self) -> Exit {
        let mut exit = self.exit.subscribe();
        match exit.wait_for(Option::is_some).await {
            Ok(exit) => exit.unwrap_or_else(|| Exit::now(0)),
            // Not while `self` is there, which holds the sender.
            Err(_) => Exit::now(0),
        }
    }

    /// Its streams are `streams`, and are copied to and from `stdio` from now on.
    pub fn run_streams(&self, streams: Arc<Streams>, stdio: Stdio) {
        let mut place = self.lock_streams();
        streams.run(stdio);
        if self.stdin_closed.load(Ordering::Relaxed) {
            streams.close_stdin();
        }
        *place = Some(streams);
    }

    /// No more input comes. May be said before there are streams.
    pub fn close_stdin(&self) {
        let streams = self.lock_streams();
        self.stdin_closed.store(true, Ordering::Relaxed);
        if let Some(streams) = &*streams {
            streams.close_stdin();
        }
    }

    /// Its streams, once they run.
    pub fn streams(&self) -> Option<Arc<Streams>> {
        self.lock_streams().clone()
    }

    /// Let go of its streams, which ends them.
    pub fn take_streams(&self) -> Option<Arc<Streams>> {
        self.lock_streams().take()
    }

    /// The answer to a State request, but for the container's part.
    pub fn state(&self) -> StateResponse {
        let mut state = StateResponse::new();
        state.exec_id.clone_from(&self.exec_id);
        state.stdin.clone_from(&self.paths.stdin);
        state.stdout.clone_from(&self.paths.stdout);
        state.stderr.clone_from(&self.paths.stderr);
        state.terminal = self.paths.terminal;
        let status = match self.life() {
            Life::Created => Status::CREATED,
            Life::Running => Status::RUNNING,
            Life::Paused => Status::PAUSED,
            Life::Stopped(exit) => {
                state.exit_status = exit.status;
                state.exited_at = Some(timestamp(exit.at_ns)).into();
                Status::STOPPED
            }
        };
        state.status = status.into();
        state
    }

    fn lock_life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_streams(&self) -> MutexGuard<'_, Option<Arc<Streams>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Nanoseconds since 1970 as protobuf has them.
pub fn timestamp(ns: u64) -> Timestamp {
    Timestamp {
        seconds: (ns / 1_000_000_000) as i64,
        nanos: (ns % 1_000_000_000) as i32,
        ..Timestamp::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process() -> Process {
        Process::new(
            "",
            String::new(),
            Paths {
                stdin: "/in".into(),
                ..Paths::default()
            },
        )
    }

    #[test]
    fn test_state_follows_life() {
        let process = process();
        let status = |process: &Process| process.state().status.enum_value().unwrap();
        assert_eq!(status(&process), Status::CREATED);
        process.set_running();
        assert_eq!(status(&process), Status::RUNNING);
        process.set_paused();
        assert_eq!(status(&process), Status::PAUSED);
        process.set_stopped(Exit {
            status: 7,
            at_ns: 1_000_000_002,
        });
        let state = process.state();
        assert_eq!((status(&process), state.exit_status), (Status::STOPPED, 7));
        assert_eq!((state.exited_at.seconds, state.exited_at.nanos), (1, 2));
        assert_eq!(state.stdin, "/in");
        // The answer to a start that comes after the end.
        process.set_running();
        assert_eq!(status(&process), Status::STOPPED);
    }

    #[tokio::test]
    async fn test_all_who_wait_are_told_before_and_after_the_end() {
        let process = Arc::new(process());
        let waiters: Vec<_> = (0..8)
            .map(|_| {
                let process = process.clone();
                tokio::spawn(async move { process.wait().await })
            })
            .collect();
        tokio::task::yield_now().await;
        let exit = Exit {
            status: 3,
            at_ns: 4,
        };
        process.set_stopped(exit);
        for waiter in waiters {
            assert_eq!(waiter.await.unwrap(), exit);
        }
        assert_eq!(process.wait().await, exit);
    }
}
