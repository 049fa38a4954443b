//! Several containers in one sandbox: with thaw in one VM, with runc under one shim. What is done to
//! one is done to that one only.

use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use thaw_tests::{
    Container, Environment, Run, Testbed, Version, finish, on_containerd, on_each_containerd, thaw,
};

/// A container of the group, that is to be run.
fn member<'a>(bed: &'a Testbed, group: &str) -> Run<'a> {
    bed.run().options([
        "--annotation",
        &format!("io.containerd.runc.v2.group={group}"),
    ])
}

/// One that sleeps, to run programs in.
fn sleeper<'a>(bed: &'a Testbed, group: &str) -> Container<'a> {
    member(bed, group).command(["sleep", "3600"]).detach()
}

/// A program can be run in it.
#[track_caller]
fn assert_answers(container: &Container<'_>) {
    let said = container.exec(["echo", "here"]).succeeded().stdout();
    assert_eq!(said, "here\n", "{}", container.id);
}

/// With thaw: the group is the only sandbox, and these are its containers.
#[track_caller]
fn assert_members(group: &str, members: &[&Container<'_>]) {
    if !Environment::get().is_thaw() {
        return;
    }
    assert_eq!(thaw::sandboxes(), [group]);
    let mut ids: Vec<_> = members.iter().map(|member| member.id.clone()).collect();
    ids.sort();
    assert_eq!(thaw::containers(group), ids);
}

fn kill_process(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL)
        .unwrap_or_else(|error| panic!("killing {pid}: {error}"));
}

on_each_containerd! {
    /// They share a kernel and nothing else; either can go, and come again.
    fn come_and_go(bed: &Testbed) {
        let group = bed.next_name("group");
        let (one, two) = (sleeper(bed, &group), sleeper(bed, &group));
        assert_members(&group, &[&one, &two]);
        assert_ne!(one.pid(), two.pid());
        let boot = |container: &Container<'_>| {
            container.exec(["cat", "/proc/sys/kernel/random/boot_id"]).succeeded().stdout()
        };
        assert_eq!(boot(&one), boot(&two));
        one.exec_shell("echo one > /tmp/file").succeeded();
        two.exec_shell("test ! -e /tmp/file && echo two > /tmp/file").succeeded();
        assert_eq!(one.exec(["cat", "/tmp/file"]).succeeded().stdout(), "one\n");
        let processes = one.exec_shell("ls -d /proc/[0-9]* | wc -l").succeeded().stdout();
        let count: u32 = processes.trim().parse().expect("it is a number");
        assert!(count < 8, "{count} processes are seen where there are four");

        let name = two.id.clone();
        two.signal("KILL").succeeded();
        assert_eq!(two.ended(), 137);
        two.remove();
        assert_answers(&one);
        assert_members(&group, &[&one]);

        let again = member(bed, &group).named(&name).command(["sleep", "3600"]).detach();
        assert_answers(&again);
        again.exec_shell("test ! -e /tmp/file").succeeded();
        let id = one.id.clone();
        one.remove();
        assert_answers(&again);
        // The group is named after none of them, so that it goes on without the first.
        let first = member(bed, &group).named(&id).command(["sleep", "3600"]).detach();
        assert_members(&group, &[&again, &first]);
        assert_answers(&first);
        first.remove();
        assert_answers(&again);
        again.remove();
        bed.assert_clean("all have gone");
    }
}

/// Started at the same time, and removed one after the other.
#[test]
fn five_at_once() {
    on_containerd(Version::V2_1, "five-at-once", |bed| {
        let group = bed.next_name("group");
        let runs: Vec<_> = (0..5)
            .map(|_| member(bed, &group).command(["sleep", "3600"]))
            .collect();
        let started: Vec<_> = runs
            .iter()
            .map(|run| {
                let mut command = run.to_command(&["--detach"]);
                // What runs on keeps whatever it is given open.
                command
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .spawn()
                    .expect("ctr is there")
            })
            .collect();
        for mut ctr in started {
            assert!(ctr.wait().expect("it is our child").success());
        }
        let mut containers: Vec<_> = runs.into_iter().map(Run::detached).collect();
        assert_members(&group, &containers.iter().collect::<Vec<_>>());
        while let Some(container) = containers.pop() {
            containers.iter().for_each(assert_answers);
            container.remove();
        }
        bed.assert_clean("all have gone");
    });
}

/// What cannot be started leaves the others as they were, and its name free.
#[test]
fn one_fails() {
    on_containerd(Version::V1_6, "one-fails", |bed| {
        let group = bed.next_name("group");
        let one = sleeper(bed, &group);
        let run = member(bed, &group).command(["/no/such/program"]);
        let failed = run.output();
        assert_ne!(failed.code, 0, "{failed}");
        assert_members(&group, &[&one]);
        assert_answers(&one);
        let ran = member(bed, &group)
            .named(run.id())
            .command(["echo", "again"]);
        assert_eq!(ran.output().succeeded().stdout(), "again\n");
        // It ends by itself while the other runs.
        member(bed, &group).shell("exit 7").output().ended_with(7);
        assert_answers(&one);
        one.remove();
    });
}

/// Namespaces of one that another is to be in.
#[test]
fn shared_namespaces() {
    on_containerd(Version::V1_7, "shared-namespaces", |bed| {
        let group = bed.next_name("group");
        let one = sleeper(bed, &group);
        let pid = one.pid();
        let kinds = ["ipc", "uts", "pid"];
        let join = kinds.iter().flat_map(|kind| {
            [
                "--with-ns".to_owned(),
                format!("{kind}:/proc/{pid}/ns/{kind}"),
            ]
        });
        let two = member(bed, &group)
            .options(join)
            .command(["sleep", "3600"])
            .detach();
        let show = "for kind in ipc uts pid; do readlink /proc/self/ns/$kind; done";
        assert_eq!(
            one.exec_shell(show).succeeded().stdout(),
            two.exec_shell(show).succeeded().stdout()
        );
        two.remove();
        assert_answers(&one);
        one.remove();
    });
}

/// What only thaw has: a VM, and a shim that is asked to delete while it lives.
mod vm {
    use super::*;

    /// Its end is told of each.
    #[test]
    fn killed_with_all_in_it() {
        on_containerd(Version::V2_1, "killed-with-all-in-it", |bed| {
            let group = bed.next_name("group");
            let containers = [
                sleeper(bed, &group),
                sleeper(bed, &group),
                sleeper(bed, &group),
            ];
            kill_process(thaw::sandbox(&group).vmm);
            for container in &containers {
                assert_eq!(container.ended(), 137);
            }
            containers.into_iter().for_each(Container::remove);
            bed.assert_clean("the VM was killed");
        });
    }

    /// The end of the shim is that of all it has served, and nothing is left.
    #[test]
    fn shim_killed_with_all_in_it() {
        on_containerd(Version::V1_6, "shim-killed-with-all-in-it", |bed| {
            let group = bed.next_name("group");
            let containers = [sleeper(bed, &group), sleeper(bed, &group)];
            kill_process(thaw::sandbox(&group).shim);
            // containerd removes the tasks itself, as soon as it notices.
            containers.into_iter().for_each(Container::remove);
            bed.assert_clean("the shim was killed");
            // The name is free.
            let again = sleeper(bed, &group);
            assert_answers(&again);
            again.remove();
        });
    }

    /// The program that containerd runs after each container ends that container and no other.
    #[test]
    fn one_deleted_by_the_shim_s_program() {
        on_containerd(Version::V1_7, "one-deleted-by-the-shim-s-program", |bed| {
            let group = bed.next_name("group");
            let (one, two) = (sleeper(bed, &group), sleeper(bed, &group));
            let delete = |id: &str| {
                let bundle = bed.containerd().bundles().join(&two.id);
                let program = Environment::get()
                    .prefix
                    .join("bin/containerd-shim-thaw-v2");
                let mut command = Command::new(program);
                let socket = bed.containerd().address();
                command
                    .args(["-namespace", thaw_tests::NAMESPACE, "-address"])
                    .arg(socket);
                command
                    .args(["-publish-binary", "/bin/true", "-id", id, "-bundle"])
                    .arg(&bundle);
                finish(command.arg("delete").current_dir(bundle)).succeeded();
            };
            delete("unknown");
            assert_answers(&one);
            assert_answers(&two);
            delete(&two.id);
            assert_eq!(two.ended(), 137);
            assert_answers(&one);
            two.remove();
            one.remove();
        });
    }
}
