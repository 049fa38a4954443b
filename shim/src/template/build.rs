//! Making a template's files: in the store's directory, or in memory where that cannot be.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use thaw_vmm_control::WorkingSet;
use thiserror::Error;

use super::digest::{Digest, descriptor_path};
use super::key::KeyInputs;
use super::lock::ScratchDirectory;
use super::manifest::{FileRecord, Manifest};
use super::publish::sync_directory;

/// Why a guest could not be booted and snapshotted.
#[derive(Debug, Error)]
pub enum BuildError {
    /// The processor has neither VMX nor SVM; a `/dev/kvm` without them emulates, and hangs or fails
    /// in the middle of a Linux guest's boot.
    #[error(
        "this host's processor has neither the vmx nor the svm flag, so its KVM, if it has one, \
         cannot run a Linux guest; `thaw doctor` says what to do"
    )]
    NoVirtualisation,
    /// Something on the host's side failed.
    #[error("{doing}: {source}")]
    Host {
        /// What was being done, with what.
        doing: String,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The VMM or the guest ended or answered with an error.
    #[error("{doing}: {reason}{}", console_tail(.console))]
    Guest {
        /// What was being done.
        doing: &'static str,
        /// What was heard.
        reason: String,
        /// The last lines of the guest's console.
        console: String,
    },
    /// A step took longer than it ever should.
    #[error(
        "{doing}: not done after {seconds} s{}; is this host overloaded, or its KVM emulated? `thaw doctor` tells",
        console_tail(.console)
    )]
    Timeout {
        /// What was being done.
        doing: &'static str,
        /// How long it was waited for.
        seconds: u64,
        /// The last lines of the guest's console.
        console: String,
    },
    /// The snapshot could not be written to the files it was to go to.
    #[error("writing the snapshot: {0}")]
    Snapshot(String),
}

fn console_tail(console: &str) -> String {
    match console.trim() {
        "" => String::new(),
        text => format!("; the guest's console says: {}", text.replace('\n', " | ")),
    }
}

/// What makes a guest and writes its snapshot. A trait so that the store can be tested without KVM.
pub(super) trait Builder {
    /// Boot the guest that `inputs` describe and write its snapshot to two files, empty and open
    /// for reading and writing. Returns what a start from them touches, as far as that is known.
    fn build(
        &self,
        inputs: &KeyInputs,
        state: &File,
        memory: &File,
    ) -> Result<WorkingSet, BuildError>;
}

/// Why a template was not published.
pub(super) enum Unpublished {
    /// It could not be made at all.
    Failed(BuildError),
    /// Its files could not be written where they belong: worth a try in memory.
    NotStored(String),
}

/// Build a template in a scratch directory of `directory` and rename it to `target`.
pub(super) fn build_and_publish(
    builder: &dyn Builder,
    inputs: &KeyInputs,
    directory: &Path,
    target: &Path,
) -> Result<(), Unpublished> {
    let storing = |doing: &'static str| {
        move |error: io::Error| Unpublished::NotStored(format!("{doing}: {error}"))
    };
    let scratch = ScratchDirectory::create(directory).map_err(storing("making a directory"))?;
    let create = |name: &str| {
        let path = scratch.path().join(name);
        OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
    };
    let state = create("state").map_err(storing("creating the state file"))?;
    let memory = create("memory").map_err(storing("creating the memory file"))?;
    let working_set = match builder.build(inputs, &state, &memory) {
        Ok(working_set) => working_set,
        // The VMM says in words only why it could not write; lack of space is the likely reason.
        Err(BuildError::Snapshot(reason)) => return Err(Unpublished::NotStored(reason)),
        Err(error) => return Err(Unpublished::Failed(error)),
    };
    // Delayed allocation may find the disk full only now.
    state
        .sync_all()
        .map_err(storing("writing the state file"))?;
    memory
        .sync_all()
        .map_err(storing("writing the memory file"))?;
    let manifest = describe(inputs, &state, &memory, working_set)?;
    let mut file = create("manifest.json").map_err(storing("creating the manifest"))?;
    serde_json::to_vec_pretty(&manifest)
        .map_err(io::Error::from)
        .and_then(|text| file.write_all(&text))
        .and_then(|()| file.sync_all())
        .map_err(storing("writing the manifest"))?;
    sync_directory(scratch.path()).map_err(storing("syncing the directory"))?;
    scratch.rename(target).map_err(storing("publishing"))?;
    sync_directory(directory).map_err(storing("publishing"))
}

/// The manifest of a template's files as they are.
fn describe(
    inputs: &KeyInputs,
    state: &File,
    memory: &File,
    working_set: WorkingSet,
) -> Result<Manifest, Unpublished> {
    let reading = |error: io::Error| {
        Unpublished::NotStored(format!("reading back what was written: {error}"))
    };
    let size = |file: &File| file.metadata().map(|metadata| metadata.len());
    let manifest = Manifest {
        inputs: inputs.clone(),
        state: FileRecord {
            size: size(state).map_err(reading)?,
            sha256: Digest::of_file(state).map_err(reading)?,
        },
        memory: FileRecord {
            size: size(memory).map_err(reading)?,
            sha256: Digest::of_sparse_file(memory).map_err(reading)?,
        },
        built_at: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs(),
        working_set,
    };
    // What a start would refuse must not be published.
    manifest.check(inputs.key()).map_err(|error| {
        Unpublished::Failed(BuildError::Host {
            doing: "checking the new template".to_owned(),
            source: Box::new(error),
        })
    })?;
    Ok(manifest)
}

/// Build a template whose files are in memory and gone with the last user: state and memory, both
/// sealed and open for reading only, and what a start from them touches.
pub(super) fn build_in_memory(
    builder: &dyn Builder,
    inputs: &KeyInputs,
) -> Result<(File, File, WorkingSet), BuildError> {
    let host = |doing: &str| {
        let doing = doing.to_owned();
        move |error: io::Error| BuildError::Host {
            doing,
            source: Box::new(error),
        }
    };
    let create = |name: &str| -> io::Result<File> {
        Ok(memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?.into())
    };
    let state = create("thaw-template-state").map_err(host("making a file in memory"))?;
    let memory = create("thaw-template-memory").map_err(host("making a file in memory"))?;
    let working_set = builder.build(inputs, &state, &memory)?;
    let finish = |file: &File| -> io::Result<File> {
        let seals = SealFlag::F_SEAL_SHRINK
            | SealFlag::F_SEAL_GROW
            | SealFlag::F_SEAL_WRITE
            | SealFlag::F_SEAL_SEAL;
        fcntl(file, FcntlArg::F_ADD_SEALS(seals))?;
        File::open(descriptor_path(file))
    };
    let finish = |file| finish(file).map_err(host("sealing a template in memory"));
    Ok((finish(&state)?, finish(&memory)?, working_set))
}
