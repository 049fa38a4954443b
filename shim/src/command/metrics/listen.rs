//! Metrics on a Unix socket, for a scraper that reads such, or for `curl --unix-socket`: HTTP/1.1, one
//! answer a connection.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};

/// Most bytes of a request that are read.
const MOST_BYTES: usize = 8 << 10;

/// How long a client may take to ask, and to take the answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Answer each request at `address`, `unix:PATH`, with the text that `metrics` gives. Returns when the
/// socket cannot be served.
pub(super) fn serve(address: &str, metrics: impl Fn() -> Result<String>) -> Result<()> {
    let Some(path) = address
        .strip_prefix("unix:")
        .filter(|path| path.starts_with('/'))
    else {
        bail!("{address:?} is no address to listen at: give unix:/PATH");
    };
    let listener = bind(Path::new(path)).with_context(|| format!("listening at {path}"))?;
    loop {
        let (stream, _) = listener
            .accept()
            .with_context(|| format!("accepting a connection at {path}"))?;
        // A client that goes away is its own affair.
        if let Err(error) = answer(stream, &metrics) {
            tracing::debug!(%error, "a client of the metrics has gone away");
        }
    }
}

/// Bind a socket for its owner only. One that nobody serves is replaced, and nothing else.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let listener = match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            let is_socket = fs::symlink_metadata(path)?.file_type().is_socket();
            if !is_socket || UnixStream::connect(path).is_ok() {
                return Err(error);
            }
            fs::remove_file(path)?;
            UnixListener::bind(path)?
        }
        other => other?,
    };
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

fn answer(mut stream: UnixStream, metrics: impl Fn() -> Result<String>) -> Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let request = head(&mut stream)?;
    let mut words = request.split(' ');
    let (status, kind, body) = match (words.next(), words.next()) {
        (Some("GET"), Some("/" | "/metrics")) => match metrics() {
            Ok(text) => ("200 OK", "text/plain; version=0.0.4; charset=utf-8", text),
            Err(error) => (
                "500 Internal Server Error",
                "text/plain",
                format!("{}\n", super::super::in_one_line(&error)),
            ),
        },
        (Some("GET"), _) => (
            "404 Not Found",
            "text/plain",
            "only /metrics is here\n".to_owned(),
        ),
        _ => (
            "405 Method Not Allowed",
            "text/plain",
            "only GET is answered\n".to_owned(),
        ),
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )?;
    Ok(())
}

/// The first line of a request, read with all of its head.
fn head(stream: &mut UnixStream) -> Result<String> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 1024];
    while !bytes.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut buffer)? {
            0 => bail!("it ended in the middle of a request"),
            count => bytes.extend_from_slice(&buffer[..count]),
        }
        if bytes.len() > MOST_BYTES {
            bail!("its request is longer than {MOST_BYTES} bytes");
        }
    }
    let text = String::from_utf8_lossy(&bytes);
    let line = text
        .lines()
        .next()
        .ok_or_else(|| anyhow!("its request is empty"))?;
    Ok(line.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(path: &Path, request: &[u8]) -> String {
        let mut stream = UnixStream::connect(path).unwrap();
        stream.write_all(request).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn test_a_request_is_answered_and_nonsense_does_not_end_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.sock");
        // Left by one that was killed.
        drop(UnixListener::bind(&path).unwrap());
        let listener = bind(&path).unwrap();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let _ = answer(stream.unwrap(), || Ok("thaw_starts_total 1\n".to_owned()));
            }
        });
        drop(UnixStream::connect(&path).unwrap());
        let text = ask(&path, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
        assert!(
            text.ends_with(
                "\r\nContent-Length: 20\r\nConnection: close\r\n\r\nthaw_starts_total 1\n"
            ),
            "{text}"
        );
        assert!(ask(&path, b"GET /x HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(ask(&path, b"PUT / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
        // Served already.
        assert_eq!(bind(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
    }

    #[test]
    fn test_what_is_no_socket_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("precious");
        fs::write(&path, "x").unwrap();
        assert!(bind(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"x");
        for address in ["/run/x", "unix:", "unix:x", "tcp:1"] {
            let error = serve(address, || Ok(String::new()))
                .unwrap_err()
                .to_string();
            assert!(error.contains("unix:/PATH"), "{error}");
        }
    }
}
