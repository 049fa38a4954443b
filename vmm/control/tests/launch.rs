//! Launches this very program in new namespaces and asks it over the control channel what it sees.
//!
//! Needs root. Without a test harness of its own, because the launched program is this one.

use std::fs;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;

use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use thaw_vmm_control::{
    CONTROL_DESCRIPTOR, Channel, ChannelError, Event, FromVmm, Launch, LaunchError, Launched,
    Reply, Request, Shape,
};

/// One test: its name, and what it does with a directory of its own.
type Test = (&'static str, fn(&Path));

const TESTS: &[Test] = &[
    (
        "the_child_is_pid_1_with_identity_maps",
        the_child_is_pid_1_with_identity_maps,
    ),
    (
        "the_child_has_five_descriptors",
        the_child_has_five_descriptors,
    ),
    (
        "the_child_may_have_many_descriptors",
        the_child_may_have_many_descriptors,
    ),
    (
        "the_child_has_an_empty_environment",
        the_child_has_an_empty_environment,
    ),
    (
        "the_child_is_in_new_namespaces",
        the_child_is_in_new_namespaces,
    ),
    (
        "a_new_network_namespace_is_empty",
        a_new_network_namespace_is_empty,
    ),
    (
        "a_given_network_namespace_is_joined",
        a_given_network_namespace_is_joined,
    ),
    (
        "later_mounts_below_the_root_reach_the_child",
        later_mounts_below_the_root_reach_the_child,
    ),
    (
        "standard_error_goes_to_the_log",
        standard_error_goes_to_the_log,
    ),
    (
        "a_missing_program_is_an_error",
        a_missing_program_is_an_error,
    ),
    (
        "a_file_that_is_no_namespace_is_an_error",
        a_file_that_is_no_namespace_is_an_error,
    ),
    (
        "the_child_ends_when_its_owner_goes",
        the_child_ends_when_its_owner_goes,
    ),
    (
        "a_killed_child_is_seen_and_reaped",
        a_killed_child_is_seen_and_reaped,
    ),
    ("many_threads_launch_at_once", many_threads_launch_at_once),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, root] = arguments.as_slice()
        && flag == "--root"
    {
        return child(root);
    }
    if !rustix::process::geteuid().is_root() {
        let error = launch(Path::new("/"), None).unwrap_err();
        assert!(matches!(error, LaunchError::NotRoot(_)));
        println!("skipped: {} tests of Launch need root", TESTS.len());
        return ExitCode::SUCCESS;
    }
    // What the tests mount must not be seen by the machine.
    // SAFETY: the process has one thread, and no borrowed descriptors table.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
    mount_change(
        "/",
        MountPropagationFlags::REC | MountPropagationFlags::PRIVATE,
    )
    .unwrap();
    let filter = arguments
        .get(1)
        .filter(|argument| !argument.starts_with('-'));
    for (name, test) in TESTS {
        if filter.is_none_or(|filter| name.contains(filter.as_str())) {
            let directory = tempfile::tempdir().unwrap();
            test(directory.path());
            println!("test {name} ... ok");
        }
    }
    ExitCode::SUCCESS
}

/// The launched program: answers `Boot{command_line}` with what the line asks for, as a console
/// event, until the owner goes.
fn child(root: &str) -> ExitCode {
    eprintln!("child started");
    // SAFETY: `Launch` puts the channel there, and nobody else has taken it.
    let channel = Channel::from_fd(unsafe { OwnedFd::from_raw_fd(CONTROL_DESCRIPTOR) });
    while let Some((request, _)) = channel.receive::<Request>().unwrap() {
        let Request::Boot { command_line, .. } = request else {
            return ExitCode::FAILURE;
        };
        let answer = match command_line.split_once(' ') {
            Some(("read", path)) => fs::read_to_string(path).unwrap_or_else(|e| e.to_string()),
            Some(("link", path)) => fs::read_link(path).unwrap().display().to_string(),
            Some(("list", path)) => names(Path::new(path)),
            Some(("root", path)) => names(&Path::new(root).join(path)),
            _ => format!(
                "pid {} uid {} sid {:?} environment {}",
                std::process::id(),
                rustix::process::getuid().as_raw(),
                rustix::process::getsid(None).unwrap().as_raw_nonzero(),
                std::env::vars_os().count(),
            ),
        };
        channel
            .send(&FromVmm::Event(Event::Console(answer.into_bytes())), &[])
            .unwrap();
        channel.send(&FromVmm::Reply(Reply::Done), &[]).unwrap();
    }
    ExitCode::SUCCESS
}

fn names(directory: &Path) -> String {
    let mut names: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names.join(" ")
}

fn launch(root: &Path, network: Option<&fs::File>) -> Result<Launched, LaunchError> {
    Launch {
        program: &std::env::current_exe().unwrap(),
        root,
        network_namespace: network.map(AsFd::as_fd),
        log: None,
    }
    .start()
}

fn ask(launched: &mut Launched, question: &str) -> String {
    let shape = Shape::new(1, 128).unwrap();
    let request = Request::Boot {
        shape,
        command_line: question.into(),
    };
    assert_eq!(launched.owner.request(&request, &[]).unwrap(), Reply::Done);
    match launched.owner.next_event().unwrap() {
        Some(Event::Console(answer)) => String::from_utf8(answer).unwrap(),
        other => panic!("{other:?}"),
    }
}

fn finish(launched: Launched) {
    let Launched { owner, .. } = &launched;
    rustix::net::shutdown(owner.channel(), rustix::net::Shutdown::Both).unwrap();
    assert!(launched.wait().unwrap().success());
}

fn the_child_is_pid_1_with_identity_maps(root: &Path) {
    let mut launched = launch(root, None).unwrap();
    assert!(ask(&mut launched, "facts").starts_with("pid 1 uid 0 sid 1 "));
    // The `/proc` that it sees is still the host's, so this is what the host sees of it.
    assert_eq!(
        ask(&mut launched, "link /proc/self"),
        launched.pid.to_string(),
        "the pid is the host's"
    );
    for map in ["uid_map", "gid_map"] {
        let map = ask(&mut launched, &format!("read /proc/self/{map}"));
        assert_eq!(
            map.split_whitespace().collect::<Vec<_>>(),
            ["0", "0", "4294967295"]
        );
    }
    finish(launched);
}

fn the_child_has_five_descriptors(root: &Path) {
    // Something that a careless launch would let through.
    let inheritable = rustix::io::dup(fs::File::open("/dev/zero").unwrap()).unwrap();
    let mut launched = launch(root, None).unwrap();
    // 5 is the directory being listed.
    assert_eq!(ask(&mut launched, "list /proc/self/fd"), "0 1 2 3 4 5");
    // In a mount of their own, whose root is `/dev`.
    assert_eq!(ask(&mut launched, "link /proc/self/fd/0"), "/null");
    assert_eq!(ask(&mut launched, "link /proc/self/fd/2"), "/null");
    assert!(ask(&mut launched, "link /proc/self/fd/3").starts_with("socket:"));
    assert_eq!(ask(&mut launched, "link /proc/self/fd/4"), "/kvm");
    finish(launched);
    drop(inheritable);
}

fn the_child_may_have_many_descriptors(root: &Path) {
    let mut launched = launch(root, None).unwrap();
    let limits = ask(&mut launched, "read /proc/self/limits");
    let line = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    let limit: u64 = line
        .unwrap()
        .split_whitespace()
        .nth(4)
        .unwrap()
        .parse()
        .unwrap();
    // Raising it takes a capability that root lacks in some containers.
    let may_raise = rustix::thread::capabilities(None)
        .unwrap()
        .effective
        .contains(rustix::thread::CapabilitySet::SYS_RESOURCE);
    let own = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let expected = if may_raise {
        own.unwrap_or(u64::MAX).max(1 << 20)
    } else {
        own.unwrap()
    };
    assert_eq!(limit, expected);
    finish(launched);
}

fn the_child_has_an_empty_environment(root: &Path) {
    assert!(std::env::vars_os().count() > 0);
    let mut launched = launch(root, None).unwrap();
    assert!(ask(&mut launched, "facts").ends_with("environment 0"));
    let status = ask(&mut launched, "read /proc/self/status");
    for line in ["SigBlk:\t0000000000000000", "Groups:\t "] {
        assert!(status.contains(line), "{line} in {status}");
    }
    finish(launched);
}

fn the_child_is_in_new_namespaces(root: &Path) {
    let mut launched = launch(root, None).unwrap();
    for kind in ["user", "mnt", "pid", "ipc", "uts", "net"] {
        let path = format!("/proc/self/ns/{kind}");
        let ours = fs::read_link(&path).unwrap().display().to_string();
        assert_ne!(ask(&mut launched, &format!("link {path}")), ours, "{kind}");
    }
    finish(launched);
}

fn a_new_network_namespace_is_empty(root: &Path) {
    let mut launched = launch(root, None).unwrap();
    let interfaces = ask(&mut launched, "read /proc/self/net/dev");
    let names: Vec<_> = interfaces
        .lines()
        .skip(2)
        .filter_map(|line| line.split(':').next())
        .collect();
    assert_eq!(names, ["    lo"]);
    let routes = ask(&mut launched, "read /proc/self/net/route");
    assert_eq!(routes.lines().skip(1).count(), 0, "{routes}");
    finish(launched);
}

fn a_given_network_namespace_is_joined(root: &Path) {
    let before = fs::read_link("/proc/thread-self/ns/net").unwrap();
    let holder = launch(root, None).unwrap();
    let namespace = fs::File::open(format!("/proc/{}/ns/net", holder.pid)).unwrap();
    let mut launched = launch(root, Some(&namespace)).unwrap();
    assert_eq!(
        ask(&mut launched, "link /proc/self/ns/net"),
        format!("net:[{}]", namespace.metadata().unwrap().ino())
    );
    assert_eq!(
        fs::read_link("/proc/thread-self/ns/net").unwrap(),
        before,
        "the caller stays"
    );
    finish(launched);
    finish(holder);
}

fn later_mounts_below_the_root_reach_the_child(root: &Path) {
    mount("thaw", root, "tmpfs", MountFlags::empty(), None).unwrap();
    mount_change(root, MountPropagationFlags::SHARED).unwrap();
    fs::create_dir(root.join("late")).unwrap();
    let mut launched = launch(root, None).unwrap();
    assert_eq!(ask(&mut launched, "root late"), "");

    mount(
        "thaw",
        root.join("late"),
        "tmpfs",
        MountFlags::empty(),
        None,
    )
    .unwrap();
    fs::write(root.join("late/file"), "").unwrap();
    assert_eq!(ask(&mut launched, "root late"), "file");

    unmount(root.join("late"), UnmountFlags::DETACH).unwrap();
    assert_eq!(ask(&mut launched, "root late"), "");
    finish(launched);
    unmount(root, UnmountFlags::DETACH).unwrap();
}

fn standard_error_goes_to_the_log(root: &Path) {
    let mut log = tempfile::tempfile().unwrap();
    let launched = Launch {
        program: &std::env::current_exe().unwrap(),
        root,
        network_namespace: None,
        log: Some(log.as_fd()),
    }
    .start()
    .unwrap();
    finish(launched);
    let mut text = String::new();
    log.rewind().unwrap();
    log.read_to_string(&mut text).unwrap();
    assert_eq!(text, "child started\n");
}

fn a_missing_program_is_an_error(root: &Path) {
    let program = root.join("thaw-vmm");
    let launch = || {
        Launch {
            program: &program,
            root,
            network_namespace: None,
            log: None,
        }
        .start()
    };
    let error = launch().unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("execve for {program:?}: No such file or directory (os error 2)")
    );
    fs::write(&program, "no program").unwrap();
    assert!(
        launch()
            .unwrap_err()
            .to_string()
            .contains("Permission denied")
    );
    // Nothing is left of the children that failed.
    let error = rustix::process::waitpid(None, rustix::process::WaitOptions::NOHANG);
    assert_eq!(error.unwrap_err(), rustix::io::Errno::CHILD);
}

fn a_file_that_is_no_namespace_is_an_error(root: &Path) {
    let file = tempfile::tempfile().unwrap();
    assert!(matches!(
        launch(root, Some(&file)),
        Err(LaunchError::NetworkNamespace(_))
    ));
    let user = fs::File::open("/proc/self/ns/user").unwrap();
    assert!(matches!(
        launch(root, Some(&user)),
        Err(LaunchError::NetworkNamespace(_))
    ));
}

fn the_child_ends_when_its_owner_goes(root: &Path) {
    let Launched { pid, pidfd, owner } = launch(root, None).unwrap();
    drop(owner);
    let owner = thaw_vmm_control::Owner::new(Channel::pair().unwrap().0);
    assert!(Launched { pid, pidfd, owner }.wait().unwrap().success());
}

fn a_killed_child_is_seen_and_reaped(root: &Path) {
    let mut launched = launch(root, None).unwrap();
    launched.kill().unwrap();
    assert_eq!(launched.owner.next_event().unwrap(), None);
    let status = launched.wait().unwrap();
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&status),
        Some(9)
    );
    launched.kill().unwrap();
    assert!(matches!(
        launched.owner.request(&Request::Run, &[]),
        Err(ChannelError::Closed)
    ));
}

fn many_threads_launch_at_once(root: &Path) {
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..5 {
                    let mut launched = launch(root, None).unwrap();
                    assert!(ask(&mut launched, "facts").starts_with("pid 1 "));
                    finish(launched);
                }
            });
        }
    });
}
