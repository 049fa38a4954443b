//! What of a runtime spec is carried out here, as types. The limits are not: see `limits`.
//!
//! Built from JSON that has been adapted (see `spec`), at one place; `null` is absence, as clients
//! write it for empty lists.

use std::collections::BTreeMap;
use std::path::PathBuf;

use libcontainer::oci_spec::runtime::LinuxSeccomp;
use serde::{Deserialize, Deserializer};

/// A container.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Description {
    /// The first process.
    pub process: ProcessDescription,
    /// The root file system.
    pub root: Root,
    /// Of the container's own UTS namespace; empty for the guest's.
    #[serde(deserialize_with = "nullable")]
    pub hostname: String,
    /// The same.
    #[serde(deserialize_with = "nullable")]
    pub domainname: String,
    /// In their order.
    #[serde(deserialize_with = "nullable")]
    pub mounts: Vec<Mount>,
    /// The Linux part.
    #[serde(deserialize_with = "nullable")]
    pub linux: Linux,
    /// Programs that are run in the container while it is made.
    #[serde(deserialize_with = "nullable")]
    pub hooks: Hooks,
    /// Told to hooks.
    #[serde(deserialize_with = "nullable")]
    pub annotations: BTreeMap<String, String>,
}

/// The root file system.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Root {
    /// Where it is in the guest.
    pub path: PathBuf,
    /// Whether it is remounted read-only.
    #[serde(deserialize_with = "nullable")]
    pub readonly: bool,
}

/// A process.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ProcessDescription {
    /// Program and arguments.
    #[serde(deserialize_with = "nullable")]
    pub args: Vec<String>,
    /// Variables.
    #[serde(deserialize_with = "nullable")]
    pub env: Vec<String>,
    /// Working directory.
    #[serde(deserialize_with = "nullable")]
    pub cwd: PathBuf,
    /// Ids.
    #[serde(deserialize_with = "nullable")]
    pub user: User,
    /// Capability names by set.
    #[serde(deserialize_with = "nullable")]
    pub capabilities: Capabilities,
    /// Limits.
    #[serde(deserialize_with = "nullable")]
    pub rlimits: Vec<Rlimit>,
    /// Whether no program gives it more privileges.
    #[serde(deserialize_with = "nullable")]
    pub no_new_privileges: bool,
    /// The kernel's readiness to kill it for memory.
    pub oom_score_adj: Option<i32>,
    /// How it is scheduled.
    pub scheduler: Option<Scheduler>,
    /// Of its reads and writes.
    pub io_priority: Option<IoPriority>,
    /// Processors of an exec, before and after it is in the container's cgroup.
    #[serde(rename = "execCPUAffinity")]
    pub affinity: Option<Affinity>,
}

/// Ids of a process.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct User {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// The mask of modes of new files.
    pub umask: Option<u32>,
    /// Other groups.
    #[serde(deserialize_with = "nullable")]
    pub additional_gids: Vec<u32>,
}

/// Names of capabilities by set.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Capabilities {
    /// What any program may get.
    #[serde(deserialize_with = "nullable")]
    pub bounding: Vec<String>,
    /// What is in force.
    #[serde(deserialize_with = "nullable")]
    pub effective: Vec<String>,
    /// What a program's file may hand on.
    #[serde(deserialize_with = "nullable")]
    pub inheritable: Vec<String>,
    /// What may be put in force.
    #[serde(deserialize_with = "nullable")]
    pub permitted: Vec<String>,
    /// What a program keeps without its file saying so.
    #[serde(deserialize_with = "nullable")]
    pub ambient: Vec<String>,
}

/// A limit of a process.
#[derive(Debug, Clone, Deserialize)]
pub struct Rlimit {
    /// `RLIMIT_…`.
    #[serde(rename = "type")]
    pub kind: String,
    /// In force.
    pub soft: u64,
    /// Most that the process may set.
    pub hard: u64,
}

/// `sched_setattr(2)`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Scheduler {
    /// `SCHED_…`.
    pub policy: String,
    /// -20 to 19.
    #[serde(deserialize_with = "nullable")]
    pub nice: i32,
    /// Of a real-time policy.
    #[serde(deserialize_with = "nullable")]
    pub priority: i32,
    /// `SCHED_FLAG_…`.
    #[serde(deserialize_with = "nullable")]
    pub flags: Vec<String>,
    /// Nanoseconds, of a policy with deadlines.
    #[serde(deserialize_with = "nullable")]
    pub runtime: u64,
    /// The same.
    #[serde(deserialize_with = "nullable")]
    pub deadline: u64,
    /// The same.
    #[serde(deserialize_with = "nullable")]
    pub period: u64,
}

/// `ioprio_set(2)`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct IoPriority {
    /// `IOPRIO_CLASS_…`.
    pub class: String,
    /// 0 to 7.
    #[serde(deserialize_with = "nullable")]
    pub priority: i32,
}

/// Lists of processors.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Affinity {
    /// Before the process is in the container's cgroup.
    #[serde(deserialize_with = "nullable")]
    pub initial: String,
    /// Afterwards.
    #[serde(rename = "final", deserialize_with = "nullable")]
    pub last: String,
}

/// A mount.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Mount {
    /// In the container.
    pub destination: PathBuf,
    /// Of file system.
    #[serde(rename = "type", deserialize_with = "nullable")]
    pub kind: String,
    /// What.
    #[serde(deserialize_with = "nullable")]
    pub source: PathBuf,
    /// As in fstab.
    #[serde(deserialize_with = "nullable")]
    pub options: Vec<String>,
    /// Of an id-mapped mount.
    #[serde(deserialize_with = "nullable")]
    pub uid_mappings: Vec<IdMapping>,
    /// The same.
    #[serde(deserialize_with = "nullable")]
    pub gid_mappings: Vec<IdMapping>,
}

/// A range of ids.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct IdMapping {
    /// First in the container.
    #[serde(rename = "containerID")]
    pub container: u32,
    /// First outside.
    #[serde(rename = "hostID")]
    pub host: u32,
    /// How many.
    pub size: u32,
}

/// The Linux part.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Linux {
    /// New ones, and those to join.
    #[serde(deserialize_with = "nullable")]
    pub namespaces: Vec<Namespace>,
    /// Of the container's user namespace.
    #[serde(deserialize_with = "nullable")]
    pub uid_mappings: Vec<IdMapping>,
    /// The same.
    #[serde(deserialize_with = "nullable")]
    pub gid_mappings: Vec<IdMapping>,
    /// Of the container's time namespace, by clock.
    #[serde(deserialize_with = "nullable")]
    pub time_offsets: BTreeMap<String, TimeOffset>,
    /// Device nodes to make.
    #[serde(deserialize_with = "nullable")]
    pub devices: Vec<Device>,
    /// Settings of the kernel, those of the network left out.
    #[serde(deserialize_with = "nullable")]
    pub sysctl: BTreeMap<String, String>,
    /// Paths that look empty.
    #[serde(deserialize_with = "nullable")]
    pub masked_paths: Vec<PathBuf>,
    /// Paths that cannot be written to.
    #[serde(deserialize_with = "nullable")]
    pub readonly_paths: Vec<PathBuf>,
    /// Of the root.
    #[serde(deserialize_with = "nullable")]
    pub rootfs_propagation: String,
    /// The filter of system calls.
    pub seccomp: Option<LinuxSeccomp>,
    /// The execution domain.
    pub personality: Option<Personality>,
}

/// A namespace.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Namespace {
    /// In the spec's words.
    #[serde(rename = "type")]
    pub kind: String,
    /// To join; empty for a new one.
    #[serde(deserialize_with = "nullable")]
    pub path: PathBuf,
}

/// How far a clock is from the guest's.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct TimeOffset {
    /// Seconds.
    #[serde(deserialize_with = "nullable")]
    pub secs: i64,
    /// And nanoseconds.
    #[serde(deserialize_with = "nullable")]
    pub nanosecs: u32,
}

/// A device node.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Device {
    /// In the container.
    pub path: PathBuf,
    /// `b`, `c`, `u` or `p`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Number.
    #[serde(deserialize_with = "nullable")]
    pub major: i64,
    /// Number.
    #[serde(deserialize_with = "nullable")]
    pub minor: i64,
    /// Permissions.
    pub file_mode: Option<u32>,
    /// Owner.
    #[serde(deserialize_with = "nullable")]
    pub uid: u32,
    /// Owner.
    #[serde(deserialize_with = "nullable")]
    pub gid: u32,
}

/// An execution domain.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Personality {
    /// `LINUX` or `LINUX32`.
    pub domain: String,
}

/// Programs that are run in the container.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Hooks {
    /// When its root is there.
    #[serde(deserialize_with = "nullable")]
    pub create_container: Vec<Hook>,
    /// Before its program is executed.
    #[serde(deserialize_with = "nullable")]
    pub start_container: Vec<Hook>,
}

/// One of them.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Hook {
    /// Absolute.
    pub path: PathBuf,
    /// Arguments, the program's name first.
    #[serde(deserialize_with = "nullable")]
    pub args: Vec<String>,
    /// Variables.
    #[serde(deserialize_with = "nullable")]
    pub env: Vec<String>,
    /// Seconds that it may take.
    pub timeout: Option<u64>,
}

impl Linux {
    /// The namespace of a kind, if the container is to have one of its own or to join one.
    pub fn namespace(&self, kind: &str) -> Option<&Namespace> {
        self.namespaces
            .iter()
            .find(|namespace| namespace.kind == kind)
    }

    /// Whether the container gets a new namespace of a kind.
    pub fn has_new(&self, kind: &str) -> bool {
        self.namespace(kind)
            .is_some_and(|namespace| namespace.path.as_os_str().is_empty())
    }
}

fn nullable<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
