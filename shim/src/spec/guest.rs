//! The spec as the guest gets it: paths are the guest's, and what only means something on the host is
//! gone.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use thaw_agent_api::{NAMESPACE_OF, SHARE};

use super::hooks::ON_HOST;
use super::{Namespace, Siblings};

/// The spec `json` of a container for the guest, which calls it `id`. `bind_mounts` are the indexes of
/// its mounts whose sources have been put into the export, `siblings` the other containers of the
/// guest by their names there.
pub fn guest_spec(mut json: Value, id: &str, bind_mounts: &[usize], siblings: &Siblings) -> Value {
    let container = Path::new(SHARE).join("containers").join(id);
    let text = |path: &Path| Value::from(path.to_string_lossy().into_owned());

    if let Some(root) = object(&mut json, "root") {
        root.insert("path".into(), text(&container.join("rootfs")));
    }
    if let Some(mounts) = json.get_mut("mounts").and_then(Value::as_array_mut) {
        for index in bind_mounts {
            if let Some(mount) = mounts.get_mut(*index).and_then(Value::as_object_mut) {
                let source = container.join("mounts").join(index.to_string());
                mount.insert("source".into(), text(&source));
            }
        }
    }
    if let Some(process) = object(&mut json, "process") {
        leave_host_profiles(process);
    }
    if let Some(hooks) = object(&mut json, "hooks") {
        // Run by the shim; what they are given is often the environment of a host's program.
        ON_HOST.iter().for_each(|name| drop(hooks.remove(*name)));
    }
    if let Some(linux) = object(&mut json, "linux") {
        linux.remove("mountLabel");
        linux.remove("intelRdt");
        // The guest has a hierarchy of its own, and no systemd.
        linux.insert("cgroupsPath".into(), json!(format!("/{id}")));
        if let Some(namespaces) = linux.get_mut("namespaces").and_then(Value::as_array_mut) {
            for namespace in namespaces.iter_mut() {
                adapt_namespace(namespace, siblings);
            }
        }
    }
    json
}

/// A namespace of another container in the guest is joined there. Of any other the anchor is in the
/// one that was given, and the guest makes its own.
fn adapt_namespace(namespace: &mut Value, siblings: &Siblings) {
    let given = Namespace::deserialize(&*namespace).unwrap_or_default();
    let Some(namespace) = namespace.as_object_mut() else {
        return;
    };
    namespace.remove("path");
    if let Some(id) = given.sibling(siblings) {
        namespace.insert("path".into(), json!(format!("{NAMESPACE_OF}{id}")));
    }
}

/// The process of an exec, an OCI process in JSON, for the guest.
pub fn guest_process(text: &[u8]) -> Result<Vec<u8>, serde_json::Error> {
    let mut process: Map<String, Value> = serde_json::from_slice(text)?;
    leave_host_profiles(&mut process);
    serde_json::to_vec(&process)
}

/// Profiles of the host's security modules go: the guest's kernel has none loaded.
fn leave_host_profiles(process: &mut Map<String, Value>) {
    process.remove("apparmorProfile");
    process.remove("selinuxLabel");
}

fn object<'a>(json: &'a mut Value, name: &str) -> Option<&'a mut Map<String, Value>> {
    json.get_mut(name)?.as_object_mut()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_host_s_paths_become_the_guest_s_and_the_rest_stays() {
        let spec = json!({
            "ociVersion": "1.1.0",
            "root": { "path": "rootfs", "readonly": true },
            "process": { "args": ["true"], "apparmorProfile": "a", "selinuxLabel": "s",
                         "somethingNew": 1 },
            "hooks": { "createRuntime": [{ "path": "/h" }], "poststop": [], "prestart": null,
                       "startContainer": [{ "path": "/c" }] },
            "mounts": [
                { "destination": "/proc", "type": "proc", "source": "proc" },
                { "destination": "/data", "type": "bind", "source": "/srv", "options": ["rbind"] },
            ],
            "linux": {
                "cgroupsPath": "system.slice:docker:x", "mountLabel": "m",
                "namespaces": [{ "type": "network", "path": "/run/netns/x" }, { "type": "pid" },
                               { "type": "ipc", "path": "/proc/7/ns/ipc" }],
            },
        });
        let siblings = Siblings::from([(7, "pause".to_owned())]);
        assert_eq!(
            guest_spec(spec, "web", &[1], &siblings),
            json!({
                "ociVersion": "1.1.0",
                "root": { "path": "/run/thaw/share/containers/web/rootfs", "readonly": true },
                "process": { "args": ["true"], "somethingNew": 1 },
                "hooks": { "startContainer": [{ "path": "/c" }] },
                "mounts": [
                    { "destination": "/proc", "type": "proc", "source": "proc" },
                    { "destination": "/data", "type": "bind", "options": ["rbind"],
                      "source": "/run/thaw/share/containers/web/mounts/1" },
                ],
                "linux": {
                    "cgroupsPath": "/web",
                    "namespaces": [{ "type": "network" }, { "type": "pid" },
                                   { "type": "ipc", "path": "container:pause" }],
                },
            })
        );
    }

    #[test]
    fn test_an_exec_s_process_loses_the_host_s_profiles_only() {
        let text = br#"{"args":["sh"],"apparmorProfile":"docker-default","cwd":"/","x":[1]}"#;
        let process: Value = serde_json::from_slice(&guest_process(text).unwrap()).unwrap();
        assert_eq!(process, json!({ "args": ["sh"], "cwd": "/", "x": [1] }));
        for bad in [&b""[..], b"[]", b"{"] {
            assert!(guest_process(bad).is_err());
        }
    }

    #[test]
    fn test_a_spec_of_nothing_stays_one() {
        let none = Siblings::new();
        assert_eq!(guest_spec(json!({}), "web", &[0], &none), json!({}));
        let odd = json!({ "mounts": [null, 3], "linux": 7 });
        assert_eq!(guest_spec(odd.clone(), "web", &[0, 1, 2], &none), odd);
    }
}
