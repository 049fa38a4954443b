//! Something is short: space, memory, descriptors. What can be done without is done without, the rest is
//! refused with the reason, and nothing is left.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use thaw_tests::{Testbed, Version, finish, on_containerd, on_each_containerd, thaw};

/// A file system in memory that is there as long as the value.
struct Mounted(&'static str);

impl Mounted {
    fn tmpfs(target: &'static str, flags: MsFlags, options: &str) -> Self {
        let mounted = mount(Some("tmpfs"), target, Some("tmpfs"), flags, Some(options));
        mounted.expect("root may");
        Self(target)
    }

    /// Leaves no byte free.
    fn fill(&self) -> PathBuf {
        let path = Path::new(self.0).join("filler");
        let mut filler = File::create(&path).expect("root may");
        let piece = [0; 4096];
        while filler.write_all(&piece).is_ok() {}
        path
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        umount2(self.0, MntFlags::MNT_DETACH).expect("it is mounted");
    }
}

/// A container runs though no template can be kept.
fn runs_without_a_template(bed: &Testbed) {
    let container = bed.sleeper();
    let exec = container.exec(["echo", "runs"]).succeeded();
    assert_eq!(exec.stdout(), "runs\n");
    assert!(thaw::templates().is_empty(), "{:?}", thaw::templates());
    container.remove();
}

/// Without space for a template, the container runs from one in memory.
#[test]
fn no_space_for_a_template() {
    on_containerd(Version::V2_1, "no-space", |bed| {
        let _small = Mounted::tmpfs("/var/lib/thaw", MsFlags::empty(), "size=2m");
        runs_without_a_template(bed);
    });
}

/// Nor does it need to write where templates are.
#[test]
fn read_only_templates() {
    on_containerd(Version::V1_6, "read-only", |bed| {
        let _read_only = Mounted::tmpfs("/var/lib/thaw", MsFlags::MS_RDONLY, "size=2m");
        runs_without_a_template(bed);
    });
}

on_each_containerd! {
    /// Where nothing can be written down, nothing is started. What runs when that comes to be can be used
    /// and ended as always.
    fn full_runtime_directory(bed: &Testbed) {
        let small = Mounted::tmpfs("/run/thaw", MsFlags::empty(), "size=256k,mode=711");
        let container = bed.run().shell("trap 'exit 7' TERM; while :; do sleep 0.1; done").detach();
        let filler = small.fill();
        let refused = bed.run().command(["true"]).output();
        assert_ne!(refused.code, 0);
        let error = refused.stderr();
        assert!(error.contains("/run/thaw") && error.contains("No space left on device"), "{refused}");

        assert_eq!(container.exec(["echo", "runs"]).succeeded().stdout(), "runs\n");
        container.signal("SIGTERM").succeeded();
        assert_eq!(container.ended(), 7);
        container.remove();
        bed.remove_containers();

        let names = |path: &str| -> Vec<_> {
            let entries = fs::read_dir(path).expect("it is there").flatten();
            entries.map(|entry| entry.file_name()).collect()
        };
        fs::remove_file(filler).expect("root may");
        bed.run().command(["true"]).output().succeeded();
        let left = names("/run/thaw");
        let shared = |name: &std::ffi::OsString| {
            let name = name.to_string_lossy();
            name.starts_with('.') || name == "traces"
        };
        assert!(left.iter().all(shared), "{left:?}");
    }

    /// A VM that gets too little memory for itself is an error that says so, and one that has run out of it
    /// has been killed.
    fn too_little_memory(bed: &Testbed) {
        let small = Limited::new("thaw-shortage", "memory.max", "2M");
        let refused = bed.run().options(["--cgroup", &small.child()]).command(["true"]).output();
        assert_ne!(refused.code, 0);
        let error = refused.stderr();
        assert!(error.contains("thaw-shortage has") && error.contains("memory.max"), "{refused}");
        bed.remove_containers();
    }

    /// A shim that can open no more files says so for what needs one, and goes on with the rest.
    fn descriptors_of_the_shim(bed: &Testbed) {
        let container = bed.sleeper();
        let shim = thaw::processes(&container.id).shim;
        // Those that are open stay so.
        let limit = |soft: u32| {
            let option = format!("--nofile={soft}:");
            finish(Command::new("prlimit").arg(format!("--pid={shim}")).arg(option)).succeeded();
        };
        let soft = || {
            let limits = fs::read_to_string(format!("/proc/{shim}/limits")).expect("it runs");
            let line = limits.lines().find(|line| line.starts_with("Max open files"));
            line.and_then(|line| line.split_whitespace().nth(3)?.parse().ok()).expect("it has one")
        };
        let before: u32 = soft();
        limit(8);
        let refused = container.exec(["true"]);
        assert_ne!(refused.code, 0);
        assert_eq!(container.status().as_deref(), Some("RUNNING"));
        limit(before);
        assert_eq!(container.exec(["echo", "runs"]).succeeded().stdout(), "runs\n");
        container.remove();
    }
}

/// A cgroup with a limit, there as long as the value.
struct Limited(PathBuf);

impl Limited {
    fn new(name: &str, limit: &str, value: &str) -> Self {
        let root = Path::new("/sys/fs/cgroup");
        // It may be on already, or not be allowed: then the limit cannot be set.
        let _ = fs::write(root.join("cgroup.subtree_control"), "+memory");
        let path = root.join(name);
        fs::create_dir(&path).expect("root may");
        fs::write(path.join(limit), value).expect("the host has cgroup v2 with its controllers");
        Self(path)
    }

    /// The path of a cgroup in it that does not exist yet, as a spec has it.
    fn child(&self) -> String {
        let name = self.0.file_name().unwrap_or_default();
        format!("/{}/one", name.to_string_lossy())
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        fs::remove_dir(&self.0).expect("nothing is left in it");
    }
}
