//! The state file of a snapshot: everything of a machine but its memory.
//!
//! ```text
//! 8 bytes  magic
//! 4        format epoch, little-endian like the rest
//! 8        length of the body
//! n        body: MachineState in postcard
//! 4        CRC-32 of all that is before it
//! ```
//!
//! A snapshot is read by the build that wrote it, on the host that wrote it: templates are a cache.
//! So there is no compatibility code; [`FORMAT_EPOCH`] changes whenever the meaning of the body
//! does. The checksum is against accidents. What was decoded is untrusted until `validate` has seen
//! it, and the PCI part until the bus has taken it.

mod state;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use thaw_vmm_control::FORMAT_EPOCH;
use thiserror::Error;

use crate::memory::InvalidExtents;
pub use state::{InterruptControllers, MachineState};

const MAGIC: [u8; 8] = *b"thaw-vm\x1a";
const HEADER_SIZE: usize = MAGIC.len() + 4 + 8;
const CHECKSUM_SIZE: usize = 4;

/// No machine's state is larger: 16 vCPUs of 16 KiB, a few KiB of devices, and a list of extents.
const MAX_SIZE: u64 = 16 << 20;

/// Why a state file is not one that can be restored, or could not be written.
#[derive(Debug, Error)]
pub enum SnapshotError {
    /// The file cannot be read or written.
    #[error("{doing} the snapshot's state: {source}")]
    File {
        /// What was being done.
        doing: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// More bytes than a state can have, or fewer.
    #[error("a snapshot's state of {0} bytes: it is damaged or something else")]
    Size(u64),
    /// Not a state file.
    #[error("not a snapshot's state")]
    Magic,
    /// Of another build.
    #[error("a snapshot of format {found}; this build has format {FORMAT_EPOCH}: make it anew")]
    Epoch {
        /// The file's format.
        found: u32,
    },
    /// The checksum is another.
    #[error("the snapshot's state is damaged (checksum)")]
    Checksum,
    /// The body is not a state.
    #[error("the snapshot's state cannot be decoded: {0}")]
    Body(#[from] postcard::Error),
    /// Memory extents out of place.
    #[error("the snapshot's state: {0}")]
    Extents(#[from] InvalidExtents),
    /// A part that does not fit the rest.
    #[error("the snapshot's state: {0}")]
    Invalid(&'static str),
}

/// The bytes of a state file.
pub fn encode(state: &MachineState) -> Result<Vec<u8>, SnapshotError> {
    let body = postcard::to_stdvec(state)?;
    let mut bytes = Vec::with_capacity(HEADER_SIZE + body.len() + CHECKSUM_SIZE);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&FORMAT_EPOCH.to_le_bytes());
    bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&body);
    let checksum = crc32fast::hash(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    Ok(bytes)
}

/// The state in the bytes of a state file, checked.
pub fn decode(bytes: &[u8]) -> Result<MachineState, SnapshotError> {
    let size = bytes.len() as u64;
    let (rest, checksum) = bytes.split_last_chunk().ok_or(SnapshotError::Size(size))?;
    let (magic, fields) = rest.split_first_chunk().ok_or(SnapshotError::Size(size))?;
    if *magic != MAGIC {
        return Err(SnapshotError::Magic);
    }
    let (epoch, fields) = fields
        .split_first_chunk()
        .ok_or(SnapshotError::Size(size))?;
    let found = u32::from_le_bytes(*epoch);
    if found != FORMAT_EPOCH {
        return Err(SnapshotError::Epoch { found });
    }
    let (length, body) = fields
        .split_first_chunk()
        .ok_or(SnapshotError::Size(size))?;
    if u64::from_le_bytes(*length) != body.len() as u64 {
        return Err(SnapshotError::Size(size));
    }
    if crc32fast::hash(rest) != u32::from_le_bytes(*checksum) {
        return Err(SnapshotError::Checksum);
    }
    let (state, rest) = postcard::take_from_bytes::<MachineState>(body)?;
    if !rest.is_empty() {
        return Err(SnapshotError::Invalid("bytes after its end"));
    }
    state.validate()?;
    Ok(state)
}

/// Write `state` to `file`, which is empty.
pub fn write(file: &File, state: &MachineState) -> Result<(), SnapshotError> {
    file.write_all_at(&encode(state)?, 0)
        .map_err(|source| SnapshotError::File {
            doing: "writing",
            source,
        })
}

/// Read and check the state in `file`.
pub fn read(file: &File) -> Result<MachineState, SnapshotError> {
    let error = |source| SnapshotError::File {
        doing: "reading",
        source,
    };
    let size = file.metadata().map_err(error)?.size();
    if size > MAX_SIZE {
        return Err(SnapshotError::Size(size));
    }
    let mut bytes = vec![0; size as usize];
    file.read_exact_at(&mut bytes, 0).map_err(error)?;
    decode(&bytes)
}
