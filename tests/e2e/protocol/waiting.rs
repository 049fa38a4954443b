//! Waiting for the ends of processes: before, after, and for what never ran.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use thaw_tests::player::{Api, CallError, Fifo, Fifos, Player, Program};
use ttrpc::Code;

use super::on_shim;

/// Whether a call came after all was over.
fn is_unknown<Answer>(called: &Result<Answer, CallError>) -> bool {
    matches!(called, Err(error) if error.code() == Code::NOT_FOUND)
}

/// Whoever waits is told something, or comes too late; nobody is left waiting.
#[track_caller]
fn assert_told(waited: Result<u32, CallError>) {
    assert!(waited.is_ok() || is_unknown(&waited), "{waited:?}");
}

on_shim! {
    /// All who wait are told the same, whether they came before the start, while it ran, or afterwards.
    fn many_at_once(player: &Player) {
        let fifos = Fifos::new(player);
        let container = player.bundle(Program::shell("read line; exit 3")).start().create(&fifos);
        let id = container.id();
        let wait = |api: Api| {
            let (task, id) = (container.shim.connect(api), id.to_owned());
            std::thread::spawn(move || task.wait(&id, "").unwrap())
        };
        let mut waiters = vec![wait(Api::V2), wait(Api::V3), wait(Api::V3)];
        container.start();
        waiters.extend([wait(Api::V2), wait(Api::V3)]);
        std::io::Write::write_all(&mut fifos.write(), b"go\n").unwrap();
        let ended = container.wait();
        assert_eq!(ended.exit_status, 3);
        assert!(ended.exited_at.seconds > 0);
        waiters.push(wait(Api::V2));
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), ended);
        }
        container.remove();
    }

    /// Whoever waits for a container whose creation then fails is told so.
    fn for_a_creation_that_fails(player: &Player) {
        // The logger holds the creation until the test lets it go on.
        let directory = player.directory();
        let gate = Fifo::new(&directory.path().join("gate"));
        let logger = directory.path().join("logger");
        let script = format!("#!/bin/sh\nread line < {}/gate\nexec 5>&-\nexec cat <&3 >/dev/null\n",
            directory.path().display());
        fs::write(&logger, script).unwrap();
        fs::set_permissions(&logger, fs::Permissions::from_mode(0o755)).unwrap();
        let shim = player.bundle(Program::new(["/no/such/program"])).start();
        let mut request = shim.create_request(&Fifos::none());
        request.stdout = format!("binary://{}", logger.display());
        let id = shim.bundle.id.clone();
        let (task, creating) = (shim.connect(Api::V3), shim.task.clone());
        let creation = std::thread::spawn(move || creating.create(&request));
        while task.connect(&id).unwrap().task_pid == 0 {}
        let waiter = {
            let (task, id) = (task.clone(), id.clone());
            std::thread::spawn(move || task.wait(&id, ""))
        };
        // On the same connection, so that the wait is under way when this is answered, or nearly.
        task.state(&id, "").unwrap();
        std::io::Write::write_all(&mut gate.write(), b"go\n").unwrap();
        let refused = creation.join().unwrap().unwrap_err();
        assert!(refused.to_string().contains("no such file or directory"), "{refused}");
        let waited = waiter.join().unwrap();
        assert!(waited.as_ref().is_ok_and(|ended| ended.exit_status == 137) || is_unknown(&waited), "{waited:?}");
        shim.shut_down();
    }

    /// An exec can be waited for before its start; when it is never started, whatever ends it is told.
    fn for_execs(player: &Player) {
        let container = player.sleeper();
        let (id, none) = (container.id(), Fifos::none());
        let wait = |exec_id: &'static str| {
            let (task, id) = (container.task.clone(), id.to_owned());
            std::thread::spawn(move || task.wait(&id, exec_id).map(|answer| answer.exit_status))
        };
        container.exec("before", &["sh", "-c", "exit 4"], &none).unwrap();
        let before = wait("before");
        container.task.start(id, "before").unwrap();
        assert_eq!(before.join().unwrap().unwrap(), 4);
        assert_eq!(container.task.wait(id, "before").unwrap().exit_status, 4);

        container.exec("broken", &["/no/such/program"], &none).unwrap();
        let broken = wait("broken");
        container.task.start(id, "broken").unwrap_err();
        assert_ne!(broken.join().unwrap().unwrap(), 0);

        container.exec("unstarted", &["true"], &none).unwrap();
        let unstarted = wait("unstarted");
        container.task.state(id, "unstarted").unwrap();
        container.task.delete(id, "unstarted").unwrap();
        assert_told(unstarted.join().unwrap());

        // Those that the container does not outlive.
        container.exec("late", &["true"], &none).unwrap();
        let late = wait("late");
        container.exec("running", &["sleep", "3600"], &none).unwrap();
        container.task.start(id, "running").unwrap();
        container.task.kill(id, "", 9).unwrap();
        container.wait();
        assert_eq!(container.task.wait(id, "running").unwrap().exit_status, 137);
        assert_eq!(container.task.start(id, "late").unwrap_err().code(), Code::FAILED_PRECONDITION);
        container.task.delete(id, "").unwrap();
        assert_told(late.join().unwrap());
        container.shim.shut_down();
    }
}
