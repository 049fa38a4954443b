//! containerd's part played to the shim program, with no daemon: what containerd would execute, send
//! and listen to, done here, so that each step of the protocol can be looked at, left out, or done
//! at the wrong moment.
//!
//! A test gets a [`Player`], asks it for a [`Bundle`] or for a container that is already there, and
//! calls the shim's services over its socket:
//!
//! ```no_run
//! use thaw_tests::player::{Program, on_shim};
//!
//! on_shim("example", |player| {
//!     let container = player.running(Program::shell("exit 7"));
//!     assert_eq!(container.task.wait(container.id(), "").unwrap().exit_status, 7);
//!     container.remove();
//! });
//! ```

mod bootstrap;
mod bundle;
mod client;
mod container;
mod events;
mod fifos;
mod publish;

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crate::command::finish;
use crate::environment::Environment;
use crate::host::Host;
use crate::testbed::TURN;

pub use bootstrap::{Answer, Protocol};
pub use bundle::{Bundle, Program, Shim};
pub use client::{Api, CallError, Task, any};
pub use container::{Container, send, wait_gone};
pub use events::{Event, Listener, Mood};
pub use fifos::{Collected, Fifo, Fifos};
pub use publish::Publish;
pub use rustix::process::Signal;

/// What one test plays containerd with.
#[derive(Debug)]
pub struct Player {
    test: String,
    /// Where this containerd has its files: bundles, sockets.
    directory: PathBuf,
    events: Listener,
    next: AtomicU32,
    /// Bundles that were made, to be deleted at the end as containerd would.
    bundles: Mutex<Vec<bundle::Remains>>,
}

/// Runs `test` with a player, and fails when anything of it is on the host afterwards.
///
/// # Panics
///
/// When the test does, or something was left over.
pub fn on_shim(name: &str, test: impl FnOnce(&Player)) {
    static WARM: OnceLock<()> = OnceLock::new();
    let directory = Environment::get().directory.join("player");
    let bundles = directory.join("bundles");
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // What is made once (the template, the root) is there before the first look.
    WARM.get_or_init(|| {
        play("first", &directory, |player| {
            player.running(Program::new(["true"])).remove()
        });
    });
    let begun = Instant::now();
    let before = Host::look(&bundles);
    let result = catch_unwind(AssertUnwindSafe(|| play(name, &directory, test)));
    let left = Host::left_since(&before, &bundles);
    // Not by a macro, whose output the test harness keeps to itself: a slow test is to be seen.
    let _ = writeln!(
        std::io::stderr(),
        "  {name} on the shim alone: {:.1} s",
        begun.elapsed().as_secs_f64()
    );
    if let Err(panic) = result {
        eprintln!("left over (the test failed anyway): {left:#?}");
        resume_unwind(panic);
    }
    assert!(left.is_empty(), "left over on the host: {left:#?}");
}

/// Runs `test` with a player of its own, and deletes what it has not.
fn play(name: &str, directory: &Path, test: impl FnOnce(&Player)) {
    let player = Player::new(name, directory);
    let result = catch_unwind(AssertUnwindSafe(|| test(&player)));
    if result.is_err() {
        player.show_logs();
    }
    player.end();
    if let Err(panic) = result {
        resume_unwind(panic);
    }
}

impl Player {
    fn new(test: &str, directory: &Path) -> Self {
        let bundles = directory.join("bundles");
        fs::create_dir_all(&bundles).expect("the tests' directory can be written");
        let events = Listener::bind(&directory.join("events.sock"));
        Self {
            test: test.replace('_', "-"),
            directory: directory.to_owned(),
            events,
            next: AtomicU32::new(0),
            bundles: Mutex::default(),
        }
    }

    /// The service that events are sent to.
    pub fn events(&self) -> &Listener {
        &self.events
    }

    /// Where this containerd would serve.
    pub fn address(&self) -> PathBuf {
        self.directory.join("socket")
    }

    /// A name that nothing else has.
    pub fn next_name(&self, what: &str) -> String {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        format!("{}-{what}-{number}", self.test)
    }

    /// A directory for the test's files, removed with the value.
    pub fn directory(&self) -> tempfile::TempDir {
        tempfile::tempdir_in(&self.directory).expect("the tests' directory can be written")
    }

    /// A bundle for a container that runs `program`.
    pub fn bundle(&self, program: Program) -> Bundle<'_> {
        self.bundle_named(&self.next_name("c"), program)
    }

    /// The same, with an id of the test's choice.
    pub fn bundle_named(&self, id: &str, program: Program) -> Bundle<'_> {
        let path = self.directory.join("bundles").join(id);
        let bundle = Bundle::new(self, id, path, program);
        self.lock_bundles().push(bundle.remains());
        bundle
    }

    /// A container that was created, its program not started, on a shim of its own.
    #[track_caller]
    pub fn created(&self, program: Program) -> Container<'_> {
        self.bundle(program).start().create(&Fifos::none())
    }

    /// A container whose program was started.
    #[track_caller]
    pub fn running(&self, program: Program) -> Container<'_> {
        let container = self.created(program);
        container.start();
        container
    }

    /// A container that sleeps, to run programs in.
    #[track_caller]
    pub fn sleeper(&self) -> Container<'_> {
        self.running(Program::new(["sleep", "3600"]))
    }

    fn show_logs(&self) {
        for remains in self.lock_bundles().iter() {
            eprintln!("log of {}:\n{}", remains.id(), remains.log());
        }
    }

    /// Deletes what the test has not: as containerd does with what it finds.
    fn end(&self) {
        for remains in self.lock_bundles().drain(..) {
            remains.delete(self);
        }
        self.events.set(Mood::Absent);
    }

    fn lock_bundles(&self) -> MutexGuard<'_, Vec<bundle::Remains>> {
        self.bundles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The program under test.
fn shim_program() -> PathBuf {
    Environment::get()
        .prefix
        .join("bin/containerd-shim-thaw-v2")
}

/// A root file system of busybox, which all containers of the player share.
pub fn root_directory() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        let root = Environment::get().directory.join("player-root");
        make_root(&root).unwrap_or_else(|error| panic!("making {}: {error}", root.display()));
        root
    })
}

fn make_root(root: &Path) -> std::io::Result<()> {
    for directory in ["bin", "dev", "etc", "proc", "root", "sys", "tmp"] {
        fs::create_dir_all(root.join(directory))?;
    }
    let found = finish(Command::new("sh").args(["-c", "command -v busybox"])).succeeded();
    let busybox = found.stdout();
    fs::copy(busybox.trim(), root.join("bin/busybox"))?;
    let list = finish(Command::new(busybox.trim()).arg("--list")).succeeded();
    for name in list.stdout().lines().filter(|name| *name != "busybox") {
        symlink("busybox", root.join("bin").join(name))?;
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n")?;
    fs::write(root.join("etc/group"), "root:x:0:\n")?;
    fs::write(root.join("etc/plain"), "no program\n")
}
