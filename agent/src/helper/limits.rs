//! The limits of a container: what a spec or an update may say, and the change of them while it runs.

use std::error::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use libcgroups::common::{CgroupConfig, CgroupManager, ControllerOpt, create_cgroup_manager};
use libcontainer::oci_spec::runtime::LinuxResources;
use serde_json::Value;

use super::{chain, device_rules, typed};
use crate::cgroup::ROOT;
use crate::protocol::Place;
use crate::status::Refusal;

/// The files that an update may write beside those of `unified`, in the order in which their old values
/// are written back: a weight cannot be set while `cpu.idle` is.
const FILES: [&str; 11] = [
    "cpu.idle",
    "cpu.weight",
    "cpu.max",
    "cpu.max.burst",
    "cpuset.cpus",
    "cpuset.mems",
    "memory.max",
    "memory.low",
    "memory.swap.max",
    "pids.max",
    "io.weight",
];

/// Numbers that may be negative.
const SIGNED: [&str; 7] = [
    "/cpu/quota",
    "/cpu/realtimeRuntime",
    "/cpu/idle",
    "/memory/limit",
    "/memory/reservation",
    "/memory/swap",
    "/pids/limit",
];

/// Numbers that may not.
const UNSIGNED: [&str; 4] = [
    "/cpu/shares",
    "/cpu/period",
    "/cpu/burst",
    "/cpu/realtimePeriod",
];

/// Checks `LinuxResources`, which are called `field`: their types, and that `unified` names files of the
/// container's own cgroup. Whether the kernel takes the values is found out by writing them.
pub fn check(resources: &Value, field: &str) -> Result<(), Refusal> {
    let given = |pointer: &str| {
        let value = resources.pointer(pointer);
        value.filter(|value| !value.is_null())
    };
    let refuse = |pointer: &str, what: &str, value: &Value| {
        let name = pointer.replace('/', ".");
        Err(Refusal::invalid(format!(
            "{field}{name}: {value} is {what}"
        )))
    };
    for pointer in SIGNED {
        if let Some(value) = given(pointer).filter(|value| !value.is_i64()) {
            return refuse(pointer, "no number", value);
        }
    }
    for pointer in UNSIGNED {
        if let Some(value) = given(pointer).filter(|value| !value.is_u64()) {
            return refuse(pointer, "no number of at least 0", value);
        }
    }
    for pointer in ["/cpu/cpus", "/cpu/mems"] {
        if let Some(value) = given(pointer).filter(|value| !value.is_string()) {
            return refuse(pointer, "no list", value);
        }
    }
    let Some(unified) = given("/unified") else {
        return Ok(());
    };
    let Some(unified) = unified.as_object() else {
        return refuse("/unified", "no map", unified);
    };
    for (name, value) in unified {
        if name.is_empty() || name.contains('/') || name.starts_with("cgroup.") {
            let text = format!("{field}.unified: {name:?} is not the file of a controller");
            return Err(Refusal::invalid(text));
        }
        if !value.is_string() {
            return refuse(&format!("/unified/{name}"), "no text", value);
        }
    }
    Ok(())
}

/// Applies `LinuxResources` (JSON) to a container's cgroup: all of it or, when the kernel refuses a
/// value, nothing.
pub fn update(place: &Place, resources: &str) -> Result<(), Refusal> {
    let invalid = |error: serde_json::Error| Refusal::invalid(format!("resources: {error}"));
    let resources: Value = serde_json::from_str(resources).map_err(invalid)?;
    check(&resources, "resources")?;
    let directory = directory(place);
    let devices = device_rules::Program::of_update(&resources, "resources")?;
    let old = Limits::read(&directory, &resources);
    let resources: LinuxResources = serde_json::from_value(resources).map_err(invalid)?;
    apply(place, &resources).map_err(|error| {
        old.write_back();
        // The file says which limit it was; where it lies is nobody's business.
        let text = chain(&*error).replace(&format!("{}/", directory.display()), "");
        Refusal::invalid(format!("resources: {text}"))
    })?;
    let Some(devices) = devices else {
        return Ok(());
    };
    devices
        .enforce(&directory, "resources")
        .inspect_err(|_| old.write_back())
}

/// Applies `linux.resources` (JSON) of a new container to its cgroup.
pub fn set(place: &Place, resources: &Value) -> Result<(), Refusal> {
    let resources: Option<LinuxResources> = typed(resources.clone(), "linux.resources")?;
    let Some(resources) = resources else {
        return Ok(());
    };
    let directory = format!("{}/", directory(place).display());
    apply(place, &resources).map_err(|error| {
        Refusal::failed(format!(
            "linux.resources: {}",
            chain(&*error).replace(&directory, "")
        ))
    })
}

fn directory(place: &Place) -> PathBuf {
    Path::new(ROOT).join(place.cgroup.trim_start_matches('/'))
}

fn apply(place: &Place, resources: &LinuxResources) -> Result<(), Box<dyn Error>> {
    let manager = create_cgroup_manager(CgroupConfig {
        cgroup_path: place.cgroup.clone().into(),
        systemd_cgroup: false,
        container_name: place.id.clone(),
    })?;
    manager.apply(&ControllerOpt {
        resources,
        disable_oom_killer: false,
        oom_score_adj: None,
        freezer_state: None,
    })?;
    let memory = resources.memory().as_ref();
    let limits = memory.and_then(|memory| memory.limit().zip(memory.swap()));
    // libcgroups takes the 0 that is left for none being said.
    if limits.is_some_and(|(limit, swap)| limit > 0 && swap == limit) {
        match fs::write(directory(place).join("memory.swap.max"), "0") {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(format!("memory.swap.max: {error}").into());
            }
            _ => {}
        }
    }
    Ok(())
}

/// The values of a cgroup's files before a change.
struct Limits(Vec<(PathBuf, String)>);

impl Limits {
    fn read(directory: &Path, resources: &Value) -> Self {
        let unified = resources.get("unified").and_then(Value::as_object);
        let names = FILES
            .into_iter()
            .chain(unified.into_iter().flatten().map(|(name, _)| name.as_str()));
        let read = |name: &str| {
            let path = directory.join(name);
            // What is not there cannot have been changed.
            fs::read_to_string(&path).ok().map(|value| (path, value))
        };
        Self(names.filter_map(read).collect())
    }

    fn write_back(&self) {
        for (path, old) in &self.0 {
            let changed = fs::read_to_string(path).is_ok_and(|now| now != *old);
            if changed && let Err(error) = write(path, old) {
                // In the log of the helper, which the answer then has too.
                tracing::error!("{} is not what it was: {error}", path.display());
            }
        }
    }
}

/// An empty list ends in a newline, without which nothing would be written.
fn write(path: &Path, value: &str) -> io::Result<()> {
    fs::write(path, format!("{}\n", value.trim_end()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn test_values_of_the_wrong_kind_are_named() {
        let cases = [
            (
                json!({"cpu": {"shares": -1}}),
                "r.cpu.shares: -1 is no number of at least 0",
            ),
            (json!({"cpu": {"cpus": 1}}), "r.cpu.cpus: 1 is no list"),
            (
                json!({"memory": {"limit": "64M"}}),
                "r.memory.limit: \"64M\" is no number",
            ),
            (
                json!({"pids": {"limit": 1.5}}),
                "r.pids.limit: 1.5 is no number",
            ),
            (
                json!({"unified": {"memory.max": 5}}),
                "r.unified.memory.max: 5 is no text",
            ),
            (
                json!({"unified": {"../other/memory.max": "5"}}),
                "r.unified: \"../other/memory.max\" is not the file of a controller",
            ),
            (
                json!({"unified": {"cgroup.freeze": "1"}}),
                "r.unified: \"cgroup.freeze\" is not the file of a controller",
            ),
        ];
        for (resources, message) in cases {
            assert_eq!(check(&resources, "r").unwrap_err().message, message);
        }
    }

    #[test]
    fn test_what_clients_send_is_taken() {
        let resources = json!({
            "devices": [{"allow": false, "access": "rwm"}],
            "cpu": {"shares": 1024, "quota": -1, "period": 100_000, "cpus": "0-1", "burst": null},
            "memory": {"limit": -1, "swap": 0}, "pids": {"limit": 0},
            "unified": {"memory.high": "max"},
        });
        assert_eq!(check(&resources, "r"), Ok(()));
        assert_eq!(check(&json!(null), "r"), Ok(()));
    }

    #[test]
    fn test_old_values_are_written_back_where_they_differ() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for (name, value) in [
            ("cpu.max", "max 100000\n"),
            ("cpuset.cpus", "\n"),
            ("io.max", ""),
        ] {
            fs::write(path(name), value).unwrap();
        }
        let limits = Limits::read(directory.path(), &json!({"unified": {"io.max": "x"}}));
        assert_eq!(limits.0.len(), 3);
        fs::write(path("cpu.max"), "5 10\n").unwrap();
        fs::write(path("cpuset.cpus"), "0\n").unwrap();
        limits.write_back();
        let read = |name: &str| fs::read_to_string(path(name)).unwrap();
        assert_eq!(read("cpu.max"), "max 100000\n");
        assert_eq!(
            (read("cpuset.cpus"), read("io.max")),
            ("\n".into(), String::new())
        );
    }
}
