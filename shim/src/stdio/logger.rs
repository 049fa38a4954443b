//! Loggers: programs of the host that are given the output of a process, as nerdctl wants for each
//! detached container.
//!
//! The URI is `binary:///path/to/program?name=value&…`; names and values are the program's arguments,
//! in that order. It gets standard output as descriptor 3, standard error as 4, and as 5 a pipe on
//! which it says that it is ready: by closing it, or with `binary-v2://` by a byte before that. See
//! containerd's `core/runtime/v2/logging` and `cmd/containerd-shim-runc-v2/process/io.go`.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tracing::warn;

use crate::host_program::{Descriptors, start_on_host};
use crate::readiness::register;

/// How long a logger may take until it is ready.
const READY_LIMIT: Duration = Duration::from_secs(10);

/// How long a logger may take to end when there is no more output, and again when it is asked to.
const END_LIMIT: Duration = Duration::from_secs(10);
const TERMINATION_LIMIT: Duration = Duration::from_secs(2);

/// A logger as a URI names it.
#[derive(Debug, PartialEq, Eq)]
pub struct Logger {
    program: PathBuf,
    arguments: Vec<OsString>,
    /// Whether a byte says that it is ready, and not just the end of the pipe.
    says_ready: bool,
}

/// For whom a logger is started, and where.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// Id of the container, or of the exec.
    pub id: &'a str,
    /// containerd's namespace.
    pub namespace: &'a str,
    /// The host's mount namespace, which the logger belongs to.
    pub mount_namespace: &'a OwnedFd,
}

/// A logger that is ready, and what it reads from.
#[derive(Debug)]
pub struct Started {
    /// Standard output goes here.
    pub stdout: File,
    /// Standard error goes here.
    pub stderr: File,
    /// The program.
    pub process: Running,
}

/// A running logger. It ends by itself when its pipes do.
#[derive(Debug)]
pub struct Running {
    child: Child,
    pidfd: AsyncFd<OwnedFd>,
}

impl Logger {
    /// The logger that a stream's URI names; nothing when it names something else.
    pub fn parse(uri: &str) -> io::Result<Option<Self>> {
        let (says_ready, rest) = match uri.split_once("://") {
            Some(("binary", rest)) => (false, rest),
            Some(("binary-v2", rest)) => (true, rest),
            _ => return Ok(None),
        };
        let invalid = |reason: &str| {
            let text = format!("stream {uri:?}: {reason}");
            io::Error::new(io::ErrorKind::InvalidInput, text)
        };
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let program: Vec<u8> = percent_encoding::percent_decode_str(path).collect();
        let program = PathBuf::from(OsString::from_vec(program));
        if !program.is_absolute() {
            return Err(invalid("the logger's path must be absolute"));
        }
        let mut arguments = Vec::new();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            arguments.extend([name, value].map(|text| OsString::from(text.into_owned())));
        }
        if arguments
            .iter()
            .any(|text| text.as_encoded_bytes().contains(&0))
        {
            return Err(invalid("an argument of the logger contains a zero byte"));
        }
        Ok(Some(Self {
            program,
            arguments,
            says_ready,
        }))
    }

    /// Start it and wait until it is ready.
    pub async fn start(&self, context: Context<'_>) -> io::Result<Started> {
        let named = |error: io::Error| {
            let text = format!("logger {}: {error}", self.program.display());
            io::Error::new(error.kind(), text)
        };
        self.start_unnamed(context).await.map_err(named)
    }

    async fn start_unnamed(&self, context: Context<'_>) -> io::Result<Started> {
        // Only ours must not block; what the logger does with its ends is its own business.
        let ours = |file: OwnedFd| -> io::Result<File> {
            rustix::io::ioctl_fionbio(&file, true)?;
            Ok(file.into())
        };
        let (stdout, to_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
        let (stderr, to_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
        let (ready, says_ready) = pipe_with(PipeFlags::CLOEXEC)?;
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .env("CONTAINER_ID", context.id)
            .env("CONTAINER_NAMESPACE", context.namespace)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let descriptors = Descriptors::from_three([stdout, stderr, says_ready])?;
        let mut child = start_on_host(command, context.mount_namespace.as_fd(), Some(descriptors))?;
        let watched = watch(&child);
        let ready = tokio::time::timeout(READY_LIMIT, self.wait_until_ready(ours(ready)?)).await;
        let failure = match ready {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error),
            Err(_) => {
                let text = format!("not ready after {} s", READY_LIMIT.as_secs());
                Some(io::Error::new(io::ErrorKind::TimedOut, text))
            }
        };
        match (watched, failure) {
            (Ok(pidfd), None) => Ok(Started {
                stdout: ours(to_stdout)?,
                stderr: ours(to_stderr)?,
                process: Running { child, pidfd },
            }),
            (watched, failure) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(failure
                    .or(watched.err())
                    .unwrap_or(io::ErrorKind::Other.into()))
            }
        }
    }

    async fn wait_until_ready(&self, pipe: File) -> io::Result<()> {
        let pipe = register(pipe, Interest::READABLE)?;
        let read = |mut pipe: &File| io::Read::read(&mut pipe, &mut [0]);
        let count = pipe.async_io(Interest::READABLE, read).await?;
        if self.says_ready && count == 0 {
            return Err(io::Error::other("ended before it was ready"));
        }
        Ok(())
    }
}

fn watch(child: &Child) -> io::Result<AsyncFd<OwnedFd>> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    register(pidfd_open(pid, PidfdFlags::empty())?, Interest::READABLE)
}

impl Running {
    /// Wait until it has ended, and end it if it does not do so by itself.
    pub async fn finish(mut self) {
        for (limit, then) in [(END_LIMIT, Signal::TERM), (TERMINATION_LIMIT, Signal::KILL)] {
            if tokio::time::timeout(limit, self.pidfd.readable())
                .await
                .is_ok()
            {
                break;
            }
            warn!(
                pid = self.child.id(),
                "a logger does not end with its streams"
            );
            let _ = pidfd_send_signal(self.pidfd.get_ref(), then);
        }
        // At once, or as soon as the kernel has taken it apart.
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn parse(uri: &str) -> Logger {
        Logger::parse(uri).unwrap().unwrap()
    }

    #[test]
    fn test_uri_names_program_and_arguments_in_order() {
        let logger = parse("binary:///usr/bin/log%20it?_NERDCTL=%2Fvar%2Flib&b=1+2&flag=");
        assert_eq!(logger.program, PathBuf::from("/usr/bin/log it"));
        assert_eq!(
            logger.arguments,
            ["_NERDCTL", "/var/lib", "b", "1 2", "flag", ""]
        );
        assert!(!logger.says_ready);
        assert!(parse("binary-v2:///x").says_ready);
        assert!(parse("binary:///x").arguments.is_empty());
    }

    #[test]
    fn test_other_uris_are_none_and_unfit_ones_refused() {
        for other in ["", "/fifo", "fifo:///x", "file:///x"] {
            assert!(Logger::parse(other).unwrap().is_none(), "{other}");
        }
        let error = |uri| Logger::parse(uri).unwrap_err().to_string();
        assert!(error("binary://logger").contains("must be absolute"));
        assert!(error("binary:///x?a=%00").contains("zero byte"));
    }

    /// A logger that is a shell script; its first argument is a directory.
    fn script(directory: &tempfile::TempDir, scheme: &str, text: &str) -> Logger {
        let path = directory.path().join("logger");
        let mut file = File::create(&path).unwrap();
        writeln!(file, "#!/bin/sh\n{text}").unwrap();
        drop(file);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        parse(&format!(
            "{scheme}://{}?{}",
            path.display(),
            directory.path().display()
        ))
    }

    async fn start(logger: &Logger) -> io::Result<Started> {
        let mount_namespace = File::open("/proc/self/ns/mnt").unwrap().into();
        let context = Context {
            id: "one",
            namespace: "some",
            mount_namespace: &mount_namespace,
        };
        logger.start(context).await
    }

    #[tokio::test]
    async fn test_logger_gets_both_streams_and_its_container_s_name() {
        let directory = tempfile::tempdir().unwrap();
        let text = "cd $1; exec 5>&-; echo $CONTAINER_NAMESPACE/$CONTAINER_ID > name; \
                    cat <&3 > out & cat <&4 > err; wait";
        let logger = script(&directory, "binary", text);
        let Started {
            mut stdout,
            mut stderr,
            process,
        } = start(&logger).await.unwrap();
        stdout.write_all(b"output").unwrap();
        stderr.write_all(b"error").unwrap();
        drop((stdout, stderr));
        process.finish().await;
        let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
        assert_eq!(read("name"), "some/one\n");
        assert_eq!(
            (read("out"), read("err")),
            ("output".into(), "error".into())
        );
    }

    #[tokio::test]
    async fn test_second_version_must_say_that_it_is_ready() {
        let directory = tempfile::tempdir().unwrap();
        let logger = script(&directory, "binary-v2", "echo >&5; exec 5>&-; cat <&3");
        let started = start(&logger).await.unwrap();
        drop((started.stdout, started.stderr));
        started.process.finish().await;
        let logger = script(&directory, "binary-v2", "exec 5>&-; cat <&3");
        let error = start(&logger).await.unwrap_err().to_string();
        assert!(error.ends_with("ended before it was ready"), "{error}");
    }

    #[tokio::test]
    async fn test_missing_program_is_named() {
        let error = start(&parse("binary:///no/such/logger")).await.unwrap_err();
        assert!(
            error.to_string().contains("/no/such/logger: No such file"),
            "{error}"
        );
    }
}
