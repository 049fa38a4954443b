//! The runtime spec: what of it is carried out as it is, what is changed for the guest, what is
//! dropped, and what is refused by name.
//!
//! This works on the JSON, not on a typed spec, so that nothing a client wrote is lost before it
//! has been looked at.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use thaw_agent_api::NAMESPACE_OF;
use tracing::debug;

use super::limits;
use crate::status::Refusal;

/// Fields that mean something on a host only: the guest's kernel has neither module, and the wall
/// between host and container is the VM. Dropped.
const DROPPED: [&str; 3] = [
    "/process/apparmorProfile",
    "/process/selinuxLabel",
    "/linux/mountLabel",
];

/// Fields that the agent cannot do. Refused unless empty.
const REFUSED: [&str; 16] = [
    "/hooks/prestart",
    "/hooks/createRuntime",
    "/hooks/poststart",
    "/hooks/poststop",
    "/linux/memoryPolicy",
    "/linux/intelRdt",
    "/linux/netDevices",
    "/linux/seccomp/listenerPath",
    "/linux/seccomp/listenerMetadata",
    "/linux/resources/rdma",
    "/linux/resources/network",
    "/linux/personality/flags",
    "/solaris",
    "/windows",
    "/vm",
    "/zos",
];

/// Namespaces of other containers that can be joined: their types in the spec, which are the names of
/// their files in procfs too.
const JOINABLE: [&str; 3] = ["ipc", "uts", "pid"];

/// Capability sets of a process, by their names in the spec.
const CAPABILITY_SETS: [&str; 5] = [
    "bounding",
    "effective",
    "inheritable",
    "permitted",
    "ambient",
];

/// Settings of an IPC namespace beside those of its message queues.
const IPC_SETTINGS: [&str; 8] = [
    "kernel/msgmax",
    "kernel/msgmnb",
    "kernel/msgmni",
    "kernel/sem",
    "kernel/shmall",
    "kernel/shmmax",
    "kernel/shmmni",
    "kernel/shm_rmid_forced",
];

/// A spec that has been checked and changed, and what of it is not the container's own.
#[derive(Debug)]
pub struct Adapted {
    /// To be carried out.
    pub spec: Value,
    /// Settings of the guest's network, file name below `/proc/sys` to value.
    pub network_settings: BTreeMap<String, String>,
    /// What concerns the first process.
    pub process: ProcessFacts,
}

/// What the helper itself needs to know of a process.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ProcessFacts {
    /// Its user id.
    pub uid: u32,
    /// Its group id.
    pub gid: u32,
    /// Whether its home is to be looked up, as the spec has none.
    pub find_home: bool,
    /// Rows and columns of its terminal, where the spec has them.
    pub window: Option<(u16, u16)>,
}

/// Checks and changes a container's spec. `others` are the first processes of the containers whose
/// namespaces may be joined.
pub fn adapt(
    mut spec: Value,
    cgroup: &str,
    terminal: bool,
    others: &BTreeMap<String, i32>,
) -> Result<Adapted, Refusal> {
    for pointer in REFUSED {
        if spec.pointer(pointer).is_some_and(|value| !is_empty(value)) {
            return Err(unsupported(&dotted(pointer)));
        }
    }
    for pointer in DROPPED {
        drop_field(&mut spec, pointer);
    }
    for pointer in ["/solaris", "/windows", "/vm", "/zos", "/linux/intelRdt"] {
        remove(&mut spec, pointer);
    }
    check_root(&spec)?;
    if !spec.get("linux").is_some_and(Value::is_object) {
        return Err(Refusal::invalid("linux: missing in the spec"));
    }
    limits::check(&spec["linux"]["resources"], "linux.resources")?;
    adapt_namespaces(&mut spec["linux"], others)?;
    check_what_needs_a_namespace(&spec)?;
    check_filter(&spec["linux"]["seccomp"])?;
    let network_settings = take_network_settings(&mut spec["linux"])?;
    check_settings(&spec["linux"])?;
    spec["linux"]["cgroupsPath"] = json!(cgroup);
    let process = spec
        .get_mut("process")
        .filter(|process| process.is_object());
    let process = process.ok_or_else(|| Refusal::invalid("process: missing in the spec"))?;
    let facts = adapt_process(process, terminal)?;
    Ok(Adapted {
        spec,
        network_settings,
        process: facts,
    })
}

/// Checks and changes the description of a process: the first of a container, or an exec's.
pub fn adapt_process(process: &mut Value, terminal: bool) -> Result<ProcessFacts, Refusal> {
    for field in ["/apparmorProfile", "/selinuxLabel"] {
        drop_field(process, field);
    }
    let arguments = process.get("args").and_then(Value::as_array);
    if arguments.is_none_or(|arguments| arguments.is_empty()) {
        return Err(Refusal::invalid("process.args: must not be empty"));
    }
    process["terminal"] = json!(terminal);
    let capabilities = &mut process["capabilities"];
    if !capabilities.is_object() {
        *capabilities = json!({});
    }
    for set in CAPABILITY_SETS {
        if !capabilities[set].is_array() {
            capabilities[set] = json!([]);
        }
    }
    let find_home = set_default_home(process);
    let id = |field: &str| -> Result<u32, Refusal> {
        let value = process.pointer(&format!("/user/{field}"));
        let id = value
            .map_or(Some(0), Value::as_u64)
            .and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| Refusal::invalid(format!("process.user.{field}: not an id")))
    };
    let side = |field: &str| {
        let value = process
            .pointer(&format!("/consoleSize/{field}"))
            .and_then(Value::as_u64);
        value
            .and_then(|side| u16::try_from(side).ok())
            .filter(|side| *side != 0)
    };
    Ok(ProcessFacts {
        uid: id("uid")?,
        gid: id("gid")?,
        find_home,
        window: side("height").zip(side("width")),
    })
}

/// Gives a process without a home the root directory for one. Says whether it had none.
fn set_default_home(process: &mut Value) -> bool {
    if !process["env"].is_array() {
        process["env"] = json!([]);
    }
    let Some(environment) = process["env"].as_array_mut() else {
        return false;
    };
    environment.retain(|variable| variable != "HOME=");
    let is_home = |variable: &Value| {
        variable
            .as_str()
            .is_some_and(|text| text.starts_with("HOME="))
    };
    let missing = !environment.iter().any(is_home);
    if missing {
        environment.push(json!("HOME=/"));
    }
    missing
}

/// Fills in what an exec takes over from the container's first process where it says nothing.
pub fn inherit(process: &mut Value, container: &Value) {
    let is_missing = |value: &Value| match value {
        // No limits are the container's; no capabilities are an object, and are none.
        Value::Array(list) => list.is_empty(),
        other => other.is_null(),
    };
    for field in ["capabilities", "rlimits", "oomScoreAdj"] {
        if process.get(field).is_none_or(is_missing)
            && let Some(value) = container.pointer(&format!("/process/{field}"))
        {
            process[field] = value.clone();
        }
    }
}

fn check_root(spec: &Value) -> Result<(), Refusal> {
    match spec.pointer("/root/path").and_then(Value::as_str) {
        Some(path) if path.starts_with('/') => Ok(()),
        _ => Err(Refusal::invalid("root.path: not an absolute path")),
    }
}

/// What a spec asks of a namespace that it does not have.
fn check_what_needs_a_namespace(spec: &Value) -> Result<(), Refusal> {
    let list = spec["linux"]["namespaces"].as_array();
    let has = |kind: &str| {
        list.is_some_and(|list| list.iter().any(|namespace| namespace["type"] == kind))
    };
    let cases = [
        ("/hostname", "uts"),
        ("/domainname", "uts"),
        ("/linux/uidMappings", "user"),
        ("/linux/gidMappings", "user"),
        ("/linux/timeOffsets", "time"),
    ];
    for (pointer, kind) in cases {
        let given = spec.pointer(pointer).is_some_and(|value| !is_empty(value));
        if given && !has(kind) {
            return Err(Refusal::invalid(format!(
                "{}: without a {kind} namespace",
                dotted(pointer)
            )));
        }
        if !given && has(kind) && kind == "user" {
            return Err(Refusal::invalid(format!(
                "{}: a user namespace needs it",
                dotted(pointer)
            )));
        }
    }
    Ok(())
}

/// A filter cannot ask a program on the host.
fn check_filter(filter: &Value) -> Result<(), Refusal> {
    let rules = filter.get("syscalls").and_then(Value::as_array);
    let actions = rules.into_iter().flatten().map(|rule| &rule["action"]);
    for action in actions.chain(filter.get("defaultAction")) {
        if action == "SCMP_ACT_NOTIFY" {
            return Err(unsupported("linux.seccomp: SCMP_ACT_NOTIFY"));
        }
    }
    Ok(())
}

/// Settings that are not those of a namespace would be the whole guest's.
fn check_settings(linux: &Value) -> Result<(), Refusal> {
    let list = linux["namespaces"].as_array();
    let has = |kind: &str| {
        list.is_some_and(|list| list.iter().any(|namespace| namespace["type"] == kind))
    };
    for name in linux
        .get("sysctl")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .map(|(name, _)| name)
    {
        let file = setting_file(name);
        let kind = match file.as_str() {
            "kernel/hostname" => {
                return Err(Refusal::invalid(format!(
                    "linux.sysctl.{name}: hostname is for that"
                )));
            }
            "kernel/domainname" => "uts",
            file if IPC_SETTINGS.contains(&file) || file.starts_with("fs/mqueue/") => "ipc",
            file if file.starts_with("user/") => "user",
            _ => {
                return Err(Refusal::invalid(format!(
                    "linux.sysctl.{name}: not of a namespace of the container's"
                )));
            }
        };
        if !has(kind) {
            return Err(Refusal::invalid(format!(
                "linux.sysctl.{name}: without a {kind} namespace"
            )));
        }
        if file.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(Refusal::invalid(format!(
                "linux.sysctl.{name}: not a setting"
            )));
        }
    }
    Ok(())
}

/// The file of a setting, below `/proc/sys`. Either separator is allowed; the other one is then part of a
/// name, such as that of a VLAN.
pub fn setting_file(name: &str) -> String {
    match name.find(['.', '/']).map(|at| name.as_bytes()[at]) {
        Some(b'.') => name.replace('/', "\0").replace('.', "/").replace('\0', "."),
        _ => name.to_owned(),
    }
}

/// Containers share the guest's network: its interface is theirs. What cannot be joined is refused.
fn adapt_namespaces(linux: &mut Value, others: &BTreeMap<String, i32>) -> Result<(), Refusal> {
    let empty = Vec::new();
    let given = linux
        .get("namespaces")
        .and_then(Value::as_array)
        .unwrap_or(&empty);
    let mut kept = Vec::new();
    for (index, namespace) in given.iter().enumerate() {
        let kind = namespace
            .get("type")
            .and_then(Value::as_str)
            .unwrap_or_default();
        match kind {
            "network" => continue,
            "mount" | "pid" | "ipc" | "uts" | "user" | "cgroup" | "time" => {}
            _ => {
                return Err(unsupported(&format!(
                    "linux.namespaces[{index}].type: {kind:?}"
                )));
            }
        }
        let mut namespace = namespace.clone();
        if namespace.get("path").is_some_and(|path| !is_empty(path)) {
            let field = format!("linux.namespaces[{index}].path ({kind})");
            namespace["path"] = json!(namespace_of(&namespace["path"], kind, &field, others)?);
        }
        kept.push(namespace);
    }
    if !kept.iter().any(|namespace| namespace["type"] == "mount") {
        return Err(unsupported("linux.namespaces: without a mount namespace"));
    }
    linux["namespaces"] = json!(kept);
    Ok(())
}

/// The path of another container's namespace.
fn namespace_of(
    path: &Value,
    kind: &str,
    field: &str,
    others: &BTreeMap<String, i32>,
) -> Result<String, Refusal> {
    let id = path
        .as_str()
        .and_then(|path| path.strip_prefix(NAMESPACE_OF));
    let Some(id) = id.filter(|_| JOINABLE.contains(&kind)) else {
        return Err(unsupported(field));
    };
    match others.get(id) {
        Some(pid) => Ok(format!("/proc/{pid}/ns/{kind}")),
        None => Err(Refusal::state(format!(
            "{field}: container {id} does not run"
        ))),
    }
}

/// Takes the settings of the network out of `linux.sysctl`: they are the guest's, as the network is.
fn take_network_settings(linux: &mut Value) -> Result<BTreeMap<String, String>, Refusal> {
    let mut taken = BTreeMap::new();
    let Some(settings) = linux.get_mut("sysctl").and_then(Value::as_object_mut) else {
        return Ok(taken);
    };
    let mut kept = serde_json::Map::new();
    for (key, value) in std::mem::take(settings) {
        let file = setting_file(&key);
        if !file.starts_with("net/") {
            kept.insert(key, value);
            continue;
        }
        let Some(value) = value.as_str() else {
            return Err(Refusal::invalid(format!(
                "linux.sysctl.{key}: not a string"
            )));
        };
        if file.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(Refusal::invalid(format!(
                "linux.sysctl.{key}: not a setting"
            )));
        }
        taken.insert(file, value.to_owned());
    }
    *settings = kept;
    Ok(taken)
}

fn unsupported(field: &str) -> Refusal {
    Refusal::invalid(format!("{field}: not supported"))
}

fn drop_field(value: &mut Value, pointer: &str) {
    if remove(value, pointer).is_some_and(|value| !is_empty(&value)) {
        debug!(
            "dropped from the spec, as it applies to a host only: {}",
            dotted(pointer)
        );
    }
}

fn remove(value: &mut Value, pointer: &str) -> Option<Value> {
    let (parent, name) = pointer.rsplit_once('/')?;
    value.pointer_mut(parent)?.as_object_mut()?.remove(name)
}

fn dotted(pointer: &str) -> String {
    pointer.trim_start_matches('/').replace('/', ".")
}

/// Whether a value asks for nothing.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.values().all(is_empty),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

#[cfg(test)]
#[path = "spec_tests.rs"]
mod tests;
