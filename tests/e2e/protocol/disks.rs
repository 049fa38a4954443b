//! Images and block devices of the host as disks of a guest, and the devices that it has of its own.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use containerd_shim_protos::api::Mount;
use nix::sys::stat::{major, minor};
use serde_json::{Value, json};
use thaw_tests::finish;
use thaw_tests::player::{Player, Program, root_directory};

use super::{on_shim, run};

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

/// A file as the host's block device.
struct Loop(PathBuf);

impl Loop {
    #[track_caller]
    fn new(file: &Path) -> Self {
        finish(Command::new("/usr/sbin/modprobe").arg("loop")).succeeded();
        let mut command = Command::new("/usr/sbin/losetup");
        let made = finish(command.args(["--find", "--show"]).arg(file)).succeeded();
        let path = PathBuf::from(made.stdout().trim());
        let made = fs::metadata(&path).unwrap();
        assert!(made.file_type().is_block_device(), "{}", path.display());
        Self(path)
    }

    fn numbers(&self) -> (u64, u64) {
        let number = fs::metadata(&self.0).unwrap().rdev();
        (major(number), minor(number))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        finish(Command::new("/usr/sbin/losetup").arg("-d").arg(&self.0));
    }
}

fn device(path: &str, kind: &str, (major, minor): (u64, u64)) -> Value {
    json!({ "path": path, "type": kind, "major": major, "minor": minor, "fileMode": 0o666 })
}

fn rule(kind: &str, (major, minor): (u64, u64), access: &str) -> Value {
    json!({ "allow": true, "type": kind, "major": major, "minor": minor, "access": access })
}

const FUSE: (u64, u64) = (10, 229);
const TUN: (u64, u64) = (10, 200);

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

    /// Block devices of the host, as a device and as the source of a mount; the guest's own character
    /// devices.
    fn devices(player: &Player) {
        let directory = player.directory();
        let content = directory.path().join("content");
        fs::create_dir(&content).unwrap();
        fs::write(content.join("file"), "in the image\n").unwrap();
        let image = directory.path().join("image");
        make_image(&image, &content);
        let raw = directory.path().join("raw");
        fs::write(&raw, format!("{:<4096}", "on the device")).unwrap();
        let (image, disk) = (Loop::new(&image), Loop::new(&raw));
        let line = "head -c 13 /dev/data; echo; printf written | dd of=/dev/data conv=notrunc 2> /dev/null; \
                    cat /data/file; (echo x > /data/x) 2>&1 | grep -o 'Read-only file system'; \
                    (exec 3<> /dev/fuse) && echo fuse; (exec 3<> /dev/net/tun) && echo tun";
        let program = Program::shell(line).with(|spec| {
            spec["mounts"].as_array_mut().unwrap().push(json!({
                "destination": "/data", "type": "ext4", "source": image.0, "options": ["ro"],
            }));
            spec["linux"]["devices"] = json!([
                device("/dev/data", "b", disk.numbers()), device("/dev/fuse", "c", FUSE),
                device("/dev/net/tun", "c", TUN),
            ]);
            spec["linux"]["resources"]["devices"] = json!([
                { "allow": false, "access": "rwm" },
                rule("c", (1, 3), "rwm"), rule("c", FUSE, "rwm"), rule("c", TUN, "rwm"),
                rule("b", disk.numbers(), "rwm"),
            ]);
        });
        let said = run(player, program, None);
        assert_eq!(said, "on the device\nin the image\nRead-only file system\nfuse\ntun\n");
        drop(disk);
        let raw = fs::read_to_string(&raw).unwrap();
        assert_eq!(raw.get(..14), Some("writtendevice "));
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
