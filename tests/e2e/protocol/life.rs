//! From the creation of a container to the end of its shim, in the right order and in others.

use std::sync::Barrier;

use thaw_tests::player::{Api, Fifos, Player, Program, Signal, send, wait_gone};
use ttrpc::Code;

use super::on_shim;

/// SIGKILL.
const KILL: u32 = 9;

on_shim! {
    /// Both versions of the task service are one: what one of them does the other one sees.
    fn both_versions_see_the_same(player: &Player) {
        let container = player.created(Program::new(["sleep", "3600"]));
        let (v2, v3) = (container.task.with(Api::V2), container.shim.connect(Api::V3));
        let id = container.id();
        let same = |status: &str| {
            let (ours, theirs) = (v2.state(id, "").unwrap(), v3.state(id, "").unwrap());
            assert_eq!(ours, theirs);
            assert_eq!(format!("{:?}", ours.status.unwrap()), status);
            assert_eq!((ours.id.as_str(), ours.pid), (id, container.pid));
            assert_eq!(ours.bundle, container.shim.bundle.path.to_str().unwrap());
            assert_eq!(v2.pids(id).unwrap(), v3.pids(id).unwrap());
            assert_eq!(v2.connect(id).unwrap(), v3.connect(id).unwrap());
        };
        same("CREATED");
        v3.start(id, "").unwrap();
        same("RUNNING");
        container.exec("e", &["sleep", "3600"], &Fifos::none()).unwrap();
        v2.start(id, "e").unwrap();
        v3.kill(id, "e", KILL).unwrap();
        assert_eq!(v2.wait(id, "e").unwrap(), v3.wait(id, "e").unwrap());
        v3.delete(id, "e").unwrap();
        assert_eq!(v2.state(id, "e").unwrap_err().code(), Code::NOT_FOUND);
        v2.kill(id, "", KILL).unwrap();
        let (ours, theirs) = (v2.wait(id, "").unwrap(), v3.wait(id, "").unwrap());
        assert_eq!((&ours, ours.exit_status), (&theirs, 137));
        same("STOPPED");
        v3.delete(id, "").unwrap();
        assert_eq!(v2.state(id, "").unwrap_err().code(), Code::NOT_FOUND);
        container.shim.shut_down();
    }

    /// A running container is not deleted; a stopped one is, once; one that was never started is too.
    fn deletions(player: &Player) {
        let container = player.sleeper();
        let (id, task) = (container.id(), &container.task);
        assert_eq!(task.delete(id, "").unwrap_err().code(), Code::FAILED_PRECONDITION);
        container.exec("e", &["sleep", "3600"], &Fifos::none()).unwrap();
        task.start(id, "e").unwrap();
        assert_eq!(task.delete(id, "e").unwrap_err().code(), Code::FAILED_PRECONDITION);
        // Neither has been harmed.
        assert_eq!(container.status(), "RUNNING");
        assert_eq!(container.run("f", &["true"]), 0);
        task.kill(id, "", KILL).unwrap();
        let ended = container.wait();
        assert_eq!(task.wait(id, "e").unwrap().exit_status, 137);
        let deleted = task.delete(id, "").unwrap();
        assert_eq!((deleted.pid, deleted.exit_status), (container.pid, 137));
        assert_eq!(deleted.exited_at, ended.exited_at);
        assert_eq!(task.delete(id, "").unwrap_err().code(), Code::NOT_FOUND);
        container.shim.shut_down();

        let created = player.created(Program::new(["true"]));
        let deleted = created.task.delete(created.id(), "").unwrap();
        assert_eq!(deleted.pid, created.pid);
        created.shim.shut_down();
    }

    /// Of two deletions at the same time one does it.
    fn two_deletions_at_once(player: &Player) {
        let container = player.running(Program::new(["true"]));
        container.wait();
        let ready = Barrier::new(2);
        let results = std::thread::scope(|scope| {
            let deletions = [Api::V2, Api::V3].map(|api| {
                let (task, ready) = (container.shim.connect(api), &ready);
                let id = container.id();
                scope.spawn(move || {
                    ready.wait();
                    task.delete(id, "")
                })
            });
            deletions.map(|deletion| deletion.join().unwrap())
        });
        let refused: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
        assert_eq!(refused.len(), 1, "{results:?}");
        assert_eq!(refused[0].code(), Code::NOT_FOUND);
        container.shim.shut_down();
    }

    /// The shim stays while it has a container, whoever asks it to end, and ends when it has none.
    fn shutdown(player: &Player) {
        let container = player.sleeper();
        container.task.shutdown(container.id()).unwrap();
        container.task.shutdown("another").unwrap();
        assert_eq!(container.run("e", &["true"]), 0);
        container.task.kill(container.id(), "", KILL).unwrap();
        container.wait();
        // It may still be asked how the container has ended.
        container.task.shutdown(container.id()).unwrap();
        assert_eq!(container.status(), "STOPPED");
        container.task.delete(container.id(), "").unwrap();
        container.shim.shut_down();
        // Before there is one at all.
        player.bundle(Program::new(["true"])).start().shut_down();
    }

    /// A killed shim takes VMM and anchor with it, and `delete` tells the exit that nobody has seen,
    /// once; then there is nothing to tell.
    fn shim_killed(player: &Player) {
        let container = player.sleeper();
        let processes = container.processes();
        container.kill_shim();
        for pid in [processes.vmm, processes.anchor] {
            wait_gone(pid);
        }
        let deleted = container.shim.bundle.delete();
        assert_eq!((deleted.pid, deleted.exit_status), (container.pid, 137));
        assert!(deleted.exited_at.seconds > 0);
        let deleted = container.shim.bundle.delete();
        assert_eq!((deleted.pid, deleted.exit_status), (0, 137));
    }

    /// What a container has ended with is told by `delete` although its shim is killed afterwards.
    fn shim_killed_after_the_end(player: &Player) {
        let container = player.running(Program::shell("exit 7"));
        let ended = container.wait();
        container.kill_shim();
        let deleted = container.shim.bundle.delete();
        assert_eq!((deleted.pid, deleted.exit_status), (container.pid, 7));
        assert_eq!(deleted.exited_at, ended.exited_at);
    }

    /// A shim that was killed with a container in the making, and one with none, leave nothing.
    fn shim_killed_while_it_creates(player: &Player) {
        let shim = player.bundle(Program::new(["true"])).start();
        send(shim.pid(), Signal::KILL);
        assert_eq!(shim.bundle.delete().exit_status, 137);

        let shim = player.bundle(Program::new(["true"])).start();
        let (task, request) = (shim.connect(Api::V3), shim.create_request(&Fifos::none()));
        let creation = std::thread::spawn(move || task.create(&request).map(drop));
        send(shim.pid(), Signal::KILL);
        // Whatever came of it in time.
        let _ = creation.join().unwrap();
        assert_eq!(shim.bundle.delete().exit_status, 137);
    }

    /// `delete` for a container whose shim lives ends both, and the id can be used again.
    fn delete_program_beside_a_living_shim(player: &Player) {
        let container = player.sleeper();
        let (shim, id) = (container.shim.pid(), container.id().to_owned());
        let deleted = container.shim.bundle.delete();
        assert_eq!((deleted.pid, deleted.exit_status), (container.pid, 137));
        wait_gone(shim);
        let again = container.shim.bundle.start();
        assert_eq!(again.bundle.id, id);
        let again = again.create(&Fifos::none());
        again.start();
        again.remove();
    }

    /// Connections come and go, as with a containerd that restarts; what was asked for on one of them is
    /// done all the same.
    fn reconnection(player: &Player) {
        let fifos = Fifos::new(player);
        let shim = player.bundle(Program::shell("read line; exit 5")).start();
        let id = shim.bundle.id.clone();
        // The client goes away in the middle of the creation, once it has been received.
        let request = shim.create_request(&fifos);
        let (broken, task) = (shim.connect(Api::V3), shim.connect(Api::V3));
        let creating = broken.clone();
        let creation = std::thread::spawn(move || creating.create(&request).map(drop));
        while task.connect(&id).unwrap().task_pid == 0 {}
        broken.hang_up();
        // Unanswered, unless it was quicker than that.
        let _ = creation.join().unwrap();
        assert_eq!(task.state(&id, "").unwrap().id, id);
        assert_eq!(task.pids(&id).unwrap().processes.len(), 1);
        // The creation goes on all the same: until it is through a start is refused.
        loop {
            match task.start(&id, "") {
                Ok(_) => break,
                Err(error) => assert_eq!(error.code(), Code::FAILED_PRECONDITION, "{error}"),
            }
        }
        // A wait on a connection that closes disturbs no other.
        let (broken, waited) = (shim.connect(Api::V2), id.clone());
        let waiter = broken.clone();
        let wait = std::thread::spawn(move || waiter.wait(&waited, "").map(drop));
        broken.state(&id, "").unwrap();
        broken.hang_up();
        assert!(wait.join().unwrap().is_err());
        let task = shim.connect(Api::V2);
        std::io::Write::write_all(&mut fifos.write(), b"go\n").unwrap();
        assert_eq!(task.wait(&id, "").unwrap().exit_status, 5);
        task.delete(&id, "").unwrap();
        shim.shut_down();
    }

    /// While the guest stands still, what is answered from memory is answered.
    fn guest_stands_still(player: &Player) {
        let container = player.sleeper();
        let (id, task) = (container.id(), &container.task);
        let vmm = container.processes().vmm;
        send(vmm, Signal::STOP);
        let asleep = {
            let (task, id) = (task.clone(), id.to_owned());
            std::thread::spawn(move || task.wait(&id, "").map(|answer| answer.exit_status))
        };
        for api in [Api::V2, Api::V3] {
            let task = container.shim.connect(api);
            assert_eq!(task.state(id, "").unwrap().pid, container.pid);
            assert_eq!(task.pids(id).unwrap().processes[0].pid, container.pid);
            assert_eq!(task.connect(id).unwrap().task_pid, container.pid);
            assert_eq!(task.state(id, "none").unwrap_err().code(), Code::NOT_FOUND);
            task.shutdown(id).unwrap();
        }
        assert!(!asleep.is_finished());
        send(vmm, Signal::CONT);
        assert_eq!(container.run("e", &["true"]), 0);
        task.kill(id, "", KILL).unwrap();
        assert_eq!(asleep.join().unwrap().unwrap(), 137);
        container.remove();
    }

    /// Connect tells the pids there are, and is never refused.
    fn connect(player: &Player) {
        let container = player.sleeper();
        let connected = container.task.connect(container.id()).unwrap();
        assert_eq!(connected.task_pid, container.pid);
        assert!(!connected.version.is_empty());
        let other = container.task.connect("another").unwrap();
        assert_eq!((other.shim_pid, other.task_pid), (connected.shim_pid, 0));
        container.remove();
    }
}
