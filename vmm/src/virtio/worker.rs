//! The thread in which an active device works, and what it waits for.
//!
//! A device builds a [`Poll`], adds the descriptors it wants to hear of (its queues' notifications,
//! sockets), and starts a [`Worker`] with it. The body loops over [`Poll::wait`] until that answers
//! [`Wake::Stop`], then returns whatever the device needs back, usually its queues:
//!
//! ```ignore
//! let poll = Poll::new()?;
//! poll.add(&queue.notify, 0, EventSet::IN)?;
//! let worker = Worker::start("thaw-console", poll, move |poll| {
//!     let mut events = Vec::new();
//!     // What was in the queue before activation has had its notification long ago.
//!     serve(&mut queue);
//!     while let Wake::Ready = poll.wait(&mut events, None) {
//!         let _ = queue.notify.read();
//!         serve(&mut queue);
//!     }
//!     queue
//! })?;
//! let queue = worker.stop();
//! ```
//!
//! The body must come back to [`Poll::wait`] after a bounded amount of work, because
//! [`Worker::stop`] waits for it.

use std::io;
use std::os::fd::AsRawFd;
use std::thread::JoinHandle;
use std::time::Duration;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::DeviceError;

/// The token of the stop event; not to be used for anything else.
const STOP: u64 = u64::MAX;

/// The most events that one wait reports; the others are reported by the next.
const EVENTS: usize = 64;

/// Stack of a worker: no body recurses or keeps large arrays.
const STACK: usize = 256 << 10;

/// One descriptor that became ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The token under which the descriptor was added.
    pub token: u64,
    /// What it is ready for.
    pub ready: EventSet,
}

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// The worker must return now.
    Stop,
    /// Descriptors are ready, or the time is over.
    Ready,
}

/// A set of descriptors to wait for, together with the worker's stop event.
pub struct Poll {
    epoll: Epoll,
    stop: EventFd,
}

impl Poll {
    /// An empty set.
    pub fn new() -> Result<Self, DeviceError> {
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(system("create an eventfd"))?;
        let epoll = Epoll::new().map_err(system("create an epoll set"))?;
        let poll = Poll { epoll, stop };
        poll.add(&poll.stop, STOP, EventSet::IN)?;
        Ok(poll)
    }

    /// Report `events` of `fd` under `token`. Any token but `u64::MAX` is the caller's to choose.
    pub fn add(&self, fd: &impl AsRawFd, token: u64, events: EventSet) -> Result<(), DeviceError> {
        self.control(ControlOperation::Add, fd, EpollEvent::new(events, token))
    }

    /// Change what is reported of `fd`, and report it again when it is ready already.
    pub fn modify(
        &self,
        fd: &impl AsRawFd,
        token: u64,
        events: EventSet,
    ) -> Result<(), DeviceError> {
        self.control(ControlOperation::Modify, fd, EpollEvent::new(events, token))
    }

    /// Report nothing of `fd` any more. Not needed before its last descriptor is closed.
    pub fn remove(&self, fd: &impl AsRawFd) -> Result<(), DeviceError> {
        self.control(ControlOperation::Delete, fd, EpollEvent::default())
    }

    fn control(
        &self,
        operation: ControlOperation,
        fd: &impl AsRawFd,
        event: EpollEvent,
    ) -> Result<(), DeviceError> {
        self.epoll
            .ctl(operation, fd.as_raw_fd(), event)
            .map_err(system("change an epoll set"))
    }

    /// Wait until something is ready, at most for `timeout` (`None`: for ever), and put it into
    /// `events` in place of what is there.
    pub fn wait(&self, events: &mut Vec<Event>, timeout: Option<Duration>) -> Wake {
        let timeout = match timeout {
            None => -1,
            // Rounded up, so that a wait for less than a millisecond is one.
            Some(time) => time
                .as_nanos()
                .div_ceil(1_000_000)
                .try_into()
                .unwrap_or(i32::MAX),
        };
        let mut ready = [EpollEvent::default(); EVENTS];
        let count = loop {
            match self.epoll.wait(timeout, &mut ready) {
                Ok(count) => break count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::error!("a device stops: waiting for its events failed: {error}");
                    return Wake::Stop;
                }
            }
        };
        events.clear();
        for event in &ready[..count] {
            if event.data() == STOP {
                return Wake::Stop;
            }
            events.push(Event {
                token: event.data(),
                ready: event.event_set(),
            });
        }
        Wake::Ready
    }
}

/// A running device thread.
pub struct Worker<T> {
    thread: Option<JoinHandle<T>>,
    stop: EventFd,
}

impl<T: Send + 'static> Worker<T> {
    /// Run `body` in a thread called `name` (15 characters are seen).
    pub fn start(
        name: &str,
        poll: Poll,
        body: impl FnOnce(Poll) -> T + Send + 'static,
    ) -> Result<Self, DeviceError> {
        let stop = poll
            .stop
            .try_clone()
            .map_err(system("duplicate an eventfd"))?;
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .stack_size(STACK)
            .spawn(move || body(poll))
            .map_err(system("start a device thread"))?;
        Ok(Worker {
            thread: Some(thread),
            stop,
        })
    }

    /// Make the body's [`Poll::wait`] answer [`Wake::Stop`], wait for the body to return, and hand
    /// on what it returned. `None` when it panicked.
    pub fn stop(mut self) -> Option<T> {
        self.join()
    }
}

impl<T> Worker<T> {
    fn join(&mut self) -> Option<T> {
        let thread = self.thread.take()?;
        if let Err(error) = self.stop.write(1) {
            // Only a counter at its maximum fails, and then the event is pending anyway.
            tracing::debug!("stop event of a device thread: {error}");
        }
        thread.join().ok()
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.join();
    }
}

/// Name a failed system call.
pub fn system(doing: &'static str) -> impl FnOnce(io::Error) -> DeviceError {
    move |source| DeviceError::System { doing, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_ends_a_worker_that_waits_for_ever() {
        let worker = Worker::start("test", Poll::new().unwrap(), |poll| {
            let mut events = Vec::new();
            while poll.wait(&mut events, None) == Wake::Ready {}
            7
        })
        .unwrap();
        assert_eq!(worker.stop(), Some(7));
    }

    #[test]
    fn a_ready_descriptor_is_reported_with_its_token() {
        let poll = Poll::new().unwrap();
        let event = EventFd::new(EFD_NONBLOCK).unwrap();
        poll.add(&event, 42, EventSet::IN).unwrap();
        let mut events = Vec::new();
        assert_eq!(poll.wait(&mut events, Some(Duration::ZERO)), Wake::Ready);
        assert_eq!(events, []);
        event.write(1).unwrap();
        assert_eq!(poll.wait(&mut events, None), Wake::Ready);
        assert_eq!(
            events,
            [Event {
                token: 42,
                ready: EventSet::IN
            }]
        );
    }

    #[test]
    fn a_dropped_worker_has_ended() {
        let (gone, wait) = std::sync::mpsc::channel::<()>();
        let worker = Worker::start("test", Poll::new().unwrap(), move |poll| {
            let _gone = gone;
            let mut events = Vec::new();
            while poll.wait(&mut events, None) == Wake::Ready {}
        })
        .unwrap();
        drop(worker);
        assert!(wait.try_recv().is_err());
    }
}
