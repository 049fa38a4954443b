//! A sandbox from its Create to its end, with VMM, agent and containerd played. The host's side is
//! real: mounts, anchor, FIFOs.

mod creation;
mod disks;
mod ends;
mod execs;
mod fake;
mod group;
mod hooks;
mod operator;

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use containerd_shim_protos::api::{
    CloseIORequest, CreateTaskRequest, DeleteRequest, ExecProcessRequest, KillRequest,
    StartRequest, StateRequest, Status, WaitRequest,
};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::json;
use ttrpc::Code;

use super::*;
use crate::console::Console;
use crate::events::Route;
use crate::facts::Facts;
use crate::process_identity::ProcessIdentity;

/// One sandbox and those around it.
struct Scene {
    directory: tempfile::TempDir,
    sandbox: Arc<Sandbox>,
    agent: Arc<fake::Agent>,
    containerd: fake::Containerd,
    vmm: Arc<Vmm>,
    /// What the VMM was asked for.
    requests: fake::Requests,
}

/// Run `test` on a thread with a mount namespace of its own.
fn scene<F: Future<Output = ()>>(test: impl FnOnce(Scene) -> F + Send + 'static) {
    play(false, test);
}

/// The same, with a sandbox that was started for a group if `grouped`.
fn play<F: Future<Output = ()>>(grouped: bool, test: impl FnOnce(Scene) -> F + Send + 'static) {
    let thread = std::thread::spawn(move || {
        crate::mounts::enter_own_namespace().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let scene = set(grouped).await;
            tokio::time::timeout(Duration::from_secs(60), test(scene))
                .await
                .unwrap();
        });
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

async fn set(grouped: bool) -> Scene {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let bundle = path("bundle");
    fs::create_dir_all(bundle.join("rootfs/etc")).unwrap();
    fs::create_dir(path("volume")).unwrap();
    let spec = json!({
        "hostname": "web",
        "root": { "path": "rootfs" },
        "process": { "args": ["true"] },
        "mounts": [
            { "destination": "/proc", "type": "proc", "source": "proc" },
            { "destination": "/data", "type": "bind", "source": path("volume"),
              "options": ["rbind", "ro"] },
        ],
        "linux": { "namespaces": [{ "type": "network" }, { "type": "pid" }, { "type": "mount" }] },
    });
    for name in ["stdin", "stdout", "stderr"] {
        mknodat(CWD, path(name), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    }
    let socket = path("socket");
    drop(UnixListener::bind(&socket).unwrap());
    let facts = Facts {
        namespace: "default".into(),
        sandbox: "web".into(),
        socket,
        shim: Some(ProcessIdentity::current().unwrap()),
        ..Facts::default()
    };
    let facts = FactsFile::create(&path("run"), facts).unwrap();
    crate::mounts::make_export(&facts.export()).unwrap();
    let anchor = Anchor::start(&path("empty"), None).unwrap();

    let containerd = fake::Containerd::serve(&path("events")).await;
    let publisher = Publisher::new("default", Route::to_socket(path("events").to_str()));
    let (launched, connections, requests) = fake::vmm();
    let vmm = Arc::new(Vmm::new(launched, Console::new(Some(facts.console()))).unwrap());
    let agent = Arc::new(fake::Agent::default());
    agent.serve(directory.path(), connections);
    let (end, guest) = (vmm.clone(), agent.clone());
    tokio::spawn(async move {
        end.wait_for_end().await;
        guest.vanish();
    });

    let mut sandbox = Sandbox::new(
        facts,
        publisher,
        Recorder::new("default", "web", 0),
        Home {
            namespace: "default".into(),
            mount_namespace: fs::File::open("/proc/self/ns/mnt").unwrap().into(),
            traces: path("traces"),
            empty: path("empty"),
            counters: path("counters"),
            options: None,
        },
        "web".into(),
        Err(String::new()),
    );
    Arc::get_mut(&mut sandbox).unwrap().grouped = grouped;
    sandbox.vmm.set(vmm.clone()).unwrap();
    let spec = BundleSpec::parse(spec.to_string().as_bytes()).unwrap();
    let restored = vmm.clone();
    sandbox.awakening.outcome.send_replace(None);
    sandbox.bring_up(async move { Ok(restored) }, "web".into());
    *sandbox.lock_prepared() = Some(Prepared {
        id: "web".into(),
        ingredients: Ok(Ingredients {
            bundle,
            spec,
            anchor,
        }),
    });
    Scene {
        directory,
        sandbox,
        agent,
        containerd,
        vmm,
        requests,
    }
}

impl Scene {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn stream(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn create_request(&self, id: &str) -> CreateTaskRequest {
        CreateTaskRequest {
            id: id.into(),
            stdin: self.stream("stdin"),
            stdout: self.stream("stdout"),
            stderr: self.stream("stderr"),
            ..CreateTaskRequest::default()
        }
    }

    async fn create(&self) -> u32 {
        self.sandbox
            .clone()
            .create(self.create_request("web"))
            .await
            .unwrap()
    }

    async fn start(&self, exec_id: &str) -> Result<u32, TaskError> {
        let request = StartRequest {
            id: "web".into(),
            exec_id: exec_id.into(),
            ..StartRequest::default()
        };
        self.sandbox.clone().start(request).await
    }

    async fn exec(&self, exec_id: &str) -> Result<(), TaskError> {
        let request = ExecProcessRequest {
            id: "web".into(),
            exec_id: exec_id.into(),
            spec: Some(Any {
                value: b"{}".to_vec(),
                ..Any::default()
            })
            .into(),
            ..ExecProcessRequest::default()
        };
        self.sandbox.clone().exec(request).await
    }

    async fn wait(&self, exec_id: &str) -> u32 {
        let request = WaitRequest {
            id: "web".into(),
            exec_id: exec_id.into(),
            ..WaitRequest::default()
        };
        self.sandbox.wait(&request).await.unwrap().exit_status
    }

    async fn delete(&self, exec_id: &str) -> Result<u32, TaskError> {
        let request = DeleteRequest {
            id: "web".into(),
            exec_id: exec_id.into(),
            ..DeleteRequest::default()
        };
        self.sandbox
            .clone()
            .delete(request)
            .await
            .map(|answer| answer.exit_status)
    }

    fn state(&self, exec_id: &str) -> Result<Status, TaskError> {
        let request = StateRequest {
            id: "web".into(),
            exec_id: exec_id.into(),
            ..StateRequest::default()
        };
        Ok(self.sandbox.state(&request)?.status.enum_value().unwrap())
    }

    async fn kill(&self, exec_id: &str, signal: u32) -> Result<(), TaskError> {
        let request = KillRequest {
            id: "web".into(),
            exec_id: exec_id.into(),
            signal,
            ..KillRequest::default()
        };
        self.sandbox.kill(request).await
    }

    /// A client that reads one of the FIFOs to its end. The shim must have it open.
    fn reader(&self, name: &str) -> tokio::task::JoinHandle<String> {
        // Open when this returns, as a client's is before it asks for a container.
        let mut file = fs::File::open(self.path(name)).unwrap();
        tokio::task::spawn_blocking(move || {
            let mut text = String::new();
            std::io::Read::read_to_string(&mut file, &mut text).unwrap();
            text
        })
    }

    /// The events that containerd has got, all of them.
    async fn events(&self) -> Vec<String> {
        self.sandbox.publisher.flush(Duration::from_secs(10)).await;
        self.containerd.events()
    }

    /// Begin a creation that does not come to an end: its guest is never restored, as while a template
    /// is being built.
    async fn create_without_guest(&self) -> tokio::task::JoinHandle<Result<u32, TaskError>> {
        self.sandbox.bring_up(std::future::pending(), String::new());
        let creating = tokio::spawn(self.sandbox.clone().create(self.create_request("web")));
        while self.state("").is_err() {
            tokio::task::yield_now().await;
        }
        creating
    }

    /// End the shim and see that nothing is left.
    async fn assert_nothing_left(&self, pid: u32) {
        assert!(self.sandbox.close_if_empty());
        self.sandbox.clean_up().await;
        assert!(!self.path("run/default").exists());
        assert!(!self.path("socket").exists());
        assert!(!self.vmm.identity().is_alive());
        assert!(ProcessIdentity::of(pid).is_err());
        let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        assert!(
            !mounts.contains(self.directory.path().to_str().unwrap()),
            "{mounts}"
        );
    }
}

#[test]
fn test_a_container_s_life_with_an_exec_in_it() {
    scene(|scene| async move {
        assert!(matches!(scene.state(""), Err(TaskError::NotFound(_))));
        let pid = scene.create().await;
        assert_eq!(scene.state("").unwrap(), Status::CREATED);
        // Its anchor is there and in another network.
        let network = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
        assert_ne!(network(&pid.to_string()), network("self"));
        assert_eq!(scene.sandbox.pids("web").unwrap()[0].pid, pid);
        let export = scene.path("run/default/web/export/containers/web");
        assert!(export.join("rootfs/etc").exists());
        let volume = scene.path("run/default/web/export/volumes/1");
        assert!(fs::write(volume.join("x"), "").is_err());
        {
            let spec = scene.agent.spec.lock().unwrap();
            assert_eq!(
                spec["root"]["path"],
                "/run/thaw/share/containers/web/rootfs"
            );
            assert_eq!(spec["mounts"][1]["source"], "/run/thaw/share/volumes/1");
            let configured = scene.agent.configured.lock().unwrap().take().unwrap();
            assert_eq!(configured.hostname, "web");
        }

        assert_eq!(scene.start("").await.unwrap(), pid);
        assert!(matches!(
            scene.start("").await,
            Err(TaskError::FailedPrecondition(_))
        ));
        assert_eq!(scene.state("").unwrap(), Status::RUNNING);
        assert!(matches!(
            scene.delete("").await,
            Err(TaskError::FailedPrecondition(_))
        ));
        let writer = scene.path("stdin");
        tokio::task::spawn_blocking(move || fs::write(writer, "typed").unwrap())
            .await
            .unwrap();
        let close = CloseIORequest {
            id: "web".into(),
            stdin: true,
            ..CloseIORequest::default()
        };
        scene.sandbox.close_io(&close).unwrap();
        assert_eq!(scene.agent.input("").await, "typed");

        scene.exec("one").await.unwrap();
        assert!(matches!(
            scene.exec("one").await,
            Err(TaskError::AlreadyExists(_))
        ));
        assert_eq!(scene.state("one").unwrap(), Status::CREATED);
        assert!(matches!(
            scene.kill("one", 15).await,
            Err(TaskError::FailedPrecondition(_))
        ));
        scene.start("one").await.unwrap();
        assert_eq!(scene.state("one").unwrap(), Status::RUNNING);
        scene.agent.end("exec-1", "", 3).await;
        assert_eq!(scene.wait("one").await, 3);
        assert_eq!(scene.delete("one").await.unwrap(), 3);
        assert!(matches!(scene.state("one"), Err(TaskError::NotFound(_))));

        let (out, err) = (scene.reader("stdout"), scene.reader("stderr"));
        scene.agent.end("", "last words", 7).await;
        assert_eq!(scene.wait("").await, 7);
        assert!(!fs::exists(format!("/proc/{pid}")).unwrap());
        assert_eq!(
            (out.await.unwrap().as_str(), err.await.unwrap().as_str()),
            ("last words", "last words")
        );
        assert_eq!(scene.state("").unwrap(), Status::STOPPED);
        let error = scene.kill("", 9).await.unwrap_err();
        assert!(matches!(error, TaskError::NotFound(_)));
        assert_eq!(error.to_string(), "process already finished");
        assert!(matches!(
            scene.exec("two").await,
            Err(TaskError::FailedPrecondition(_))
        ));
        assert_eq!(scene.delete("").await.unwrap(), 7);
        assert!(matches!(
            scene.delete("").await,
            Err(TaskError::NotFound(_))
        ));
        assert_eq!(
            scene.events().await,
            [
                "create",
                "start",
                "exec-added",
                "exec-started",
                "exit one 3",
                "exit web 7",
                "delete"
            ]
        );
        scene.assert_nothing_left(pid).await;
    });
}

#[test]
fn test_an_exit_that_is_quicker_than_the_start_is_told_after_it() {
    scene(|scene| async move {
        *scene.agent.ends_at_once.lock().unwrap() = true;
        let pid = scene.create().await;
        let (out, _err) = (scene.reader("stdout"), scene.reader("stderr"));
        scene.start("").await.unwrap();
        assert_eq!(scene.wait("").await, 7);
        assert_eq!(out.await.unwrap(), "gone");
        scene.delete("").await.unwrap();
        assert_eq!(
            scene.events().await,
            ["create", "start", "exit web 7", "delete"]
        );
        scene.assert_nothing_left(pid).await;
    });
}

#[test]
fn test_the_exits_of_execs_come_before_the_container_s() {
    scene(|scene| async move {
        scene.create().await;
        scene.start("").await.unwrap();
        for exec in ["one", "two"] {
            scene.exec(exec).await.unwrap();
            scene.start(exec).await.unwrap();
        }
        let _readers = (scene.reader("stdout"), scene.reader("stderr"));
        // The first process is the first to be known dead.
        scene.agent.end("", "", 137).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(matches!(
            scene.start("one").await,
            Err(TaskError::FailedPrecondition(_))
        ));
        scene.agent.end("exec-2", "", 137).await;
        scene.agent.end("exec-1", "", 137).await;
        scene.wait("").await;
        let events = scene.events().await;
        assert_eq!(events.last().unwrap(), "exit web 137", "{events:?}");
        assert_eq!(
            events
                .iter()
                .filter(|event| event.starts_with("exit"))
                .count(),
            3
        );
    });
}

#[test]
fn test_the_end_of_the_vm_is_the_end_of_all_in_it() {
    scene(|scene| async move {
        let pid = scene.create().await;
        scene.start("").await.unwrap();
        scene.exec("one").await.unwrap();
        scene.start("one").await.unwrap();
        scene.vmm.kill();
        assert_eq!(scene.wait("").await, 137);
        assert_eq!(scene.wait("one").await, 137);
        scene.delete("one").await.unwrap();
        assert_eq!(scene.delete("").await.unwrap(), 137);
        let events = scene.events().await;
        assert_eq!(events[4..], ["exit one 137", "exit web 137", "delete"]);
        scene.assert_nothing_left(pid).await;
    });
}

#[test]
fn test_whoever_kills_the_anchor_kills_the_container() {
    scene(|scene| async move {
        let pid = scene.create().await;
        scene.start("").await.unwrap();
        let _readers = (scene.reader("stdout"), scene.reader("stderr"));
        let anchor = rustix::process::Pid::from_raw(pid as i32).unwrap();
        rustix::process::kill_process(anchor, rustix::process::Signal::KILL).unwrap();
        assert_eq!(scene.wait("").await, 137);
        assert!(
            scene
                .agent
                .calls
                .lock()
                .unwrap()
                .contains(&"Kill 9 all=true".to_owned())
        );
        scene.delete("").await.unwrap();
        scene.assert_nothing_left(pid).await;
    });
}

/// Told before the exit that follows, of the right container, and not as often as the guest says so.
#[test]
fn test_kills_for_memory_are_told_before_the_exit() {
    scene(|scene| async move {
        let pid = scene.create().await;
        scene.start("").await.unwrap();
        let _readers = (scene.reader("stdout"), scene.reader("stderr"));
        // Once somebody listens.
        while scene.agent.memory_kills.receiver_count() == 0 {
            tokio::task::yield_now().await;
        }
        scene
            .agent
            .memory_kills
            .send_replace(vec!["other", "web", "web", "web"]);
        scene.agent.end("", "", 137).await;
        assert_eq!(scene.wait("").await, 137);
        let events = scene.events().await;
        assert_eq!(
            events,
            ["create", "start", "oom web", "exit web 137"],
            "{events:?}"
        );
        scene.delete("").await.unwrap();
        scene.assert_nothing_left(pid).await;
    });
}

#[test]
fn test_a_guest_that_only_says_that_it_kills_is_killed() {
    scene(|scene| async move {
        let pid = scene.create().await;
        scene.start("").await.unwrap();
        *scene.agent.spares.lock().unwrap() = true;
        scene.kill("", 15).await.unwrap();
        scene.kill("", 9).await.unwrap();
        // The task that waits begins to do so.
        tokio::task::yield_now().await;
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(29)).await;
        assert!(scene.vmm.identity().is_alive());
        tokio::time::advance(Duration::from_secs(2)).await;
        tokio::time::resume();
        assert_eq!(scene.wait("").await, 137);
        scene.delete("").await.unwrap();
        scene.assert_nothing_left(pid).await;
    });
}
