//! Images of the host as disks of a guest, and devices that a guest cannot have.

use std::path::Path;
use std::process::Command;

use containerd_shim_protos::api::Mount;
use serde_json::{Value, json};
use thaw_tests::finish;
use thaw_tests::player::{Fifos, Player, Program, root_directory};

use super::on_shim;

/// An image of an ext4 file system with what is in `directory`.
#[track_caller]
fn make_image(image: &Path, directory: &Path) {
    let mut command = Command::new("/usr/sbin/mkfs.ext4");
    command
        .args(["-q", "-F", "-d"])
        .arg(directory)
        .arg(image)
        .arg("32M");
    finish(&mut command).succeeded();
}

/// Runs `program`, with `rootfs` as its root if that is given; what it has printed.
#[track_caller]
fn run(player: &Player, program: Program, rootfs: Option<Mount>) -> String {
    let fifos = Fifos::output(player);
    let shim = player.bundle(program).start();
    let mut request = shim.create_request(&fifos);
    if let Some(root) = rootfs {
        request.rootfs = vec![root];
    }
    let output = fifos.read();
    let id = shim.bundle.id.clone();
    if let Err(error) = shim.task.create(&request) {
        panic!("creating {id}: {error}");
    }
    shim.task
        .start(&id, "")
        .unwrap_or_else(|error| panic!("starting {id}: {error}"));
    let text = output.text();
    shim.task.wait(&id, "").unwrap();
    shim.task.delete(&id, "").unwrap();
    shim.shut_down();
    shim.bundle.delete();
    text
}

fn device(path: &str, kind: &str, (major, minor): (u64, u64)) -> Value {
    json!({ "path": path, "type": kind, "major": major, "minor": minor, "fileMode": 0o666 })
}

on_shim! {
    /// As the blockfile snapshotter has it: an image of ext4 that would be mounted by a loop device. What
    /// the container writes is in it when it is deleted, and a read-only one refuses it.
    fn image_as_root(player: &Player) {
        let directory = player.directory();
        let image = directory.path().join("image");
        make_image(&image, root_directory());
        let root = |option: &str| Mount {
            type_: "ext4".to_owned(),
            source: image.to_string_lossy().into_owned(),
            options: vec!["loop".to_owned(), option.to_owned()],
            ..Mount::default()
        };
        let line = "awk '$2 == \"/\" { print $3 }' /proc/mounts; echo content > /written";
        let program = Program::shell(line);
        assert_eq!(run(player, program, Some(root("rw"))), "ext4\n");
        let mut command = Command::new("/usr/sbin/debugfs");
        let read = finish(command.args(["-R", "cat /written"]).arg(&image)).succeeded();
        assert_eq!(read.stdout(), "content\n");
        let line = "cat /written; (echo x > /another) 2>&1 | grep -o 'Read-only file system'";
        let program = Program::shell(line);
        assert_eq!(run(player, program, Some(root("ro"))), "content\nRead-only file system\n");
    }

    /// What a guest cannot have is refused by name before anything is started.
    fn devices_of_the_host(player: &Player) {
        for (device, words) in [
            (device("/dev/kvm", "c", (10, 232)), "linux.devices[0]: /dev/kvm: a guest has no KVM"),
            (device("/dev/snd/timer", "c", (116, 33)), "linux.devices[0]: /dev/snd/timer"),
        ] {
            let program = Program::new(["true"]).with(|spec| spec["linux"]["devices"] = json!([device]));
            let started = player.bundle(program).try_start();
            assert!(started.code != 0 && started.stderr().contains(words), "{started}");
        }
    }
}
