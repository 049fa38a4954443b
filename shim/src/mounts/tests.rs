//! These need root, as the shim does: each works in a mount namespace of its own, on a thread of its
//! own.

use std::os::unix::fs::MetadataExt;

use super::*;

/// Run `test` in a mount namespace of its own with an export in it.
fn with_export(test: impl FnOnce(&Path, &Path) + Send + 'static) {
    assert!(
        rustix::process::geteuid().is_root(),
        "mount tests need root"
    );
    let outcome = std::thread::spawn(move || {
        let directory = tempfile::tempdir().unwrap();
        // A namespace is a thread's; this one ends with the test.
        enter_own_namespace().unwrap();
        let export = directory.path().join("export");
        make_export(&export).unwrap();
        test(directory.path(), &export);
        unmount(&export, UnmountFlags::DETACH).unwrap();
    });
    if let Err(panic) = outcome.join() {
        std::panic::resume_unwind(panic);
    }
}

fn container(export: &Path) -> ContainerMounts {
    let volumes = Arc::new(Volumes::new(export.to_owned()));
    ContainerMounts::new(export, "web", volumes)
}

fn api_mount(kind: &str, source: &Path, options: &[String]) -> ApiMount {
    ApiMount {
        type_: kind.into(),
        source: source.to_str().unwrap().into(),
        options: options.to_vec(),
        ..ApiMount::default()
    }
}

#[test]
fn test_overlay_root_is_mounted_and_taken_away() {
    with_export(|directory, export| {
        // Overlay's upper layer cannot be on every file system that a temporary directory is on.
        let layers = directory.join("layers");
        fs::create_dir(&layers).unwrap();
        mount("t", &layers, "tmpfs", MountFlags::empty(), None).unwrap();
        for name in ["lower", "upper", "work"] {
            fs::create_dir(layers.join(name)).unwrap();
        }
        fs::write(layers.join("lower/file"), "below").unwrap();
        let option = |name: &str, dir: &str| format!("{name}={}", layers.join(dir).display());
        let options = [
            option("lowerdir", "lower"),
            option("upperdir", "upper"),
            option("workdir", "work"),
        ];
        let mounts = container(export);
        mounts
            .mount_root(
                &[api_mount("overlay", Path::new("overlay"), &options)],
                Path::new(""),
            )
            .unwrap();
        let root = export.join("containers/web/rootfs");
        assert_eq!(fs::read_to_string(root.join("file")).unwrap(), "below");
        fs::write(root.join("new"), "x").unwrap();
        assert!(layers.join("upper/new").exists());
        mounts.unmount().unwrap();
        assert!(!export.join("containers/web").exists());
        assert!(layers.join("upper/new").exists());
    });
}

#[test]
fn test_overlay_of_more_layers_than_fit_in_a_page() {
    with_export(|directory, export| {
        let layers =
            directory.join("a-directory-with-a-rather-long-name-as-snapshotters-have-them");
        fs::create_dir(&layers).unwrap();
        let paths: Vec<_> = (0..90)
            .map(|number| {
                let layer = layers.join(format!("{number}/fs"));
                fs::create_dir_all(&layer).unwrap();
                fs::write(layer.join(number.to_string()), "").unwrap();
                layer.to_str().unwrap().to_owned()
            })
            .collect();
        let options = ["ro".to_owned(), format!("lowerdir={}", paths.join(":"))];
        assert!(options[1].len() > MOST_DATA);
        let mounts = container(export);
        mounts
            .mount_root(
                &[api_mount("overlay", Path::new("overlay"), &options)],
                Path::new(""),
            )
            .unwrap();
        let count = fs::read_dir(export.join("containers/web/rootfs"))
            .unwrap()
            .count();
        assert_eq!(count, 90);
        mounts.unmount().unwrap();
    });
}

#[test]
fn test_read_only_holds_for_what_is_mounted_below() {
    with_export(|directory, export| {
        let source = directory.join("source");
        fs::create_dir_all(source.join("below")).unwrap();
        mount(
            "t",
            source.join("below"),
            "tmpfs",
            MountFlags::empty(),
            None,
        )
        .unwrap();
        let options = ["rbind", "ro"].map(str::to_owned).to_vec();
        let spec = [
            SpecMount {
                kind: "proc".into(),
                ..SpecMount::default()
            },
            SpecMount {
                kind: "bind".into(),
                source: source.clone(),
                options,
                ..Default::default()
            },
        ];
        let mounts = container(export);
        assert_eq!(
            mounts.bind_sources(&spec, &[], directory).unwrap(),
            [(1, "volumes/1".into())]
        );
        let seen = export.join("volumes/1");
        let kind = |path| fs::write(path, "x").unwrap_err().kind();
        assert_eq!(kind(seen.join("file")), io::ErrorKind::ReadOnlyFilesystem);
        assert_eq!(
            kind(seen.join("below/file")),
            io::ErrorKind::ReadOnlyFilesystem
        );
        // The host's own view stays writable.
        fs::write(source.join("below/file"), "x").unwrap();
        assert!(seen.join("below/file").exists());
        mounts.unmount().unwrap();
        assert!(source.join("below/file").exists());
    });
}

#[test]
fn test_a_single_file_is_bound_without_its_directory() {
    with_export(|directory, export| {
        let source = directory.join("hosts");
        fs::write(&source, "127.0.0.1 localhost").unwrap();
        // Relative to the bundle, without a type.
        let spec = [SpecMount {
            source: "hosts".into(),
            options: vec!["bind".into()],
            ..SpecMount::default()
        }];
        let mounts = container(export);
        assert_eq!(
            mounts.bind_sources(&spec, &[], directory).unwrap(),
            [(0, "volumes/1".into())]
        );
        let seen = export.join("volumes/1");
        fs::write(&seen, "changed").unwrap();
        assert_eq!(fs::read_to_string(&source).unwrap(), "changed");
        mounts.unmount().unwrap();
    });
}

/// A file system of its own, to see which mount something is of.
fn tmpfs(path: &Path) {
    fs::create_dir_all(path).unwrap();
    mount("t", path, "tmpfs", MountFlags::empty(), None).unwrap();
}

fn binds<const N: usize>(source: &Path, all: [&[&str]; N]) -> [SpecMount; N] {
    all.map(|options| SpecMount {
        kind: "bind".into(),
        source: source.to_owned(),
        options: options.iter().map(|&option| option.to_owned()).collect(),
        ..SpecMount::default()
    })
}

#[test]
fn test_what_containers_bind_alike_is_one_mount_while_one_of_them_is_there() {
    with_export(|directory, export| {
        let source = directory.join("a source");
        fs::create_dir(&source).unwrap();
        std::os::unix::fs::symlink(&source, directory.join("link")).unwrap();
        let volumes = Arc::new(Volumes::new(export.to_owned()));
        let [one, two] = ["one", "two"].map(|id| ContainerMounts::new(export, id, volumes.clone()));
        let ways: [&[&str]; 4] = [
            &["rbind"],
            &["rbind", "ro"],
            &["bind"],
            &["rbind", "rslave"],
        ];
        let numbers = |mounts: &ContainerMounts, source: &Path| {
            let bound = mounts.bind_sources(&binds(source, ways), &[], directory);
            bound
                .unwrap()
                .into_iter()
                .map(|(_, path)| path)
                .collect::<Vec<_>>()
        };
        let first = numbers(&one, &source);
        let different: std::collections::BTreeSet<_> = first.iter().collect();
        assert_eq!(different.len(), 4);
        assert_eq!(numbers(&two, &directory.join("link")), first);
        one.unmount().unwrap();
        fs::write(source.join("file"), "").unwrap();
        assert!(
            first
                .iter()
                .all(|path| export.join(path).join("file").exists())
        );
        two.unmount().unwrap();
        assert_eq!(fs::read_dir(export.join("volumes")).unwrap().count(), 0);
        // A name that the guest may remember is never another volume's.
        assert!(
            numbers(&one, &source)
                .iter()
                .all(|path| !first.contains(path))
        );
        one.unmount().unwrap();
    });
}

#[test]
fn test_what_has_been_mounted_below_a_source_meanwhile_is_seen() {
    with_export(|directory, export| {
        let source = directory.join("a source");
        fs::create_dir_all(source.join("below")).unwrap();
        let volumes = Arc::new(Volumes::new(export.to_owned()));
        let bound = |id| {
            let mounts = ContainerMounts::new(export, id, volumes.clone());
            let bound = mounts.bind_sources(&binds(&source, [&["rbind"]]), &[], directory);
            (mounts, export.join(&bound.unwrap()[0].1))
        };
        let (one, before) = bound("one");
        tmpfs(&source.join("below"));
        fs::write(source.join("below/file"), "").unwrap();
        let (two, after) = bound("two");
        assert!(!before.join("below/file").exists() && after.join("below/file").exists());
        unmount(source.join("below"), UnmountFlags::empty()).unwrap();
        let (three, last) = bound("three");
        assert_eq!(last, before);
        for mounts in [one, two, three] {
            mounts.unmount().unwrap();
        }
    });
}

#[test]
fn test_a_missing_source_is_named_by_field_and_path() {
    with_export(|directory, export| {
        let spec = [SpecMount {
            kind: "bind".into(),
            source: "/does/not/exist".into(),
            ..SpecMount::default()
        }];
        let mounts = container(export);
        let error = mounts
            .bind_sources(&spec, &[], directory)
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "mounts[0] from /does/not/exist: no such file or directory"
        );
        let root = Path::new("/does/not/exist");
        let error = mounts.mount_root(&[], root).unwrap_err().to_string();
        assert_eq!(
            error,
            "root.path /does/not/exist: no such file or directory"
        );
    });
}

#[test]
fn test_mounts_reach_a_slave_namespace_and_never_the_host() {
    with_export(|directory, export| {
        let source = directory.join("source");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("file"), "x").unwrap();
        let (export, source) = (export.to_owned(), source);
        let (ready, is_ready) = std::sync::mpsc::channel();
        let (mounted, is_mounted) = std::sync::mpsc::channel();
        let inner = export.clone();
        let other = std::thread::spawn(move || {
            enter_own_namespace().unwrap();
            ready.send(()).unwrap();
            is_mounted.recv().unwrap();
            fs::read_to_string(inner.join("containers/web/rootfs/file")).unwrap()
        });
        is_ready.recv().unwrap();
        let mounts = container(&export);
        mounts.mount_root(&[], &source).unwrap();
        mounted.send(()).unwrap();
        assert_eq!(other.join().unwrap(), "x");
        let host = fs::read_to_string("/proc/1/mountinfo").unwrap_or_default();
        assert!(!host.contains(export.to_str().unwrap()));
        let device = |path: &Path| fs::metadata(path).unwrap().dev();
        assert_eq!(
            device(&export.join("containers/web/rootfs")),
            device(&source)
        );
        mounts.unmount().unwrap();
    });
}

#[test]
fn test_what_cannot_be_mounted_here_says_so() {
    let image = api_mount("ext4", Path::new("/x.img"), &["loop".to_owned()]);
    let error = mount_one(&image, Path::new("/nowhere"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("\"loop\""), "{error}");
    let raw = api_mount("format/mkdir/overlay", Path::new("overlay"), &[]);
    let error = mount_one(&raw, Path::new("/nowhere"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("mount manager"), "{error}");
}

#[test]
fn test_what_is_still_mounted_is_not_emptied() {
    with_export(|directory, export| {
        let volume = directory.join("volume");
        fs::create_dir(&volume).unwrap();
        fs::write(volume.join("file"), "the user's").unwrap();
        let mounts = container(export);
        mounts.mount_root(&[], &volume).unwrap();
        // One that is not found when the others are taken away.
        let stray = export.join("containers/web/stray");
        fs::create_dir(&stray).unwrap();
        bind(&volume, &stray, &Options::parse(["rbind"])).unwrap();
        mounts.unmount().unwrap();
        assert_eq!(
            fs::read_to_string(volume.join("file")).unwrap(),
            "the user's"
        );
    });
}
