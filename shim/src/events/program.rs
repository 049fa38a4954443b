//! Events for a containerd without a socket for them: it gives shims the path of a program, itself,
//! that takes one event each time it is executed.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::shim::event::Envelope;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;

use crate::host_program::start_on_host;
use crate::readiness::register;

/// How long one execution may take.
const LIMIT: Duration = Duration::from_secs(10);

/// The program that publishes an event (`-publish-binary`).
#[derive(Debug)]
pub struct PublishProgram {
    /// The program.
    pub path: PathBuf,
    /// containerd's gRPC address, which it publishes to.
    pub address: String,
    /// The mount namespace that it belongs to; the shim has one of its own.
    pub mount_namespace: OwnedFd,
}

impl PublishProgram {
    /// Execute it for one event; an error means that the event was not taken.
    pub async fn publish(&self, envelope: &Envelope) -> io::Result<()> {
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("{}: {error}", self.path.display()))
        };
        let mut child = self.start(envelope).map_err(named)?;
        match tokio::time::timeout(LIMIT, ended(&child)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                end(&mut child);
                return Err(named(error));
            }
            Err(_) => {
                end(&mut child);
                return Err(named(io::ErrorKind::TimedOut.into()));
            }
        }
        let status = child.wait().map_err(named)?;
        if status.success() {
            return Ok(());
        }
        Err(named(io::Error::other(status.to_string())))
    }

    fn start(&self, envelope: &Envelope) -> io::Result<Child> {
        let mut command = Command::new(&self.path);
        command
            .args(["--address", &self.address, "publish"])
            .args(["--topic", &envelope.topic])
            .args(["--namespace", &envelope.namespace])
            .stdin(Stdio::from(contents(envelope)?))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        start_on_host(command, self.mount_namespace.as_fd(), None)
    }
}

/// The event, to be read from a file in memory: writing it never waits for the program.
fn contents(envelope: &Envelope) -> io::Result<File> {
    let event = envelope.event.write_to_bytes().map_err(io::Error::other)?;
    let mut file = File::from(memfd_create("thaw-event", MemfdFlags::CLOEXEC)?);
    file.write_all(&event)?;
    file.rewind()?;
    Ok(file)
}

/// Wait until a child has ended; it is still to be waited for.
async fn ended(child: &Child) -> io::Result<()> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    let descriptor = register(pidfd_open(pid, PidfdFlags::empty())?, Interest::READABLE)?;
    descriptor.readable().await?.retain_ready();
    Ok(())
}

fn end(child: &mut Child) {
    // Both fail for one that has ended and was waited for, which is what is wanted.
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use containerd_shim_protos::protobuf::well_known_types::any::Any;

    use super::*;

    fn program(directory: &Path, script: &str) -> PublishProgram {
        let path = directory.join("publish");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        PublishProgram {
            path,
            address: "/run/c.sock".into(),
            mount_namespace: File::open("/proc/self/ns/mnt").unwrap().into(),
        }
    }

    fn envelope() -> Envelope {
        Envelope {
            topic: "/tasks/start".into(),
            namespace: "default".into(),
            event: Some(Any {
                type_url: "containerd.events.TaskStart".into(),
                value: vec![1, 2, 3],
                ..Any::default()
            })
            .into(),
            ..Envelope::default()
        }
    }

    /// Publish with a program that was just written: a test beside this one that starts a process
    /// meanwhile lets that have the file open for a moment.
    async fn publish(program: &PublishProgram) -> io::Result<()> {
        loop {
            match program.publish(&envelope()).await {
                Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {}
                other => return other,
            }
        }
    }

    #[tokio::test]
    async fn test_program_gets_the_event_as_containerd_s_own_does() {
        let directory = tempfile::tempdir().unwrap();
        let program = program(
            directory.path(),
            "cd ${0%/*} && echo \"$@\" > words && cat > event",
        );
        publish(&program).await.unwrap();
        let read = |name: &str| std::fs::read(directory.path().join(name)).unwrap();
        let words = "--address /run/c.sock publish --topic /tasks/start --namespace default\n";
        assert_eq!(String::from_utf8(read("words")).unwrap(), words);
        let event = Any::parse_from_bytes(&read("event")).unwrap();
        assert_eq!(event.type_url, "containerd.events.TaskStart");
        assert_eq!(event.value, [1, 2, 3]);
    }

    #[tokio::test]
    async fn test_a_failure_is_one_of_the_event() {
        let directory = tempfile::tempdir().unwrap();
        let mut program = program(directory.path(), "exit 3");
        let error = publish(&program).await.unwrap_err().to_string();
        assert!(error.contains("publish: exit status: 3"), "{error}");
        program.path = "/no/such/program".into();
        let error = publish(&program).await.unwrap_err().to_string();
        assert!(error.contains("/no/such/program: "), "{error}");
    }
}
