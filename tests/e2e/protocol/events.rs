//! Events: their order, by either way, and that none is lost while containerd is away.

use serde_json::json;
use thaw_tests::player::{Container, Fifos, Mood, Player, Program, Publish, any};

use super::on_shim;

/// A life with everything that is told: an exec, a pause, and the end.
fn live(container: &Container<'_>) {
    let (id, task) = (container.id(), &container.task);
    container.start();
    container
        .exec("e", &["sh", "-c", "exit 3"], &Fifos::none())
        .unwrap();
    task.start(id, "e").unwrap();
    task.wait(id, "e").unwrap();
    task.pause(id).unwrap();
    task.resume(id).unwrap();
    task.kill(id, "", 9).unwrap();
    container.wait();
    task.delete(id, "").unwrap();
}

/// What is told of that.
fn life(id: &str) -> Vec<String> {
    [
        "create ID",
        "start ID",
        "exec-added ID e",
        "exec-started ID e",
        "exit ID e 3",
        "paused ID",
        "resumed ID",
        "exit ID ID 137",
        "delete ID 137",
    ]
    .map(|line| line.replace("ID", id))
    .to_vec()
}

/// The last of it.
fn end(id: &str) -> String {
    format!("delete {id} 137")
}

on_shim! {
    /// In the order of what happened, over containerd's socket, with everything in them.
    fn over_the_socket(player: &Player) {
        let container = player.created(Program::new(["sleep", "3600"]));
        let id = container.id().to_owned();
        let created = player.events().next();
        assert_eq!(created.namespace, thaw_tests::NAMESPACE);
        assert_eq!(created.topic, "/tasks/create");
        assert_eq!(created.type_url, "containerd.events.TaskCreate");
        let contents: containerd_shim_protos::events::task::TaskCreate = created.decode();
        assert_eq!((contents.pid, contents.container_id), (container.pid, id.clone()));
        assert_eq!(contents.bundle, container.shim.bundle.path.to_str().unwrap());
        assert_eq!(contents.rootfs.len(), 1);
        live(&container);
        assert_eq!(player.events().until(&end(&id)), life(&id)[1..]);
        container.shim.shut_down();
    }

    /// In the same order by executing a program, for containerds that have no such socket.
    fn by_a_program(player: &Player) {
        let publish = Publish::new(player);
        let bundle = player.bundle(Program::new(["sleep", "3600"])).publishing_to(&publish);
        let container = bundle.start().create(&Fifos::none());
        let id = container.id().to_owned();
        live(&container);
        assert_eq!(publish.until(&end(&id)), life(&id));
        container.shim.shut_down();
        // It fails for a while.
        publish.set_away(true);
        let bundle = player.bundle(Program::new(["sleep", "3600"])).publishing_to(&publish);
        let container = bundle.start().create(&Fifos::none());
        let id = container.id().to_owned();
        live(&container);
        publish.set_away(false);
        assert_eq!(publish.until(&end(&id)), life(&id));
        container.shim.shut_down();
    }

    /// containerd is slow, goes away, and comes back: everything arrives, in order. What it has not
    /// confirmed may arrive again.
    fn while_containerd_is_away(player: &Player) {
        for mood in [Mood::Silent, Mood::Absent] {
            player.events().set(mood);
            let container = player.created(Program::new(["sleep", "3600"]));
            let id = container.id().to_owned();
            live(&container);
            player.events().set(Mood::Answering);
            let mut lines = player.events().until(&end(&id));
            lines.dedup();
            assert_eq!(lines, life(&id), "{mood:?}");
            container.shim.shut_down();
        }
        // In the middle, several times.
        let container = player.created(Program::new(["sleep", "3600"]));
        let id = container.id().to_owned();
        player.events().set(Mood::Absent);
        container.start();
        player.events().set(Mood::Silent);
        container.task.kill(&id, "", 9).unwrap();
        container.wait();
        player.events().set(Mood::Absent);
        container.task.delete(&id, "").unwrap();
        player.events().set(Mood::Answering);
        let mut lines = player.events().until(&end(&id));
        lines.dedup();
        let whole = life(&id);
        assert_eq!(lines, [&whole[..2], &whole[7..]].concat());
        container.shim.shut_down();
    }

    /// A shim that ends while containerd is away ends all the same.
    fn containerd_never_comes_back(player: &Player) {
        player.events().set(Mood::Absent);
        let container = player.running(Program::new(["true"]));
        container.wait();
        container.remove();
    }

    /// What ends at once has started before it has ended, and the exits of all execs come before that of
    /// the container.
    fn exits_come_last(player: &Player) {
        let container = player.running(Program::new(["true"]));
        let id = container.id().to_owned();
        container.wait();
        container.task.delete(&id, "").unwrap();
        let lines = player.events().until(&format!("delete {id} 0"));
        let whole = ["create ID", "start ID", "exit ID ID 0", "delete ID 0"];
        assert_eq!(lines, whole.map(|line| line.replace("ID", &id)));
        container.shim.shut_down();

        let container = player.sleeper();
        let id = container.id().to_owned();
        let names: Vec<String> = (0..8).map(|number| format!("e{number}")).collect();
        for name in &names {
            container.exec(name, &["sleep", "3600"], &Fifos::none()).unwrap();
            container.task.start(&id, name).unwrap();
        }
        container.task.kill(&id, "", 9).unwrap();
        container.wait();
        let mut lines = player.events().until(&format!("exit {id} {id} 137"));
        lines.pop();
        for name in &names {
            assert!(lines.contains(&format!("exit {id} {name} 137")), "{name}: {lines:#?}");
        }
        container.remove();
    }

    /// A kill for want of memory is told before the exit that it is the reason for.
    fn memory_before_exit(player: &Player) {
        let fifos = Fifos::new(player);
        let program = Program::shell("read line; exec tail /dev/zero");
        let container = player.bundle(program).start().create(&fifos);
        let id = container.id().to_owned();
        container.start();
        let limit = json!({ "memory": { "limit": 16 << 20, "swap": 16 << 20 } });
        container.task.update(&id, any("LinuxResources", &limit)).unwrap();
        std::io::Write::write_all(&mut fifos.write(), b"go\n").unwrap();
        assert_eq!(container.wait().exit_status, 137);
        let lines = player.events().until(&format!("exit {id} {id} 137"));
        assert!(lines.contains(&format!("oom {id}")), "{lines:#?}");
        container.remove();
    }
}
