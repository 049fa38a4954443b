//! The OCI runtime spec of a bundle: what the shim needs to know of it, what it refuses, and how it
//! reads once the guest gets it.
//!
//! The spec is kept as the JSON that it came as, because the guest must get every field of it, known
//! here or not; [`Spec`] is a view of the fields that concern the host.

mod devices;
mod guest;
mod hooks;
mod shape;

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer};
use serde_json::Value;
use thiserror::Error;

pub use devices::{Device, DeviceRule, guest_device};
pub use guest::{GuestSide, guest_process, guest_spec};
pub use hooks::{Hook, Hooks};
pub use shape::shape;

/// Most bytes of a `config.json`. It travels to the guest in one ttrpc message, of 4 MiB at most, in
/// which the paths of mounts may be longer than here.
const MOST_BYTES: u64 = (4 << 20) - (256 << 10);

/// Why a bundle is refused. Each text names the field.
#[derive(Debug, Error)]
pub enum SpecError {
    /// The file cannot be read.
    #[error("reading {}: {source}", .path.display())]
    Read {
        /// The bundle's `config.json`.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is no OCI runtime spec.
    #[error("{}: {source}", .path.display())]
    Malformed {
        /// The bundle's `config.json`.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// It does not fit a message to the guest.
    #[error(
        "{}: larger than {MOST_BYTES} bytes, which is what fits a message to the guest: shorten its annotations",
        .0.display()
    )]
    TooLarge(PathBuf),
    /// It asks for what this runtime does not do.
    #[error("config.json: {0}")]
    Unsupported(String),
}

/// The fields of a spec that concern the host.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Spec {
    /// The version of the specification that it follows.
    #[serde(rename = "ociVersion", deserialize_with = "nullable")]
    pub oci_version: String,
    /// Host name; empty for the host's own.
    #[serde(deserialize_with = "nullable")]
    pub hostname: String,
    /// The root file system.
    #[serde(deserialize_with = "nullable")]
    pub root: Root,
    /// Annotations.
    #[serde(deserialize_with = "nullable")]
    pub annotations: HashMap<String, String>,
    /// Mounts, in their order.
    #[serde(deserialize_with = "nullable")]
    pub mounts: Vec<Mount>,
    /// The process.
    #[serde(deserialize_with = "nullable")]
    pub process: Process,
    /// Hooks that run on the host.
    #[serde(deserialize_with = "nullable")]
    pub hooks: Hooks,
    /// The Linux part.
    #[serde(deserialize_with = "nullable")]
    pub linux: Linux,
}

/// The root file system of a container.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Root {
    /// Absolute, or relative to the bundle.
    pub path: PathBuf,
}

/// One mount of a spec.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Mount {
    /// Where, in the container.
    pub destination: PathBuf,
    /// File system type; `bind` and the empty string are bind mounts when the options say so.
    #[serde(rename = "type", deserialize_with = "nullable")]
    pub kind: String,
    /// What is mounted.
    #[serde(deserialize_with = "nullable")]
    pub source: PathBuf,
    /// Options as in fstab.
    #[serde(deserialize_with = "nullable")]
    pub options: Vec<String>,
}

/// The process of a container.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Process {
    /// The kernel's readiness to kill it for memory, -1000 to 1000.
    #[serde(rename = "oomScoreAdj")]
    pub oom_score_adj: Option<i32>,
}

/// The Linux part of a spec.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Linux {
    /// The cgroup, in cgroupfs or systemd notation.
    #[serde(rename = "cgroupsPath", deserialize_with = "nullable")]
    pub cgroups_path: String,
    /// Namespaces.
    #[serde(deserialize_with = "nullable")]
    pub namespaces: Vec<Namespace>,
    /// Devices.
    #[serde(deserialize_with = "nullable")]
    pub devices: Vec<Device>,
    /// Limits.
    #[serde(deserialize_with = "nullable")]
    pub resources: Resources,
}

/// One namespace of a spec.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Namespace {
    /// Its type, in the spec's words.
    #[serde(rename = "type")]
    pub kind: String,
    /// The namespace to join; empty for a new one.
    #[serde(deserialize_with = "nullable")]
    pub path: PathBuf,
}

/// Limits of a spec.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// Memory.
    #[serde(deserialize_with = "nullable")]
    pub memory: Memory,
    /// CPU time.
    #[serde(deserialize_with = "nullable")]
    pub cpu: Cpu,
    /// Which devices may be used, in an order in which the last that matches counts.
    #[serde(deserialize_with = "nullable")]
    pub devices: Vec<DeviceRule>,
}

/// Limits of memory.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// Bytes; none or not positive for no limit.
    pub limit: Option<i64>,
}

/// Limits of CPU time.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Cpu {
    /// Microseconds in each period; none or not positive for no limit.
    pub quota: Option<i64>,
    /// Microseconds.
    pub period: Option<u64>,
}

/// `null` for a field means what its absence means: Go writes it for empty slices and maps.
fn nullable<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// The spec of a bundle, as the JSON it is and as the view that the shim uses.
#[derive(Debug)]
pub struct BundleSpec {
    /// Everything.
    pub json: Value,
    /// What concerns the host.
    pub view: Spec,
}

impl BundleSpec {
    /// Read the `config.json` of `bundle`.
    pub fn read(bundle: &Path) -> Result<Self, SpecError> {
        let path = bundle.join("config.json");
        let mut text = Vec::new();
        File::open(&path)
            .and_then(|file| file.take(MOST_BYTES + 1).read_to_end(&mut text))
            .map_err(|source| SpecError::Read {
                path: path.clone(),
                source,
            })?;
        if text.len() as u64 > MOST_BYTES {
            return Err(SpecError::TooLarge(path));
        }
        Self::parse(&text).map_err(|source| SpecError::Malformed { path, source })
    }

    /// Parse the text of a `config.json`.
    pub fn parse(text: &[u8]) -> Result<Self, serde_json::Error> {
        thaw_fault_points::arm_by_spec(text);
        let json: Value = serde_json::from_slice(text)?;
        let view = Spec::deserialize(&json)?;
        Ok(Self { json, view })
    }
}

/// Annotations by which containers are put together into one sandbox, most particular first.
const GROUP_ANNOTATIONS: [&str; 2] = [
    "io.containerd.runc.v2.group",
    "io.kubernetes.cri.sandbox-id",
];

/// The kernel's `__NEW_UTS_LEN`.
const MOST_HOSTNAME: usize = 64;

impl Spec {
    /// The sandbox that a container with this spec belongs to, when it is not its own.
    pub fn group(&self) -> Option<&str> {
        let group = GROUP_ANNOTATIONS
            .iter()
            .find_map(|name| self.annotations.get(*name))?;
        (!group.is_empty()).then_some(group)
    }

    /// The network namespace that the container is to have: `Some(path)` to join, `None` for a new
    /// one. Checked by [`Spec::check`] to be there.
    pub fn network_namespace(&self) -> Option<&Path> {
        let namespace = self
            .linux
            .namespaces
            .iter()
            .find(|ns| ns.kind == "network")?;
        (!namespace.path.as_os_str().is_empty()).then_some(&namespace.path)
    }

    /// Whether the container is one of a pod, and not the pod's own.
    pub fn is_pod_member(&self) -> bool {
        let kind = self.annotations.get("io.kubernetes.cri.container-type");
        kind.is_some_and(|kind| kind == "container")
    }

    /// Refuse what this runtime does not do, before anything is started. `siblings` are the containers
    /// of the same sandbox, by the pids that are reported for them: their namespaces can be joined.
    pub fn check(&self, siblings: &Siblings) -> Result<(), SpecError> {
        let unsupported = |text: String| Err(SpecError::Unsupported(text));
        if self.root.path.as_os_str().is_empty() {
            return unsupported(
                "root.path is missing: a container needs a root file system".into(),
            );
        }
        for kind in ["network", "pid", "mount"] {
            if !self
                .linux
                .namespaces
                .iter()
                .any(|namespace| namespace.kind == kind)
            {
                return unsupported(format!(
                    "linux.namespaces has no {kind} namespace: a container in a VM cannot share \
                     the host's; run it without the option that asks for it (--net-host, \
                     --network host, --pid host, hostNetwork, hostPID)"
                ));
            }
        }
        for namespace in &self.linux.namespaces {
            if namespace.kind != "network"
                && !namespace.path.as_os_str().is_empty()
                && namespace.sibling(siblings).is_none()
            {
                return unsupported(format!(
                    "linux.namespaces: the {} namespace {} is on the host and cannot be joined \
                     from a VM",
                    namespace.kind,
                    namespace.path.display()
                ));
            }
        }
        if self.hostname.len() > MOST_HOSTNAME {
            return unsupported(format!(
                "hostname: {} bytes, of which the kernel takes {MOST_HOSTNAME}",
                self.hostname.len()
            ));
        }
        self.check_network(siblings)?;
        self.check_devices()?;
        self.hooks.check()?;
        Ok(())
    }

    /// Refuse a network namespace that is not there, or that is not the one of the sandbox: its
    /// containers all have the guest's network.
    fn check_network(&self, siblings: &Siblings) -> Result<(), SpecError> {
        let Some(path) = self.network_namespace() else {
            return Ok(());
        };
        let identity = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino()));
        let named = identity(path).map_err(|error| {
            SpecError::Unsupported(format!(
                "linux.namespaces: the network namespace {}: {error}",
                path.display()
            ))
        })?;
        let mut others = siblings
            .keys()
            .filter_map(|pid| identity(Path::new(&format!("/proc/{pid}/ns/net"))).ok())
            .peekable();
        if others.peek().is_some() && !others.any(|other| other == named) {
            return Err(SpecError::Unsupported(format!(
                "linux.namespaces: the network namespace {} is not that of the sandbox, whose \
                 network all its containers have: name that one, or none",
                path.display()
            )));
        }
        Ok(())
    }
}

/// Containers of one sandbox, by the pids that are reported for them. What they are called is up to
/// whoever asks.
pub type Siblings = BTreeMap<u32, String>;

/// Types of namespaces that containers of one sandbox can share.
const SHAREABLE: [&str; 3] = ["ipc", "uts", "pid"];

impl Namespace {
    /// The one of `siblings` whose namespace this is to be.
    pub fn sibling<'a>(&self, siblings: &'a Siblings) -> Option<&'a str> {
        if !SHAREABLE.contains(&self.kind.as_str()) {
            return None;
        }
        // Exactly as clients write it: what leads there by other ways may lead elsewhere later.
        let path = self.path.to_str()?.strip_prefix("/proc/")?;
        let pid = path.strip_suffix(&format!("/ns/{}", self.kind))?;
        siblings.get(&pid.parse().ok()?).map(String::as_str)
    }
}

impl Mount {
    /// Whether this is a bind mount, whose source is on the host.
    pub fn is_bind(&self) -> bool {
        self.kind == "bind"
            || self
                .options
                .iter()
                .any(|option| option == "bind" || option == "rbind")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(json: Value) -> Spec {
        BundleSpec::parse(json.to_string().as_bytes()).unwrap().view
    }

    fn namespaces(kinds: &[&str]) -> Value {
        kinds.iter().map(|kind| json!({ "type": kind })).collect()
    }

    #[test]
    fn test_null_is_absence() {
        let spec = parse(json!({
            "root": null, "mounts": null, "annotations": null, "hooks": null,
            "linux": { "namespaces": null, "resources": { "memory": null, "cpu": { "quota": null } } }
        }));
        assert!(spec.mounts.is_empty());
        assert_eq!(spec.linux.resources.cpu.quota, None);
    }

    #[test]
    fn test_group_of_a_pod_s_container() {
        let spec = |annotations| parse(json!({ "annotations": annotations }));
        assert_eq!(spec(json!({})).group(), None);
        let cri = json!({ "io.kubernetes.cri.sandbox-id": "pod" });
        assert_eq!(spec(cri).group(), Some("pod"));
        let both = json!({
            "io.kubernetes.cri.sandbox-id": "pod", "io.containerd.runc.v2.group": "group"
        });
        assert_eq!(spec(both).group(), Some("group"));
    }

    #[test]
    fn test_the_host_s_namespaces_are_refused_by_name() {
        let check = |list: Value| {
            let spec = json!({ "root": { "path": "rootfs" }, "linux": { "namespaces": list } });
            parse(spec)
                .check(&Siblings::new())
                .map_err(|error| error.to_string())
        };
        check(namespaces(&["network", "pid", "mount", "ipc", "uts"])).unwrap();
        let error = check(namespaces(&["pid", "mount"])).unwrap_err();
        assert!(error.contains("no network namespace"), "{error}");
        let error = check(json!([
            { "type": "network", "path": "/run/netns/x" }, { "type": "mount" },
            { "type": "pid", "path": "/proc/7/ns/pid" }
        ]))
        .unwrap_err();
        assert!(error.contains("pid namespace /proc/7/ns/pid"), "{error}");
    }

    #[test]
    fn test_namespaces_of_the_sandbox_s_own_containers_can_be_joined() {
        let siblings = Siblings::from([(7, "pause".to_owned())]);
        let check = |kind: &str, path: &str| {
            let list = json!([
                { "type": "network" }, { "type": "pid" }, { "type": "mount" },
                { "type": kind, "path": path },
            ]);
            let spec = json!({ "root": { "path": "rootfs" }, "linux": { "namespaces": list } });
            parse(spec)
                .check(&siblings)
                .map_err(|error| error.to_string())
        };
        for kind in ["ipc", "uts", "pid"] {
            check(kind, &format!("/proc/7/ns/{kind}")).unwrap();
        }
        for (kind, path) in [
            ("ipc", "/proc/8/ns/ipc"),
            ("ipc", "/proc/7/ns/uts"),
            ("mount", "/proc/7/ns/mnt"),
            ("cgroup", "/proc/7/ns/cgroup"),
            ("ipc", "/proc/self/ns/ipc"),
            ("ipc", "/proc/7/root/proc/7/ns/ipc"),
        ] {
            let error = check(kind, path).unwrap_err();
            assert!(
                error.contains(&format!("{kind} namespace {path}")),
                "{error}"
            );
        }
    }

    #[test]
    fn test_what_would_only_fail_later_is_refused_by_name() {
        let check = |hostname: &str, network: &str| {
            let spec = json!({
                "root": { "path": "rootfs" }, "hostname": hostname, "linux": { "namespaces": [
                    { "type": "network", "path": network }, { "type": "pid" }, { "type": "mount" },
                ] }
            });
            parse(spec)
                .check(&Siblings::new())
                .map_err(|error| error.to_string())
        };
        check(&"h".repeat(64), "/proc/self/ns/net").unwrap();
        let error = check(&"h".repeat(65), "").unwrap_err();
        assert!(error.contains("hostname: 65 bytes"), "{error}");
        let error = check("", "/run/netns/none").unwrap_err();
        assert!(
            error.contains("network namespace /run/netns/none"),
            "{error}"
        );
    }

    #[test]
    fn test_another_network_than_the_sandbox_s_is_refused_by_name() {
        let siblings = Siblings::from([(std::process::id(), "pause".to_owned())]);
        let check = |path: &str| {
            let spec = json!({
                "root": { "path": "rootfs" }, "linux": { "namespaces": [
                    { "type": "network", "path": path }, { "type": "pid" }, { "type": "mount" },
                ] }
            });
            parse(spec)
                .check(&siblings)
                .map_err(|error| error.to_string())
        };
        check("").unwrap();
        check(&format!("/proc/{}/ns/net", std::process::id())).unwrap();
        // Any other file than that of the sandbox's namespace.
        let error = check("/proc/self/ns/uts").unwrap_err();
        assert!(
            error.contains("network namespace /proc/self/ns/uts is not that of the sandbox"),
            "{error}"
        );
    }

    #[test]
    fn test_network_namespace_new_and_given() {
        let spec = |path: &str| {
            parse(json!({ "linux": { "namespaces": [{ "type": "network", "path": path }] } }))
        };
        assert_eq!(spec("").network_namespace(), None);
        assert_eq!(
            spec("/run/netns/x").network_namespace(),
            Some(Path::new("/run/netns/x"))
        );
    }

    #[test]
    fn test_hooks_that_cannot_run_are_refused_by_name() {
        let check = |hooks: Value| {
            let mut spec = parse(json!({ "root": { "path": "r" }, "hooks": hooks }));
            for kind in ["network", "pid", "mount"] {
                let kind = kind.to_owned();
                spec.linux.namespaces.push(Namespace {
                    kind,
                    ..Namespace::default()
                });
            }
            spec.check(&Siblings::new())
                .map_err(|error| error.to_string())
        };
        check(json!({
            "prestart": null, "startContainer": [{ "path": "/bin/true" }],
            "createRuntime": [{ "path": "/bin/true", "args": null, "env": null, "timeout": 3 }],
        }))
        .unwrap();
        for (hooks, name) in [
            (
                json!({ "createRuntime": [{ "path": "/bin/true" }, { "path": "true" }] }),
                "hooks.createRuntime[1].path",
            ),
            (
                json!({ "poststop": [{ "path": "/bin/true", "timeout": 0 }] }),
                "hooks.poststop[0].timeout",
            ),
            (
                json!({ "prestart": [{ "path": "/bin/true", "args": ["a\u{0}"] }] }),
                "hooks.prestart[0].args",
            ),
        ] {
            let error = check(hooks).unwrap_err();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn test_what_is_no_spec_is_refused_with_the_path() {
        let bundle = tempfile::tempdir().unwrap();
        let error = BundleSpec::read(bundle.path()).unwrap_err().to_string();
        assert!(error.contains("config.json"), "{error}");
        fs::write(bundle.path().join("config.json"), "{\"mounts\": 3}").unwrap();
        let error = BundleSpec::read(bundle.path()).unwrap_err().to_string();
        assert!(error.contains("config.json"), "{error}");
        let spaces = " ".repeat(MOST_BYTES as usize);
        fs::write(bundle.path().join("config.json"), format!("{{}}{spaces}")).unwrap();
        let error = BundleSpec::read(bundle.path()).unwrap_err().to_string();
        assert!(error.contains("larger than"), "{error}");
    }
}
