//! What a template is made from, and the key that follows from it.

use std::path::Path;

use serde::{Deserialize, Serialize};
use thaw_vmm_control::{BLOCK_SLOTS, COMMAND_LINE, FORMAT_EPOCH, Shape};

use super::TemplateError;
use super::cache::DigestCache;
use super::digest::Digest;
use super::host::HostFacts;
use crate::paths::Installation;

/// The key of a template: the digest of its [`KeyInputs`].
pub type TemplateKey = Digest;

/// All that a template depends on. Where any of it differs, a template is built anew; none is ever
/// converted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyInputs {
    /// [`FORMAT_EPOCH`].
    pub format_epoch: u32,
    /// vCPUs and memory.
    pub shape: Shape,
    /// The devices in the order in which the guest has found them.
    pub devices: String,
    /// The kernel's command line.
    pub command_line: String,
    /// Digest of the kernel.
    pub kernel: Digest,
    /// Digest of the initramfs.
    pub initramfs: Digest,
    /// Digest of the VMM program.
    pub vmm: Digest,
    /// The host.
    pub host: HostFacts,
}

impl KeyInputs {
    /// What a template of `shape` is made from on this host with this installation. Digests of
    /// files that `cache` knows are not computed again.
    pub(super) fn gather(
        installation: &Installation,
        shape: Shape,
        cache: &mut DigestCache,
    ) -> Result<Self, TemplateError> {
        let mut digest = |path: &Path| {
            let reading =
                |source| TemplateError::system(format!("reading {}", path.display()), source);
            cache.digest(path).map_err(reading)
        };
        Ok(Self {
            format_epoch: FORMAT_EPOCH,
            shape,
            devices: format!("vsock fs console block*{BLOCK_SLOTS} balloon memory vmgenid"),
            command_line: COMMAND_LINE.to_owned(),
            kernel: digest(&installation.kernel)?,
            initramfs: digest(&installation.initramfs)?,
            vmm: digest(&installation.vmm)?,
            host: HostFacts::gather().map_err(|source| {
                TemplateError::system("asking for the kernel's release", source)
            })?,
        })
    }

    /// The key.
    pub fn key(&self) -> TemplateKey {
        // The field names, their order and JSON's quoting make this unambiguous.
        let text = serde_json::to_vec(self).unwrap_or_default();
        Digest::of(&text)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::host::KvmFlavour;
    use super::*;

    /// Inputs of no host in particular.
    pub fn inputs() -> KeyInputs {
        KeyInputs {
            format_epoch: FORMAT_EPOCH,
            shape: Shape::new(2, 256).unwrap(),
            devices: "vsock fs".to_owned(),
            command_line: COMMAND_LINE.to_owned(),
            kernel: Digest::of(b"kernel"),
            initramfs: Digest::of(b"initramfs"),
            vmm: Digest::of(b"vmm"),
            host: HostFacts {
                kernel: "6.12.1 #1".to_owned(),
                microcode: Some("0x1".to_owned()),
                kvm: KvmFlavour::Svm,
                cpuid: Digest::of(b"cpuid"),
                tsc_khz: Some(2_000_000),
            },
        }
    }

    #[test]
    fn test_key_differs_when_any_input_differs() {
        type Change = fn(&mut KeyInputs);
        let changes: [Change; 14] = [
            |i| i.format_epoch += 1,
            |i| i.shape = Shape::new(1, 256).unwrap(),
            |i| i.shape = Shape::new(2, 512).unwrap(),
            |i| i.devices.push_str(" net"),
            |i| i.command_line.push_str(" debug"),
            |i| i.kernel = Digest::of(b"other"),
            |i| i.initramfs = Digest::of(b"other"),
            |i| i.vmm = Digest::of(b"other"),
            |i| i.host.kernel.push('1'),
            |i| i.host.microcode = None,
            |i| i.host.microcode = Some("0x2".to_owned()),
            |i| i.host.kvm = KvmFlavour::Vmx,
            |i| i.host.cpuid = Digest::of(b"other"),
            |i| i.host.tsc_khz = None,
        ];
        let mut keys = std::collections::HashSet::from([inputs().key()]);
        for (number, change) in changes.iter().enumerate() {
            let mut changed = inputs();
            change(&mut changed);
            assert!(
                keys.insert(changed.key()),
                "change {number} does not show in the key"
            );
        }
    }

    #[test]
    fn test_key_survives_the_manifest() {
        let text = serde_json::to_string(&inputs()).unwrap();
        let read: KeyInputs = serde_json::from_str(&text).unwrap();
        assert_eq!(read.key(), inputs().key());
    }

    #[test]
    fn test_digests_of_the_installation_s_files_go_into_the_inputs() {
        let prefix = tempfile::tempdir().unwrap();
        let installation = Installation::expected_at(prefix.path());
        for (path, content) in installation
            .files()
            .into_iter()
            .zip(["vmm", "kernel", "initramfs"])
        {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        let mut cache = DigestCache::load(prefix.path());
        let shape = Shape::new(1, 128).unwrap();
        let gathered = KeyInputs::gather(&installation, shape, &mut cache).unwrap();
        assert_eq!(gathered.vmm, Digest::of(b"vmm"));
        assert_eq!(gathered.kernel, Digest::of(b"kernel"));
        assert_eq!(gathered.initramfs, Digest::of(b"initramfs"));
        std::fs::remove_file(&installation.kernel).unwrap();
        let error = KeyInputs::gather(&installation, shape, &mut cache)
            .unwrap_err()
            .to_string();
        assert!(error.contains("share/thaw/vmlinux"), "{error}");
    }
}
