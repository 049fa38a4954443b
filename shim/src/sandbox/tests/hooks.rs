//! Hooks that run on the host: when, with what, and what becomes of a container when they fail.

use serde_json::Value;

use super::*;

impl Scene {
    /// Give the container these hooks: a script of a shell for each, by kind.
    fn set_hooks(&self, hooks: &[(&str, &str)]) {
        let mut prepared = self.sandbox.lock_prepared();
        let ingredients = prepared.as_mut().unwrap().ingredients.as_mut().unwrap();
        let mut json = ingredients.spec.json.clone();
        json["ociVersion"] = "1.2.0".into();
        json["annotations"] = json!({ "a": "b" });
        for (kind, script) in hooks {
            let hook = json!({ "path": "/bin/sh", "args": ["sh", "-c", script] });
            json["hooks"][kind] = json!([hook]);
        }
        ingredients.spec = BundleSpec::parse(json.to_string().as_bytes()).unwrap();
    }

    /// What a hook has written to a file in the bundle.
    fn written(&self, name: &str) -> String {
        fs::read_to_string(self.path("bundle").join(name)).unwrap_or_default()
    }

    fn poststop_is_due(&self) -> bool {
        let facts = FactsFile::read(&self.path("run/default/web"))
            .unwrap()
            .unwrap();
        let mut containers = facts.containers.values();
        containers.any(|container| container.poststop.is_some())
    }
}

/// Notes the state, and the network namespace of its pid, and the order.
const NOTE: &str = "cat > $KIND; pid=$(sed 's/.*\"pid\":\\([0-9]*\\).*/\\1/' $KIND); \
     readlink /proc/$pid/ns/net > $KIND.network; echo $KIND >> order";

#[test]
fn test_each_kind_runs_at_its_moment_with_the_true_state() {
    scene(|scene| async move {
        let note = |kind: &str| format!("KIND={kind}; {NOTE}");
        let kinds = ["prestart", "createRuntime", "poststart", "poststop"];
        let scripts = kinds.map(note);
        let hooks: Vec<_> = kinds
            .into_iter()
            .zip(scripts.iter().map(String::as_str))
            .collect();
        scene.set_hooks(&hooks);

        let pid = scene.create().await;
        assert_eq!(scene.written("order"), "prestart\ncreateRuntime\n");
        assert!(scene.poststop_is_due());
        let anchors = fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
        assert_eq!(
            scene.written("createRuntime.network").trim(),
            anchors.to_str().unwrap()
        );
        assert_eq!(scene.agent.spec.lock().unwrap()["hooks"], json!({}));
        scene.start("").await.unwrap();
        let _readers = (scene.reader("stdout"), scene.reader("stderr"));
        scene.agent.end("", "", 0).await;
        scene.wait("").await;
        assert_eq!(scene.written("poststop"), "");
        scene.delete("").await.unwrap();
        assert!(!scene.poststop_is_due());
        assert_eq!(
            scene.written("order"),
            "prestart\ncreateRuntime\npoststart\npoststop\n"
        );
        for (kind, status, pid) in [
            ("createRuntime", "creating", Some(pid)),
            ("poststart", "running", Some(pid)),
            ("poststop", "stopped", None),
        ] {
            let state: Value = serde_json::from_str(&scene.written(kind)).unwrap();
            let mut expected = json!({
                "ociVersion": "1.2.0", "id": "web", "status": status,
                "bundle": scene.path("bundle"), "annotations": { "a": "b" },
            });
            if let Some(pid) = pid {
                expected["pid"] = pid.into();
            }
            assert_eq!(state, expected);
        }
        assert_eq!(
            scene.events().await,
            ["create", "start", "exit web 0", "delete"]
        );
        scene.assert_nothing_left(pid).await;
    });
}

#[test]
fn test_a_hook_that_fails_fails_the_creation_and_all_is_taken_back() {
    scene(|scene| async move {
        scene.set_hooks(&[
            ("createRuntime", "echo no address left >&2; exit 1"),
            ("poststop", "touch back"),
        ]);
        let error = scene
            .sandbox
            .clone()
            .create(scene.create_request("web"))
            .await
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "hooks.createRuntime[0] (/bin/sh): exited with status 1: no address left"
        );
        assert!(
            !scene
                .agent
                .calls
                .lock()
                .unwrap()
                .contains(&"Create".to_owned())
        );
        assert!(scene.path("bundle/back").exists());
        assert!(scene.events().await.is_empty());
        scene.assert_nothing_left(u32::MAX).await;
    });
}

#[test]
fn test_a_creation_that_hangs_in_a_hook_can_be_given_up() {
    scene(|scene| async move {
        scene.set_hooks(&[("createRuntime", "echo $$ > pid; exec sleep 1000")]);
        let creating = tokio::spawn(scene.sandbox.clone().create(scene.create_request("web")));
        let mut pid = String::new();
        while !pid.ends_with('\n') {
            tokio::task::yield_now().await;
            pid = scene.written("pid");
        }
        scene.kill("", 9).await.unwrap();
        let error = creating.await.unwrap().unwrap_err();
        assert!(error.to_string().contains("was deleted while"), "{error}");
        assert!(ProcessIdentity::of(pid.trim().parse().unwrap()).is_err());
        scene.assert_nothing_left(u32::MAX).await;
    });
}

#[test]
fn test_a_poststart_hook_that_fails_ends_the_container() {
    scene(|scene| async move {
        scene.set_hooks(&[("poststart", "exit 4"), ("poststop", "exit 5")]);
        let pid = scene.create().await;
        let _readers = (scene.reader("stdout"), scene.reader("stderr"));
        let error = scene.start("").await.unwrap_err();
        assert!(
            error.to_string().starts_with("hooks.poststart[0]"),
            "{error}"
        );
        assert_eq!(scene.wait("").await, 137);
        // That of the last is logged.
        assert_eq!(scene.delete("").await.unwrap(), 137);
        assert_eq!(scene.events().await, ["create", "exit web 137", "delete"]);
        scene.assert_nothing_left(pid).await;
    });
}

#[test]
fn test_what_is_never_deleted_has_its_poststop_hooks_once_the_shim_ends() {
    scene(|scene| async move {
        scene.set_hooks(&[("poststop", "echo x >> back")]);
        scene.create().await;
        assert!(scene.poststop_is_due());
        scene.sandbox.clean_up().await;
        assert_eq!(scene.written("back"), "x\n");
        assert!(!scene.path("run/default").exists());
    });
}
