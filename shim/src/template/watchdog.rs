//! Limits on the steps of a build, which wait for a guest, and its progress in the log.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Signal, pidfd_send_signal};
use thaw_vmm_control::Shape;

/// How often a step that takes long is mentioned.
const PROGRESS: Duration = Duration::from_secs(5);

/// One step of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    /// What is being done.
    pub doing: &'static str,
    /// How long it may take at most.
    pub limit: Duration,
}

/// Kills a VMM when a step takes longer than its limit, whatever blocks on it.
pub(super) struct Watchdog {
    sender: Option<Sender<Step>>,
    expired: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watch the process of `pidfd`, beginning with `step`.
    pub fn start(pidfd: OwnedFd, shape: Shape, step: Step) -> std::io::Result<Self> {
        let (sender, receiver) = channel();
        let expired = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&expired);
        let thread = std::thread::Builder::new()
            .name("watchdog".into())
            .spawn(move || watch(&pidfd, shape, step, &receiver, &flag))?;
        Ok(Self {
            sender: Some(sender),
            expired,
            thread: Some(thread),
        })
    }

    /// The step before is done, `step` begins.
    pub fn step(&self, step: Step) {
        if let Some(sender) = &self.sender {
            // Fails only when the process was killed, which its owner is about to see.
            let _ = sender.send(step);
        }
    }

    /// Whether the process was killed.
    pub fn expired(&self) -> bool {
        self.expired.load(Ordering::Acquire)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take() {
            // It does not panic, and has nothing to tell.
            let _ = thread.join();
        }
    }
}

fn watch(
    pidfd: &OwnedFd,
    shape: Shape,
    mut step: Step,
    receiver: &Receiver<Step>,
    expired: &AtomicBool,
) {
    let mut begin = Instant::now();
    loop {
        let elapsed = begin.elapsed();
        let Some(left) = step
            .limit
            .checked_sub(elapsed)
            .filter(|left| !left.is_zero())
        else {
            expired.store(true, Ordering::Release);
            if let Err(error) = pidfd_send_signal(pidfd.as_fd(), Signal::KILL) {
                tracing::warn!(%error, "cannot kill a VMM that takes too long");
            }
            return;
        };
        match receiver.recv_timeout(left.min(PROGRESS)) {
            Ok(next) => {
                step = next;
                begin = Instant::now();
            }
            Err(RecvTimeoutError::Timeout) => {
                let seconds = begin.elapsed().as_secs();
                tracing::info!(%shape, seconds, "building a template: still {}", step.doing);
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    fn sleeper() -> (Child, OwnedFd) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_raw(child.id() as i32).unwrap();
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        (child, pidfd)
    }

    const SHORT: Step = Step {
        doing: "waiting",
        limit: Duration::from_millis(20),
    };
    const LONG: Step = Step {
        doing: "waiting",
        limit: Duration::from_secs(60),
    };

    #[test]
    fn test_step_over_its_limit_kills() {
        let (mut child, pidfd) = sleeper();
        let shape = Shape::new(1, 128).unwrap();
        let watchdog = Watchdog::start(pidfd, shape, LONG).unwrap();
        assert!(!watchdog.expired());
        watchdog.step(SHORT);
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        assert!(watchdog.expired());
    }

    #[test]
    fn test_dropped_watchdog_does_nothing() {
        let (mut child, pidfd) = sleeper();
        let shape = Shape::new(1, 128).unwrap();
        drop(Watchdog::start(pidfd, shape, LONG).unwrap());
        assert!(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
