//! A container from create to delete.

use std::io::Read;
use std::time::Duration;

use containerd_shim_protos::api;
use serde_json::json;
use thaw_agent_api::agent::{InfoRequest, ProcessesRequest, QuiesceRequest};
use ttrpc::Code;

use crate::guest::{collect, context, guest_or_skip, refusal, text};

#[tokio::test]
async fn test_run_output_and_status() {
    let guest = guest_or_skip!();
    let ran = guest
        .run_script("a", "echo out; echo err >&2; exit 7")
        .await;
    assert_eq!(
        (ran.status, &*ran.stdout, &*ran.stderr),
        (7, "out\n", "err\n")
    );
    for (script, status) in [
        ("true", 0),
        ("exit 1", 1),
        ("exit 128", 128),
        ("exit 255", 255),
    ] {
        assert_eq!(
            guest.run_script("a", script).await.status,
            status,
            "{script}"
        );
    }
    // By a signal of a child of its own: a container's first process is immune to its own kill.
    let ran = guest.run_script("a", "sh -c 'kill -9 $$'; exit $?").await;
    assert_eq!(ran.status, 137);
}

#[tokio::test]
async fn test_nothing_is_left_after_delete() {
    let guest = guest_or_skip!();
    guest.run_script("a", "true").await;
    assert!(!guest.cgroup("a").exists());
    for directory in ["bundles", "state"] {
        let mut entries = std::fs::read_dir(guest.directory().join(directory)).unwrap();
        assert!(entries.next().is_none(), "{directory}");
    }
    assert_eq!(refusal(guest.state("a", "").await).0, Code::NOT_FOUND);
    assert_eq!(refusal(guest.wait("a", "").await).0, Code::NOT_FOUND);
}

#[tokio::test]
async fn test_state_through_a_life() {
    let guest = guest_or_skip!();
    let host = guest
        .create("a", &guest.spec(&["sleep", "1000"]), false)
        .await
        .unwrap();
    let status = |state: api::StateResponse| state.status.enum_value().unwrap();
    let state = guest.state("a", "").await.unwrap();
    let created_pid = state.pid;
    assert!(created_pid > 0);
    assert_eq!((&*state.id, &*state.bundle), ("a", "/client/bundle"));
    assert_eq!(status(state), api::Status::CREATED);
    let again = guest
        .create("a", &guest.spec(&["true"]), false)
        .await
        .map(drop);
    assert_eq!(refusal(again).0, Code::ALREADY_EXISTS);
    assert_eq!(guest.start_process("a", "").await.unwrap(), created_pid);
    assert_eq!(
        status(guest.state("a", "").await.unwrap()),
        api::Status::RUNNING
    );
    assert_eq!(
        refusal(guest.start_process("a", "").await).0,
        Code::FAILED_PRECONDITION
    );
    assert_eq!(
        refusal(guest.delete("a", "").await).0,
        Code::FAILED_PRECONDITION
    );
    let request = api::PidsRequest {
        id: "a".into(),
        ..Default::default()
    };
    let pids = guest.task.pids(context(), &request).await;
    let pids: Vec<_> = pids
        .unwrap()
        .processes
        .iter()
        .map(|process| process.pid)
        .collect();
    assert_eq!(pids, [created_pid]);
    guest.kill("a", "", libc::SIGKILL, false).await.unwrap();
    assert_eq!(guest.wait("a", "").await.unwrap(), 137);
    let state = guest.state("a", "").await.unwrap();
    assert_eq!(
        (state.exit_status, state.exited_at.seconds > 0),
        (137, true)
    );
    assert_eq!(status(state), api::Status::STOPPED);
    let (code, message) = refusal(guest.kill("a", "", libc::SIGTERM, false).await);
    assert_eq!(
        (code, &*message),
        (Code::NOT_FOUND, "process already finished")
    );
    assert_eq!(guest.delete("a", "").await.unwrap(), 137);
    drop(host);
}

#[tokio::test]
async fn test_wait_before_start_during_and_after() {
    let guest = guest_or_skip!();
    let _host = guest
        .create("a", &guest.spec(&["sh", "-c", "sleep 0.2; exit 3"]), false)
        .await
        .unwrap();
    let before = guest.wait("a", "");
    let again = guest.wait("a", "");
    let start = guest.start_process("a", "");
    let (before, again, started) = tokio::join!(before, again, start);
    started.unwrap();
    assert_eq!((before.unwrap(), again.unwrap()), (3, 3));
    assert_eq!(guest.wait("a", "").await.unwrap(), 3);
}

#[tokio::test]
async fn test_created_container_can_be_killed_or_deleted() {
    let guest = guest_or_skip!();
    let _host = guest
        .create("a", &guest.spec(&["true"]), false)
        .await
        .unwrap();
    guest.kill("a", "", libc::SIGKILL, false).await.unwrap();
    assert_eq!(guest.wait("a", "").await.unwrap(), 137);
    assert!(guest.start_process("a", "").await.is_err());
    guest.delete("a", "").await.unwrap();
    let _host = guest
        .create("a", &guest.spec(&["true"]), false)
        .await
        .unwrap();
    assert_eq!(guest.delete("a", "").await.unwrap(), 137);
}

#[tokio::test]
async fn test_programs_that_cannot_be_run_are_refused_in_the_known_words() {
    let guest = guest_or_skip!();
    let bad = guest.root().join("bin/bad");
    std::fs::write(&bad, "garbage").unwrap();
    let mut mode = std::fs::metadata(&bad).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o755);
    std::fs::set_permissions(&bad, mode).unwrap();
    let cases = [
        (
            "noexist",
            r#"exec: "noexist": executable file not found in $PATH"#,
        ),
        (
            "/no/such",
            r#"exec: "/no/such": stat /no/such: no such file or directory"#,
        ),
        ("/etc/passwd", r#"exec: "/etc/passwd": permission denied"#),
        ("/etc", r#"exec: "/etc": is a directory"#),
    ];
    for (program, message) in cases {
        for terminal in [false, true] {
            let created = guest.create("a", &guest.spec(&[program]), terminal).await;
            assert_eq!(refusal(created.map(drop)).1, message);
            assert!(!guest.cgroup("a").exists());
        }
    }
    // What only the kernel can find out fails at Start, and leaves a container to be deleted.
    let _host = guest
        .create("a", &guest.spec(&["/bin/bad"]), false)
        .await
        .unwrap();
    assert_eq!(
        refusal(guest.start_process("a", "").await).1,
        "exec /bin/bad: exec format error"
    );
    guest.wait("a", "").await.unwrap();
    guest.delete("a", "").await.unwrap();

    let _host = guest.sleeper("b").await;
    let cases = [
        cases.as_slice(),
        &[("/bin/bad", "exec /bin/bad: exec format error")],
    ]
    .concat();
    for (program, message) in cases {
        let process = &guest.spec(&[program])["process"];
        assert_eq!(refusal(guest.run_exec("b", "e", process).await).1, message);
        let state = guest.state("b", "").await.unwrap();
        assert_eq!(state.status.enum_value().unwrap(), api::Status::RUNNING);
    }
    // The id can be used again.
    assert_eq!(guest.exec_script("b", "e", "exit 4").await.status, 4);
}

#[tokio::test]
async fn test_container_without_a_pid_namespace_leaves_no_process() {
    let guest = guest_or_skip!();
    let mut spec = guest.spec(&["sh", "-c", "sleep 1000 & sleep 1000 & exit 6"]);
    spec["linux"]["namespaces"] = json!([{"type": "mount"}]);
    spec.as_object_mut().unwrap().remove("hostname");
    let ran = guest.run("a", &spec).await.unwrap();
    assert_eq!(ran.status, 6);
    assert!(!guest.cgroup("a").exists());
}

#[tokio::test]
async fn test_signals() {
    let guest = guest_or_skip!();
    let script = "trap 'echo TERM; exit 3' TERM; echo ready; while :; do sleep 0.05; done";
    let mut host = guest
        .create("a", &guest.spec(&["sh", "-c", script]), false)
        .await
        .unwrap();
    guest.start_process("a", "").await.unwrap();
    let mut stdout = host.stdout.take().unwrap();
    let mut ready = [0; 6];
    stdout.read_exact(&mut ready).unwrap();
    let _exec = guest
        .exec("a", "e", &guest.spec(&["sleep", "1000"])["process"])
        .await
        .unwrap();
    guest.start_process("a", "e").await.unwrap();
    guest.kill("a", "e", libc::SIGTERM, false).await.unwrap();
    assert_eq!(guest.wait("a", "e").await.unwrap(), 143);
    guest.kill("a", "", 0, false).await.unwrap();
    assert_eq!(
        refusal(guest.kill("a", "", 99, false).await).0,
        Code::INVALID_ARGUMENT
    );
    guest.kill("a", "", libc::SIGTERM, true).await.unwrap();
    assert_eq!(guest.wait("a", "").await.unwrap(), 3);
    assert_eq!(text(collect(Some(stdout))).await, "TERM\n");
}

#[tokio::test]
async fn test_connect_answers_for_any_id() {
    let guest = guest_or_skip!();
    let request = api::ConnectRequest {
        id: "unknown".into(),
        ..Default::default()
    };
    assert_eq!(
        guest
            .task
            .connect(context(), &request)
            .await
            .unwrap()
            .task_pid,
        0
    );
    let _host = guest.sleeper("a").await;
    let request = api::ConnectRequest {
        id: "a".into(),
        ..Default::default()
    };
    assert!(
        guest
            .task
            .connect(context(), &request)
            .await
            .unwrap()
            .task_pid
            > 0
    );
}

#[tokio::test]
async fn test_quiesce_leaves_nothing_but_waiting_helpers() {
    let guest = guest_or_skip!();
    guest
        .sandbox
        .quiesce(context(), &QuiesceRequest::new())
        .await
        .unwrap();
    let info = guest
        .sandbox
        .info(context(), &InfoRequest::new())
        .await
        .unwrap();
    assert!(info.nonce.is_empty() && info.monotonic_ns > 0 && !info.kernel_release.is_empty());
    assert_eq!(
        std::fs::read_dir(guest.directory().join("bundles"))
            .unwrap()
            .count(),
        0
    );
    // More than there are helpers waiting; one of those has died meanwhile.
    let pids = std::process::Command::new("pgrep")
        .args(["-P", &guest.agent_pid().to_string()])
        .output()
        .unwrap();
    let pids = String::from_utf8(pids.stdout).unwrap();
    let pids: Vec<_> = pids.lines().collect();
    assert_eq!(pids.len(), 2);
    let killed = std::process::Command::new("kill")
        .args(["-KILL", pids[0]])
        .status();
    assert!(killed.unwrap().success());
    for status in 2..6 {
        let script = format!("exit {status}");
        assert_eq!(guest.run_script("a", &script).await.status, status);
    }
}

#[tokio::test]
async fn test_client_that_goes_away_during_create_leaves_a_whole_container() {
    let guest = guest_or_skip!();
    let path = format!("unix://{}", guest.directory().join("control").display());
    let client = ttrpc::asynchronous::Client::connect(&path).await.unwrap();
    let other = containerd_shim_protos::shim_async::TaskClient::new(client);
    let request = api::CreateTaskRequest {
        id: "a".into(),
        options: crate::guest::any(thaw_agent_api::SPEC_TYPE_URL, &guest.spec(&["true"])),
        ..Default::default()
    };
    let _ = tokio::time::timeout(Duration::from_millis(1), other.create(context(), &request)).await;
    drop(other);
    while guest.start_process("a", "").await.is_err() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(guest.wait("a", "").await.unwrap(), 0);
    guest.delete("a", "").await.unwrap();
}

#[tokio::test]
async fn test_an_operator_sees_a_container_s_processes() {
    let guest = guest_or_skip!();
    let _streams = guest.sleeper("a").await;
    let answer = guest
        .operator
        .processes(context(), &ProcessesRequest::new())
        .await
        .unwrap();
    let own = answer
        .processes
        .iter()
        .find(|process| process.container_id == "a");
    let own = own.unwrap_or_else(|| panic!("{answer:?}"));
    assert!(own.command.contains("sleep"), "{own:?}");
    let agent = answer
        .processes
        .iter()
        .find(|process| process.pid == guest.agent_pid());
    assert_eq!(agent.map(|agent| agent.container_id.as_str()), Some(""));
    guest.kill("a", "", libc::SIGKILL, false).await.unwrap();
    guest.wait("a", "").await.unwrap();
    guest.delete("a", "").await.unwrap();
}
