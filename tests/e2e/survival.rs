//! Nothing is lost while containerd is away, and a guest that does not answer is not waited for.

use std::fs;
use std::io::{BufReader, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use thaw_tests::{
    Container, LIMIT, Testbed, Version, finish, on_containerd, on_each_containerd, thaw,
};

/// Waits until `done` is true of something that nobody announces.
#[track_caller]
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LIMIT, "{what}: not after {LIMIT:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// A container that waits for a file of the host's before it writes `lines` lines, and ends with `code`.
/// Its client has gone, and its output is to be read from the FIFO that this returns.
fn gated<'a>(bed: &'a Testbed, directory: &Path, lines: u32, code: u8) -> (Container<'a>, PathBuf) {
    let mount = format!(
        "type=bind,src={},dst=/gate,options=rbind:ro",
        directory.display()
    );
    let run = bed.run().shell(&format!(
        "until test -e /gate/{code}; do sleep 0.1; done; seq 1 {lines}; exit {code}"
    ));
    let fifos = directory.join(run.id());
    fs::create_dir(&fifos).expect("the tests' directory can be written");
    let fifos_option = fifos.display().to_string();
    let container = run
        .options(["--mount", &mount, "--fifo-dir", &fifos_option])
        .detach();
    let fifo = find(&fifos, &format!("{}-stdout", container.id));
    (container, fifo.expect("ctr has made it"))
}

/// The file `name` somewhere below `directory`.
fn find(directory: &Path, name: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(directory).ok()?;
    entries.flatten().find_map(|entry| {
        let path = entry.path();
        if path.is_dir() {
            return find(&path, name);
        }
        path.ends_with(name).then_some(path)
    })
}

/// All that comes out of a FIFO until its end. Whoever writes to it has it open.
fn read_all(fifo: &Path) -> String {
    let mut options = fs::OpenOptions::new();
    // Not waiting for whoever writes, since it may have closed it already.
    let file = options
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(fifo);
    let file = file.unwrap_or_else(|error| panic!("{}: {error}", fifo.display()));
    nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_SETFL(OFlag::empty())).expect("it is open");
    let mut text = String::new();
    BufReader::new(file)
        .read_to_string(&mut text)
        .expect("it is text");
    text
}

/// A container is deleted while its template is being built: the build is given up, and the shim ends.
#[test]
fn template_build_given_up() {
    on_containerd(Version::V2_1, "given-up", |bed| {
        let _shapes = thaw::OtherShapes::allow();
        let before = thaw::templates();
        let run = bed
            .run()
            .options(["--memory-limit", "50331648"])
            .command(["true"]);
        let mut ctr = run.spawn();
        let building = || {
            let entries = fs::read_dir(thaw::TEMPLATES).expect("it is there");
            let mut names = entries.flatten().map(|entry| entry.file_name());
            names.any(|name| name.to_string_lossy().starts_with(".building-"))
        };
        wait_until("a template is being built", building);
        let [shim, ..] = thaw::noted(run.id());
        let shim = shim.expect("it was noted before");
        // containerd may not know of it yet.
        wait_until("its creation ends", || {
            let mut command = bed.containerd().ctr();
            finish(command.args(["tasks", "delete", "--force", run.id()]));
            ctr.try_wait().expect("it is our child").is_some()
        });
        let output = ctr.wait_with_output().expect("it is our child");
        assert!(!output.status.success(), "{output:?}");
        wait_until("the shim ends", || {
            !Path::new(&format!("/proc/{shim}")).exists()
        });
        assert!(!building());
        assert_eq!(thaw::templates(), before);
    });
}

fn numbers(last: u32) -> String {
    (1..=last).map(|number| format!("{number}\n")).collect()
}

on_each_containerd! {
    /// containerd is killed while containers start and run. What ends meanwhile has written all of its
    /// output and its status is there afterwards; what goes on can be used as before.
    fn containerd_killed_under_load(bed: &Testbed) {
        const LINES: u32 = 50_000;
        let directory = bed.directory();
        let open = |code: u8| {
            fs::write(directory.path().join(code.to_string()), "").expect("the tests' directory can be written");
        };
        let (ends_meanwhile, first) = gated(bed, directory.path(), LINES, 7);
        let (ends_later, second) = gated(bed, directory.path(), LINES, 8);
        let pid = ends_later.pid();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            // What is under way when containerd is killed may fail, and is cleaned up behind.
            for _ in 0..2 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        bed.run().command(["true"]).output();
                    }
                });
            }
            bed.containerd().kill();
            open(7);
            assert_eq!(read_all(&first), numbers(LINES));
            wait_until("its exit is noted", || thaw::noted_exit(&ends_meanwhile.id) == Some(7));
            over.store(true, Ordering::Relaxed);
            bed.containerd().restart();
        });
        assert_eq!(ends_meanwhile.ended(), 7);
        ends_meanwhile.remove();

        assert_eq!(ends_later.status().as_deref(), Some("RUNNING"));
        assert_eq!(ends_later.pid(), pid);
        assert_eq!(ends_later.exec(["echo", "here"]).succeeded().stdout(), "here\n");
        open(8);
        assert_eq!(read_all(&second), numbers(LINES));
        assert_eq!(ends_later.ended(), 8);
        ends_later.remove();
        // And all is as it was.
        bed.run().shell("exit 9").output().ended_with(9);
    }

    /// A guest that does not answer is killed from outside, and its state is told all the time.
    fn frozen_guest(bed: &Testbed) {
        let container = bed.sleeper();
        let vmm = Pid::from_raw(thaw::processes(&container.id).vmm);
        kill(vmm, Signal::SIGSTOP).expect("it runs");
        let other = bed.sleeper();
        assert_eq!(container.status().as_deref(), Some("RUNNING"));
        // The guest cannot do it.
        assert_ne!(container.signal("SIGUSR1").code, 0);
        container.signal("SIGKILL").succeeded();
        assert_eq!(container.ended(), 137);
        assert_eq!(other.exec(["echo", "here"]).succeeded().stdout(), "here\n");
        container.remove();
    }

    /// The same while it is being created: who asked for it is told, and it can be deleted.
    fn frozen_while_starting(bed: &Testbed) {
        let run = bed.run().command(["true"]);
        let ctr = run.spawn();
        let mut vmm = None;
        wait_until("its VMM is there", || {
            [_, vmm, _] = thaw::noted(run.id());
            vmm.is_some()
        });
        // It may have ended, on a quick machine.
        let frozen = vmm.is_some_and(|vmm| kill(Pid::from_raw(vmm), Signal::SIGSTOP).is_ok());
        let mut command = bed.containerd().ctr();
        let deleted = finish(command.args(["tasks", "delete", "--force", run.id()]));
        if let Some(vmm) = vmm.filter(|_| deleted.code != 0) {
            // Asked for too early: there was no task yet. It is as good when nobody asks any more.
            let _ = kill(Pid::from_raw(vmm), Signal::SIGKILL);
        }
        let alarm = thaw_tests::Alarm::set(&ctr, LIMIT);
        let output = ctr.wait_with_output().expect("ctr is a child of this process");
        assert!(!alarm.stop(), "ctr hangs: frozen {frozen}, {deleted}, {output:?}");
    }
}
