//! Templates are a cache: a damaged one is replaced, a missing one is made, once.

use std::fs::{self, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use nix::unistd::{Whence, lseek};
use thaw_tests::{Testbed, Version, on_containerd, thaw};

/// Does damage to the template, and shows that a container runs then, from a new template.
fn survives(name: &str, damage: impl FnOnce(&Path)) {
    on_containerd(Version::V2_1, name, |bed| {
        // Whatever other tests have made of it.
        bed.run().command(["true"]).output().succeeded();
        let template = thaw::template();
        let before = identities(&template);
        damage(&template);
        let run = bed.run().command(["echo", "runs"]).output().succeeded();
        assert_eq!(run.stdout(), "runs\n");
        let after = identities(&thaw::template());
        assert!(
            before.iter().all(|file| !after.contains(file)),
            "{before:?} {after:?}"
        );
        thaw::thaw(&["template", "verify"]).succeeded();
        // And the next one is satisfied with the new one.
        bed.run().command(["true"]).output().succeeded();
        assert_eq!(identities(&thaw::template()), after);
    });
}

/// Which files a template consists of.
fn identities(template: &Path) -> Vec<(u64, i64, i64)> {
    let identity = |name: &str| {
        let metadata =
            fs::metadata(template.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        (metadata.ino(), metadata.mtime(), metadata.mtime_nsec())
    };
    ["manifest.json", "state", "memory"].map(identity).to_vec()
}

/// Changes one byte, in the first part of the file that is not a hole.
fn flip_a_byte(path: &Path) {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .expect("root may");
    let data = lseek(file.as_fd(), 0, Whence::SeekData).expect("it is not all holes");
    let offset = data.cast_unsigned() + 100;
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset)
        .expect("it is that long");
    file.write_all_at(&[!byte[0]], offset).expect("root may");
}

fn truncate_to_half(path: &Path) {
    let file = OpenOptions::new().write(true).open(path).expect("root may");
    let length = file.metadata().expect("it is open").len();
    file.set_len(length / 2).expect("root may");
}

#[test]
fn memory_truncated() {
    survives("memory-truncated", |template| {
        truncate_to_half(&template.join("memory"))
    });
}

#[test]
fn memory_with_another_byte() {
    survives("memory-flipped", |template| {
        flip_a_byte(&template.join("memory"))
    });
}

#[test]
fn state_truncated() {
    survives("state-truncated", |template| {
        truncate_to_half(&template.join("state"))
    });
}

#[test]
fn state_with_another_byte() {
    survives("state-flipped", |template| {
        flip_a_byte(&template.join("state"))
    });
}

#[test]
fn state_missing() {
    survives("state-missing", |template| {
        fs::remove_file(template.join("state")).expect("root may")
    });
}

#[test]
fn manifest_truncated() {
    survives("manifest-truncated", |template| {
        truncate_to_half(&template.join("manifest.json"))
    });
}

/// A manifest of another guest: well-formed, and its directory's name is not its key.
#[test]
fn manifest_of_another_key() {
    survives("other-key", |template| {
        let path = template.join("manifest.json");
        let text = fs::read_to_string(&path).expect("it is text");
        let mut manifest: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
        let line = &mut manifest["inputs"]["command_line"];
        let text = line
            .as_str()
            .expect("the guest's command line is part of the key");
        *line = format!("{text} other").into();
        fs::write(&path, manifest.to_string()).expect("root may");
    });
}

/// Two first starts at once make one template, and both run from it.
#[test]
fn two_first_starts() {
    on_containerd(Version::V2_1, "two-first-starts", |bed: &Testbed| {
        for template in thaw::templates() {
            fs::remove_dir_all(template).expect("root may");
        }
        let runs = [bed.run(), bed.run()].map(|run| run.command(["sleep", "3600"]));
        let containers = std::thread::scope(|scope| {
            let started = runs.map(|run| scope.spawn(|| run.detach()));
            started.map(|container| container.join().expect("it starts"))
        });
        let memory = fs::metadata(thaw::template().join("memory"))
            .expect("a template has it")
            .ino();
        for container in containers {
            let vmm = thaw::processes(&container.id).vmm;
            let maps = fs::read_to_string(format!("/proc/{vmm}/maps")).expect("the VMM runs");
            let inode = format!(" {memory} ");
            assert!(
                maps.lines()
                    .any(|line| line.ends_with("/memory") && line.contains(&inode)),
                "{inode}: {maps}"
            );
        }
    });
}
