//! Launches this very program, lets it enter the jail, and has it try there what a hostile guest or
//! an escaped one would try, and what a friendly guest needs.
//!
//! Needs root. Without a test harness of its own, because the launched program is this one. Each
//! test has a part outside, which prepares the export and looks at what came of it, and cases
//! inside, which it asks for by name.

mod files;
mod guest;
mod hostile;
mod walls;

use std::fs;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change,
    mount_remount, unmount,
};
use thaw_vmm::jail::{self, Jail};
use thaw_vmm::virtio::fs::FileSystem;
use thaw_vmm_control::{
    CONTROL_DESCRIPTOR, Channel, Event, FromVmm, Launch, Launched, Reply, Request, Shape,
};

use guest::Guest;

/// A test outside.
type Test = (&'static str, fn());

/// A case inside.
type Case = (&'static str, fn(&mut Inside));

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, root] = arguments.as_slice()
        && flag == "--root"
    {
        return inside(Path::new(root));
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: the tests of the jail need root");
        return ExitCode::SUCCESS;
    }
    // What the tests mount must not be seen by the machine.
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
    mount_change(
        "/",
        MountPropagationFlags::REC | MountPropagationFlags::PRIVATE,
    )
    .unwrap();
    let filter = arguments
        .get(1)
        .filter(|argument| !argument.starts_with('-'));
    for (name, test) in walls::TESTS
        .iter()
        .chain(files::TESTS)
        .chain(hostile::TESTS)
    {
        if filter.is_none_or(|filter| name.contains(filter.as_str())) {
            test();
            println!("test {name} ... ok");
        }
    }
    ExitCode::SUCCESS
}

/// The state inside.
struct Inside {
    jail: Option<Jail>,
    guest: Option<Guest>,
}

impl Inside {
    /// The guest, with the export mounted.
    fn guest(&mut self) -> &mut Guest {
        self.guest.get_or_insert_with(|| {
            let root = self.jail.take().unwrap().file_server_root();
            let mut guest = Guest::new(FileSystem::new("thaw", root, 1).unwrap());
            guest.mount();
            guest
        })
    }
}

/// The launched program: enters the jail, then runs the cases that it is asked for.
fn inside(root: &Path) -> ExitCode {
    // SAFETY: `Launch` puts the channel there, and nobody else has taken it.
    let channel = Channel::from_fd(unsafe { OwnedFd::from_raw_fd(CONTROL_DESCRIPTOR) });
    let jail = match jail::enter(root) {
        Ok(jail) => jail,
        Err(error) => {
            let text = Event::Console(error.to_string().into_bytes());
            channel.send(&FromVmm::Event(text), &[]).unwrap();
            return ExitCode::FAILURE;
        }
    };
    let mut state = Inside {
        jail: Some(jail),
        guest: None,
    };
    while let Some((request, _)) = channel.receive::<Request>().unwrap() {
        let Request::Boot { command_line, .. } = request else {
            return ExitCode::FAILURE;
        };
        let (_, case) = walls::CASES
            .iter()
            .chain(files::CASES)
            .chain(hostile::CASES)
            .find(|(name, _)| *name == command_line)
            .unwrap_or_else(|| panic!("no case {command_line}"));
        case(&mut state);
        channel.send(&FromVmm::Reply(Reply::Done), &[]).unwrap();
    }
    ExitCode::SUCCESS
}

/// An export and the process that is jailed in it.
struct Sandbox {
    launched: Option<Launched>,
    /// Holds the export and the directories mounted in it.
    directory: tempfile::TempDir,
}

impl Sandbox {
    /// Where the export is, before anything is started.
    fn prepare() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("export")).unwrap();
        let sandbox = Sandbox {
            launched: None,
            directory,
        };
        let export = sandbox.export();
        mount("thaw", &export, "tmpfs", MountFlags::empty(), None).unwrap();
        mount_change(&export, MountPropagationFlags::SHARED).unwrap();
        sandbox
    }

    /// A started sandbox with nothing mounted in its export.
    fn start() -> Self {
        let mut sandbox = Self::prepare();
        sandbox.launch(&sandbox.export());
        sandbox
    }

    fn launch(&mut self, root: &Path) {
        let stderr = std::io::stderr();
        let launched = Launch {
            program: &std::env::current_exe().unwrap(),
            root,
            network_namespace: None,
            log: Some(stderr.as_fd()),
        }
        .start()
        .unwrap();
        self.launched = Some(launched);
    }

    fn export(&self) -> PathBuf {
        self.directory.path().join("export")
    }

    /// Make `name` in the export a mount of a directory on disk; returns that directory.
    fn mount_directory(&self, name: &str) -> PathBuf {
        let source = self.directory.path().join(name);
        let target = self.export().join(name);
        fs::create_dir(&source).unwrap();
        fs::create_dir(&target).unwrap();
        mount_bind(&source, &target).unwrap();
        source
    }

    /// As [`Sandbox::mount_directory`], but nothing can be written through the mount. It is read-only
    /// before it appears in the export: a remount of what has appeared already does not propagate.
    fn mount_read_only(&self, name: &str) -> PathBuf {
        let source = self.directory.path().join(name);
        let target = self.export().join(name);
        fs::create_dir(&source).unwrap();
        fs::create_dir(&target).unwrap();
        mount_bind(&source, &source).unwrap();
        let flags = MountFlags::BIND | MountFlags::RDONLY;
        mount_remount(&source, flags, "").unwrap();
        mount_bind(&source, &target).unwrap();
        unmount(&source, UnmountFlags::DETACH).unwrap();
        source
    }

    /// Make `name` in the export an overlay of two directories on disk, as a snapshotter does;
    /// returns its upper directory.
    fn mount_overlay(&self, name: &str) -> PathBuf {
        let target = self.export().join(name);
        fs::create_dir(&target).unwrap();
        let layers = ["lower", "upper", "work"].map(|layer| {
            let path = self.directory.path().join(format!("{name}-{layer}"));
            fs::create_dir(&path).unwrap();
            path
        });
        let [lower, upper, work] = &layers;
        fs::write(lower.join("below"), "from the lower layer").unwrap();
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            lower.display(),
            upper.display(),
            work.display()
        );
        let options = std::ffi::CString::new(options).unwrap();
        let options = Some(options.as_c_str());
        mount("overlay", &target, "overlay", MountFlags::empty(), options).unwrap();
        upper.clone()
    }

    /// Make `name` in the export a tmpfs with `options`.
    fn mount_tmpfs(&self, name: &str, options: &std::ffi::CStr) -> PathBuf {
        let target = self.export().join(name);
        fs::create_dir(&target).unwrap();
        mount("thaw", &target, "tmpfs", MountFlags::empty(), Some(options)).unwrap();
        target
    }

    /// Run a case inside; a failed one has said why on standard error.
    fn run(&mut self, case: &str) {
        let shape = Shape::new(1, 128).unwrap();
        let command_line = case.to_owned();
        let request = Request::Boot {
            shape,
            command_line,
        };
        let launched = self.launched.as_mut().expect("launched");
        match launched.owner.request(&request, &[]) {
            Ok(reply) => assert_eq!(reply, Reply::Done),
            Err(error) => panic!("case {case:?}: {error}"),
        }
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if let Some(launched) = &self.launched {
            launched.kill().unwrap();
            launched.wait().unwrap();
        }
        // With everything below it.
        unmount(self.export(), UnmountFlags::DETACH).unwrap();
    }
}
