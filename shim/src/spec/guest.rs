//! The spec as the guest gets it: paths are the guest's, and what only means something on the host is
//! gone.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value, json};
use thaw_agent_api::{NAMESPACE_OF, ROOT_DISK, SHARE};

use super::hooks::ON_HOST;
use super::{DeviceRule, Namespace, Siblings};
use crate::disks::Special;

/// What the guest has of a container.
#[derive(Debug, Clone, Copy)]
pub struct GuestSide<'a> {
    /// Its name there.
    pub id: &'a str,
    /// The indexes of its mounts whose sources have been put into the export, and where there.
    pub bind_mounts: &'a [(usize, PathBuf)],
    /// The other containers of the guest by their names there.
    pub siblings: &'a Siblings,
    /// What of it is not files.
    pub special: &'a Special,
    /// The guest's numbers of its disks, by slot.
    pub disks: &'a [(u32, u32)],
}

/// The spec `json` of a container for the guest.
pub fn guest_spec(mut json: Value, side: GuestSide<'_>) -> Value {
    let GuestSide {
        id,
        bind_mounts,
        siblings,
        special,
        ..
    } = side;
    let container = Path::new(SHARE).join("containers").join(id);
    let text = |path: &Path| Value::from(path.to_string_lossy().into_owned());

    if let Some(root) = object(&mut json, "root") {
        let path = match special.root {
            Some(_) => ROOT_DISK.into(),
            None => container.join("rootfs"),
        };
        root.insert("path".into(), text(&path));
    }
    if let Some(mounts) = json.get_mut("mounts").and_then(Value::as_array_mut) {
        for (index, path) in bind_mounts {
            if let Some(mount) = mounts.get_mut(*index).and_then(Value::as_object_mut) {
                let source = Path::new(SHARE).join(path);
                mount.insert("source".into(), text(&source));
            }
        }
        for (index, path) in &special.mounts {
            if let Some(mount) = mounts.get_mut(*index).and_then(Value::as_object_mut) {
                mount.insert("source".into(), json!(path));
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
        adapt_devices(linux, side);
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

/// Disks have the guest's numbers, there and in the rules for their use; what is left out is gone.
fn adapt_devices(linux: &mut Map<String, Value>, side: GuestSide<'_>) {
    let GuestSide { special, disks, .. } = side;
    let number = |device: &mut Value, slot: u8| {
        if let (Some(device), Some((major, minor))) =
            (device.as_object_mut(), disks.get(usize::from(slot)))
        {
            device.insert("major".into(), json!(major));
            device.insert("minor".into(), json!(minor));
        }
    };
    if let Some(devices) = linux.get_mut("devices").and_then(Value::as_array_mut) {
        for (index, slot) in &special.devices {
            if let Some(device) = devices.get_mut(*index) {
                number(device, *slot);
            }
        }
        let mut index = 0..;
        devices.retain(|_| {
            index
                .next()
                .is_none_or(|index| !special.left_out.contains(&index))
        });
    }
    let rules = linux
        .get_mut("resources")
        .and_then(|all| all.get_mut("devices"));
    for rule in rules.and_then(Value::as_array_mut).into_iter().flatten() {
        let given = DeviceRule::deserialize(&*rule).unwrap_or_default();
        if given.kind == "b"
            && let (Some(major), Some(minor)) = (given.major, given.minor)
            && let Some(slot) = special.slot_of((major, minor))
        {
            number(rule, slot);
        }
    }
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

    fn side<'a>(
        bind_mounts: &'a [(usize, PathBuf)],
        siblings: &'a Siblings,
        special: &'a Special,
    ) -> GuestSide<'a> {
        GuestSide {
            id: "web",
            bind_mounts,
            siblings,
            special,
            disks: &[(254, 0), (254, 16)],
        }
    }

    #[test]
    fn test_disks_have_the_guest_s_numbers_and_paths() {
        let spec = json!({
            "root": { "path": "rootfs" },
            "mounts": [{ "destination": "/d", "type": "ext4", "source": "/dev/sdb" }],
            "linux": {
                "devices": [
                    { "path": "/dev/snd/timer", "type": "c", "major": 116, "minor": 33 },
                    { "path": "/dev/disk", "type": "b", "major": 8, "minor": 16, "uid": 5 },
                    { "path": "/dev/fuse", "type": "c", "major": 10, "minor": 229 },
                ],
                "resources": { "devices": [
                    { "allow": true, "type": "b", "major": 8, "minor": 16, "access": "rw" },
                    { "allow": true, "type": "c", "major": 8, "minor": 16, "access": "rw" },
                    { "allow": false, "access": "rwm" },
                ] },
            },
        });
        let special = Special {
            root: Some(Default::default()),
            mounts: vec![(0, "/dev/vdb".into())],
            devices: vec![(1, 1)],
            left_out: vec![0],
            on_host: vec![None, Some((8, 16))],
            ..Special::default()
        };
        let none = Siblings::new();
        assert_eq!(
            guest_spec(spec, side(&[], &none, &special)),
            json!({
                "root": { "path": ROOT_DISK },
                "mounts": [{ "destination": "/d", "type": "ext4", "source": "/dev/vdb" }],
                "linux": {
                    "cgroupsPath": "/web",
                    "devices": [
                        { "path": "/dev/disk", "type": "b", "major": 254, "minor": 16, "uid": 5 },
                        { "path": "/dev/fuse", "type": "c", "major": 10, "minor": 229 },
                    ],
                    "resources": { "devices": [
                        { "allow": true, "type": "b", "major": 254, "minor": 16, "access": "rw" },
                        { "allow": true, "type": "c", "major": 8, "minor": 16, "access": "rw" },
                        { "allow": false, "access": "rwm" },
                    ] },
                },
            })
        );
    }

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
            guest_spec(
                spec,
                side(&[(1, "volumes/7".into())], &siblings, &Special::default())
            ),
            json!({
                "ociVersion": "1.1.0",
                "root": { "path": "/run/thaw/share/containers/web/rootfs", "readonly": true },
                "process": { "args": ["true"], "somethingNew": 1 },
                "hooks": { "startContainer": [{ "path": "/c" }] },
                "mounts": [
                    { "destination": "/proc", "type": "proc", "source": "proc" },
                    { "destination": "/data", "type": "bind", "options": ["rbind"],
                      "source": "/run/thaw/share/volumes/7" },
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
        let nothing = Special::default();
        assert_eq!(
            guest_spec(json!({}), side(&[(0, PathBuf::new())], &none, &nothing)),
            json!({})
        );
        let odd = json!({ "mounts": [null, 3], "linux": 7 });
        let special = Special {
            mounts: vec![(0, "/dev/vda".into()), (7, "/dev/vdb".into())],
            ..Special::default()
        };
        assert_eq!(
            guest_spec(
                odd.clone(),
                side(
                    &[0, 1, 2].map(|index| (index, PathBuf::new())),
                    &none,
                    &special
                )
            ),
            odd
        );
    }
}
