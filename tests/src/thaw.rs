//! What only thaw has: facts about its sandboxes, traces, templates.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::command::{Finished, finish};
use crate::containerd::NAMESPACE;
use crate::environment::Environment;

/// Directory of the templates.
pub const TEMPLATES: &str = "/var/lib/thaw/templates";

/// The templates that are there, by their directories.
pub fn templates() -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(TEMPLATES) else {
        return Vec::new();
    };
    let directories = entries.flatten().map(|entry| entry.path());
    let mut templates: Vec<PathBuf> = directories
        .filter(|path| path.join("manifest.json").exists())
        .collect();
    templates.sort();
    templates
}

/// The template of the shape without limits: the largest one.
///
/// # Panics
///
/// When there is none.
#[track_caller]
pub fn template() -> PathBuf {
    let size = |template: &PathBuf| {
        let text = fs::read_to_string(template.join("manifest.json")).expect("a template has it");
        let manifest: Value = serde_json::from_str(&text).expect("it is JSON");
        let shape = &manifest["inputs"]["shape"];
        let of = |field: &str| shape[field].as_u64().expect("a shape has numbers");
        (of("memory_mib"), of("vcpus"))
    };
    let templates = templates().into_iter().max_by_key(size);
    templates.expect("a container has run, so there is a template")
}

/// Removes at its end the templates that were not there at its beginning, which take room.
#[derive(Debug)]
pub struct OtherShapes(Vec<PathBuf>);

impl OtherShapes {
    /// From now on.
    pub fn allow() -> Self {
        Self(templates())
    }
}

impl Drop for OtherShapes {
    fn drop(&mut self) {
        for template in templates() {
            if !self.0.contains(&template) {
                let _ = fs::remove_dir_all(template);
            }
        }
    }
}

/// Runs the `thaw` command of the installed tree.
#[track_caller]
pub fn thaw(words: &[&str]) -> Finished {
    finish(Command::new(Environment::get().prefix.join("bin/thaw")).args(words))
}

/// The processes of a sandbox, by what it has written down.
#[derive(Debug, Clone, Copy)]
pub struct Processes {
    /// The shim that serves containerd.
    pub shim: i32,
    /// The VMM.
    pub vmm: i32,
    /// The process that stands for the container on the host.
    pub anchor: i32,
}

/// The processes of a sandbox that are not those of one container.
#[derive(Debug, Clone, Copy)]
pub struct SandboxProcesses {
    /// The shim that serves containerd.
    pub shim: i32,
    /// The VMM.
    pub vmm: i32,
}

/// The processes of the sandbox that container `id` is alone in.
///
/// # Panics
///
/// When they are not all there.
#[track_caller]
pub fn processes(id: &str) -> Processes {
    let facts = facts(id).unwrap_or_else(|| panic!("there are no facts about {id}"));
    let pid = |value: &Value| {
        pid_of(value).unwrap_or_else(|| panic!("a process is missing in {facts:#}"))
    };
    Processes {
        shim: pid(&facts["shim"]),
        vmm: pid(&facts["vmm"]),
        anchor: pid(&facts["containers"][id]["anchor"]),
    }
}

/// Names of the sandboxes that there are, in order.
pub fn sandboxes() -> Vec<String> {
    let Ok(entries) = fs::read_dir(Path::new("/run/thaw").join(NAMESPACE)) else {
        return Vec::new();
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    let mut names: Vec<_> = names
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Ids of the containers of a sandbox, in order.
pub fn containers(sandbox: &str) -> Vec<String> {
    let facts = facts(sandbox).unwrap_or_default();
    let containers = facts["containers"].as_object();
    containers.map_or_else(Vec::new, |containers| containers.keys().cloned().collect())
}

/// Shim and VMM of a sandbox.
///
/// # Panics
///
/// When they are not both there.
#[track_caller]
pub fn sandbox(name: &str) -> SandboxProcesses {
    let facts = facts(name).unwrap_or_else(|| panic!("there are no facts about {name}"));
    match (pid_of(&facts["shim"]), pid_of(&facts["vmm"])) {
        (Some(shim), Some(vmm)) => SandboxProcesses { shim, vmm },
        _ => panic!("a process is missing in {facts:#}"),
    }
}

/// Those processes of the sandbox that it has noted so far.
pub fn noted_processes(id: &str) -> Vec<i32> {
    noted(id).into_iter().flatten().collect()
}

/// The same, by what they are: shim, VMM, anchor.
pub fn noted(id: &str) -> [Option<i32>; 3] {
    let facts = facts(id).unwrap_or_default();
    [
        &facts["shim"],
        &facts["vmm"],
        &facts["containers"][id]["anchor"],
    ]
    .map(pid_of)
}

/// The exit status that the sandbox of container `id` has noted of it.
pub fn noted_exit(id: &str) -> Option<u64> {
    facts(id)?["containers"][id]["exit"]["status"].as_u64()
}

fn facts(id: &str) -> Option<Value> {
    let path = Path::new("/run/thaw")
        .join(NAMESPACE)
        .join(id)
        .join("facts.json");
    serde_json::from_str(&fs::read_to_string(path).ok()?).ok()
}

fn pid_of(process: &Value) -> Option<i32> {
    process["pid"].as_i64()?.try_into().ok()
}
