//! Places where templates cannot be kept.

use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_remount};

use super::*;

#[test]
fn test_unusable_directory_falls_back_to_memory() {
    let (fixture, builder) = (Fixture::new(), FakeBuilder::default());
    fs::create_dir_all(fixture.root.path().join("lib")).unwrap();
    fs::write(&fixture.store.directory, b"in the way").unwrap();
    for number in 1..=2 {
        let template = fixture.obtain(&builder);
        assert_eq!(
            (template.origin, build_number(&template)),
            (Origin::Memory, number)
        );
        assert_eq!(template.memory.metadata().unwrap().len(), MEMORY_SIZE);
        for file in [&template.state, &template.memory] {
            assert!(file.write_at(b"x", 0).is_err());
            assert!(file.set_len(1).is_err());
        }
    }
}

/// A file system in memory, mounted while this lives.
struct SmallFileSystem(PathBuf);

impl SmallFileSystem {
    /// `None`, with words, where the test may not mount.
    fn mount(path: PathBuf, options: &str) -> Option<Self> {
        fs::create_dir_all(&path).unwrap();
        let mount = ["-t", "tmpfs", "-o", options, "tmpfs"];
        let mounted = nix::unistd::geteuid().is_root()
            && std::process::Command::new("mount")
                .args(mount)
                .arg(&path)
                .status()
                .unwrap()
                .success();
        if !mounted {
            eprintln!(
                "SKIPPED: {} needs root and the right to mount",
                module_path!()
            );
            return None;
        }
        Some(Self(path))
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn test_no_space_falls_back_to_memory_and_leaves_nothing() {
    let (fixture, builder) = (Fixture::new(), FakeBuilder::default());
    let place = fixture.store.directory.clone();
    let Some(_mounted) = SmallFileSystem::mount(place, "size=512k") else {
        return;
    };
    let template = fixture.obtain(&builder);
    // The first build found the disk full, the second went to memory.
    assert_eq!(
        (template.origin, build_number(&template)),
        (Origin::Memory, 2)
    );
    assert_eq!(fixture.names(), [format!("{}.lock", inputs().key())]);
}

#[test]
fn test_no_inode_falls_back_to_memory() {
    let (fixture, builder) = (Fixture::new(), FakeBuilder::default());
    let place = fixture.store.directory.clone();
    let Some(_mounted) = SmallFileSystem::mount(place, "nr_inodes=2") else {
        return;
    };
    assert_eq!(fixture.obtain(&builder).origin, Origin::Memory);
}

#[test]
fn test_read_only_store_still_serves_what_it_has() {
    let (fixture, builder) = (Fixture::new(), FakeBuilder::default());
    let place = fixture.store.directory.clone();
    let Some(mounted) = SmallFileSystem::mount(place, "size=64m") else {
        return;
    };
    fixture.obtain(&builder);
    // A child that another test starts holds copies of all descriptors until it executes its program,
    // and the file system is busy for as long as one that can write is among them.
    let flags = MountFlags::RDONLY;
    while let Err(error) = mount_remount(&mounted.0, flags, c"") {
        assert_eq!(error, Errno::BUSY);
        std::thread::yield_now();
    }
    assert_eq!(fixture.obtain(&builder).origin, Origin::Stored);
    fixture.store.markers.remove(inputs().key());
    assert_eq!(fixture.obtain(&builder).origin, Origin::Stored);
    let mut other = inputs();
    other.host.tsc_khz = None;
    let template = fixture.store.obtain_with(&other, &builder).unwrap();
    assert_eq!(template.origin, Origin::Memory);
}
