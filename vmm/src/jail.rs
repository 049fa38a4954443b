//! The jail of `thaw-vmm`: what is left of the host once [`enter`] has returned.
//!
//! [`thaw_vmm_control::Launch`] started the process in namespaces of its own, with all capabilities
//! of its user namespace. That namespace maps every id onto itself, so the process is uid 0 towards
//! every file of the host that it can name. The jail therefore takes the names away:
//!
//! - The root directory becomes the export, and the old root is detached with all that was mounted on
//!   it. The export's own mount is read-only: the guest can write only to what the owner of the
//!   sandbox mounts below it, which keeps arriving because the mount is a slave of the owner's.
//! - No procfs is reachable. The file server needs `/proc/self/fd`, to open a file anew that it holds
//!   by an `O_PATH` descriptor; it gets a clone of that one directory as a detached mount of its own,
//!   from which `..` leads nowhere.
//! - Capabilities are reduced to those that a file server has use for, in the bounding set too;
//!   programs gain none (`no_new_privs`, `SECBIT_NOROOT`), though there is none to execute.
//! - No user namespace below this one, in which it would have all capabilities again.
//! - No core dump, no attaching debugger (`PR_SET_DUMPABLE`).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, StatVfsMountFlags, fstatfs, statvfs};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, OpenTreeFlags, UnmountFlags, mount_bind_recursive,
    mount_change, mount_remount, open_tree, unmount,
};
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, chdir, getpid, getrlimit, pivot_root,
    set_dumpable_behavior, setrlimit,
};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, capability_is_in_bounding_set,
    clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
    set_capabilities_secure_bits, set_no_new_privs,
};
use thiserror::Error;

use crate::virtio::fs::FileServerRoot;

/// What a file server has use for: owners (`CHOWN`, `FOWNER`, and `SETUID` and `SETGID` to create a
/// file as its owner), permissions that the guest's kernel has checked already (`DAC_OVERRIDE`),
/// setuid and setgid bits (`FSETID`) and file capabilities (`SETFCAP`).
///
/// `MKNOD` is not among them because the kernel asks for it in the initial user namespace: no
/// process of this one can make a device node, with or without it.
pub const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETFCAP);

/// `PROC_SUPER_MAGIC` of `linux/magic.h`.
const PROCFS: u64 = 0x9fa0;

/// How many user namespaces may be made below the one that writes it (`namespaces(7)`).
const MAX_USER_NAMESPACES: &str = "/proc/sys/user/max_user_namespaces";

/// Capability numbers that a kernel may know are below this (a `u64` holds them).
const CAPABILITY_LIMIT: u32 = 64;

/// Why the process could not be jailed. It must not go on.
#[derive(Debug, Error)]
pub enum JailError {
    /// Not the first process of a pid namespace: then this is not a process that was started to be
    /// jailed, and its mounts may be the host's.
    #[error(
        "entering the jail: process {0} is not the first of its pid namespace: start it by Launch"
    )]
    NotLaunched(i32),
    /// Other threads would stay outside.
    #[error("entering the jail: the process has {0} threads and must have one")]
    Threads(usize),
    /// `/proc` is something else.
    #[error("entering the jail: /proc/self/fd is not on a procfs")]
    NoProcfs,
    /// A step failed.
    #[error("entering the jail in {root:?}: {doing}: {source}")]
    Step {
        /// What was being done.
        doing: &'static str,
        /// The directory that was to become the root.
        root: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Proof that the process is jailed, with what it may take from outside.
#[derive(Debug)]
pub struct Jail {
    descriptors: OwnedFd,
    file_limit: u64,
}

impl Jail {
    /// The export, for the one file server of this process.
    pub fn file_server_root(self) -> FileServerRoot {
        FileServerRoot::new(Path::new("/"), self.descriptors, self.file_limit)
    }
}

/// Make `root` the root directory of the process and give up all that a VMM does not need. To be
/// called first thing, while the process has one thread: what is given up is given up by thread.
/// After an error the process must end.
pub fn enter(root: &Path) -> Result<Jail, JailError> {
    let pid = getpid();
    if !pid.is_init() {
        return Err(JailError::NotLaunched(pid.as_raw_nonzero().get()));
    }
    let step = |doing| {
        move |errno: Errno| JailError::Step {
            doing,
            root: root.to_owned(),
            source: errno.into(),
        }
    };
    let threads = fs::read_dir("/proc/self/task").map(Iterator::count);
    match threads {
        Ok(1) => {}
        Ok(threads) => return Err(JailError::Threads(threads)),
        Err(source) => {
            let (doing, root) = ("listing /proc/self/task", root.to_owned());
            return Err(JailError::Step {
                doing,
                root,
                source,
            });
        }
    }
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let descriptors =
        open_tree(CWD, "/proc/self/fd", flags).map_err(step("cloning /proc/self/fd"))?;
    let file_system = fstatfs(&descriptors).map_err(step("looking at /proc/self/fd"))?;
    if file_system.f_type as u64 != PROCFS {
        return Err(JailError::NoProcfs);
    }
    if let Err(error) = fs::write(MAX_USER_NAMESPACES, "0") {
        // Where /proc/sys is read-only. One wall less, with others behind it.
        tracing::warn!("the jail leaves user namespaces allowed: {MAX_USER_NAMESPACES}: {error}");
    }
    change_root(root).map_err(|(doing, errno)| step(doing)(errno))?;
    let file_limit = set_limits().map_err(step("setting resource limits"))?;
    drop_privileges().map_err(|(doing, errno)| step(doing)(errno))?;
    Ok(Jail {
        descriptors,
        file_limit,
    })
}

type Step = (&'static str, Errno);

fn at(doing: &'static str) -> impl Fn(Errno) -> Step {
    move |errno| (doing, errno)
}

/// `pivot_root(2)` with both arguments ".": the old root ends up on top of the new one, from where
/// it is detached, and no directory is needed to put it in.
fn change_root(root: &Path) -> Result<(), Step> {
    // They are already, across the border of a user namespace; but nothing mounted here may ever be
    // seen outside, so it is said again.
    let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change("/", slave).map_err(at("making all mounts slaves"))?;
    // Recursive, because mounts below it are locked to it, and because pivot_root wants a mount.
    mount_bind_recursive(root, root).map_err(at("binding the root onto itself"))?;
    chdir(root).map_err(at("changing to the root"))?;
    pivot_root(".", ".").map_err(at("pivot_root"))?;
    unmount(".", UnmountFlags::DETACH).map_err(at("detaching the old root"))?;
    chdir("/").map_err(at("changing to the new root"))?;
    let attributes = statvfs("/").map_err(at("looking at the new root"))?.f_flag;
    mount_remount(
        "/",
        MountFlags::BIND | MountFlags::RDONLY | kept_flags(attributes),
        "",
    )
    .map_err(at("making the new root read-only"))
}

/// The flags that a remount must repeat: those that this user namespace found set may not be cleared
/// (`mount_namespaces(7)`).
fn kept_flags(attributes: StatVfsMountFlags) -> MountFlags {
    let mut flags = MountFlags::empty();
    for (attribute, flag) in [
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        (StatVfsMountFlags::NOATIME, MountFlags::NOATIME),
        (StatVfsMountFlags::NODIRATIME, MountFlags::NODIRATIME),
        (StatVfsMountFlags::RELATIME, MountFlags::RELATIME),
    ] {
        flags.set(flag, attributes.contains(attribute));
    }
    let access_times = StatVfsMountFlags::NOATIME | StatVfsMountFlags::RELATIME;
    flags.set(
        MountFlags::STRICTATIME,
        !attributes.intersects(access_times),
    );
    flags
}

/// All descriptors that the process may have, and no core dump. Returns the number of the former.
fn set_limits() -> Result<u64, Errno> {
    let files = getrlimit(Resource::Nofile).maximum;
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: files,
            maximum: files,
        },
    )?;
    setrlimit(
        Resource::Core,
        Rlimit {
            current: Some(0),
            maximum: Some(0),
        },
    )?;
    Ok(files.unwrap_or(u64::MAX))
}

fn drop_privileges() -> Result<(), Step> {
    for number in 0..CAPABILITY_LIMIT {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if KEPT.contains(capability) {
            continue;
        }
        match capability_is_in_bounding_set(capability) {
            Ok(true) => remove_capability_from_bounding_set(capability)
                .map_err(at("reducing the bounding set"))?,
            Ok(false) => {}
            // The first number that the kernel does not know.
            Err(Errno::INVAL) => break,
            Err(errno) => return Err(("reading the bounding set", errno)),
        }
    }
    // Not NO_SETUID_FIXUP: the file server changes its effective uid to that of the guest's caller
    // to create a file, and then must not have the capabilities of uid 0.
    let bits = CapabilitiesSecureBits::NO_ROOT
        | CapabilitiesSecureBits::NO_ROOT_LOCKED
        | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
        | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED;
    set_capabilities_secure_bits(bits).map_err(at("setting the secure bits"))?;
    clear_ambient_capability_set().map_err(at("clearing ambient capabilities"))?;
    let sets = CapabilitySets {
        effective: KEPT,
        permitted: KEPT,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).map_err(at("reducing capabilities"))?;
    set_no_new_privs(true).map_err(at("setting no_new_privs"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(at("clearing dumpable"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_process_that_was_not_launched_is_refused() {
        // The test's own process has other threads and the host's mounts.
        assert!(matches!(
            enter(Path::new("/nowhere")),
            Err(JailError::NotLaunched(_))
        ));
    }

    #[test]
    fn test_locked_mount_flags_are_repeated() {
        let flags = kept_flags(StatVfsMountFlags::NOSUID | StatVfsMountFlags::RELATIME);
        assert_eq!(flags, MountFlags::NOSUID | MountFlags::RELATIME);
        assert_eq!(
            kept_flags(StatVfsMountFlags::empty()),
            MountFlags::STRICTATIME
        );
    }
}
