//! Several containers in one sandbox: what is done to one is done to that one only.

use super::*;

/// Run `test` with a sandbox that was started for a group.
fn group<F: Future<Output = ()>>(test: impl FnOnce(Scene) -> F + Send + 'static) {
    play(true, test);
}

impl Scene {
    /// A request to create another container, without streams, from a bundle of its own.
    fn another(&self, id: &str, namespaces: serde_json::Value) -> CreateTaskRequest {
        let bundle = self.path(id);
        fs::create_dir_all(bundle.join("rootfs").join(id)).unwrap();
        let mut list = json!([{ "type": "network" }, { "type": "mount" }]);
        let list = list.as_array_mut().unwrap();
        list.extend(namespaces.as_array().unwrap().iter().cloned());
        let spec = json!({
            "root": { "path": "rootfs" },
            "process": { "args": ["true"] },
            "linux": { "namespaces": list },
        });
        fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        CreateTaskRequest {
            id: id.into(),
            bundle: bundle.to_str().unwrap().into(),
            ..CreateTaskRequest::default()
        }
    }

    async fn add(&self, id: &str) -> Result<u32, TaskError> {
        let request = self.another(id, json!([{ "type": "pid" }]));
        self.sandbox.clone().create(request).await
    }

    async fn start_of(&self, id: &str) {
        let request = StartRequest {
            id: id.into(),
            ..StartRequest::default()
        };
        self.sandbox.clone().start(request).await.unwrap();
    }

    async fn kill_of(&self, id: &str, signal: u32) -> Result<(), TaskError> {
        let request = KillRequest {
            id: id.into(),
            signal,
            ..KillRequest::default()
        };
        self.sandbox.kill(request).await
    }

    async fn wait_of(&self, id: &str) -> u32 {
        let request = WaitRequest {
            id: id.into(),
            ..WaitRequest::default()
        };
        self.sandbox.wait(&request).await.unwrap().exit_status
    }

    async fn delete_of(&self, id: &str) -> Result<u32, TaskError> {
        let request = DeleteRequest {
            id: id.into(),
            ..DeleteRequest::default()
        };
        let deleted = self.sandbox.clone().delete(request).await;
        deleted.map(|answer| answer.exit_status)
    }

    fn state_of(&self, id: &str) -> Result<Status, TaskError> {
        let request = StateRequest {
            id: id.into(),
            ..StateRequest::default()
        };
        Ok(self.sandbox.state(&request)?.status.enum_value().unwrap())
    }

    /// The first container, running, with somebody who reads what it writes.
    async fn run_first(&self) -> u32 {
        let pid = self.create().await;
        self.start("").await.unwrap();
        let _readers = (self.reader("stdout"), self.reader("stderr"));
        pid
    }

    fn export(&self) -> PathBuf {
        self.path("run/default/web/export/containers")
    }

    fn facts(&self) -> Facts {
        FactsFile::read(&self.path("run/default/web"))
            .unwrap()
            .unwrap()
    }
}

#[test]
fn test_containers_come_and_go_without_harm_to_each_other() {
    group(|scene| async move {
        let first = scene.run_first().await;
        let second = scene.add("two").await.unwrap();
        scene.start_of("two").await;
        assert_ne!(first, second);
        assert!(scene.export().join("web/rootfs/etc").exists());
        assert!(scene.export().join("two+1/rootfs/two").exists());
        assert_eq!(scene.facts().siblings().len(), 2);
        assert!(!scene.sandbox.close_if_empty());

        // The second goes, and comes again under the same name.
        scene.kill_of("two", 9).await.unwrap();
        assert_eq!(scene.wait_of("two").await, 137);
        assert_eq!(scene.delete_of("two").await.unwrap(), 137);
        assert!(matches!(
            scene.delete_of("two").await,
            Err(TaskError::NotFound(_))
        ));
        assert!(ProcessIdentity::of(second).is_err());
        assert!(!scene.export().join("two+1").exists());
        assert_eq!(scene.state("").unwrap(), Status::RUNNING);
        scene.add("two").await.unwrap();
        scene.start_of("two").await;
        assert!(scene.export().join("two+2/rootfs/two").exists());

        // The first goes, and others go on and come.
        scene.agent.end("", "", 3).await;
        assert_eq!(scene.wait("").await, 3);
        assert_eq!(scene.delete("").await.unwrap(), 3);
        assert_eq!(scene.state_of("two").unwrap(), Status::RUNNING);
        scene.add("three").await.unwrap();
        scene.start_of("three").await;
        assert!(!scene.sandbox.close_if_empty());
        for (id, name) in [("two", "two+2"), ("three", "three+3")] {
            scene.agent.end_in(name, "", "", 0).await;
            assert_eq!(scene.wait_of(id).await, 0);
            scene.delete_of(id).await.unwrap();
        }
        // More may come, until the shim is told to end.
        assert!(scene.vmm.identity().is_alive());
        assert!(!scene.facts().ending);
        let exits: Vec<_> = scene.events().await;
        let exits: Vec<_> = exits.iter().filter(|e| e.starts_with("exit")).collect();
        assert_eq!(
            exits,
            ["exit two 137", "exit web 3", "exit two 0", "exit three 0"]
        );
        assert!(scene.sandbox.close_if_empty());
        assert!(scene.facts().ending);
        let late = scene.add("four").await.unwrap_err().to_string();
        assert!(late.contains("has ended"), "{late}");
        scene.assert_nothing_left(first).await;
    });
}

#[test]
fn test_the_first_container_s_end_is_not_the_others() {
    // Also where only the second says that it belongs to the first.
    for grouped in [true, false] {
        play(grouped, |scene| async move {
            scene.run_first().await;
            scene.add("two").await.unwrap();
            scene.start_of("two").await;
            scene.agent.end("", "", 0).await;
            assert_eq!(scene.wait("").await, 0);
            scene.delete("").await.unwrap();
            assert_eq!(scene.state_of("two").unwrap(), Status::RUNNING);
            assert!(scene.vmm.identity().is_alive());
            scene.agent.end_in("two+1", "", "", 4).await;
            assert_eq!(scene.wait_of("two").await, 4);
            scene.delete_of("two").await.unwrap();
            scene.assert_nothing_left(u32::MAX).await;
        });
    }
}

#[test]
fn test_a_creation_that_fails_leaves_the_others_alone() {
    group(|scene| async move {
        let first = scene.run_first().await;
        *scene.agent.refuse_create.lock().unwrap() = Some((Code::NOT_FOUND, "no such program"));
        let error = scene.add("two").await.unwrap_err();
        assert_eq!(error.to_string(), "no such program");
        *scene.agent.refuse_create.lock().unwrap() = None;
        // One of the host's: it never comes to the guest.
        let request = scene.another("three", json!([{ "type": "pid" }]));
        fs::remove_dir_all(scene.path("three/rootfs")).unwrap();
        let error = scene.sandbox.clone().create(request).await.unwrap_err();
        assert!(error.to_string().contains("root.path"), "{error}");
        // One without a spec.
        let mut request = scene.another("four", json!([]));
        request.bundle = scene.path("nowhere").to_str().unwrap().into();
        let error = scene.sandbox.clone().create(request).await.unwrap_err();
        assert!(matches!(error, TaskError::InvalidArgument(_)), "{error}");

        assert_eq!(scene.facts().containers.len(), 1);
        assert_eq!(fs::read_dir(scene.export()).unwrap().count(), 1);
        for id in ["two", "three", "four"] {
            assert!(matches!(scene.state_of(id), Err(TaskError::NotFound(_))));
        }
        assert_eq!(scene.state("").unwrap(), Status::RUNNING);
        scene.add("two").await.unwrap();
        scene.kill("", 9).await.unwrap();
        assert_eq!(scene.wait("").await, 137);
        scene.delete("").await.unwrap();
        // Never started, it can be deleted.
        assert_eq!(scene.delete_of("two").await.unwrap(), 137);
        scene.assert_nothing_left(first).await;
    });
}

#[test]
fn test_a_dead_vm_is_the_end_of_each() {
    group(|scene| async move {
        let first = scene.run_first().await;
        for id in ["two", "three"] {
            scene.add(id).await.unwrap();
        }
        scene.start_of("two").await;
        scene.vmm.kill();
        for id in ["web", "two", "three"] {
            assert_eq!(scene.wait_of(id).await, 137);
        }
        let error = scene.add("four").await.unwrap_err().to_string();
        assert!(error.contains("VM has ended"), "{error}");
        for id in ["web", "two", "three"] {
            assert_eq!(scene.delete_of(id).await.unwrap(), 137);
        }
        let events = scene.events().await;
        for id in ["web", "two", "three"] {
            let exit = format!("exit {id} 137");
            assert_eq!(events.iter().filter(|event| **event == exit).count(), 1);
        }
        scene.assert_nothing_left(first).await;
    });
}

#[test]
fn test_killing_an_anchor_kills_its_container_only() {
    group(|scene| async move {
        scene.run_first().await;
        let second = scene.add("two").await.unwrap();
        scene.start_of("two").await;
        let anchor = rustix::process::Pid::from_raw(second as i32).unwrap();
        rustix::process::kill_process(anchor, rustix::process::Signal::KILL).unwrap();
        assert_eq!(scene.wait_of("two").await, 137);
        assert_eq!(scene.state("").unwrap(), Status::RUNNING);
        scene.delete_of("two").await.unwrap();
        scene.kill("", 9).await.unwrap();
        scene.wait("").await;
        scene.delete("").await.unwrap();
        scene.assert_nothing_left(second).await;
    });
}

/// The guest answers and does not end it: it is given up, and the VM is kept for the other.
#[test]
fn test_a_container_that_outlives_sigkill_takes_no_other_with_it() {
    group(|scene| async move {
        let first = scene.run_first().await;
        scene.add("two").await.unwrap();
        scene.start_of("two").await;
        *scene.agent.spares.lock().unwrap() = true;
        scene.kill_of("two", 9).await.unwrap();
        tokio::task::yield_now().await;
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(31)).await;
        tokio::time::resume();
        assert_eq!(scene.wait_of("two").await, 137);
        assert!(scene.vmm.identity().is_alive());
        assert_eq!(scene.state("").unwrap(), Status::RUNNING);
        scene.delete_of("two").await.unwrap();
        // What is left of it in the guest has a name of its own.
        scene.add("two").await.unwrap();
        *scene.agent.spares.lock().unwrap() = false;
        scene.kill("", 9).await.unwrap();
        scene.wait("").await;
        scene.delete("").await.unwrap();
        scene.delete_of("two").await.unwrap();
        scene.assert_nothing_left(first).await;
    });
}

#[test]
fn test_kills_for_memory_are_told_of_the_container_that_they_hit() {
    group(|scene| async move {
        let first = scene.run_first().await;
        scene.add("two").await.unwrap();
        scene.start_of("two").await;
        let kills = &scene.agent.memory_kills;
        kills.send_replace(vec!["two+1", "web", "two", "two+1"]);
        scene.agent.end_in("two+1", "", "", 137).await;
        scene.wait_of("two").await;
        let events = scene.events().await;
        let told: Vec<_> = events.iter().filter(|e| !e.starts_with("cre")).collect();
        assert_eq!(
            told,
            ["start", "start", "oom two", "oom web", "exit two 137"]
        );
        scene.delete_of("two").await.unwrap();
        scene.kill("", 9).await.unwrap();
        scene.wait("").await;
        scene.delete("").await.unwrap();
        scene.assert_nothing_left(first).await;
    });
}

#[test]
fn test_a_sibling_s_namespaces_are_joined_and_others_refused() {
    group(|scene| async move {
        let first = scene.run_first().await;
        let with = |pid: u32| {
            let path = format!("/proc/{pid}/ns/ipc");
            json!([{ "type": "pid" }, { "type": "ipc", "path": path }])
        };
        let request = scene.another("two", with(std::process::id()));
        let error = scene.sandbox.clone().create(request).await.unwrap_err();
        assert!(error.to_string().contains("the ipc namespace"), "{error}");
        let request = scene.another("two", with(first));
        scene.sandbox.clone().create(request).await.unwrap();
        let spec = scene.agent.spec.lock().unwrap().clone();
        assert_eq!(
            spec["linux"]["namespaces"][3],
            json!({ "type": "ipc", "path": "container:web" })
        );
        scene.delete_of("two").await.unwrap();
        scene.kill("", 9).await.unwrap();
        scene.wait("").await;
        scene.delete("").await.unwrap();
        scene.assert_nothing_left(first).await;
    });
}

/// Whoever comes first wakes the guest, and each has what it was prepared.
#[test]
fn test_containers_that_are_created_at_once() {
    group(|scene| async move {
        let (two, first, three) =
            tokio::join!(scene.add("two"), scene.create(), scene.add("three"));
        let (two, three) = (two.unwrap(), three.unwrap());
        assert_eq!([first, two, three].len(), 3);
        let calls = scene.agent.calls.lock().unwrap().clone();
        assert_eq!(calls, ["Configure", "Create", "Create", "Create"]);
        for id in ["web", "two", "three"] {
            scene.delete_of(id).await.unwrap();
        }
        scene.assert_nothing_left(first).await;
    });
}

#[test]
fn test_a_group_waits_for_its_first_container() {
    group(|scene| async move {
        // A second one has come and gone before the first.
        scene.add("two").await.unwrap();
        scene.delete_of("two").await.unwrap();
        assert!(!scene.sandbox.close_if_empty());
        let first = scene.create().await;
        scene.delete("").await.unwrap();
        scene.assert_nothing_left(first).await;
    });
}
