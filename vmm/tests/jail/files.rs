//! Owners, modes, attributes and names, as the guest makes them and as the host finds them, on a
//! directory of a disk and on an overlay of two.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{XattrFlags, getxattr, lsetxattr};
use thaw_vmm::virtio::Device;
use virtiofsd::fuse::{ATTR_SUBMOUNT, Opcode, SetattrIn};

use crate::guest::{Caller, Guest, KILL_PRIVILEGES, ROOT, SUPERUSER};
use crate::{Case, Inside, Sandbox, Test};

/// The mounts that every test here is done on.
const MOUNTS: [&str; 2] = ["disk", "overlay"];

pub const TESTS: &[Test] = &[
    (
        "new_files_belong_to_the_caller",
        new_files_belong_to_the_caller,
    ),
    ("any_owner_can_be_given", any_owner_can_be_given),
    (
        "capabilities_of_files_are_the_hosts",
        capabilities_of_files_are_the_hosts,
    ),
    (
        "privileges_are_lost_by_writing",
        privileges_are_lost_by_writing,
    ),
    (
        "nodes_that_are_no_devices_can_be_made",
        nodes_that_are_no_devices_can_be_made,
    ),
    (
        "attributes_that_users_may_set_are_kept",
        attributes_that_users_may_set_are_kept,
    ),
    (
        "names_can_be_linked_moved_and_removed",
        names_can_be_linked_moved_and_removed,
    ),
    ("data_arrives_unchanged", data_arrives_unchanged),
    ("what_the_host_does_is_seen", what_the_host_does_is_seen),
    ("mounts_are_announced", mounts_are_announced),
    (
        "a_mounted_file_system_is_not_saved",
        a_mounted_file_system_is_not_saved,
    ),
];

pub const CASES: &[Case] = &[
    ("new files belong to the caller", |inside| {
        on_mounts(inside, make_as_callers)
    }),
    ("any owner can be given", |inside| {
        on_mounts(inside, give_owners)
    }),
    ("set capabilities", |inside| {
        on_mounts(inside, set_capabilities)
    }),
    ("lose privileges", |inside| {
        on_mounts(inside, lose_privileges)
    }),
    ("make nodes", |inside| on_mounts(inside, make_nodes)),
    ("set attributes", |inside| on_mounts(inside, set_attributes)),
    ("link and move", |inside| on_mounts(inside, link_and_move)),
    ("write data", |inside| on_mounts(inside, write_data)),
    ("nothing is there", |inside| {
        on_mounts(inside, |guest, parent| {
            assert_eq!(guest.lookup(parent, "new").unwrap_err(), libc::ENOENT);
        });
    }),
    ("something is there", |inside| {
        on_mounts(inside, |guest, parent| {
            let entry = guest.lookup(parent, "new").unwrap();
            assert_eq!((entry.attr.size, owner(&entry.attr)), (4, (1234, 5678)));
            assert!(guest.list(parent).unwrap().contains(&"new".into()));
        });
    }),
    ("mounts are announced", see_mounts),
    ("save", save),
];

fn on_mounts(inside: &mut Inside, case: fn(&mut Guest, u64)) {
    for mount in MOUNTS {
        let guest = inside.guest();
        let node = guest.node(mount);
        case(guest, node);
    }
}

/// A sandbox with both mounts, and the directories behind them.
fn sandbox() -> (Sandbox, [PathBuf; 2]) {
    let sandbox = Sandbox::start();
    let directories = [
        sandbox.mount_directory("disk"),
        sandbox.mount_overlay("overlay"),
    ];
    (sandbox, directories)
}

fn owner(attributes: &virtiofsd::fuse::Attr) -> (u32, u32) {
    use virtiofsd::soft_idmap::Id;
    (attributes.uid.into_inner(), attributes.gid.into_inner())
}

fn host_owner(path: &Path) -> (u32, u32) {
    let metadata = fs::symlink_metadata(path).unwrap();
    (metadata.uid(), metadata.gid())
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

const USER: Caller = Caller(1000, 100);
/// The last id there is; one more means "none".
const LAST: u32 = u32::MAX - 1;

fn new_files_belong_to_the_caller() {
    let (mut sandbox, directories) = sandbox();
    for mount in MOUNTS {
        let path = sandbox.export().join(mount);
        fs::set_permissions(path, PermissionsExt::from_mode(0o777)).unwrap();
    }
    sandbox.run("new files belong to the caller");
    for directory in directories {
        for (name, owner) in [
            ("file", (1000, 100)),
            ("directory", (1000, 100)),
            ("symlink", (1000, 100)),
            ("last", (LAST, LAST)),
            ("root", (0, 0)),
        ] {
            assert_eq!(host_owner(&directory.join(name)), owner, "{name}");
        }
    }
}

fn make_as_callers(guest: &mut Guest, parent: u64) {
    let (entry, _) = guest.create(USER, parent, "file", 0o640).unwrap();
    assert_eq!(owner(&entry.attr), (1000, 100));
    assert_eq!(entry.attr.mode & 0o7777, 0o640);
    guest.mkdir(USER, parent, "directory").unwrap();
    guest
        .symlink(USER, parent, "symlink", "/etc/passwd")
        .unwrap();
    guest
        .create(Caller(LAST, LAST), parent, "last", 0o600)
        .unwrap();
    guest.create(SUPERUSER, parent, "root", 0o600).unwrap();
    // As the caller, not with the server's rights.
    let node = guest.lookup(parent, "root").unwrap().nodeid;
    guest.unlink(parent, "root").unwrap();
    let error = guest.create(USER, node, "below-a-file", 0o600).unwrap_err();
    assert_eq!(error, libc::ENOTDIR);
    guest.create(SUPERUSER, parent, "root", 0o600).unwrap();
}

fn any_owner_can_be_given() {
    let (mut sandbox, directories) = sandbox();
    sandbox.run("any owner can be given");
    for directory in directories {
        assert_eq!(host_owner(&directory.join("given")), (LAST, 65534));
        assert_eq!(mode(&directory.join("given")), 0o4711);
        assert_eq!(mode(&directory.join("sticky")), 0o3755);
        assert_eq!(host_owner(&directory.join("link")), (33, 44));
    }
}

fn give_owners(guest: &mut Guest, parent: u64) {
    let (entry, _) = guest.create(SUPERUSER, parent, "given", 0o644).unwrap();
    for (uid, gid) in [(1, 2), (100_000, 65536), (LAST, 65534)] {
        let set = guest.chown(entry.nodeid, uid, gid).unwrap();
        assert_eq!(owner(&set.attr), (uid, gid));
    }
    let set = guest.chmod(entry.nodeid, 0o4711).unwrap();
    assert_eq!(set.attr.mode & 0o7777, 0o4711);
    let directory = guest.mkdir(SUPERUSER, parent, "sticky").unwrap();
    guest.chown(directory.nodeid, 7, 8).unwrap();
    guest.chmod(directory.nodeid, 0o3755).unwrap();
    guest.symlink(SUPERUSER, parent, "link", "nowhere").unwrap();
    let link = guest.lookup(parent, "link").unwrap();
    guest.chown(link.nodeid, 33, 44).unwrap();
}

/// `cap_net_raw=ep`, as `vfs_cap_data` of revision 2 (`linux/capability.h`).
const NET_RAW: [u8; 20] = [
    1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

const CAPABILITY: &str = "security.capability";

fn capabilities_of_files_are_the_hosts() {
    let (mut sandbox, directories) = sandbox();
    for directory in &directories {
        fs::write(directory.join("of-the-host"), "").unwrap();
        let path = directory.join("of-the-host");
        lsetxattr(path, CAPABILITY, &NET_RAW, XattrFlags::empty()).unwrap();
    }
    sandbox.run("set capabilities");
    for directory in directories {
        let mut value = [0; 64];
        let length = getxattr(directory.join("of-the-guest"), CAPABILITY, &mut value[..]).unwrap();
        assert_eq!(value[..length], NET_RAW, "of a binary that root may run");
    }
}

fn set_capabilities(guest: &mut Guest, parent: u64) {
    let (entry, _) = guest
        .create(SUPERUSER, parent, "of-the-guest", 0o755)
        .unwrap();
    guest.set_xattr(entry.nodeid, CAPABILITY, &NET_RAW).unwrap();
    assert_eq!(guest.xattr(entry.nodeid, CAPABILITY).unwrap(), NET_RAW);
    let host = guest.lookup(parent, "of-the-host").unwrap();
    assert_eq!(guest.xattr(host.nodeid, CAPABILITY).unwrap(), NET_RAW);
}

fn privileges_are_lost_by_writing() {
    let (mut sandbox, directories) = sandbox();
    sandbox.run("lose privileges");
    for directory in directories {
        for name in ["written", "written-by-root", "owned", "truncated"] {
            assert_eq!(mode(&directory.join(name)), 0o755, "{name}");
            let value = getxattr(directory.join(name), CAPABILITY, &mut [0u8; 64][..]);
            assert_eq!(value.unwrap_err(), rustix::io::Errno::NODATA, "{name}");
        }
    }
}

fn lose_privileges(guest: &mut Guest, parent: u64) {
    let privileged = |guest: &mut Guest, name: &str| {
        let (entry, handle) = guest.create(SUPERUSER, parent, name, 0o755).unwrap();
        guest.chmod(entry.nodeid, 0o6755).unwrap();
        guest.set_xattr(entry.nodeid, CAPABILITY, &NET_RAW).unwrap();
        (entry.nodeid, handle)
    };
    let (node, handle) = privileged(guest, "written");
    guest
        .write(node, handle, 0, b"data", KILL_PRIVILEGES)
        .unwrap();
    // The guest's root would keep the bits on a file system of its own. Here it is the host's kernel
    // that asks for CAP_FSETID, and in the initial user namespace, in which this process has none.
    let (node, handle) = privileged(guest, "written-by-root");
    guest.write(node, handle, 0, b"data", 0).unwrap();
    let (node, _) = privileged(guest, "owned");
    guest.chown(node, 5, 5).unwrap();
    let (node, _) = privileged(guest, "truncated");
    let truncate = SetattrIn {
        // SIZE and KILL_SUIDGID.
        valid: 1 << 3 | 1 << 11,
        size: 3,
        ..SetattrIn::default()
    };
    guest.set_attributes(node, truncate).unwrap();
}

fn nodes_that_are_no_devices_can_be_made() {
    let (mut sandbox, directories) = sandbox();
    sandbox.run("make nodes");
    for directory in directories {
        let kind = |name: &str| fs::metadata(directory.join(name)).unwrap().file_type();
        assert!(kind("fifo").is_fifo());
        assert!(kind("socket").is_socket());
        assert!(kind("regular").is_file());
        for name in ["character", "block"] {
            assert!(!directory.join(name).exists());
        }
    }
}

/// Device nodes are for the initial user namespace to make (`mknod(2)`), so the guest gets EPERM;
/// its own are in a file system of its own.
fn make_nodes(guest: &mut Guest, parent: u64) {
    guest
        .mknod(parent, "fifo", libc::S_IFIFO | 0o644, 0)
        .unwrap();
    guest
        .mknod(parent, "socket", libc::S_IFSOCK | 0o644, 0)
        .unwrap();
    guest
        .mknod(parent, "regular", libc::S_IFREG | 0o644, 0)
        .unwrap();
    let null = 1 << 8 | 3;
    for (name, kind) in [("character", libc::S_IFCHR), ("block", libc::S_IFBLK)] {
        let error = guest.mknod(parent, name, kind | 0o666, null).unwrap_err();
        assert_eq!(error, libc::EPERM, "{name}");
    }
    // Nothing but files and directories is opened on the host: the guest's kernel serves the rest.
    for name in ["fifo", "socket"] {
        let node = guest.lookup(parent, name).unwrap().nodeid;
        assert_eq!(guest.open(node, libc::O_RDONLY).unwrap_err(), libc::EBADF);
        guest.chown(node, 12, 13).unwrap();
        guest.chmod(node, 0o600).unwrap();
    }
}

/// `user::rwx, user:1000:r, group::rx, mask::rwx, other::r` of `acl(5)`, as the kernel's
/// `posix_acl_xattr` has it: version, then tag, permissions and id of each entry.
fn access_list() -> Vec<u8> {
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in [
        (1u16, 7u16, u32::MAX),
        (2, 4, 1000),
        (4, 5, u32::MAX),
        (0x10, 7, u32::MAX),
        (0x20, 4, u32::MAX),
    ] {
        list.extend(tag.to_le_bytes());
        list.extend(permissions.to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    list
}

const ACL: &str = "system.posix_acl_access";

fn attributes_that_users_may_set_are_kept() {
    let (mut sandbox, directories) = sandbox();
    sandbox.run("set attributes");
    for directory in directories {
        let mut value = [0; 256];
        let path = directory.join("file");
        let length = getxattr(&path, "user.thaw", &mut value[..]).unwrap();
        assert_eq!(&value[..length], b"value");
        let length = getxattr(&path, ACL, &mut value[..]).unwrap();
        assert_eq!(value[..length], access_list());
        assert!(getxattr(&path, "trusted.thaw", &mut value[..]).is_err());
    }
}

/// `user.*` and ACLs work as on the host. `trusted.*` and security labels belong to the initial
/// user namespace: they can neither be set nor seen.
fn set_attributes(guest: &mut Guest, parent: u64) {
    let (entry, _) = guest.create(SUPERUSER, parent, "file", 0o644).unwrap();
    let node = entry.nodeid;
    guest.set_xattr(node, "user.thaw", b"value").unwrap();
    assert_eq!(guest.xattr(node, "user.thaw").unwrap(), b"value");
    guest.set_xattr(node, ACL, &access_list()).unwrap();
    assert_eq!(guest.xattr(node, ACL).unwrap(), access_list());
    let mode = guest.attributes(node).unwrap().attr.mode;
    assert_eq!(mode & 0o777, 0o774, "the mask is the group's mode");
    let names = guest.xattrs(node).unwrap();
    assert_eq!(names, ["user.thaw", ACL].map(String::from).as_slice());

    guest.set_xattr(node, "user.gone", b"").unwrap();
    let removed = guest.call(Opcode::Removexattr, node, &[b"user.gone\0"]);
    removed.unwrap();
    assert_eq!(guest.xattr(node, "user.gone").unwrap_err(), libc::ENODATA);

    for name in ["trusted.thaw", "security.thaw"] {
        let error = guest.set_xattr(node, name, b"value").unwrap_err();
        assert!(
            [libc::EPERM, libc::EOPNOTSUPP].contains(&error),
            "{name}: {error}"
        );
        let error = guest.xattr(node, name).unwrap_err();
        assert!(
            [libc::ENODATA, libc::EOPNOTSUPP].contains(&error),
            "{name}: {error}"
        );
    }
    // On what cannot be opened: by way of the directory of descriptors.
    guest.symlink(SUPERUSER, parent, "link", "nowhere").unwrap();
    let link = guest.lookup(parent, "link").unwrap().nodeid;
    assert!(guest.set_xattr(link, "user.thaw", b"value").is_err());
    assert!(guest.xattrs(link).unwrap().is_empty());
}

fn names_can_be_linked_moved_and_removed() {
    let (mut sandbox, directories) = sandbox();
    sandbox.run("link and move");
    for directory in directories {
        assert_eq!(fs::metadata(directory.join("second")).unwrap().nlink(), 2);
        assert_eq!(fs::read_to_string(directory.join("one")).unwrap(), "2");
        assert_eq!(fs::read_to_string(directory.join("two")).unwrap(), "1");
        assert!(!directory.join("gone").exists());
    }
}

fn link_and_move(guest: &mut Guest, parent: u64) {
    let (first, _) = guest.create(SUPERUSER, parent, "first", 0o644).unwrap();
    let second = guest.link(first.nodeid, parent, "second").unwrap();
    assert_eq!((second.nodeid, second.attr.nlink), (first.nodeid, 2));
    for (name, text) in [("one", "1"), ("two", "2"), ("gone", "")] {
        let (entry, handle) = guest.create(SUPERUSER, parent, name, 0o644).unwrap();
        guest
            .write(entry.nodeid, handle, 0, text.as_bytes(), 0)
            .unwrap();
    }
    let no_replace = libc::RENAME_NOREPLACE;
    let error = guest.rename(parent, "one", "two", no_replace).unwrap_err();
    assert_eq!(error, libc::EEXIST);
    guest
        .rename(parent, "one", "two", libc::RENAME_EXCHANGE)
        .unwrap();
    guest.rename(parent, "gone", "really-gone", 0).unwrap();
    // A file that is open stays readable when its name is gone.
    let node = guest.lookup(parent, "really-gone").unwrap().nodeid;
    let handle = guest.open(node, libc::O_RDWR).unwrap();
    guest.write(node, handle, 0, b"still", 0).unwrap();
    guest.unlink(parent, "really-gone").unwrap();
    assert_eq!(guest.read(node, handle, 0, 16).unwrap(), b"still");
    guest.release(node, handle).unwrap();
    // The library does not know FUSE_TMPFILE: programs that use O_TMPFILE get EOPNOTSUPP from their
    // kernel, and have a fallback for it.
    let error = guest
        .call(Opcode::TmpFile, parent, &[&[0; 32]])
        .unwrap_err();
    assert_eq!(error, libc::ENOSYS);
}

fn data_arrives_unchanged() {
    let (mut sandbox, directories) = sandbox();
    sandbox.run("write data");
    for directory in directories {
        let bytes = fs::read(directory.join("big")).unwrap();
        assert_eq!(bytes, pattern(3 << 20));
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length as u32)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect()
}

fn write_data(guest: &mut Guest, parent: u64) {
    let bytes = pattern(3 << 20);
    let (entry, handle) = guest.create(SUPERUSER, parent, "big", 0o644).unwrap();
    let node = entry.nodeid;
    for (at, part) in bytes.chunks(1 << 20).enumerate() {
        let offset = (at as u64) << 20;
        assert_eq!(guest.write(node, handle, offset, part, 0), Ok(part.len()));
    }
    let read: Vec<u8> = (0..4)
        .flat_map(|at| guest.read(node, handle, at << 20, 1 << 20).unwrap())
        .collect();
    assert!(read == bytes);
    assert_eq!(guest.read(node, handle, 10 << 20, 4096).unwrap(), b"");
}

fn what_the_host_does_is_seen() {
    let (mut sandbox, directories) = sandbox();
    // The host writes through the mount, as `docker cp` does: an overlay's layers are not to be
    // changed behind its back.
    let export = sandbox.export();
    sandbox.run("nothing is there");
    for mount in MOUNTS {
        let path = export.join(mount).join("new");
        fs::write(&path, "text").unwrap();
        std::os::unix::fs::chown(&path, Some(1234), Some(5678)).unwrap();
    }
    sandbox.run("something is there");
    for mount in MOUNTS {
        fs::remove_file(export.join(mount).join("new")).unwrap();
    }
    sandbox.run("nothing is there");
    drop(directories);
}

fn mounts_are_announced() {
    let (mut sandbox, _) = sandbox();
    fs::create_dir(sandbox.export().join("no-mount")).unwrap();
    fs::write(sandbox.export().join("file"), "").unwrap();
    let file = sandbox.export().join("file");
    rustix::mount::mount_bind("/etc/hostname", &file).unwrap();
    sandbox.run("mounts are announced");
}

fn see_mounts(inside: &mut Inside) {
    let guest = inside.guest();
    for (name, flags) in [
        ("disk", ATTR_SUBMOUNT),
        ("overlay", ATTR_SUBMOUNT),
        ("no-mount", 0),
    ] {
        assert_eq!(
            guest.lookup(ROOT, name).unwrap().attr.flags,
            flags,
            "{name}"
        );
    }
    // A single file as a volume.
    let file = guest.node("file");
    let handle = guest.open(file, libc::O_RDONLY).unwrap();
    assert!(!guest.read(file, handle, 0, 4096).unwrap().is_empty());
    let names = guest.list(ROOT).unwrap();
    assert_eq!(names, [".", "..", "disk", "file", "no-mount", "overlay"]);
}

fn a_mounted_file_system_is_not_saved() {
    let (mut sandbox, _) = sandbox();
    sandbox.run("save");
}

fn save(inside: &mut Inside) {
    let guest = inside.guest();
    let queues = guest.device().deactivate();
    assert!(guest.device().save().is_err());
    guest.activate(queues);
    guest.node("disk");
    guest.unmount();
    let queues = guest.device().deactivate();
    guest.device().save().unwrap();
    guest.activate(queues);
    guest.mount();
    guest.node("overlay");
}
