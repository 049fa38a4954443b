//! The one fork of the shim: `start` must exit while the daemon stays. It is a fork and not an
//! execution because the daemon goes on with what `start` has read and made.

#![allow(unsafe_code)]

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

/// Which of the two processes this is.
#[derive(Debug)]
pub enum Role {
    /// The one that was there.
    Parent(Child),
    /// The new one.
    Child(Parent),
}

/// The new process, as the old one sees it.
#[derive(Debug)]
pub struct Child {
    report: PipeReader,
    confirmation: PipeWriter,
}

/// The old process, as the new one sees it.
#[derive(Debug)]
pub struct Parent {
    report: PipeWriter,
    confirmation: PipeReader,
}

/// Ends, with a byte in it, when the old process has given containerd its answer; without one when it
/// ended before that, and nobody knows of the new one.
pub type Confirmation = PipeReader;

/// What a child sends when it stands on its own feet.
const READY: &[u8] = b"\0ready";

/// Fork. The child keeps its standard streams and `kept`, and no other descriptor. The process must
/// have one thread only.
pub fn fork(kept: &[BorrowedFd<'_>]) -> io::Result<Role> {
    let (reader, writer) = io::pipe()?;
    let (confirmation, confirm) = io::pipe()?;
    // SAFETY: there is one thread, so the child's memory is that of a whole process.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // A descriptor is a descriptor of nothing once it is closed behind its owner's back.
            std::mem::forget((reader, confirm));
            let mut kept: Vec<RawFd> = kept.iter().map(|kept| kept.as_raw_fd()).collect();
            kept.extend([writer.as_raw_fd(), confirmation.as_raw_fd()]);
            close_all_but(&mut kept);
            Ok(Role::Child(Parent {
                report: writer,
                confirmation,
            }))
        }
        _ => Ok(Role::Parent(Child {
            report: reader,
            confirmation: confirm,
        })),
    }
}

/// Close all descriptors but the standard ones and `kept`.
fn close_all_but(kept: &mut [RawFd]) {
    kept.sort_unstable();
    let mut first = 3;
    for descriptor in kept.iter().copied().chain([RawFd::MAX]) {
        if first < descriptor {
            // SAFETY: closes descriptors that nothing in this process owns any more: what was
            // opened before the fork and is not kept is not used after it.
            unsafe { libc::syscall(libc::SYS_close_range, first, descriptor - 1, 0) };
        }
        first = descriptor.saturating_add(1).max(first);
    }
}

impl Child {
    /// Wait until the child stands on its own feet, or says why it does not.
    pub fn wait_for_report(&mut self) -> io::Result<()> {
        let mut report = Vec::new();
        self.report.read_to_end(&mut report)?;
        match &report[..] {
            READY => Ok(()),
            [] => Err(io::Error::other("the shim ended while it started")),
            words => Err(io::Error::other(
                String::from_utf8_lossy(words).into_owned(),
            )),
        }
    }

    /// Tell the child that containerd has the answer.
    pub fn confirm(mut self) {
        // A child that is gone is what containerd will find.
        let _ = self.confirmation.write_all(b"\0");
    }
}

impl Parent {
    /// Say what came of the start. Returns what tells whether containerd learns of it.
    pub fn report(mut self, error: Option<&io::Error>) -> Confirmation {
        // A parent that is gone has nobody to tell.
        let _ = match error {
            None => self.report.write_all(READY),
            Some(error) => self.report.write_all(error.to_string().as_bytes()),
        };
        self.confirmation
    }
}
