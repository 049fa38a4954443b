//! A template's manifest: what it was made from and what its files must look like.

use serde::{Deserialize, Serialize};
use thaw_vmm_control::{FORMAT_EPOCH, InvalidWorkingSet, Shape, WorkingSet};
use thiserror::Error;

use super::digest::Digest;
use super::key::{KeyInputs, TemplateKey};

/// Size and digest of one file of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Bytes, holes included.
    pub size: u64,
    /// Digest: of the bytes for the state, [`Digest::of_sparse_file`] for the memory.
    pub sha256: Digest,
}

/// What `manifest.json` says, checked: it belongs to the template it was found in, and its numbers
/// are within bounds. Made by [`Manifest::parse`] from a file and by the store for a new template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Manifest {
    pub(super) inputs: KeyInputs,
    pub(super) state: FileRecord,
    pub(super) memory: FileRecord,
    pub(super) built_at: u64,
    pub(super) working_set: WorkingSet,
}

/// As read: anything may be in it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawManifest {
    inputs: KeyInputs,
    state: FileRecord,
    memory: FileRecord,
    built_at: u64,
    #[serde(default)]
    working_set: WorkingSet,
}

/// Why a manifest is not that of a usable template.
#[derive(Debug, Error)]
pub enum InvalidManifest {
    /// Not JSON, or not these fields.
    #[error("manifest.json: {0}")]
    Syntax(#[from] serde_json::Error),
    /// More bytes than any manifest has.
    #[error("manifest.json is larger than {} bytes", Manifest::MAX_BYTES)]
    TooLarge,
    /// Made by another version.
    #[error("manifest.json has format epoch {0}, this version reads {FORMAT_EPOCH}")]
    Epoch(u32),
    /// It describes another template.
    #[error("manifest.json is that of template {0}")]
    OtherKey(TemplateKey),
    /// A size that cannot be right.
    #[error("manifest.json: {field} of {size} bytes is not between 1 and {max}")]
    Size {
        /// Which file's.
        field: &'static str,
        /// As given.
        size: u64,
        /// The most it can be.
        max: u64,
    },
    /// A working set that is not one of this memory.
    #[error("manifest.json: {0}")]
    WorkingSet(#[from] InvalidWorkingSet),
}

impl Manifest {
    /// More than a manifest with the largest working set takes.
    pub const MAX_BYTES: u64 = 1 << 20;

    /// The largest state file: registers and device state of 16 vCPUs take far less.
    const MAX_STATE: u64 = 64 << 20;

    /// Parse the manifest of the template with `key`. The text is untrusted.
    pub fn parse(text: &[u8], key: TemplateKey) -> Result<Self, InvalidManifest> {
        if text.len() as u64 > Self::MAX_BYTES {
            return Err(InvalidManifest::TooLarge);
        }
        let RawManifest {
            inputs,
            state,
            memory,
            built_at,
            working_set,
        } = serde_json::from_slice(text)?;
        let manifest = Self {
            inputs,
            state,
            memory,
            built_at,
            working_set,
        };
        manifest.check(key)?;
        Ok(manifest)
    }

    pub(super) fn check(&self, key: TemplateKey) -> Result<(), InvalidManifest> {
        if self.inputs.format_epoch != FORMAT_EPOCH {
            return Err(InvalidManifest::Epoch(self.inputs.format_epoch));
        }
        let own = self.inputs.key();
        if own != key {
            return Err(InvalidManifest::OtherKey(own));
        }
        let size = |field, size, max| match size {
            1.. if size <= max => Ok(()),
            _ => Err(InvalidManifest::Size { field, size, max }),
        };
        size("state", self.state.size, Self::MAX_STATE)?;
        // The VMM may lay out the memory with gaps, so the size is bounded, not prescribed.
        size(
            "memory",
            self.memory.size,
            self.shape().memory_bytes().saturating_mul(2),
        )?;
        // That it is one at all was seen when it was decoded.
        Ok(self.working_set.check_within(self.memory.size)?)
    }

    /// vCPUs and memory.
    pub fn shape(&self) -> Shape {
        self.inputs.shape
    }

    /// What the template was made from.
    pub fn inputs(&self) -> &KeyInputs {
        &self.inputs
    }

    /// The pages of guest memory that a start is known to touch; empty when not recorded.
    pub fn working_set(&self) -> &WorkingSet {
        &self.working_set
    }

    /// When it was built, in seconds since 1970.
    pub fn built_at(&self) -> u64 {
        self.built_at
    }
}

#[cfg(test)]
mod tests {
    use thaw_vmm_control::TouchedPages;

    use super::super::key::tests::inputs;
    use super::*;

    fn working_set(ranges: &[(u32, u32)]) -> WorkingSet {
        let ranges = ranges.iter().map(|(first, count)| TouchedPages {
            first: *first,
            count: *count,
            written: *first > 1,
        });
        WorkingSet::new(ranges.collect()).unwrap()
    }

    fn manifest() -> Manifest {
        let record = |size| FileRecord {
            size,
            sha256: Digest::of(b"file"),
        };
        Manifest {
            inputs: inputs(),
            state: record(5000),
            memory: record(256 << 20),
            built_at: 1_700_000_000,
            working_set: working_set(&[(0, 1), (2, 2)]),
        }
    }

    fn parse(manifest: &Manifest) -> Result<Manifest, InvalidManifest> {
        Manifest::parse(&serde_json::to_vec(manifest).unwrap(), inputs().key())
    }

    #[test]
    fn test_round_trip() {
        assert_eq!(parse(&manifest()).unwrap(), manifest());
    }

    #[test]
    fn test_hostile_content_is_refused() {
        type Change = fn(&mut Manifest);
        let changes: [Change; 8] = [
            |m| m.inputs.kernel = Digest::of(b"other"),
            |m| m.inputs.format_epoch = 7,
            |m| m.state.size = 0,
            |m| m.state.size = u64::MAX,
            |m| m.memory.size = 0,
            |m| m.memory.size = u64::MAX,
            |m| m.working_set = working_set(&[(0, 1), (65_535, 2)]),
            |m| m.working_set = working_set(&[(u32::MAX, 1)]),
        ];
        for (number, change) in changes.iter().enumerate() {
            let mut changed = manifest();
            change(&mut changed);
            assert!(parse(&changed).is_err(), "change {number}");
        }
    }

    #[test]
    fn test_other_text_is_refused() {
        let good = serde_json::to_string(&manifest()).unwrap();
        let long = format!("{good}{}", " ".repeat(Manifest::MAX_BYTES as usize));
        let deep = "[".repeat(100_000);
        let texts = [
            "",
            "null",
            "[]",
            "{}",
            &good[..good.len() - 1],
            &good.replace("\"built_at\"", "\"built\""),
            &good.replace("\"vcpus\":2", "\"vcpus\":200"),
            &good.replace("\"memory_mib\":256", "\"memory_mib\":257"),
            &good.replacen('{', "{\"more\":1,", 1),
            // The second range of the working set: empty, out of order, beyond any memory, too large.
            &good.replace("\"first\":2,\"count\":2", "\"first\":2,\"count\":0"),
            &good.replace("\"first\":2,", "\"first\":0,"),
            &good.replace("\"first\":2,", "\"first\":4294967296,"),
            &good.replace("\"first\":2,\"count\":2", "\"first\":2,\"count\":8192"),
            &good.replace("\"written\":true", "\"written\":1"),
            &long,
            &deep,
        ];
        for (number, text) in texts.into_iter().enumerate() {
            assert_ne!(text, good, "text {number}");
            let result = Manifest::parse(text.as_bytes(), inputs().key());
            assert!(result.is_err(), "{}", &text[..text.len().min(200)]);
        }
    }
}
