//! Templates: snapshots of booted guests, from which every sandbox is restored.
//!
//! A template is a cache entry. Its key is the digest of all that it was made from, this host
//! included ([`KeyInputs`]); where no published template has the key, one is built, and nothing is
//! ever converted. [`TemplateStore::obtain`] gives the template of a shape, whatever that takes.
//!
//! On disk:
//!
//! ```text
//! /var/lib/thaw/templates/
//!   <key>/manifest.json   what it was made from, digests and sizes of the other two
//!   <key>/state           the VMM's state of machine and devices
//!   <key>/memory          guest memory, sparse
//!   <key>.lock            held by whoever builds, verifies or removes; its mtime is the last use
//!   .building-*           being built, or left by a process that was killed
//!   digests.json          digests of the installed files
//! /run/thaw/.templates/<key>.json
//!                         what the files looked like when they were last verified, and in which boot
//! ```
//!
//! A template is published by renaming a complete, synced directory, and its files never change
//! afterwards: running guests have them mapped. Removing one is safe at any time, since a mapped
//! file lives on.

mod abandonment;
mod boot;
mod budget;
mod build;
mod cache;
mod digest;
mod host;
mod key;
mod lock;
mod manifest;
mod marker;
mod publish;
mod store;
mod watchdog;

use std::fs::File;
use std::io;
use std::path::PathBuf;

use thaw_vmm_control::{Shape, WorkingSet};
use thiserror::Error;

pub use abandonment::Abandonment;
pub use build::BuildError;
pub use digest::{Digest, FileIdentity, InvalidDigest};
pub use host::{HostFacts, KvmFlavour};
pub use key::{KeyInputs, TemplateKey};
pub use manifest::{InvalidManifest, Manifest};
pub use store::{StoredTemplate, TemplateStore, Trust};

/// A template, ready to be restored: the descriptors that
/// [`Request::Restore`](thaw_vmm_control::Request::Restore) takes, and what is known about them.
#[derive(Debug)]
pub struct Template {
    /// State of the machine and its devices, open for reading.
    pub state: File,
    /// Guest memory, open for reading; to be mapped privately, never read as a whole.
    pub memory: File,
    /// vCPUs and memory.
    pub shape: Shape,
    /// Its key.
    pub key: TemplateKey,
    /// Where it comes from.
    pub origin: Origin,
    /// The pages of guest memory that a start is known to touch; empty when not recorded.
    pub working_set: WorkingSet,
}

/// Where a [`Template`] comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// It had been published before.
    Stored,
    /// It was built and published for this call.
    Built,
    /// It was built for this call and lives in memory only, since it could not be stored.
    Memory,
}

/// Why there is no template.
#[derive(Debug, Error)]
pub enum TemplateError {
    /// A system call failed.
    #[error("{doing}: {source}")]
    System {
        /// What was being done, with what.
        doing: String,
        /// The cause.
        source: io::Error,
    },
    /// The guest could not be made.
    #[error("building the template of shape {shape}: {source}")]
    Build {
        /// vCPUs and memory.
        shape: Shape,
        /// The cause.
        source: BuildError,
    },
    /// No published template has this key.
    #[error("{} has no template {key}; `thaw template list` shows those it has", .directory.display())]
    Unknown {
        /// Where it was looked for.
        directory: PathBuf,
        /// As it was given.
        key: String,
    },
    /// The abbreviation of a key fits more than one template.
    #[error("{0} is the beginning of several templates' keys; give more of it")]
    Ambiguous(String),
}

impl TemplateError {
    fn system(doing: impl Into<String>, source: io::Error) -> Self {
        Self::System {
            doing: doing.into(),
            source,
        }
    }
}
