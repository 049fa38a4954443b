//! The anchor: the small host process of a container whose pid the shim reports.
//!
//! It sits in the container's network namespace, so that whoever plugs interfaces by that pid finds
//! it there; its root is an empty read-only directory, so that whoever goes through `/proc/PID/root`
//! finds nothing of the host; and its death ends the container, as that of a container's process
//! should. It does nothing but wait for the end of its socket, which comes with the shim's.

mod child;

use std::ffi::CString;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::process::{Signal, pidfd_send_signal};

use crate::process_identity::ProcessIdentity;
use child::{Plan, Report, Step};

/// A started anchor. It ends when this is dropped; [`Anchor::pidfd`] tells when.
#[derive(Debug)]
pub struct Anchor {
    identity: ProcessIdentity,
    pidfd: OwnedFd,
    socket: UnixStream,
}

impl Anchor {
    /// Start an anchor in the network namespace at `network_namespace`, or in a new one. Its root
    /// becomes the directory `empty`, which is made.
    ///
    /// The process is there when this returns; what it does to get into its namespaces is done in
    /// parallel, and told on the socket: [`REPORT_LENGTH`] bytes for [`Anchor::explain`].
    pub fn start(empty: &Path, network_namespace: Option<&Path>) -> io::Result<Self> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o555)
            .create(empty)?;
        let text =
            |path: &Path| CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other);
        let plan = Plan {
            root: text(empty)?,
            network_namespace: network_namespace.map(text).transpose()?,
        };
        let (socket, childs) = UnixStream::pair()?;
        let (pid, pidfd) = child::start(&plan, &OwnedFd::from(childs))?;
        let identity = ProcessIdentity::of(pid.as_raw_nonzero().get().unsigned_abs())?;
        Ok(Self {
            identity,
            pidfd,
            socket,
        })
    }

    /// Which process it is.
    pub fn identity(&self) -> ProcessIdentity {
        self.identity
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.identity.pid
    }

    /// Readable when the process has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// A duplicate of the socket, on which the report arrives.
    pub fn socket(&self) -> io::Result<UnixStream> {
        self.socket.try_clone()
    }

    /// What the `bytes` mean that the anchor has sent.
    pub fn explain(&self, bytes: [u8; Report::LENGTH]) -> io::Result<()> {
        let Some(report) = Report::decode(bytes) else {
            return Err(io::Error::other("the anchor sent a malformed report"));
        };
        let Some(errno) = report.errno else {
            return Ok(());
        };
        let error = io::Error::from(errno);
        let doing = match report.step {
            Step::JoinNetwork => "linux.namespaces: joining the given network namespace",
            Step::Unshare => "making the namespaces of the anchor",
            Step::Root => "giving the anchor an empty root",
        };
        Err(io::Error::new(error.kind(), format!("{doing}: {error}")))
    }

    /// Kill the process.
    pub fn kill(&self) {
        // Only fails when it has ended.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }
}

/// Length of the report that an anchor sends on its socket once it is ready or has failed.
pub const REPORT_LENGTH: usize = Report::LENGTH;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read;
    use std::time::Duration;

    use super::*;

    fn start(network_namespace: Option<&Path>) -> (tempfile::TempDir, Anchor) {
        let directory = tempfile::tempdir().unwrap();
        let anchor = Anchor::start(&directory.path().join("empty"), network_namespace).unwrap();
        (directory, anchor)
    }

    fn wait_until_ready(anchor: &Anchor) -> io::Result<()> {
        let mut report = [0; REPORT_LENGTH];
        anchor.socket()?.read_exact(&mut report)?;
        anchor.explain(report)
    }

    fn network(pid: u32) -> std::path::PathBuf {
        fs::read_link(format!("/proc/{pid}/ns/net")).unwrap()
    }

    fn reap(anchor: &Anchor) {
        let id = rustix::process::WaitId::PidFd(anchor.pidfd());
        rustix::process::waitid(id, rustix::process::WaitIdOptions::EXITED).unwrap();
    }

    #[test]
    fn test_anchor_has_an_own_network_and_an_empty_root() {
        let (_directory, anchor) = start(None);
        wait_until_ready(&anchor).unwrap();
        assert_ne!(network(anchor.pid()), network(std::process::id()));
        let root = format!("/proc/{}/root", anchor.pid());
        assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
        let error = fs::write(format!("{root}/x"), "").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem);
        let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", anchor.pid())).unwrap();
        assert_eq!(mounts.lines().count(), 1, "{mounts}");
        // Nothing of this process' descriptors but its socket.
        let descriptors = fs::read_dir(format!("/proc/{}/fd", anchor.pid()))
            .unwrap()
            .count();
        assert_eq!(descriptors, 1);
        anchor.kill();
        reap(&anchor);
    }

    #[test]
    fn test_anchor_joins_a_given_network_namespace() {
        let (_directory, first) = start(None);
        wait_until_ready(&first).unwrap();
        let path = format!("/proc/{}/ns/net", first.pid());
        let (_directory, second) = start(Some(Path::new(&path)));
        wait_until_ready(&second).unwrap();
        assert_eq!(network(first.pid()), network(second.pid()));
        for anchor in [first, second] {
            anchor.kill();
            reap(&anchor);
        }
    }

    #[test]
    fn test_anchor_ends_with_its_socket() {
        let (_directory, anchor) = start(None);
        wait_until_ready(&anchor).unwrap();
        let Anchor {
            identity,
            pidfd,
            socket,
        } = anchor;
        drop(socket);
        let id = rustix::process::WaitId::PidFd(pidfd.as_fd());
        rustix::process::waitid(id, rustix::process::WaitIdOptions::EXITED).unwrap();
        assert!(identity.kill(Duration::ZERO).unwrap());
    }

    #[test]
    fn test_a_network_namespace_that_is_none_is_named() {
        for path in ["/does/not/exist", "/dev/null"] {
            let (_directory, anchor) = start(Some(Path::new(path)));
            let error = wait_until_ready(&anchor).unwrap_err().to_string();
            assert!(
                error.contains("joining the given network namespace"),
                "{error}"
            );
            reap(&anchor);
        }
    }
}
