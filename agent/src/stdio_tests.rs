use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::*;

/// A process's pipes, the host's ends of its streams, and the cues.
struct Rig {
    cues: Cues,
    ended: watch::Sender<bool>,
    close: watch::Sender<bool>,
}

impl Rig {
    fn new() -> Self {
        let (ended, close) = (watch::Sender::new(false), watch::Sender::new(false));
        let cues = Cues {
            ended: ended.subscribe(),
            close_stdin: close.subscribe(),
        };
        Self { cues, ended, close }
    }
}

fn socket() -> (UnixStream, Stream) {
    let (host, guest) = UnixStream::pair().unwrap();
    (host, Stream::new(guest.into()).unwrap())
}

/// Reads to the end on a thread of its own.
async fn read_all(mut host: UnixStream) -> Vec<u8> {
    tokio::task::spawn_blocking(move || {
        let mut data = Vec::new();
        host.read_to_end(&mut data).map(|_| data)
    })
    .await
    .unwrap()
    .unwrap()
}

#[tokio::test]
async fn test_output_is_complete_and_ends_when_the_process_ends() {
    let rig = Rig::new();
    let (host, guest) = socket();
    let streams = ProcessStreams {
        stdout: Some(guest),
        ..Default::default()
    };
    let (pipes, [_, stdout, _]) = Pipes::new(streams).unwrap();
    let mut stdio = pipes.connect(&rig.cues);
    // More than a pipe, a socket and a chunk hold.
    let data: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let expected = data.clone();
    let writer = std::thread::spawn(move || std::fs::File::from(stdout).write_all(&data));
    assert_eq!(read_all(host).await, expected);
    writer.join().unwrap().unwrap();
    rig.ended.send_replace(true);
    stdio.drain().wait().await;
}

#[tokio::test]
async fn test_output_held_open_by_a_background_process_does_not_hold_the_exit_back() {
    let rig = Rig::new();
    let (host, guest) = socket();
    let streams = ProcessStreams {
        stdout: Some(guest),
        ..Default::default()
    };
    let (pipes, [_, stdout, _]) = Pipes::new(streams).unwrap();
    let mut stdio = pipes.connect(&rig.cues);
    let mut background = std::fs::File::from(stdout);
    background.write_all(b"hi").unwrap();
    rig.ended.send_replace(true);
    stdio.drain().wait().await;
    // The host hears the end after what the process wrote.
    assert_eq!(read_all(host).await, b"hi");
    // And the one in the background can go on writing, past what a pipe holds.
    let written = tokio::task::spawn_blocking(move || background.write_all(&vec![0; 200_000]));
    written.await.unwrap().unwrap();
}

#[tokio::test]
async fn test_output_without_a_reader_does_not_stop_the_process() {
    let rig = Rig::new();
    let (host, guest) = socket();
    drop(host);
    let streams = ProcessStreams {
        stdout: Some(guest),
        ..Default::default()
    };
    let (pipes, [_, stdout, _]) = Pipes::new(streams).unwrap();
    let mut stdio = pipes.connect(&rig.cues);
    let mut stdout = std::fs::File::from(stdout);
    let written = tokio::task::spawn_blocking(move || stdout.write_all(&vec![0; 500_000]));
    written.await.unwrap().unwrap();
    rig.ended.send_replace(true);
    stdio.drain().wait().await;
}

#[tokio::test(start_paused = true)]
async fn test_exit_is_reported_when_the_host_takes_no_more_output() {
    let rig = Rig::new();
    let (_host, guest) = socket();
    let streams = ProcessStreams {
        stdout: Some(guest),
        ..Default::default()
    };
    let (pipes, [_, stdout, _]) = Pipes::new(streams).unwrap();
    let mut stdio = pipes.connect(&rig.cues);
    // Fills the pipe and is then gone, with the write unfinished.
    let stdout = Stream::new(stdout).unwrap();
    loop {
        tokio::task::yield_now().await;
        if stdout.try_write(&[0; 4096]).is_err() {
            tokio::task::yield_now().await;
            if stdout.try_write(&[0; 4096]).is_err() {
                break;
            }
        }
    }
    drop(stdout);
    rig.ended.send_replace(true);
    stdio.drain().wait().await;
}

#[tokio::test]
async fn test_input_arrives_and_its_end_is_the_end_of_the_pipe() {
    let rig = Rig::new();
    let (mut host, guest) = socket();
    let streams = ProcessStreams {
        stdin: Some(guest),
        ..Default::default()
    };
    let (pipes, [stdin, ..]) = Pipes::new(streams).unwrap();
    let _stdio = pipes.connect(&rig.cues);
    let data: Vec<u8> = (0..1_000_000_u32).map(|n| (n % 253) as u8).collect();
    let expected = data.clone();
    std::thread::spawn(move || {
        host.write_all(&data)
            .and_then(|()| host.shutdown(std::net::Shutdown::Write))
    });
    let read = tokio::task::spawn_blocking(move || {
        let mut data = Vec::new();
        std::fs::File::from(stdin)
            .read_to_end(&mut data)
            .map(|_| data)
    });
    assert_eq!(read.await.unwrap().unwrap(), expected);
}

#[tokio::test]
async fn test_input_closed_by_request_is_closed_after_what_has_arrived() {
    let rig = Rig::new();
    let (mut host, guest) = socket();
    let streams = ProcessStreams {
        stdin: Some(guest),
        ..Default::default()
    };
    let (pipes, [stdin, ..]) = Pipes::new(streams).unwrap();
    host.write_all(b"arrived").unwrap();
    rig.close.send_replace(true);
    let _stdio = pipes.connect(&rig.cues);
    let read = tokio::task::spawn_blocking(move || {
        let mut data = Vec::new();
        std::fs::File::from(stdin)
            .read_to_end(&mut data)
            .map(|_| data)
    });
    assert_eq!(read.await.unwrap().unwrap(), b"arrived");
}

#[tokio::test]
async fn test_streams_that_are_not_there_are_dev_null() {
    let (_, ends) = Pipes::new(ProcessStreams::default()).unwrap();
    for end in ends {
        let mut file = std::fs::File::from(end);
        assert_eq!(file.read(&mut [0; 1]).unwrap(), 0);
        file.write_all(b"x").unwrap();
    }
}
