//! Which disks a container gets, and what is refused.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

use rustix::fs::{FileType, Mode, mknodat};
use serde_json::{Value, json};

use super::*;
use crate::spec::BundleSpec;

fn spec(json: Value) -> Spec {
    BundleSpec::parse(json.to_string().as_bytes()).unwrap().view
}

fn image(directory: &Path) -> String {
    let path = directory.join("image");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    path.to_str().unwrap().to_owned()
}

fn root(kind: &str, source: &str, options: &[&str]) -> [ApiMount; 1] {
    [ApiMount {
        type_: kind.into(),
        source: source.into(),
        options: options.iter().map(|option| (*option).to_owned()).collect(),
        ..ApiMount::default()
    }]
}

fn refusal(rootfs: &[ApiMount], spec: &Spec, can_have_disks: bool) -> String {
    let found = Special::find(rootfs, spec, Path::new("/"), can_have_disks);
    found.unwrap_err().to_string()
}

fn slots() -> Slots {
    Slots {
        can_have_disks: true,
        ..Slots::default()
    }
}

#[test]
fn test_an_image_as_root_becomes_a_disk_without_the_host_s_options() {
    let directory = tempfile::tempdir().unwrap();
    let image = image(directory.path());
    for (option, read_only) in [("rw", false), ("ro", true)] {
        let rootfs = root("ext4", &image, &["loop", option, "discard"]);
        assert!(Special::is_possible(&rootfs, &Spec::default()));
        let found = Special::find(&rootfs, &Spec::default(), Path::new("/"), true).unwrap();
        let root = RootDisk {
            slot: 0,
            kind: "ext4".into(),
            options: vec![option.into(), "discard".into()],
        };
        assert_eq!(found.root, Some(root));
        let [disk] = &found.disks[..] else {
            panic!("{found:?}")
        };
        assert_eq!((disk.read_only, disk.sectors), (read_only, 2048));
        assert!(found.mounts.is_empty() && found.devices.is_empty());
    }
}

#[test]
fn test_a_read_only_disk_cannot_be_opened_for_writing_by_whoever_has_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    fs::write(&path, [7; 512]).unwrap();
    let anew = |file: &File| {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        File::options().write(true).open(path)
    };
    let (writable, bytes) = open(&path, true).unwrap();
    assert_eq!(bytes, 512);
    anew(&writable).unwrap();
    let (read_only, _) = open(&path, false).unwrap();
    let error = anew(&read_only).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem);
    assert!(
        read_only
            .set_permissions(fs::Permissions::from_mode(0o777))
            .is_err()
    );
}

#[test]
fn test_a_device_cannot_be_opened_anew() {
    let (null, _) = open(Path::new("/dev/null"), true).unwrap();
    let error = File::open(format!("/proc/self/fd/{}", null.as_raw_fd())).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
}

#[test]
fn test_slots_run_out_with_words() {
    let directory = tempfile::tempdir().unwrap();
    let image = image(directory.path());
    let mut slots = slots();
    for slot in 0..BLOCK_SLOTS {
        assert_eq!(slots.add(Path::new(&image), true).unwrap(), slot);
    }
    let error = slots.add(Path::new(&image), true).unwrap_err().to_string();
    assert!(error.contains("all 8 block slots"), "{error}");
}

#[test]
fn test_what_is_added_to_a_sandbox_has_no_disks() {
    let directory = tempfile::tempdir().unwrap();
    let image = image(directory.path());
    let none = Spec::default();
    let error = refusal(&root("ext4", &image, &["loop"]), &none, false);
    assert!(
        error.starts_with("rootfs[0] of type \"ext4\" from "),
        "{error}"
    );
    assert!(
        error.contains("can only be given to the container"),
        "{error}"
    );
    // The host mounts what it can.
    let found = Special::find(&root("ext4", &image, &[]), &none, Path::new("/"), false).unwrap();
    assert_eq!(found.root, None);
    let error = refusal(&root("xfs", &image, &["loop"]), &none, true);
    assert!(error.contains("no such file system in blocks"), "{error}");
}

#[test]
fn test_sources_that_are_devices_and_sockets() {
    let directory = tempfile::tempdir().unwrap();
    let bind = |source: &str| {
        let mount =
            json!({ "destination": "/x", "type": "bind", "source": source, "options": ["bind"] });
        spec(json!({ "mounts": [{ "destination": "/proc", "type": "proc" }, mount] }))
    };
    let found = |source: &str| Special::find(&[], &bind(source), directory.path(), true);
    assert_eq!(
        found("/dev/null").unwrap().mounts,
        [(1, "/dev/null".to_owned())]
    );
    assert!(found("/does/not/exist").unwrap().mounts.is_empty());
    assert!(found(".").unwrap().mounts.is_empty());
    let device = directory.path().join("console");
    let number = rustix::fs::makedev(5, 1);
    mknodat(CWD, &device, FileType::CharacterDevice, Mode::RUSR, number).unwrap();
    let error = found("console").unwrap_err().to_string();
    assert!(
        error.starts_with("mounts[1] from console: a device of the host (5:1)"),
        "{error}"
    );
    let _socket = UnixListener::bind(directory.path().join("socket")).unwrap();
    let error = found("socket").unwrap_err().to_string();
    assert!(
        error.starts_with("mounts[1] from socket: a socket of the host"),
        "{error}"
    );
}

#[test]
fn test_a_device_that_the_host_has_not_is_named() {
    let device = json!({ "path": "/dev/data", "type": "b", "major": 4095, "minor": 7 });
    let error = refusal(
        &[],
        &spec(json!({ "linux": { "devices": [device] } })),
        true,
    );
    assert_eq!(
        error,
        "linux.devices[0]: /dev/data: the host has no block device 4095:7"
    );
}
