use std::io::Read;
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;

struct Fifos {
    _directory: tempfile::TempDir,
    paths: Paths,
}

fn fifos() -> Fifos {
    let directory = tempfile::tempdir().unwrap();
    let make = |name: &str| {
        let path = directory.path().join(name);
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let paths = Paths {
        stdin: make("stdin"),
        stdout: make("stdout"),
        stderr: make("stderr"),
        terminal: false,
    };
    Fifos {
        _directory: directory,
        paths,
    }
}

/// The guest's end of a stream, its header read.
fn guest_end(descriptor: OwnedFd) -> StdUnixStream {
    let mut stream = StdUnixStream::from(descriptor);
    let mut header = [0; StreamHeader::LENGTH];
    stream.read_exact(&mut header).unwrap();
    StreamHeader::decode(header).unwrap();
    stream
}

/// Open the host's side for a container without a logger.
async fn open(paths: &Paths) -> io::Result<Stdio> {
    let mount_namespace = File::open("/proc/self/ns/mnt").unwrap().into();
    let context = Context {
        id: "one",
        namespace: "some",
        mount_namespace: &mount_namespace,
    };
    Stdio::open(paths, context).await
}

async fn connect(paths: &Paths) -> (Arc<Streams>, Vec<StdUnixStream>) {
    let stdio = open(paths).await.unwrap();
    let connections = Connections::new(paths, &AtomicU64::new(1)).unwrap();
    connections.streams.run(stdio);
    let ends = connections.guest_ends.into_iter().map(guest_end).collect();
    (connections.streams, ends)
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length)
        .map(|index| (index.wrapping_mul(2_654_435_761) >> 11) as u8)
        .collect()
}

#[tokio::test]
async fn test_60_mb_each_way_arrive_unchanged_and_end() {
    const LENGTH: usize = 60_000_000;
    let fifos = fifos();
    let (streams, ends) = connect(&fifos.paths).await;
    let [stdin, stdout, stderr] = <[_; 3]>::try_from(ends).unwrap();
    drop(stderr);
    // The guest is `cat`.
    let cat = thread::spawn(move || {
        io::copy(&mut &stdin, &mut &stdout).unwrap();
        stdout.shutdown(std::net::Shutdown::Write).unwrap();
    });
    let path = fifos.paths.stdin.clone();
    let closer = streams.clone();
    let client_in = thread::spawn(move || {
        let mut file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all(&pattern(LENGTH)).unwrap();
        // As a client does: told first, closed afterwards.
        closer.close_stdin();
    });
    let path = fifos.paths.stdout.clone();
    let client_out = thread::spawn(move || {
        let mut bytes = Vec::new();
        File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
        bytes
    });
    // The copies run on this thread.
    let joined = tokio::task::spawn_blocking(move || {
        client_in.join().unwrap();
        cat.join().unwrap();
    });
    joined.await.unwrap();
    assert!(streams.drain(Duration::from_secs(10)).await);
    let bytes = tokio::task::spawn_blocking(move || client_out.join().unwrap())
        .await
        .unwrap();
    assert!(bytes == pattern(LENGTH));
}

#[tokio::test]
async fn test_input_goes_on_over_several_writers_until_it_is_closed() {
    let fifos = fifos();
    let (streams, mut ends) = connect(&fifos.paths).await;
    let path = PathBuf::from(&fifos.paths.stdin);
    let mut stdin = ends.remove(0);
    let guest = tokio::task::spawn_blocking(move || {
        let mut text = String::new();
        stdin.read_to_string(&mut text).unwrap();
        text
    });
    for text in ["one ", "two ", "three"] {
        let path = path.clone();
        tokio::task::spawn_blocking(move || std::fs::write(path, text))
            .await
            .unwrap()
            .unwrap();
    }
    streams.close_stdin();
    assert_eq!(guest.await.unwrap(), "one two three");
}

#[tokio::test]
async fn test_a_reader_that_goes_away_breaks_nothing_and_does_not_hold_the_end_for_ever() {
    let fifos = fifos();
    let (streams, ends) = connect(&fifos.paths).await;
    let [_stdin, mut stdout, stderr] = <[_; 3]>::try_from(ends).unwrap();
    drop(stderr);
    drop(
        OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&fifos.paths.stdout),
    );
    let writer = tokio::task::spawn_blocking(move || stdout.write_all(&pattern(200_000)));
    writer.await.unwrap().unwrap();
    assert!(!streams.drain(Duration::from_millis(100)).await);
    // A reader that comes back gets all of it.
    let path = fifos.paths.stdout.clone();
    let client = tokio::task::spawn_blocking(move || std::fs::read(path).unwrap());
    assert!(streams.drain(Duration::from_secs(10)).await);
    assert!(client.await.unwrap() == pattern(200_000));
}

#[tokio::test]
async fn test_output_to_files_and_to_nowhere() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    std::fs::write(&log, "before ").unwrap();
    let paths = Paths {
        stdin: "/dev/null".into(),
        stdout: format!("file://{}", log.display()),
        stderr: "/dev/null".into(),
        terminal: false,
    };
    let (streams, ends) = connect(&paths).await;
    let [mut stdin, mut stdout, mut stderr] = <[_; 3]>::try_from(ends).unwrap();
    tokio::task::spawn_blocking(move || {
        assert_eq!(stdin.read(&mut [0; 8]).unwrap(), 0);
        stdout.write_all(b"out").unwrap();
        stderr.write_all(b"err").unwrap();
    })
    .await
    .unwrap();
    assert!(streams.drain(Duration::from_secs(10)).await);
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "before out");
}

/// Of containerd's clients this is how one says that it wants a log, wherever it is to lie.
#[tokio::test]
async fn test_a_file_is_made_with_its_directories_and_takes_both_streams() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("a b/deep/log");
    let uri = format!("file://{}", log.display().to_string().replace(' ', "%20"));
    let paths = Paths {
        stdout: uri.clone(),
        stderr: uri,
        ..Paths::default()
    };
    let (streams, ends) = connect(&paths).await;
    for (mut end, text) in ends.into_iter().zip(["out ", "err"]) {
        end.write_all(text.as_bytes()).unwrap();
    }
    assert!(streams.drain(Duration::from_secs(10)).await);
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(text == "out err" || text == "errout ", "{text:?}");
}

#[tokio::test]
async fn test_a_terminal_has_no_error_stream_and_no_stream_has_no_uri() {
    let mut fifos = fifos();
    fifos.paths.terminal = true;
    fifos.paths.stdin.clear();
    let connections = Connections::new(&fifos.paths, &AtomicU64::new(7)).unwrap();
    assert_eq!(connections.uris(), ["", "stream://7", ""]);
    assert_eq!(connections.guest_ends.len(), 1);
}

#[tokio::test]
async fn test_streams_that_cannot_be_are_named() {
    let refused = async |stdin: &str, stdout: &str, stderr: &str| {
        let paths = Paths {
            stdin: stdin.into(),
            stdout: stdout.into(),
            stderr: stderr.into(),
            terminal: false,
        };
        open(&paths).await.unwrap_err().to_string()
    };
    let streaming = refused("", "ttrpc+unix:///x?streaming_id=1", "").await;
    assert!(
        streaming.contains("ttrpc+unix:// is not supported"),
        "{streaming}"
    );
    let logger = refused("", "binary:///bin/true", "/fifo").await;
    assert!(logger.contains("\"/fifo\": not the logger"), "{logger}");
    assert!(
        refused("binary:///bin/true", "", "")
            .await
            .contains("binary:// is not supported")
    );
    assert!(
        refused("", "/does/not/exist", "")
            .await
            .contains("/does/not/exist")
    );
    assert!(!Path::new("/does/not").exists());
    let relative = refused("", "file://relative/log", "").await;
    assert!(relative.contains("must be absolute"), "{relative}");
}

/// The logger has everything when the streams are finished.
#[tokio::test]
async fn test_output_goes_to_a_logger_to_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let script = format!("exec 5>&-; cat <&3 > {0}; cat <&4 >> {0}", log.display());
    let script: String = form_urlencoded::byte_serialize(script.as_bytes()).collect();
    let uri = format!("binary:///bin/sh?-c={script}");
    let paths = Paths {
        stdout: uri.clone(),
        stderr: uri,
        ..Paths::default()
    };
    let (streams, mut ends) = connect(&paths).await;
    let output = pattern(1_000_000);
    let expected = [&output[..], b"error"].concat();
    let writer = thread::spawn(move || {
        ends[1].write_all(b"error").unwrap();
        ends[0].write_all(&output).unwrap();
    });
    assert!(streams.drain(Duration::from_secs(10)).await);
    streams.finish_logger().await;
    writer.join().unwrap();
    assert_eq!(std::fs::read(&log).unwrap(), expected);
}
