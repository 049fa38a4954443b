//! How the agent's children ended, and who wants to know.
//!
//! The agent reaps every child there is, also processes whose parent has died, and hands each exit
//! to whoever has claimed the pid. A process may end before its pid is known: while anything is
//! being started, unclaimed exits are kept.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::sys::{self, Ended};

/// The end of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// How.
    pub ended: Ended,
    /// When the agent learnt of it.
    pub at: SystemTime,
}

/// The table.
#[derive(Debug, Default)]
pub struct Exits {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    claimed: HashMap<i32, oneshot::Sender<Exit>>,
    early: HashMap<i32, Exit>,
    starting: usize,
}

/// While it lives, exits of pids that nobody has claimed are kept.
#[derive(Debug)]
pub struct Starting {
    exits: Arc<Exits>,
}

impl Exits {
    /// To be called before a process is started, and held until its pid has been claimed.
    pub fn starting(self: &Arc<Self>) -> Starting {
        self.lock().starting += 1;
        Starting {
            exits: Arc::clone(self),
        }
    }

    /// Notes that a process has ended.
    pub fn record(&self, pid: i32, exit: Exit) {
        let mut table = self.lock();
        if let Some(claim) = table.claimed.remove(&pid) {
            // Whoever claimed it may have lost interest.
            let _ = claim.send(exit);
        } else if table.starting > 0 {
            table.early.insert(pid, exit);
        }
    }

    /// Reaps until the end of the guest.
    pub async fn reap(&self, mut children: Signal) {
        loop {
            while let Some((pid, ended)) = sys::reap() {
                self.record(
                    pid,
                    Exit {
                        ended,
                        at: SystemTime::now(),
                    },
                );
            }
            if children.recv().await.is_none() {
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What [`Exits::reap`] listens to. Made before any child is.
pub fn child_signal() -> std::io::Result<Signal> {
    signal(SignalKind::child())
}

impl Starting {
    /// The end of a process that was started since this guard was made, past or future.
    pub fn claim(&self, pid: i32) -> oneshot::Receiver<Exit> {
        let (sender, receiver) = oneshot::channel();
        let mut table = self.exits.lock();
        match table.early.remove(&pid) {
            Some(exit) => {
                let _ = sender.send(exit);
            }
            None => {
                table.claimed.insert(pid, sender);
            }
        }
        receiver
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        let mut table = self.exits.lock();
        table.starting -= 1;
        if table.starting == 0 {
            table.early = HashMap::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit(code: i32) -> Exit {
        Exit {
            ended: Ended::Exited(code),
            at: SystemTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn test_exit_after_the_claim_is_delivered() {
        let exits = Arc::new(Exits::default());
        let mut receiver = exits.starting().claim(7);
        exits.record(7, exit(3));
        assert_eq!(receiver.try_recv(), Ok(exit(3)));
    }

    #[test]
    fn test_exit_before_the_pid_is_known_is_kept() {
        let exits = Arc::new(Exits::default());
        let starting = exits.starting();
        exits.record(7, exit(3));
        exits.record(8, exit(4));
        assert_eq!(starting.claim(7).try_recv(), Ok(exit(3)));
    }

    #[test]
    fn test_exits_of_strangers_are_forgotten_when_nothing_is_starting() {
        let exits = Arc::new(Exits::default());
        exits.record(6, exit(0));
        let (first, second) = (exits.starting(), exits.starting());
        exits.record(7, exit(1));
        drop(first);
        assert_eq!(exits.lock().early.len(), 1);
        drop(second);
        assert!(exits.lock().early.is_empty());
        // The pid of a stranger used again is not mistaken for it.
        assert!(exits.starting().claim(7).try_recv().is_err());
    }

    #[test]
    fn test_exit_is_delivered_once() {
        let exits = Arc::new(Exits::default());
        let starting = exits.starting();
        let first = starting.claim(7);
        exits.record(7, exit(1));
        drop(first);
        assert!(starting.claim(7).try_recv().is_err());
    }
}
