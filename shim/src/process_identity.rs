//! A process of this boot, named so that another that got the same id later is not mistaken for it.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// The id of this boot of the host (`random(4)`).
pub fn boot_id() -> io::Result<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(text.trim().to_owned())
}

/// A process id and the time at which that process started, in clock ticks since boot
/// (`proc_pid_stat(5)`, field 22).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks.
    pub start_time: u64,
}

impl ProcessIdentity {
    /// The process that has `pid` now.
    pub fn of(pid: u32) -> io::Result<Self> {
        let (_, start_time) = stat(pid)?;
        Ok(Self { pid, start_time })
    }

    /// The calling process.
    pub fn current() -> io::Result<Self> {
        Self::of(std::process::id())
    }

    /// Whether the process is there and no zombie.
    pub fn is_alive(self) -> bool {
        matches!(stat(self.pid), Ok((state, start)) if state != b'Z' && start == self.start_time)
    }

    /// Kill the process, if it is still there, and wait until it is gone. `Ok(false)` when it is
    /// still there after `limit`.
    pub fn kill(self, limit: Duration) -> io::Result<bool> {
        let killed = || {
            let Some(descriptor) = self.open()? else {
                return Ok(true);
            };
            match pidfd_send_signal(&descriptor, Signal::KILL) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(errno) => return Err(errno.into()),
            }
            wait_for_end(&descriptor, limit)
        };
        killed().map_err(|error: io::Error| {
            io::Error::new(
                error.kind(),
                format!("killing process {}: {error}", self.pid),
            )
        })
    }

    /// A descriptor of the process; `None` when it is gone.
    fn open(self) -> io::Result<Option<OwnedFd>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        let descriptor = descriptor_of(pid)?;
        // Looked at after it was opened: the descriptor keeps meaning the process that had the id.
        Ok(descriptor.filter(|_| self.is_alive()))
    }
}

/// A descriptor of the process that has the id `pid`; `None` when there is none.
fn descriptor_of(pid: Pid) -> io::Result<Option<OwnedFd>> {
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(descriptor) => Ok(Some(descriptor)),
        // The second is one that is reaped during the call (kernel/fork.c, `pidfd_prepare`, of Linux up to
        // 6.14): nothing else about the arguments can be invalid.
        Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Wait until the process of a pidfd has ended; `false` when `limit` is over first.
fn wait_for_end(descriptor: &OwnedFd, limit: Duration) -> io::Result<bool> {
    let limit = Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    let mut descriptors = [PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::IN)];
    loop {
        match poll(&mut descriptors, Some(&limit)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// State letter and start time of a process.
fn stat(pid: u32) -> io::Result<(u8, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_stat(&text).ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat is malformed")))
}

fn parse_stat(text: &str) -> Option<(u8, u64)> {
    // The name in parentheses may hold anything, parentheses too.
    let (_, fields) = text.rsplit_once(") ")?;
    let mut fields = fields.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    let start_time = fields.nth(18)?.parse().ok()?;
    Some((state, start_time))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn test_stat_of_a_name_with_parentheses() {
        let text = "12 (a) b) S 1 12 12 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 99 5\n";
        assert_eq!(parse_stat(text), Some((b'S', 4711)));
        assert_eq!(parse_stat("12 (a) S 1"), None);
        assert_eq!(parse_stat(""), None);
    }

    /// A process may be reaped between any two steps of looking for it.
    #[test]
    fn test_a_process_that_goes_meanwhile_is_gone() {
        for _ in 0..500 {
            let mut child = Command::new("true").spawn().unwrap();
            let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(move || child.wait().unwrap());
                while descriptor_of(pid).unwrap().is_some() {}
            });
        }
    }

    #[test]
    fn test_a_process_is_killed_and_another_with_its_id_is_not() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let identity = ProcessIdentity::of(child.id()).unwrap();
        assert!(identity.is_alive());

        let later = ProcessIdentity {
            start_time: identity.start_time + 1,
            ..identity
        };
        assert!(!later.is_alive());
        assert!(later.kill(Duration::from_secs(1)).unwrap());
        assert!(identity.is_alive());

        assert!(identity.kill(Duration::from_secs(5)).unwrap());
        assert!(!identity.is_alive(), "a zombie is not alive");
        child.wait().unwrap();
        assert!(identity.kill(Duration::ZERO).unwrap());
    }
}
