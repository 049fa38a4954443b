//! Bytes and terminals.

use std::io::{Read, Write};
use std::net::Shutdown;

use containerd_shim_protos::api;
use serde_json::json;
use tokio::task::spawn_blocking;
use ttrpc::Code;

use crate::guest::{Guest, collect, context, guest_or_skip, refusal, text};

#[tokio::test]
async fn test_input_of_60_mb_comes_back_unchanged() {
    let guest = guest_or_skip!();
    let mut host = guest
        .create("a", &guest.spec(&["cat"]), false)
        .await
        .unwrap();
    let mut stdin = host.stdin.take().unwrap();
    let output = collect(host.stdout.take());
    guest.start_process("a", "").await.unwrap();
    let data: Vec<u8> = (0..60_000_000_u32).map(|n| (n ^ (n >> 8)) as u8).collect();
    let sent = data.clone();
    let writer = spawn_blocking(move || {
        stdin
            .write_all(&sent)
            .and_then(|()| stdin.shutdown(Shutdown::Write))
    });
    assert_eq!(guest.wait("a", "").await.unwrap(), 0);
    writer.await.unwrap().unwrap();
    assert!(output.await.unwrap() == data);
}

#[tokio::test]
async fn test_output_of_a_process_that_exits_at_once_is_complete() {
    let guest = guest_or_skip!();
    for _ in 0..5 {
        let ran = guest.run_script("a", "seq 1 100000 >&2").await;
        assert_eq!(ran.stderr.lines().count(), 100_000);
        assert!(ran.stderr.ends_with("\n100000\n"));
    }
}

#[tokio::test]
async fn test_close_io_before_start_gives_an_immediate_end() {
    let guest = guest_or_skip!();
    let host = guest
        .create("a", &guest.spec(&["cat"]), false)
        .await
        .unwrap();
    let request = api::CloseIORequest {
        id: "a".into(),
        stdin: true,
        ..Default::default()
    };
    guest.task.close_io(context(), &request).await.unwrap();
    guest.start_process("a", "").await.unwrap();
    assert_eq!(guest.wait("a", "").await.unwrap(), 0);
    drop(host);
}

#[tokio::test]
async fn test_process_without_streams_has_dev_null() {
    let guest = guest_or_skip!();
    let spec = guest.spec(&[
        "sh",
        "-c",
        "cat; echo x; test \"$(readlink /proc/self/fd/0)\" = /dev/null",
    ]);
    let request = api::CreateTaskRequest {
        id: "a".into(),
        options: crate::guest::any(thaw_agent_api::SPEC_TYPE_URL, &spec),
        ..Default::default()
    };
    guest.task.create(context(), &request).await.unwrap();
    guest.start_process("a", "").await.unwrap();
    assert_eq!(guest.wait("a", "").await.unwrap(), 0);
}

#[tokio::test]
async fn test_terminal_size_and_output() {
    let guest = guest_or_skip!();
    let mut spec = guest.spec(&["sh", "-c", "tty; stty size; read x; stty size; echo got $x"]);
    spec["process"]["consoleSize"] = json!({"height": 41, "width": 123});
    let mut host = guest.create("a", &spec, true).await.unwrap();
    guest.start_process("a", "").await.unwrap();
    let mut first = [0; "/dev/pts/0\r\n41 123\r\n".len()];
    let mut stdout = host.stdout.take().unwrap();
    stdout.read_exact(&mut first).unwrap();
    assert_eq!(
        std::str::from_utf8(&first).unwrap(),
        "/dev/pts/0\r\n41 123\r\n"
    );
    resize(&guest, "", 200, 50).await.unwrap();
    host.stdin.as_mut().unwrap().write_all(b"word\n").unwrap();
    assert_eq!(guest.wait("a", "").await.unwrap(), 0);
    assert_eq!(
        text(collect(Some(stdout))).await,
        "word\r\n50 200\r\ngot word\r\n"
    );
    assert_eq!(refusal(resize(&guest, "", 1, 1).await).0, Code::NOT_FOUND);
}

#[tokio::test]
async fn test_terminal_of_an_exec_resized_before_start() {
    let guest = guest_or_skip!();
    let _host = guest.sleeper("a").await;
    let (stdout, socket) = guest.stream();
    let request = api::ExecProcessRequest {
        id: "a".into(),
        exec_id: "e".into(),
        terminal: true,
        stdout,
        spec: crate::guest::any("", &guest.spec(&["stty", "size"])["process"]),
        ..Default::default()
    };
    guest.task.exec(context(), &request).await.unwrap();
    resize(&guest, "e", 100, 30).await.unwrap();
    resize(&guest, "", 100, 30).await.unwrap();
    guest.start_process("a", "e").await.unwrap();
    assert_eq!(guest.wait("a", "e").await.unwrap(), 0);
    let output = text(collect(Some(socket))).await;
    assert_eq!(output, "30 100\r\n");
}

async fn resize(guest: &Guest, exec_id: &str, width: u32, height: u32) -> ttrpc::Result<()> {
    let request = api::ResizePtyRequest {
        id: "a".into(),
        exec_id: exec_id.into(),
        width,
        height,
        ..Default::default()
    };
    guest.task.resize_pty(context(), &request).await.map(drop)
}

#[tokio::test]
async fn test_short_terminal_program_shows_all_its_output() {
    let guest = guest_or_skip!();
    for _ in 0..10 {
        let mut host = guest
            .create("a", &guest.spec(&["seq", "1", "1000"]), true)
            .await
            .unwrap();
        let output = collect(host.stdout.take());
        guest.start_process("a", "").await.unwrap();
        assert_eq!(guest.wait("a", "").await.unwrap(), 0);
        assert!(text(output).await.ends_with("\n999\r\n1000\r\n"));
        guest.delete("a", "").await.unwrap();
    }
}

#[tokio::test]
async fn test_exec_with_a_terminal_says_why_it_cannot_run() {
    let guest = guest_or_skip!();
    let _host = guest.sleeper("a").await;
    let (stdin, _stdin) = guest.stream();
    let (stdout, _stdout) = guest.stream();
    let request = api::ExecProcessRequest {
        id: "a".into(),
        exec_id: "e".into(),
        terminal: true,
        stdin,
        stdout,
        spec: crate::guest::any("", &guest.spec(&["/no/such"])["process"]),
        ..Default::default()
    };
    guest.task.exec(context(), &request).await.unwrap();
    let (_, message) = refusal(guest.start_process("a", "e").await);
    assert!(message.contains("/no/such: no such file"), "{message}");
}
