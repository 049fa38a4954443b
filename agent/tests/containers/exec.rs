//! Further processes in a container.

use std::time::Instant;

use containerd_shim_protos::api;
use serde_json::json;
use ttrpc::Code;

use crate::guest::{guest_or_skip, refusal};

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
    assert!(before.elapsed() < crate::guest::LIMIT);
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
