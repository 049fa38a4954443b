//! Limits: what is refused, what is put back, what too small ones do.

use containerd_shim_protos::api;
use serde_json::{Value, json};
use ttrpc::Code;

use crate::confinement::has_controller;
use crate::guest::{Guest, any, context, guest_or_skip, refusal};

async fn update(guest: &Guest, resources: &Value) -> ttrpc::Result<()> {
    let request = api::UpdateTaskRequest {
        id: "a".into(),
        resources: any("", resources),
        ..Default::default()
    };
    guest.task.update(context(), &request).await.map(drop)
}

#[tokio::test]
async fn test_update_before_the_start_and_of_an_ended_container() {
    let guest = guest_or_skip!();
    if !has_controller(&guest, "pids") {
        return;
    }
    let spec = guest.spec(&["sleep", "1000"]);
    let _host = guest.create("a", &spec, false).await.unwrap();
    let limit = || std::fs::read_to_string(guest.cgroup("a").join("pids.max")).unwrap();
    update(&guest, &json!({"pids": {"limit": 33}}))
        .await
        .unwrap();
    assert_eq!(limit(), "33\n");
    guest.start_process("a", "").await.unwrap();
    assert_eq!(limit(), "33\n");
    guest.kill("a", "", libc::SIGKILL, false).await.unwrap();
    guest.wait("a", "").await.unwrap();
    let late = update(&guest, &json!({"pids": {"limit": 44}})).await;
    assert_eq!(refusal(late).0, Code::FAILED_PRECONDITION);
}

#[tokio::test]
async fn test_update_that_is_refused_changes_nothing() {
    let guest = guest_or_skip!();
    if !has_controller(&guest, "pids") || !has_controller(&guest, "cpu") {
        return;
    }
    let _host = guest.sleeper("a").await;
    let limits = || {
        ["pids.max", "cpu.weight", "cpu.max"]
            .map(|name| std::fs::read_to_string(guest.cgroup("a").join(name)).unwrap())
    };
    update(
        &guest,
        &json!({"pids": {"limit": 33}, "cpu": {"shares": 2}}),
    )
    .await
    .unwrap();
    let before = limits();
    let resources = json!({
        "pids": {"limit": 44}, "cpu": {"shares": 1024, "quota": 50_000, "period": 100_000},
        "unified": {"pids.max": "several"},
    });
    let (code, message) = refusal(update(&guest, &resources).await);
    assert_eq!(code, Code::INVALID_ARGUMENT);
    assert!(message.contains("several to pids.max"), "{message}");
    assert!(!message.contains("/sys/fs"), "{message}");
    assert_eq!(limits(), before);
    let spec = {
        let mut spec = guest.spec(&["true"]);
        spec["linux"]["resources"] = json!({"unified": {"../b/pids.max": "1"}});
        spec
    };
    let (code, message) = refusal(guest.create("b", &spec, false).await.map(drop));
    assert_eq!(code, Code::INVALID_ARGUMENT);
    assert!(
        message.starts_with("linux.resources.unified: "),
        "{message}"
    );
}

#[tokio::test]
async fn test_too_little_memory_is_said_in_the_known_words() {
    let guest = guest_or_skip!();
    if !has_controller(&guest, "memory") {
        return;
    }
    let mut spec = guest.spec(&["true"]);
    spec["linux"]["resources"] = json!({"memory": {"limit": 4096, "swap": 4096}});
    let (_, message) = refusal(guest.create("a", &spec, false).await.map(drop));
    assert_eq!(
        message,
        "container init was OOM-killed (memory limit too low?)"
    );
    assert!(!guest.cgroup("a").exists());
    // The agent goes on.
    assert_eq!(guest.run_script("a", "exit 3").await.status, 3);
}
