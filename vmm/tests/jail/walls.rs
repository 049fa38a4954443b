//! What the jail keeps out.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::sched::CloneFlags;
use rustix::fs::{AtFlags, Mode, OFlags, RawDir, chmodat, fchmod, openat, statat};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, unmount};
use rustix::process::{
    DumpableBehavior, Resource, chroot, dumpable_behavior, getrlimit, pivot_root,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    configure_capability_in_ambient_set, no_new_privs, set_capabilities,
};
use thaw_vmm::jail::KEPT;
use thaw_vmm_control::Event;

use crate::{Case, Inside, Sandbox, Test};

pub const TESTS: &[Test] = &[
    ("nothing_of_the_host_is_named", || {
        run("nothing of the host is named")
    }),
    ("the_directory_of_descriptors_leads_nowhere", || {
        run("the directory of descriptors leads nowhere");
    }),
    ("what_is_lent_cannot_be_changed", || {
        run("what is lent cannot be changed");
    }),
    ("only_a_file_servers_capabilities_are_left", || {
        run("only a file server's capabilities are left");
    }),
    ("there_is_no_way_to_get_more", || {
        run("there is no way to get more")
    }),
    ("the_process_is_not_to_be_looked_into", || {
        run("the process is not to be looked into");
    }),
    (
        "only_what_is_mounted_can_be_written_to",
        only_what_is_mounted_can_be_written_to,
    ),
    (
        "mounts_of_the_owner_come_and_go",
        mounts_of_the_owner_come_and_go,
    ),
    (
        "a_root_that_does_not_exist_is_an_error",
        a_root_that_does_not_exist_is_an_error,
    ),
];

pub const CASES: &[Case] = &[
    ("nothing of the host is named", nothing_of_the_host_is_named),
    (
        "the directory of descriptors leads nowhere",
        descriptors_lead_nowhere,
    ),
    (
        "what is lent cannot be changed",
        what_is_lent_cannot_be_changed,
    ),
    (
        "only a file server's capabilities are left",
        only_kept_capabilities,
    ),
    ("there is no way to get more", no_way_to_get_more),
    (
        "the process is not to be looked into",
        not_to_be_looked_into,
    ),
    ("the root is read-only", the_root_is_read_only),
    ("a late mount is there", |_| {
        assert_eq!(fs::read_to_string("/late/file").unwrap(), "text");
    }),
    ("a late mount is gone", |_| {
        assert_eq!(fs::read_dir("/late").unwrap().count(), 0);
    }),
];

fn run(case: &str) {
    Sandbox::start().run(case);
}

fn nothing_of_the_host_is_named(_: &mut Inside) {
    assert_eq!(fs::read_dir("/").unwrap().count(), 0);
    for path in ["/proc", "/sys", "/dev", "/etc", "/tmp", "../../../../etc"] {
        let error = fs::metadata(path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{path}");
    }
    let root = fs::metadata("/").unwrap();
    let above = fs::metadata("/../..").unwrap();
    assert_eq!((root.dev(), root.ino()), (above.dev(), above.ino()));
    assert_eq!(std::env::current_dir().unwrap(), Path::new("/"));
    // The network namespace is empty, and abstract sockets belong to it.
    assert!(std::net::UdpSocket::bind("127.0.0.1:0").is_ok());
    assert!(std::net::TcpStream::connect("127.0.0.1:22").is_err());
}

/// The jail's descriptor of `/proc/self/fd`, and no other, is on a procfs.
fn descriptors() -> BorrowedFd<'static> {
    const PROCFS: i64 = 0x9fa0;
    let mut found = (0..64).filter_map(|number: RawFd| {
        // SAFETY: the descriptor is only looked at, and nothing is closed meanwhile; numbers that
        // are not open are errors.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        let on_procfs = rustix::fs::fstatfs(descriptor).is_ok_and(|fs| fs.f_type == PROCFS);
        on_procfs.then_some(descriptor)
    });
    let descriptor = found.next().expect("a descriptor on procfs");
    assert!(found.next().is_none());
    descriptor
}

fn descriptors_lead_nowhere(_: &mut Inside) {
    let directory = descriptors();
    let own = statat(directory, "", AtFlags::EMPTY_PATH).unwrap();
    for path in ["..", "../..", "../../..", "."] {
        let other = statat(directory, path, AtFlags::empty()).unwrap();
        assert_eq!(
            (own.st_dev, own.st_ino),
            (other.st_dev, other.st_ino),
            "{path}"
        );
    }
    for path in [
        "../root",
        "../environ",
        "../mem",
        "../ns/user",
        "../fd/x",
        "task",
    ] {
        let error = openat(directory, path, OFlags::PATH, Mode::empty()).unwrap_err();
        assert_eq!(error, Errno::NOENT, "{path}");
    }
    // Nothing but the numbers of open descriptors.
    let opened = openat(directory, ".", OFlags::RDONLY, Mode::empty()).unwrap();
    let mut buffer = Vec::with_capacity(4096);
    let mut entries = RawDir::new(&opened, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = entry.unwrap();
        let name = entry.file_name().to_str().unwrap();
        assert!(
            [".", ".."].contains(&name) || name.parse::<u32>().is_ok(),
            "{name}"
        );
    }
    // What it is there for.
    let number = directory.as_raw_fd().to_string();
    let again = openat(directory, number, OFlags::PATH, Mode::empty()).unwrap();
    let other = statat(&again, "", AtFlags::EMPTY_PATH).unwrap();
    assert_eq!(own.st_ino, other.st_ino);
}

fn what_is_lent_cannot_be_changed(_: &mut Inside) {
    // Standard input and output, and /dev/kvm.
    for number in [0, 1, 4] {
        // SAFETY: the descriptor is open for the whole life of the process.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        assert_eq!(fchmod(descriptor, Mode::RWXU), Err(Errno::ROFS), "{number}");
        let changed = chmodat(
            descriptors(),
            number.to_string(),
            Mode::RWXU,
            AtFlags::empty(),
        );
        assert_eq!(changed, Err(Errno::ROFS), "{number}");
    }
}

fn only_kept_capabilities(_: &mut Inside) {
    let sets = capabilities(None).unwrap();
    assert_eq!((sets.effective, sets.permitted), (KEPT, KEPT));
    assert_eq!(sets.inheritable, CapabilitySet::empty());
    for number in 0..64 {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if let Ok(bounding) = capability_is_in_bounding_set(capability) {
            assert_eq!(bounding, KEPT.contains(capability), "{capability:?}");
        }
    }
    for dangerous in [
        CapabilitySet::SYS_ADMIN,
        CapabilitySet::SYS_CHROOT,
        CapabilitySet::SYS_PTRACE,
        CapabilitySet::SETPCAP,
        CapabilitySet::NET_ADMIN,
        CapabilitySet::MKNOD,
        CapabilitySet::DAC_READ_SEARCH,
    ] {
        assert!(!KEPT.intersects(dangerous));
    }
}

fn no_way_to_get_more(_: &mut Inside) {
    let refused = |result: Result<(), Errno>| assert_eq!(result, Err(Errno::PERM));
    refused(mount("none", "/", "tmpfs", MountFlags::empty(), None));
    refused(mount_bind("/", "/"));
    refused(unmount("/", UnmountFlags::DETACH));
    refused(chroot("/"));
    refused(pivot_root(".", "."));
    for flags in [
        CloneFlags::CLONE_NEWNS,
        CloneFlags::CLONE_NEWPID,
        CloneFlags::CLONE_NEWNET,
        CloneFlags::CLONE_NEWIPC,
        CloneFlags::CLONE_NEWUTS,
    ] {
        assert_eq!(nix::sched::unshare(flags), Err(nix::errno::Errno::EPERM));
    }
    // A user namespace below this one would have all capabilities again, for what they are worth.
    assert_eq!(
        nix::sched::unshare(CloneFlags::CLONE_NEWUSER),
        Err(nix::errno::Errno::ENOSPC)
    );
    let more = CapabilitySets {
        effective: KEPT | CapabilitySet::SYS_ADMIN,
        permitted: KEPT | CapabilitySet::SYS_ADMIN,
        inheritable: CapabilitySet::empty(),
    };
    assert_eq!(set_capabilities(None, more), Err(Errno::PERM));
    assert!(configure_capability_in_ambient_set(CapabilitySet::CHOWN, true).is_err());
    assert!(no_new_privs().unwrap());
}

fn not_to_be_looked_into(_: &mut Inside) {
    assert!(matches!(
        dumpable_behavior().unwrap(),
        DumpableBehavior::NotDumpable
    ));
    assert_eq!(getrlimit(Resource::Core).maximum, Some(0));
    let files = getrlimit(Resource::Nofile);
    assert_eq!(files.current, files.maximum);
}

fn only_what_is_mounted_can_be_written_to() {
    let mut sandbox = Sandbox::start();
    let directory = sandbox.mount_directory("disk");
    sandbox.mount_read_only("read-only");
    sandbox.run("the root is read-only");
    assert_eq!(fs::read_to_string(directory.join("file")).unwrap(), "text");
    assert_eq!(fs::read_dir(sandbox.export()).unwrap().count(), 2);
}

fn the_root_is_read_only(inside: &mut Inside) {
    let read_only = |path: &str| {
        let error = fs::write(path, "text").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem, "{path}");
    };
    read_only("/file");
    read_only("/read-only/file");
    fs::write("/disk/file", "text").unwrap();
    // By the guest's way too.
    let guest = inside.guest();
    for path in ["", "read-only"] {
        let parent = match path {
            "" => crate::guest::ROOT,
            path => guest.node(path),
        };
        let created = guest.create(crate::guest::SUPERUSER, parent, "new", 0o644);
        assert_eq!(created.unwrap_err(), libc::EROFS, "{path:?}");
        let made = guest.mkdir(crate::guest::SUPERUSER, parent, "new");
        assert_eq!(made.unwrap_err(), libc::EROFS, "{path:?}");
    }
    let chmod = guest.chmod(crate::guest::ROOT, 0o777);
    assert_eq!(chmod.unwrap_err(), libc::EROFS);
}

fn mounts_of_the_owner_come_and_go() {
    let mut sandbox = Sandbox::start();
    let late = sandbox.mount_tmpfs("late", c"size=1m");
    fs::write(late.join("file"), "text").unwrap();
    sandbox.run("a late mount is there");
    unmount(&late, UnmountFlags::DETACH).unwrap();
    sandbox.run("a late mount is gone");
}

fn a_root_that_does_not_exist_is_an_error() {
    let mut sandbox = Sandbox::prepare();
    let missing = sandbox.export().join("missing");
    sandbox.launch(&missing);
    let event = sandbox.launched.as_mut().unwrap().owner.next_event();
    let Some(Event::Console(text)) = event.unwrap() else {
        panic!("no error");
    };
    let text = String::from_utf8(text).unwrap();
    assert!(
        text.starts_with(&format!("entering the jail in {missing:?}")),
        "{text}"
    );
    assert!(text.contains("No such file or directory"), "{text}");
}
