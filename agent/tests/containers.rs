//! The agent's container engine end to end: real processes, over ttrpc and streams, without a VM.

mod guest;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use containerd_shim_protos::api;
use guest::{Guest, collect, context, guest_or_skip, refusal, text};
use protobuf::Message;
use serde_json::json;
use thaw_agent_api::agent::{EventsRequest, InfoRequest, QuiesceRequest};
use tokio::task::spawn_blocking;
use ttrpc::Code;

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
async fn test_what_a_process_is_born_with() {
    let guest = guest_or_skip!();
    let script = "grep -E 'Sig(Ign|Blk)|Cap(Bnd|Eff|Inh)' /proc/self/status | tr '\\n' ' '; \
                  ls /proc/self/fd | tr '\\n' ' '; hostname; tr '\\0' '\\n' < /proc/1/environ; id; umask";
    let ran = guest.run_script("a", script).await;
    // CHOWN, DAC_OVERRIDE, KILL, SETGID, SETUID; no signal ignored or blocked; no descriptor but
    // stdio (3 is that of the listing itself); no variable but the spec's and a home.
    let expected = "SigBlk:\t0000000000000000 SigIgn:\t0000000000000000 \
                    CapInh:\t0000000000000000 CapEff:\t00000000000000e3 CapBnd:\t00000000000000e3 \
                    0 1 2 3 test\nPATH=/bin:/sbin\nHOME=/root\nuid=0(root) gid=0\n0022\n";
    assert_eq!(ran.stdout, expected, "{}", ran.stderr);
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
async fn test_spec_that_asks_for_too_much_is_refused_with_the_field() {
    let guest = guest_or_skip!();
    let mut spec = guest.spec(&["true"]);
    spec["hooks"] = json!({"prestart": [{"path": "/bin/true"}]});
    let (code, message) = refusal(guest.create("a", &spec, false).await.map(drop));
    assert_eq!(
        (code, &*message),
        (Code::INVALID_ARGUMENT, "hooks.prestart: not supported")
    );
    assert!(!guest.cgroup("a").exists());
    let mut spec = guest.spec(&["true"]);
    spec["linux"]["sysctl"] = json!({"kernel.panic": "1"});
    let (_, message) = refusal(guest.create("a", &spec, false).await.map(drop));
    assert!(message.contains("kernel.panic"), "{message}");
    let (code, _) = refusal(
        guest
            .create("../a", &guest.spec(&["true"]), false)
            .await
            .map(drop),
    );
    assert_eq!(code, Code::INVALID_ARGUMENT);
}

#[tokio::test]
async fn test_exec_output_status_and_identity() {
    let guest = guest_or_skip!();
    let mut spec = guest.spec(&["sleep", "1000"]);
    spec["process"]["user"] =
        json!({"uid": 264, "gid": 51020, "additionalGids": [266], "umask": 0o027});
    spec["process"]["rlimits"] = json!([
        {"type": "RLIMIT_NOFILE", "soft": 42, "hard": 43}, {"type": "RLIMIT_NPROC", "soft": 99, "hard": 99},
    ]);
    let script = "id; umask; ulimit -n; ulimit -Hn; grep processes /proc/self/limits; echo $HOME; env | sort; pwd";
    let expected = "uid=264 gid=51020 groups=266\n0027\n42\n43\nMax processes             99                   99                   processes \n/\n\
                    HOME=/\nPATH=/bin:/sbin\nPWD=/\nSHLVL=1\n/\n";
    spec["process"]["args"] = json!([
        "sh",
        "-c",
        format!("{script}; echo x > /dev/stderr; exit 9")
    ]);
    let ran = guest.run("a", &spec).await.unwrap();
    assert_eq!(
        (ran.status, &*ran.stdout, &*ran.stderr),
        (9, expected, "x\n")
    );
    let process = spec["process"].clone();
    spec["process"]["args"] = json!(["sleep", "1000"]);
    let _host = guest.create("a", &spec, false).await.unwrap();
    guest.start_process("a", "").await.unwrap();
    let mut process = process;
    let ran = guest.run_exec("a", "e", &process).await.unwrap();
    assert_eq!(
        (ran.status, &*ran.stdout, &*ran.stderr),
        (9, expected, "x\n")
    );
    process["args"] = json!(["sh", "-c", "pwd; echo $X"]);
    process["cwd"] = json!("/tmp");
    process["env"] = json!(["PATH=/bin", "X=1", "X=2"]);
    assert_eq!(
        guest.run_exec("a", "e", &process).await.unwrap().stdout,
        "/tmp\n2\n"
    );
}

#[tokio::test]
async fn test_exec_in_a_created_container_and_its_refusals() {
    let guest = guest_or_skip!();
    let _host = guest
        .create("a", &guest.spec(&["sleep", "1000"]), false)
        .await
        .unwrap();
    assert_eq!(guest.exec_script("a", "e", "exit 5").await.status, 5);
    guest.start_process("a", "").await.unwrap();
    let process = &guest.spec(&["true"])["process"];
    let _exec = guest.exec("a", "e", process).await.unwrap();
    let again = guest.exec("a", "e", process).await.map(drop);
    assert_eq!(refusal(again).0, Code::ALREADY_EXISTS);
    assert_eq!(
        refusal(guest.kill("a", "e", 15, false).await).0,
        Code::FAILED_PRECONDITION
    );
    assert_eq!(refusal(guest.state("a", "f").await).0, Code::NOT_FOUND);
    guest.kill("a", "", libc::SIGKILL, false).await.unwrap();
    guest.wait("a", "").await.unwrap();
    assert_eq!(
        refusal(guest.start_process("a", "e").await).0,
        Code::FAILED_PRECONDITION
    );
    assert_eq!(
        refusal(guest.exec("a", "g", process).await.map(drop)).0,
        Code::FAILED_PRECONDITION
    );
    guest.delete("a", "e").await.unwrap();
    guest.delete("a", "").await.unwrap();
}

#[tokio::test]
async fn test_many_execs_at_once() {
    let guest = guest_or_skip!();
    let _host = guest.sleeper("a").await;
    let guest = std::sync::Arc::new(guest);
    let execs: Vec<_> = (0..12)
        .map(|n| {
            let guest = guest.clone();
            tokio::spawn(async move {
                let ran = guest
                    .exec_script("a", &format!("e{n}"), &format!("echo {n}; exit {n}"))
                    .await;
                assert_eq!((ran.status, ran.stdout), (n, format!("{n}\n")));
            })
        })
        .collect();
    for exec in execs {
        exec.await.unwrap();
    }
}

#[tokio::test]
async fn test_exec_with_a_background_child_is_reported_at_once_and_the_child_lives() {
    let guest = guest_or_skip!();
    let _host = guest.sleeper("a").await;
    let before = Instant::now();
    let ran = guest
        .exec_script("a", "e", "sleep 1000 & echo $!; exit 5")
        .await;
    assert_eq!(ran.status, 5);
    // The child lives for 1000 s.
    assert!(before.elapsed() < guest::LIMIT);
    let child = ran.stdout.trim();
    let ran = guest
        .exec_script("a", "e", &format!("cat /proc/{child}/comm"))
        .await;
    assert_eq!(ran.stdout, "sleep\n");
}

#[tokio::test]
async fn test_init_takes_its_execs_along_and_is_reported_last() {
    let guest = guest_or_skip!();
    for _ in 0..5 {
        let _host = guest.sleeper("a").await;
        let _exec = guest
            .exec("a", "e", &guest.spec(&["sleep", "1000"])["process"])
            .await
            .unwrap();
        guest.start_process("a", "e").await.unwrap();
        let init = async {
            let status = guest.wait("a", "").await.unwrap();
            // By now the exec has been reported.
            let exec = guest.state("a", "e").await.unwrap();
            assert_eq!(exec.status.enum_value().unwrap(), api::Status::STOPPED);
            status
        };
        let (init, exec, killed) = tokio::join!(
            init,
            guest.wait("a", "e"),
            guest.kill("a", "", libc::SIGKILL, false)
        );
        killed.unwrap();
        assert_eq!((init, exec.unwrap()), (137, 137));
        guest.delete("a", "").await.unwrap();
    }
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
        options: guest::any(thaw_agent_api::SPEC_TYPE_URL, &spec),
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
        spec: guest::any("", &guest.spec(&["stty", "size"])["process"]),
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
async fn test_pause_stops_everything_and_resume_continues() {
    let guest = guest_or_skip!();
    let script = "while :; do echo x; sleep 0.01; done";
    let mut host = guest
        .create("a", &guest.spec(&["sh", "-c", script]), false)
        .await
        .unwrap();
    guest.start_process("a", "").await.unwrap();
    let mut stdout = host.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 10]).unwrap();
    let id = || "a".to_owned();
    guest
        .task
        .pause(
            context(),
            &api::PauseRequest {
                id: id(),
                ..Default::default()
            },
        )
        .await
        .unwrap();
    let state = guest.state("a", "").await.unwrap();
    assert_eq!(state.status.enum_value().unwrap(), api::Status::PAUSED);
    assert_eq!(
        std::fs::read_to_string(guest.cgroup("a").join("cgroup.freeze")).unwrap(),
        "1\n"
    );
    let exec = guest
        .exec("a", "e", &guest.spec(&["true"])["process"])
        .await
        .map(drop);
    assert_eq!(refusal(exec).0, Code::FAILED_PRECONDITION);
    guest
        .task
        .resume(
            context(),
            &api::ResumeRequest {
                id: id(),
                ..Default::default()
            },
        )
        .await
        .unwrap();
    stdout.read_exact(&mut [0; 100]).unwrap();
    let request = api::ResumeRequest {
        id: id(),
        ..Default::default()
    };
    let again = guest.task.resume(context(), &request).await;
    assert_eq!(refusal(again).0, Code::FAILED_PRECONDITION);
    guest
        .task
        .pause(
            context(),
            &api::PauseRequest {
                id: id(),
                ..Default::default()
            },
        )
        .await
        .unwrap();
    guest.kill("a", "", libc::SIGKILL, false).await.unwrap();
    assert_eq!(guest.wait("a", "").await.unwrap(), 137);
}

#[tokio::test]
async fn test_seccomp_filter_holds_in_init_and_in_exec() {
    let guest = guest_or_skip!();
    for no_new_privileges in [false, true] {
        let script = "grep Seccomp: /proc/self/status; mkdir /tmp/x; grep CapEff /proc/self/status; sleep 1000";
        let mut spec = guest.spec(&["sh", "-c", script]);
        spec["process"]["noNewPrivileges"] = json!(no_new_privileges);
        spec["linux"]["seccomp"] = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}],
        });
        let expected = "Seccomp:\t2\nCapEff:\t00000000000000e3\n";
        let mut host = guest.create("a", &spec, false).await.unwrap();
        guest.start_process("a", "").await.unwrap();
        let mut output = vec![0; expected.len()];
        host.stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut output)
            .unwrap();
        assert_eq!(std::str::from_utf8(&output).unwrap(), expected);
        let mut process = spec["process"].clone();
        let short = script.replace("; sleep 1000", "");
        process["args"] = json!(["sh", "-c", short]);
        let ran = guest.run_exec("a", "e", &process).await.unwrap();
        assert_eq!(ran.stdout, expected);
        assert!(
            ran.stderr.contains("Operation not permitted"),
            "{}",
            ran.stderr
        );
        // A user without capabilities: none is left that was kept for the filter.
        process["user"] = json!({"uid": 1000, "gid": 1000});
        process["capabilities"] = json!({});
        process["args"] = json!([
            "grep",
            "-E",
            "Seccomp:|Cap(Eff|Prm|Bnd)",
            "/proc/self/status"
        ]);
        let ran = guest.run_exec("a", "e", &process).await.unwrap();
        let none = "0000000000000000";
        let expected = format!("CapPrm:\t{none}\nCapEff:\t{none}\nCapBnd:\t{none}\nSeccomp:\t2\n");
        assert_eq!(ran.stdout, expected);
        guest.kill("a", "", libc::SIGKILL, false).await.unwrap();
        guest.wait("a", "").await.unwrap();
        guest.delete("a", "").await.unwrap();
    }
}

#[tokio::test]
async fn test_stats_are_complete() {
    let guest = guest_or_skip!();
    let _host = guest.sleeper("a").await;
    let request = api::StatsRequest {
        id: "a".into(),
        ..Default::default()
    };
    let stats = guest
        .task
        .stats(context(), &request)
        .await
        .unwrap()
        .stats
        .unwrap();
    assert_eq!(stats.type_url, "io.containerd.cgroups.v2.Metrics");
    let metrics =
        containerd_shim_protos::cgroups_v2::metrics::Metrics::parse_from_bytes(&stats.value)
            .unwrap();
    assert!(metrics.cpu.usage_usec > 0);
    assert!(metrics.memory.is_some() && metrics.memory_events.is_some() && metrics.pids.is_some());
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
        options: guest::any(thaw_agent_api::SPEC_TYPE_URL, &guest.spec(&["true"])),
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
async fn test_working_directory_is_made_where_it_is_missing() {
    let guest = guest_or_skip!();
    let mut spec = guest.spec(&["pwd"]);
    spec["process"]["cwd"] = json!("/new/place");
    assert_eq!(guest.run("a", &spec).await.unwrap().stdout, "/new/place\n");
    assert!(guest.root().join("new/place").is_dir());
    // Never outside of the root.
    std::os::unix::fs::symlink("/tmp/outside", guest.root().join("link")).unwrap();
    spec["process"]["cwd"] = json!("/link/../../x");
    let _ = guest.run("a", &spec).await;
    assert!(!std::path::Path::new("/tmp/outside").exists());
}

/// Whether the kernel here has a controller for containers; it may be with another hierarchy.
fn has_controller(guest: &Guest, name: &str) -> bool {
    let list = std::fs::read_to_string(guest.cgroup("").join("cgroup.controllers")).unwrap();
    let found = list.split_whitespace().any(|controller| controller == name);
    assert!(found || std::env::var_os("THAW_TESTS_MUST_RUN").is_none());
    if !found {
        eprintln!("SKIPPED: no {name} controller in this hierarchy");
    }
    found
}

#[tokio::test]
async fn test_limits_and_their_update() {
    let guest = guest_or_skip!();
    if !has_controller(&guest, "memory") || !has_controller(&guest, "pids") {
        return;
    }
    let mut spec = guest.spec(&["sleep", "1000"]);
    spec["linux"]["resources"] = json!({
        "memory": {"limit": 64 << 20}, "pids": {"limit": 20}, "cpu": {"quota": 50000, "period": 100000},
        "devices": [{"allow": false, "access": "rwm"}],
    });
    let _host = guest.create("a", &spec, false).await.unwrap();
    let file = |name: &str| std::fs::read_to_string(guest.cgroup("a").join(name)).unwrap();
    assert_eq!(
        (&*file("memory.max"), &*file("pids.max")),
        ("67108864\n", "20\n")
    );
    assert_eq!(file("cpu.max"), "50000 100000\n");
    let resources = json!({"memory": {"limit": 128 << 20}, "pids": {"limit": 30}});
    let request = api::UpdateTaskRequest {
        id: "a".into(),
        resources: guest::any(
            "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources",
            &resources,
        ),
        ..Default::default()
    };
    guest.task.update(context(), &request).await.unwrap();
    assert_eq!(
        (&*file("memory.max"), &*file("pids.max")),
        ("134217728\n", "30\n")
    );
    assert_eq!(file("cpu.max"), "50000 100000\n");
}

#[tokio::test]
async fn test_out_of_memory_is_told_once_and_before_the_exit() {
    let guest = guest_or_skip!();
    if !has_controller(&guest, "memory") {
        return;
    }
    let mut events = guest
        .sandbox
        .events(ttrpc::context::Context::default(), &EventsRequest::new())
        .await
        .unwrap();
    let mut spec = guest.spec(&["tail", "/dev/zero"]);
    spec["linux"]["resources"] = json!({"memory": {"limit": 32 << 20, "swap": 32 << 20}});
    // The events of the call begin with it; another call on the connection comes after.
    guest
        .sandbox
        .info(context(), &InfoRequest::new())
        .await
        .unwrap();
    assert_eq!(guest.run("a", &spec).await.unwrap().status, 137);
    let event = tokio::time::timeout(guest::LIMIT, events.recv())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert_eq!(event.out_of_memory().container_id, "a");
    let script = "tail /dev/zero; echo rc $?; sleep 0.2";
    spec["process"]["args"] = json!(["sh", "-c", script]);
    assert_eq!(guest.run("b", &spec).await.unwrap().stdout, "rc 137\n");
    let event = tokio::time::timeout(guest::LIMIT, events.recv())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert_eq!(event.out_of_memory().container_id, "b");
    let more = tokio::time::timeout(Duration::from_millis(300), events.recv()).await;
    assert!(more.is_err(), "{more:?}");
}

#[tokio::test]
async fn test_delete_ends_the_wait_for_an_exec_that_was_never_started() {
    let guest = guest_or_skip!();
    let _host = guest.sleeper("a").await;
    let process = &guest.spec(&["true"])["process"];
    let _exec = guest.exec("a", "e", process).await.unwrap();
    let ended = async {
        guest.kill("a", "", libc::SIGKILL, false).await.unwrap();
        guest.wait("a", "").await.unwrap();
        guest.delete("a", "").await.unwrap();
    };
    let (waited, ()) = tokio::join!(guest.wait("a", "e"), ended);
    waited.unwrap();
}
