//! What is refused, with which code and which words: containerd acts on the codes, and Docker takes
//! its own exit statuses 126 and 127 from the words.

use containerd_shim_protos::api::{Empty, ExecProcessRequest, ResizePtyRequest};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use serde_json::json;
use thaw_tests::player::{Api, CallError, Container, Fifos, Player, Program, any};
use ttrpc::Code;

use super::on_shim;

/// The code of a refusal.
#[track_caller]
fn code<Answer: std::fmt::Debug>(called: Result<Answer, CallError>) -> Code {
    match called {
        Ok(answer) => panic!("not refused: {answer:?}"),
        Err(error) => error.code(),
    }
}

fn resources(value: &serde_json::Value) -> Any {
    any("LinuxResources", value)
}

/// Starts an exec that cannot be, and returns why.
#[track_caller]
fn refused_exec(container: &Container<'_>, exec_id: &str, process: serde_json::Value) -> String {
    let refused = match container.exec_process(exec_id, &process, &Fifos::none()) {
        Err(error) => error,
        Ok(()) => match container.task.start(container.id(), exec_id) {
            Err(error) => error,
            Ok(_) => panic!("not refused: {process}"),
        },
    };
    container
        .task
        .delete(container.id(), exec_id)
        .unwrap_or_default();
    refused.to_string()
}

fn process(program: &str) -> serde_json::Value {
    json!({
        "args": [program, "x"], "cwd": "/", "env": ["PATH=/bin"], "user": { "uid": 0, "gid": 0 },
    })
}

on_shim! {
    /// Ids that are not there, of containers and of execs, by both versions of the service.
    fn unknown_ids(player: &Player) {
        let container = player.sleeper();
        for api in [Api::V2, Api::V3] {
            let task = container.task.with(api);
            let own = container.id();
            for (id, exec_id) in [("another", ""), ("another", "e"), (own, "e")] {
                let all = [
                    task.state(id, exec_id).map(drop),
                    task.start(id, exec_id).map(drop),
                    task.kill(id, exec_id, 15).map(drop),
                    task.wait(id, exec_id).map(drop),
                    task.delete(id, exec_id).map(drop),
                    task.close_stdin(id, exec_id).map(drop),
                    task.resize(id, exec_id, (80, 24)).map(drop),
                ];
                for (index, called) in all.into_iter().enumerate() {
                    assert_eq!(code(called), Code::NOT_FOUND, "{index} of {id} {exec_id}");
                }
            }
            let all = [
                task.pids("another").map(drop),
                task.pause("another").map(drop),
                task.resume("another").map(drop),
                task.stats("another").map(drop),
                task.update("another", resources(&json!({}))).map(drop),
                task.exec(&ExecProcessRequest {
                    id: "another".to_owned(),
                    exec_id: "e".to_owned(),
                    spec: Some(any("Process", &process("true"))).into(),
                    ..ExecProcessRequest::default()
                }).map(drop),
            ];
            for (index, called) in all.into_iter().enumerate() {
                assert_eq!(code(called), Code::NOT_FOUND, "{index}");
            }
        }
        container.remove();
    }

    /// What has been done is not done again, and what comes too early or too late is refused.
    fn wrong_states(player: &Player) {
        let container = player.created(Program::new(["sleep", "3600"]));
        let (id, task, none) = (container.id(), &container.task, Fifos::none());
        let again = container.shim.create_request(&none);
        assert_eq!(code(task.create(&again)), Code::ALREADY_EXISTS);
        task.resume(id).unwrap_err();
        container.start();
        assert_eq!(code(task.create(&again)), Code::ALREADY_EXISTS);
        assert_eq!(code(task.start(id, "")), Code::FAILED_PRECONDITION);
        assert_eq!(code(task.delete(id, "")), Code::FAILED_PRECONDITION);

        container.exec("e", &["sleep", "3600"], &none).unwrap();
        assert_eq!(code(container.exec("e", &["true"], &none)), Code::ALREADY_EXISTS);
        assert_eq!(code(task.kill(id, "e", 9)), Code::FAILED_PRECONDITION);
        task.start(id, "e").unwrap();
        assert_eq!(code(task.start(id, "e")), Code::FAILED_PRECONDITION);
        assert_eq!(code(task.delete(id, "e")), Code::FAILED_PRECONDITION);
        task.kill(id, "e", 9).unwrap();
        task.wait(id, "e").unwrap();
        let finished = task.kill(id, "e", 9).unwrap_err();
        assert_eq!(finished.code(), Code::NOT_FOUND);
        assert!(finished.to_string().contains("process already finished"), "{finished}");
        assert_eq!(code(task.start(id, "e")), Code::FAILED_PRECONDITION);

        container.exec("waiting", &["true"], &none).unwrap();
        task.pause(id).unwrap();
        task.pause(id).unwrap_err();
        assert_eq!(code(container.exec("p", &["true"], &none)), Code::FAILED_PRECONDITION);
        assert_eq!(code(task.start(id, "waiting")), Code::FAILED_PRECONDITION);
        task.resume(id).unwrap();
        task.resume(id).unwrap_err();

        task.kill(id, "", 9).unwrap();
        container.wait();
        let finished = task.kill(id, "", 9).unwrap_err();
        assert_eq!(finished.code(), Code::NOT_FOUND);
        assert!(finished.to_string().contains("process already finished"), "{finished}");
        assert_eq!(code(container.exec("x", &["true"], &none)), Code::FAILED_PRECONDITION);
        assert_eq!(code(task.start(id, "")), Code::FAILED_PRECONDITION);
        assert_eq!(code(task.create(&again)), Code::ALREADY_EXISTS);
        task.pause(id).unwrap_err();
        task.delete(id, "").unwrap();
        container.shim.shut_down();
    }

    /// Arguments that make no sense.
    fn invalid_arguments(player: &Player) {
        let container = player.sleeper();
        let (id, task, none) = (container.id(), &container.task, Fifos::none());
        for signal in [65, 1000, u32::MAX] {
            assert_eq!(code(task.kill(id, "", signal)), Code::INVALID_ARGUMENT, "{signal}");
        }
        task.kill(id, "", 0).unwrap();
        task.kill_all(id, 0).unwrap();
        // Without a terminal there is nothing to resize, which is no error.
        task.resize(id, "", (80, 24)).unwrap();
        let exec = |spec: &[u8]| {
            task.exec(&ExecProcessRequest {
                id: id.to_owned(),
                exec_id: "e".to_owned(),
                spec: Some(Any { value: spec.to_vec(), ..any("Process", &json!({})) }).into(),
                ..ExecProcessRequest::default()
            })
        };
        for spec in ["", "{", "[]", "7", "{\"args\": 3}"] {
            let refused = exec(spec.as_bytes()).and_then(|_| task.start(id, "e").map(drop));
            assert_eq!(code(refused), Code::INVALID_ARGUMENT, "{spec:?}");
            let _ = task.delete(id, "e");
        }
        assert_eq!(code(container.exec("", &["true"], &none)), Code::INVALID_ARGUMENT);
        let malformed = Any { value: b"{".to_vec(), ..resources(&json!({})) };
        assert_eq!(code(task.update(id, malformed)), Code::INVALID_ARGUMENT);
        let empty = task.call::<Empty>("Update", &containerd_shim_protos::api::UpdateTaskRequest {
            id: id.to_owned(),
            ..Default::default()
        });
        assert_eq!(code(empty), Code::INVALID_ARGUMENT);

        let terminal = Fifos::terminal(player);
        container.exec("t", &["sleep", "3600"], &terminal).unwrap();
        let _output = terminal.read();
        let size = |width, height| task.call::<Empty>("ResizePty", &ResizePtyRequest {
            id: id.to_owned(),
            exec_id: "t".to_owned(),
            width,
            height,
            ..ResizePtyRequest::default()
        });
        size(80, 24).unwrap();
        task.start(id, "t").unwrap();
        size(132, 50).unwrap();
        assert_eq!(code(size(70_000, 24)), Code::INVALID_ARGUMENT);
        container.remove();
    }

    /// What this runtime does not do is said so, by a code that is not taken for an older version where
    /// containerd would.
    fn not_done_here(player: &Player) {
        let shim = player.bundle(Program::new(["true"])).start();
        let mut request = shim.create_request(&Fifos::none());
        request.checkpoint = "/tmp/checkpoint".to_owned();
        let refused = shim.task.create(&request).unwrap_err();
        assert_ne!(refused.code(), Code::UNIMPLEMENTED);
        assert!(refused.to_string().contains("checkpoint"), "{refused}");
        let container = shim.create(&Fifos::none());
        container.start();
        assert_eq!(code(container.task.checkpoint(container.id())), Code::UNIMPLEMENTED);
        let none = container.task.call::<Empty>("Levitate", &Empty::new());
        assert_eq!(code(none), Code::UNIMPLEMENTED);
        container.task.call_service::<Empty>("containerd.task.v1.Task", "Connect", &Empty::new())
            .unwrap_err();
        container.remove();
    }

    /// Programs that cannot be executed: the words are those by which Docker reports 126 and 127. The
    /// same for an exec, and for a container, which is refused when it is created.
    fn programs_that_cannot_be(player: &Player) {
        let cases = [
            ("nope", r#"exec: "nope": executable file not found in $PATH"#),
            ("/no/such", r#"exec: "/no/such": stat /no/such: no such file or directory"#),
            ("/etc/plain", r#"exec: "/etc/plain": permission denied"#),
            ("/etc", r#"exec: "/etc": is a directory"#),
            ("/etc/plain/x", r#"exec: "/etc/plain/x": stat /etc/plain/x: not a directory"#),
        ];
        let container = player.sleeper();
        for (index, (program, words)) in cases.iter().enumerate() {
            let refused = refused_exec(&container, &format!("e{index}"), process(program));
            assert!(refused.contains(words), "{program}: {refused}");
        }
        let directories = [("/no/such", "no such file or directory"), ("/etc/plain", "not a directory")];
        for (index, (cwd, words)) in directories.into_iter().enumerate() {
            let mut elsewhere = process("true");
            elsewhere["cwd"] = json!(cwd);
            let refused = refused_exec(&container, &format!("cwd{index}"), elsewhere);
            assert!(refused.contains("chdir") && refused.contains(words), "{refused}");
        }
        let mut relative = process("true");
        relative["cwd"] = json!("relative");
        refused_exec(&container, "relative", relative);
        let mut nobody = process("true");
        nobody["user"]["uid"] = json!("somebody");
        let refused = refused_exec(&container, "user", nobody);
        assert!(refused.contains("uid") || refused.contains("somebody"), "{refused}");
        let mut empty = process("true");
        empty["args"] = json!([]);
        refused_exec(&container, "empty", empty);
        // None of that has harmed the container.
        assert_eq!(container.run("true", &["true"]), 0);
        container.remove();

        for (program, words) in &cases[..3] {
            let shim = player.bundle(Program::new([*program])).start();
            let refused = shim.task.create(&shim.create_request(&Fifos::none())).unwrap_err();
            assert!(refused.to_string().contains(words), "{program}: {refused}");
            assert_eq!(code(shim.task.state(&shim.bundle.id, "")), Code::NOT_FOUND);
            shim.shut_down();
        }
    }

    /// Streams that cannot be opened, and roots that are not there, are refused by name.
    fn streams_and_roots_that_cannot_be(player: &Player) {
        let container = player.sleeper();
        let exec = |exec_id: &str, uri: &str| {
            let request = ExecProcessRequest {
                id: container.id().to_owned(),
                exec_id: exec_id.to_owned(),
                stdout: uri.to_owned(),
                spec: Some(any("Process", &process("true"))).into(),
                ..ExecProcessRequest::default()
            };
            let refused = container.task.exec(&request).and_then(|_| {
                container.task.start(container.id(), exec_id).map(drop)
            });
            refused.unwrap_err().to_string()
        };
        for (index, uri) in ["/no/such/fifo", "gopher://x/y", "file://relative/file"].iter().enumerate() {
            let refused = exec(&format!("e{index}"), uri);
            assert!(refused.contains(uri), "{refused}");
        }
        container.remove();

        let shim = player.bundle(Program::new(["true"])).start();
        let mut request = shim.create_request(&Fifos::none());
        request.rootfs[0].source = "/no/such/root".to_owned();
        let refused = shim.task.create(&request).unwrap_err().to_string();
        assert!(refused.contains("rootfs[0]") && refused.contains("no such file"), "{refused}");
        shim.shut_down();
    }
}
