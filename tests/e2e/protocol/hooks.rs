//! Hooks that run on the host, with a real shim: at which moment, and after a crash.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use thaw_tests::player::{Fifos, Player, Program};

use super::on_shim;

/// A hook that runs a line of the host's shell.
fn hook(line: &str) -> Value {
    json!([{ "path": "/bin/sh", "args": ["sh", "-c", line], "env": ["PATH=/usr/bin:/bin"] }])
}

/// A hook that keeps the state that it gets, and the network namespace of its pid.
fn note(directory: &Path, kind: &str) -> Value {
    let file = directory.join(kind);
    let file = file.display();
    hook(&format!(
        "cat > {file}; pid=$(sed 's/.*\"pid\":\\([0-9]*\\).*/\\1/' {file}); \
         readlink /proc/$pid/ns/net > {file}.network || true"
    ))
}

#[track_caller]
fn state(directory: &Path, kind: &str) -> Value {
    let text = fs::read_to_string(directory.join(kind));
    let text = text.unwrap_or_else(|error| panic!("the state for {kind}: {error}"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text:?}: {error}"))
}

on_shim! {
    /// Each kind has run by when its step is answered, with the pid of the container; that of the end
    /// also when the shim was killed.
    fn hooks_on_the_host(player: &Player) {
        let directory = player.directory();
        let path = directory.path();
        let program = Program::new(["sleep", "3600"]).with(|spec| {
            spec["annotations"] = json!({ "name": "value" });
            for kind in ["prestart", "createRuntime", "poststart", "poststop"] {
                spec["hooks"][kind] = note(path, kind);
            }
        });
        let container = player.created(program);
        for kind in ["prestart", "createRuntime"] {
            let state = state(path, kind);
            assert_eq!(state["pid"], container.pid, "{state}");
            assert_eq!(state["status"], "creating", "{state}");
            assert_eq!(state["id"], container.id(), "{state}");
            assert_eq!(state["annotations"]["name"], "value", "{state}");
        }
        let network = fs::read_link(format!("/proc/{}/ns/net", container.pid)).unwrap();
        let seen = fs::read_to_string(path.join("createRuntime.network")).unwrap();
        assert_eq!(seen.trim(), network.to_str().unwrap());
        assert!(!path.join("poststart").exists());
        container.start();
        assert_eq!(state(path, "poststart")["status"], "running");
        assert!(!path.join("poststop").exists());

        container.kill_shim();
        container.shim.bundle.delete();
        let state = state(path, "poststop");
        assert_eq!((&state["status"], state.get("pid")), (&json!("stopped"), None), "{state}");
    }

    /// A hook that fails is named, with what it says, and nothing is left of the container.
    fn a_hook_that_fails(player: &Player) {
        let program = Program::new(["true"]).with(|spec| {
            spec["hooks"]["createRuntime"] = hook("echo no address is left >&2; exit 3");
        });
        let shim = player.bundle(program).start();
        let refused = shim.task.create(&shim.create_request(&Fifos::none())).unwrap_err();
        let words = "hooks.createRuntime[0] (/bin/sh): exited with status 3: no address is left";
        assert!(refused.to_string().contains(words), "{refused}");
        shim.shut_down();
        shim.bundle.delete();
    }
}
