//! Several containers in one guest.

use serde_json::{Value, json};
use thaw_agent_api::NAMESPACE_OF;
use ttrpc::Code;

use crate::guest::{Guest, guest_or_skip, refusal};

/// A spec of a program that prints which namespaces it has, in those of `other` where `kinds` says so.
fn spec(guest: &Guest, other: &str, kinds: &[&str]) -> Value {
    let script = "for n in ipc uts pid; do readlink /proc/self/ns/$n; done; echo $$";
    let mut spec = guest.spec(&["sh", "-c", script]);
    for namespace in spec["linux"]["namespaces"].as_array_mut().unwrap() {
        if kinds.contains(&namespace["type"].as_str().unwrap()) {
            namespace["path"] = json!(format!("{NAMESPACE_OF}{other}"));
        }
    }
    spec
}

#[tokio::test]
async fn test_containers_come_and_go_beside_each_other() {
    let guest = guest_or_skip!();
    let _a = guest.sleeper("a").await;
    let _b = guest.sleeper("b").await;
    assert_eq!(guest.exec_script("b", "e", "echo b").await.stdout, "b\n");
    guest.kill("b", "", libc::SIGKILL, true).await.unwrap();
    assert_eq!(guest.wait("b", "").await.unwrap(), 137);
    guest.delete("b", "").await.unwrap();
    assert!(!guest.cgroup("b").exists());
    // One that was never started, and one that cannot be made.
    let _c = guest.create("b", &guest.spec(&["true"]), false).await;
    assert_eq!(guest.delete("b", "").await.unwrap(), 137);
    let mut wrong = guest.spec(&["true"]);
    wrong["hooks"] = json!({"prestart": [{"path": "/bin/true"}]});
    assert!(guest.create("b", &wrong, false).await.is_err());
    assert_eq!(guest.run_script("b", "echo again").await.stdout, "again\n");
    assert_eq!(guest.exec_script("a", "e", "echo a").await.stdout, "a\n");
    guest.kill("a", "", libc::SIGKILL, true).await.unwrap();
    assert_eq!(guest.wait("a", "").await.unwrap(), 137);
}

#[tokio::test]
async fn test_another_container_s_namespaces_are_joined() {
    let guest = guest_or_skip!();
    let _pause = guest.sleeper("pause").await;
    let script = "for n in ipc uts pid; do readlink /proc/self/ns/$n; done";
    let shared = guest.exec_script("pause", "e", script).await.stdout;
    let shared: Vec<_> = shared.lines().collect();
    let lines = |text: &str| -> Vec<String> { text.lines().map(str::to_owned).collect() };

    let all = spec(&guest, "pause", &["ipc", "uts", "pid"]);
    let ran = lines(&guest.run("a", &all).await.unwrap().stdout);
    assert_eq!(ran[..3], shared);
    assert_ne!(ran[3], "1", "it is not the first process of that namespace");
    let one = spec(&guest, "pause", &["ipc"]);
    let ran = lines(&guest.run("b", &one).await.unwrap().stdout);
    assert_eq!(ran[0], shared[0]);
    assert!(ran[1] != shared[1] && ran[2] != shared[2] && ran[3] == "1");
    // Nothing of that was the other's end.
    assert_eq!(
        guest.exec_script("pause", "f", "echo x").await.stdout,
        "x\n"
    );

    guest.kill("pause", "", libc::SIGKILL, true).await.unwrap();
    guest.wait("pause", "").await.unwrap();
    let late = guest.create("c", &one, false).await;
    let (code, message) = refusal(late.map(drop));
    assert_eq!(code, Code::FAILED_PRECONDITION);
    assert!(
        message.contains("container pause does not run"),
        "{message}"
    );
}

/// Whoever shares the first process' namespace of pids ends with it, as with every runtime.
#[tokio::test]
async fn test_the_end_of_a_shared_namespace_of_pids_is_the_end_of_all_in_it() {
    let guest = guest_or_skip!();
    let _pause = guest.sleeper("pause").await;
    let mut spec = spec(&guest, "pause", &["pid"]);
    spec["process"]["args"] = json!(["sleep", "1000"]);
    let _a = guest.create("a", &spec, false).await.unwrap();
    guest.start_process("a", "").await.unwrap();
    let _b = guest.sleeper("b").await;
    guest.kill("pause", "", libc::SIGKILL, false).await.unwrap();
    assert_eq!(guest.wait("pause", "").await.unwrap(), 137);
    assert_eq!(guest.wait("a", "").await.unwrap(), 137);
    assert_eq!(guest.exec_script("b", "e", "echo b").await.stdout, "b\n");
}
