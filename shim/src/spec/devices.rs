//! The devices of a spec: which of them a guest has, and which are the host's.
//!
//! | device | becomes |
//! |---|---|
//! | one that every Linux kernel has under the same number, and the guest's is built with | the guest's own |
//! | a block device of the host | a disk of the guest, through a block slot |
//! | any other | refused by name |
//!
//! A privileged container's spec lists all devices that the host has, since that is what its client finds.
//! It is known by its rule that allows all devices, and gets those of the guest only: whatever else is in
//! its list is left out.

use std::path::PathBuf;

use serde::Deserialize;
use tracing::debug;

use super::{Spec, SpecError, nullable};

/// A device of a spec.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Device {
    /// Where, in the container.
    pub path: PathBuf,
    /// `c`, `u`, `b` or `p`.
    #[serde(rename = "type", deserialize_with = "nullable")]
    pub kind: String,
    /// Its numbers on the host.
    #[serde(deserialize_with = "nullable")]
    pub major: i64,
    /// The same.
    #[serde(deserialize_with = "nullable")]
    pub minor: i64,
}

/// A rule of a device cgroup.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct DeviceRule {
    /// Whether it allows.
    pub allow: bool,
    /// `c`, `b`, or `a` for all; empty for all too.
    #[serde(rename = "type", deserialize_with = "nullable")]
    pub kind: String,
    /// The numbers; none or negative for all.
    pub major: Option<i64>,
    /// The same.
    pub minor: Option<i64>,
    /// `r`, `w`, `m`.
    #[serde(deserialize_with = "nullable")]
    pub access: String,
}

/// Character devices of the guest, by numbers that the kernel's documentation has assigned
/// (`Documentation/admin-guide/devices.txt`), so that they are the host's too. `packaging/kernel` builds
/// the guest's kernel with each.
const OF_GUEST: [(i64, i64, &str); 13] = [
    (1, 3, "null"),
    (1, 5, "zero"),
    (1, 7, "full"),
    (1, 8, "random"),
    (1, 9, "urandom"),
    (1, 11, "kmsg"),
    (5, 0, "tty"),
    (5, 2, "ptmx"),
    (10, 183, "hwrng"),
    (10, 200, "net/tun"),
    (10, 229, "fuse"),
    (10, 236, "mapper/control"),
    (10, 237, "loop-control"),
];

/// Block devices of the guest that are made by use: `loop0` and so on.
const LOOP_MAJOR: i64 = 7;

/// `/dev/kvm`, which people ask for by name.
const KVM: (i64, i64) = (10, 232);

/// What becomes of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// The guest's own.
    Guest,
    /// A disk.
    Disk,
    /// Left out.
    LeftOut,
    Refused,
}

impl Device {
    /// Whether the guest's kernel has it.
    fn is_of_guest(&self) -> bool {
        match self.kind.as_str() {
            "p" => true,
            "c" | "u" => guest_device(self.major, self.minor).is_some(),
            _ => false,
        }
    }

    fn fate(&self, privileged: bool) -> Fate {
        match (self.kind.as_str(), privileged) {
            _ if self.is_of_guest() => Fate::Guest,
            ("b", true) if self.major == LOOP_MAJOR => Fate::Guest,
            (_, true) => Fate::LeftOut,
            ("b", false) => Fate::Disk,
            (_, false) => Fate::Refused,
        }
    }

    fn refusal(&self, index: usize) -> String {
        let (path, major, minor) = (self.path.display(), self.major, self.minor);
        if (major, minor) == KVM {
            return format!(
                "linux.devices[{index}]: {path}: a guest has no KVM of its own: virtual machines in \
                 a container are not supported"
            );
        }
        format!(
            "linux.devices[{index}]: {path} (type {:?}, {major}:{minor}) is a device of the host, which \
             cannot be given to a VM: run without it",
            self.kind
        )
    }
}

/// Where the guest has the character device of these numbers.
pub fn guest_device(major: i64, minor: i64) -> Option<String> {
    let mut all = OF_GUEST.iter();
    let (_, _, name) = all.find(|(of, number, _)| (*of, *number) == (major, minor))?;
    Some(format!("/dev/{name}"))
}

impl DeviceRule {
    /// Whether it is about all devices, in all ways.
    fn is_for_all(&self) -> bool {
        let all = |number: Option<i64>| number.is_none_or(|number| number < 0);
        matches!(self.kind.as_str(), "" | "a")
            && all(self.major)
            && all(self.minor)
            && "rwm".chars().all(|way| self.access.contains(way))
    }
}

impl DeviceRule {
    /// Whether it is about `device`.
    fn matches(&self, device: &Device) -> bool {
        let is =
            |number: Option<i64>, of: i64| number.is_none_or(|number| number < 0 || number == of);
        let kind = self.kind.as_str();
        (matches!(kind, "" | "a") || kind == device.kind)
            && is(self.major, device.major)
            && is(self.minor, device.minor)
    }
}

impl Spec {
    /// Whether the container may write to `device`.
    pub fn may_write(&self, device: &Device) -> bool {
        let rules = self.linux.resources.devices.iter();
        let writes = |rule: &&DeviceRule| rule.matches(device) && rule.access.contains('w');
        rules.rev().find(writes).is_some_and(|rule| rule.allow)
    }

    /// Whether the container may use all devices.
    pub fn is_privileged(&self) -> bool {
        let rules = self.linux.resources.devices.iter();
        rules
            .rev()
            .find(|rule| rule.is_for_all())
            .is_some_and(|rule| rule.allow)
    }

    /// Refuse devices that a guest cannot have.
    pub(super) fn check_devices(&self) -> Result<(), SpecError> {
        let privileged = self.is_privileged();
        for (index, device) in self.linux.devices.iter().enumerate() {
            if device.fate(privileged) == Fate::Refused {
                return Err(SpecError::Unsupported(device.refusal(index)));
            }
        }
        Ok(())
    }

    /// The indexes of the devices that become disks.
    pub fn disk_devices(&self) -> Vec<usize> {
        self.devices_with(Fate::Disk)
    }

    /// The indexes of the devices that the container does not get.
    pub fn devices_left_out(&self) -> Vec<usize> {
        let left_out = self.devices_with(Fate::LeftOut);
        for index in &left_out {
            let device = &self.linux.devices[*index];
            debug!(path = %device.path.display(), "a device of the host is left out of a privileged container");
        }
        left_out
    }

    fn devices_with(&self, fate: Fate) -> Vec<usize> {
        let privileged = self.is_privileged();
        let devices = self.linux.devices.iter().enumerate();
        devices
            .filter(|(_, device)| device.fate(privileged) == fate)
            .map(|(index, _)| index)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::BundleSpec;
    use super::*;

    fn spec(rules: Value, devices: Value) -> Spec {
        let json = json!({ "linux": { "devices": devices, "resources": { "devices": rules } } });
        BundleSpec::parse(json.to_string().as_bytes()).unwrap().view
    }

    fn devices() -> Value {
        json!([
            { "path": "/dev/fuse", "type": "c", "major": 10, "minor": 229, "fileMode": 438 },
            { "path": "/dev/mytun", "type": "u", "major": 10, "minor": 200 },
            { "path": "/run/pipe", "type": "p" },
            { "path": "/dev/disk", "type": "b", "major": 8, "minor": 16 },
            { "path": "/dev/loop3", "type": "b", "major": 7, "minor": 3 },
        ])
    }

    #[test]
    fn test_the_guest_s_devices_and_disks_are_taken() {
        let spec = spec(Value::Null, devices());
        spec.check_devices().unwrap();
        assert_eq!(spec.disk_devices(), [3, 4]);
        assert!(spec.devices_left_out().is_empty());
    }

    #[test]
    fn test_a_disk_is_writable_when_a_rule_says_so() {
        let rule = |allow, major, access| json!({ "allow": allow, "type": "b", "major": major, "access": access });
        for (rules, writable) in [
            (json!([]), false),
            (json!([rule(true, 8, "rwm")]), true),
            (json!([rule(true, 8, "r")]), false),
            (json!([rule(true, 9, "rwm")]), false),
            (json!([rule(true, 8, "rwm"), rule(false, 8, "w")]), false),
        ] {
            let spec = spec(rules.clone(), devices());
            assert_eq!(spec.may_write(&spec.linux.devices[3]), writable, "{rules}");
        }
    }

    #[test]
    fn test_the_host_s_devices_are_refused_by_name() {
        for (device, words) in [
            (
                json!({ "path": "/dev/snd/timer", "type": "c", "major": 116, "minor": 33 }),
                "linux.devices[0]: /dev/snd/timer (type \"c\", 116:33) is a device of the host",
            ),
            (
                json!({ "path": "/dev/kvm", "type": "c", "major": 10, "minor": 232 }),
                "linux.devices[0]: /dev/kvm: a guest has no KVM",
            ),
            (
                json!({ "path": "/dev/odd", "type": "x" }),
                "linux.devices[0]: /dev/odd",
            ),
        ] {
            let error = spec(Value::Null, json!([device]))
                .check_devices()
                .unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn test_a_privileged_container_gets_the_guest_s_devices_only() {
        let mut all = devices();
        let timer = json!({ "path": "/dev/snd/timer", "type": "c", "major": 116, "minor": 33 });
        all.as_array_mut().unwrap().push(timer);
        for rule in [
            json!({ "allow": true, "access": "rwm" }),
            json!({ "allow": true, "type": "a", "major": -1, "minor": null, "access": "rwm" }),
        ] {
            let denied_first = json!([{ "allow": false, "access": "rwm" }, rule]);
            let spec = spec(denied_first, all.clone());
            assert!(spec.is_privileged());
            spec.check_devices().unwrap();
            assert!(spec.disk_devices().is_empty());
            // The loop device is one that the guest makes by use.
            assert_eq!(spec.devices_left_out(), [3, 5]);
        }
    }

    #[test]
    fn test_what_may_use_some_devices_is_not_privileged() {
        for rules in [
            json!([]),
            json!([{ "allow": true, "access": "rwm" }, { "allow": false, "access": "rwm" }]),
            json!([{ "allow": true, "access": "rw" }]),
            json!([{ "allow": true, "type": "c", "access": "rwm" }]),
            json!([{ "allow": true, "major": 8, "access": "rwm" }]),
        ] {
            assert!(!spec(rules.clone(), Value::Null).is_privileged(), "{rules}");
        }
    }
}
