//! Ranges of a memory file that hold data.

use std::fs::File;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Region;
use crate::layout::PAGE_SIZE;

/// A range of a memory file, in whole pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

impl Extent {
    /// The byte after the last. Not for extents that have not been validated.
    pub fn end(&self) -> u64 {
        self.offset + self.length
    }

    /// The part that lies in `region`, if any.
    pub fn within(&self, region: &Region) -> Option<Self> {
        let start = self.offset.max(region.offset);
        let end = self.end().min(region.offset + region.size);
        (start < end).then(|| Self {
            offset: start,
            length: end - start,
        })
    }
}

/// Why a list of extents does not describe a machine's memory.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum InvalidExtents {
    /// Not in whole pages, or empty.
    #[error("memory extent {0} is empty or not in whole pages")]
    Alignment(usize),
    /// Not after the one before it.
    #[error("memory extent {0} is out of order")]
    Order(usize),
    /// Past the end of the machine's memory.
    #[error("memory extent {0} ends outside of the machine's memory")]
    Outside(usize),
}

/// Check that `extents` are whole pages, in order, apart from each other, and below `size`.
pub fn validate(extents: &[Extent], size: u64) -> Result<(), InvalidExtents> {
    let mut previous = 0;
    for (index, extent) in extents.iter().enumerate() {
        if extent.length == 0 || (extent.offset | extent.length) % PAGE_SIZE != 0 {
            return Err(InvalidExtents::Alignment(index));
        }
        if extent.offset < previous {
            return Err(InvalidExtents::Order(index));
        }
        let end = extent
            .offset
            .checked_add(extent.length)
            .filter(|end| *end <= size);
        previous = end.ok_or(InvalidExtents::Outside(index))?;
    }
    Ok(())
}

/// Join the extents of an ordered list that are not more than `gap` bytes apart.
pub fn merge(extents: &[Extent], gap: u64) -> Vec<Extent> {
    let mut merged: Vec<Extent> = Vec::new();
    for extent in extents {
        match merged.last_mut() {
            Some(last) if extent.offset - last.end() <= gap => {
                last.length = extent.end() - last.offset;
            }
            _ => merged.push(*extent),
        }
    }
    merged
}

/// The data of `file` within `range`, as the file system reports it (`lseek(2)`, `SEEK_DATA`).
pub fn data(file: &File, range: Extent) -> Result<Vec<Extent>, Errno> {
    let mut extents = Vec::new();
    let mut at = range.offset;
    while at < range.end() {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // No data from here on.
            Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno),
        };
        if start >= range.end() {
            break;
        }
        at = seek(file, SeekFrom::Hole(start))?.min(range.end());
        extents.push(Extent {
            offset: start,
            length: at - start,
        });
    }
    Ok(extents)
}
