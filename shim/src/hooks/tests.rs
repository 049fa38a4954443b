//! Hooks that succeed, fail, hang, and print.

use std::fs;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

use super::*;

fn subject(bundle: &Path) -> Subject {
    Subject {
        id: "web".into(),
        bundle: bundle.to_owned(),
        oci_version: "1.1.0".into(),
        annotations: [("a".to_owned(), "b".to_owned())].into(),
    }
}

fn shell(script: &str) -> Hook {
    Hook {
        path: "/bin/sh".into(),
        args: ["hook", "-c", script].map(str::to_owned).into(),
        ..Hook::default()
    }
}

/// Run `hooks` as a shim does; the error in words.
async fn run_here(hooks: &[Hook], bundle: &Path) -> Result<(), String> {
    let namespace = File::open("/proc/self/ns/mnt").unwrap();
    let moment = Moment::CreateRuntime(7);
    let done = run(moment, hooks, &subject(bundle), namespace.as_fd()).await;
    done.map_err(|error| error.to_string())
}

#[tokio::test]
async fn test_hooks_get_the_state_in_the_bundle_and_run_in_order() {
    let bundle = tempfile::tempdir().unwrap();
    let mut second = shell("echo \"$0 $VALUE $(pwd)\" >> told; env | grep -c . >> told");
    second.env = Some(vec!["VALUE=a=b".into(), "nonsense".into()]);
    let hooks = [shell("cat > state; echo first > told"), second];
    run_here(&hooks, bundle.path()).await.unwrap();
    let state: Value =
        serde_json::from_slice(&fs::read(bundle.path().join("state")).unwrap()).unwrap();
    assert_eq!(
        state,
        json!({
            "ociVersion": "1.1.0", "id": "web", "status": "creating", "pid": 7,
            "bundle": bundle.path(), "annotations": { "a": "b" },
        })
    );
    let told = fs::read_to_string(bundle.path().join("told")).unwrap();
    let mut lines = told.lines();
    assert_eq!(lines.next(), Some("first"));
    let place = bundle.path().canonicalize().unwrap();
    let second = format!("hook a=b {}", place.display());
    assert_eq!(lines.next(), Some(second.as_str()));
    // The variable, and those that a shell sets itself: nothing of this process.
    let variables: u32 = lines.next().unwrap().parse().unwrap();
    assert!(variables < 5, "{told}");
}

#[tokio::test]
async fn test_a_hook_that_fails_is_named_with_what_it_printed() {
    let bundle = tempfile::tempdir().unwrap();
    let failing = shell("echo no network >&2; echo at all; exit 3");
    let error = run_here(
        &[shell("true"), failing, shell("touch late")],
        bundle.path(),
    )
    .await
    .unwrap_err();
    assert_eq!(
        error,
        "hooks.createRuntime[1] (/bin/sh): exited with status 3: no network; at all"
    );
    assert!(!bundle.path().join("late").exists());
    let missing = Hook {
        path: "/does/not/exist".into(),
        ..Hook::default()
    };
    let error = run_here(&[missing], bundle.path()).await.unwrap_err();
    assert!(
        error.starts_with("hooks.createRuntime[0] (/does/not/exist): No such file"),
        "{error}"
    );
}

#[tokio::test]
async fn test_a_hook_that_hangs_is_killed_with_its_descendants() {
    let bundle = tempfile::tempdir().unwrap();
    let mut hanging = shell("sleep 1000 & echo $! > pid; wait");
    hanging.timeout = Some(1);
    let error = run_here(&[hanging], bundle.path()).await.unwrap_err();
    assert!(
        error.contains("not done after its timeout of 1 s"),
        "{error}"
    );
    let pid = fs::read_to_string(bundle.path().join("pid")).unwrap();
    let pid = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    // Killed, but perhaps not yet scheduled to end; whoever inherits it reaps it in its own time.
    if let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) {
        let limit = Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        };
        let ended = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit));
        assert_eq!(ended, Ok(1), "{pid:?} still runs");
    }
}

#[tokio::test]
async fn test_a_process_that_a_hook_leaves_behind_keeps_nobody_waiting() {
    let bundle = tempfile::tempdir().unwrap();
    let end = bundle.path().join("end");
    mknodat(CWD, &end, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    // It has the hook's output open, and waits for the end of the test.
    let script = "(read -r _ < end) & exit 0";
    run_here(&[shell(script)], bundle.path()).await.unwrap();
    // It is still there: this returns once it has opened its end.
    fs::write(end, "\n").unwrap();
}

#[test]
fn test_poststop_hooks_all_run_and_what_does_not_end_is_left() {
    let bundle = tempfile::tempdir().unwrap();
    let hanging = shell("echo $$ > pid; exec sleep 1000");
    let last = shell("cat > state; touch done");
    let hooks = [shell("exit 1"), hanging, last];
    let deadline = Instant::now() + Duration::from_millis(300);
    run_poststop_until(&hooks, &subject(bundle.path()), deadline);
    // The last one had no time left, and is left to itself too.
    let deadline = Instant::now() + Duration::from_secs(60);
    run_poststop_until(&hooks[2..], &subject(bundle.path()), deadline);
    let state = fs::read_to_string(bundle.path().join("state")).unwrap();
    assert!(state.contains(r#""status":"stopped""#), "{state}");
    assert!(!state.contains("pid"), "{state}");
    assert!(bundle.path().join("done").exists());
    let pid = fs::read_to_string(bundle.path().join("pid")).unwrap();
    let pid = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
}

#[test]
fn test_a_bundle_that_is_gone_is_no_hindrance() {
    let bundle = tempfile::tempdir().unwrap();
    let mark = bundle.path().join("mark");
    let hook = shell(&format!("pwd > {}", mark.display()));
    let deadline = Instant::now() + Duration::from_secs(60);
    run_poststop_until(&[hook], &subject(Path::new("/does/not/exist")), deadline);
    assert_eq!(fs::read_to_string(mark).unwrap(), "/\n");
}
