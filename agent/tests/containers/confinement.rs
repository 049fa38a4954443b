//! What a container is given and what it is kept from.

use std::io::Read;
use std::time::Duration;

use containerd_shim_protos::api;
use protobuf::Message;
use serde_json::json;
use thaw_agent_api::agent::{EventsRequest, InfoRequest};
use ttrpc::Code;

use crate::guest::{Guest, context, guest_or_skip, refusal};

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
async fn test_mount_that_fails_is_named_with_the_reason() {
    let guest = guest_or_skip!();
    let mut spec = guest.spec(&["true"]);
    let mounts = spec["mounts"].as_array_mut().unwrap();
    mounts.push(json!({"destination": "/data", "type": "nosuchfs", "source": "none"}));
    let (_, message) = refusal(guest.create("a", &spec, false).await.map(drop));
    for part in ["/data", "nosuchfs", "no such device"] {
        assert!(message.contains(part), "no {part}: {message}");
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
pub fn has_controller(guest: &Guest, name: &str) -> bool {
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
        resources: crate::guest::any(
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
    let event = tokio::time::timeout(crate::guest::LIMIT, events.recv())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert_eq!(event.out_of_memory().container_id, "a");
    let script = "tail /dev/zero; echo rc $?; sleep 0.2";
    spec["process"]["args"] = json!(["sh", "-c", script]);
    assert_eq!(guest.run("b", &spec).await.unwrap().stdout, "rc 137\n");
    let event = tokio::time::timeout(crate::guest::LIMIT, events.recv())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert_eq!(event.out_of_memory().container_id, "b");
    let more = tokio::time::timeout(Duration::from_millis(300), events.recv()).await;
    assert!(more.is_err(), "{more:?}");
}
