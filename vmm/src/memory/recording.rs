//! Which pages of its memory a guest touches.
//!
//! What is mapped in this process has been touched, by the guest or for it: a restore maps nothing,
//! and KVM resolves each of the guest's accesses by the process' own page tables. They are read from
//! `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst). To be exact they must hold no page
//! that was mapped because it lies near a touched one: see [`PagewiseMapping`].

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use thaw_vmm_control::{InvalidWorkingSet, TouchedPages, WorkingSet};
use thiserror::Error;
use vm_memory::GuestMemory;

use super::userfault::PagewiseMapping;
use super::{GuestRam, mapping, regions};
use crate::layout::PAGE_SIZE;

/// Bytes of the page map for one page.
const ENTRY: u64 = 8;
/// Entries that are read at once.
const CHUNK: u64 = 8192;

/// The page is mapped by this process only. Not so the zero page, which a read of memory that
/// nothing was written to finds.
const EXCLUSIVE: u64 = 1 << 56;
/// The page belongs to a file.
const OF_FILE: u64 = 1 << 61;
/// The page, which is the process' own, has been swapped out.
const SWAPPED: u64 = 1 << 62;
/// The page is there.
const PRESENT: u64 = 1 << 63;

/// Why nothing is recorded.
#[derive(Debug, Error)]
pub enum RecordingError {
    /// The kernel is older than 6.7, or was built without userfaultfd.
    #[error("recording touched pages: userfaultfd with asynchronous write protection: {0}")]
    Unsupported(io::Error),
    /// The page map cannot be read.
    #[error("recording touched pages: reading the page map: {0}")]
    PageMap(io::Error),
    /// What was found is nothing that can be kept.
    #[error("recording touched pages: {0}")]
    Invalid(#[from] InvalidWorkingSet),
}

/// The record of a guest's accesses to its memory, from its restore on.
pub struct Recording {
    pagemap: File,
    /// Ends the recording when it is closed.
    _pagewise: PagewiseMapping,
}

impl Recording {
    /// Record accesses to `ram`, which nobody has touched yet. `pagemap` is this process' page map.
    pub fn start(ram: &GuestRam, pagemap: File) -> Result<Self, RecordingError> {
        let pagewise = PagewiseMapping::new().map_err(RecordingError::Unsupported)?;
        for region in ram.memory().iter() {
            pagewise.add(region).map_err(RecordingError::Unsupported)?;
            // A huge page would make one touched page 512. Kernels without them refuse.
            if let Err(error) = mapping::forbid_huge_pages(region) {
                tracing::debug!("forbidding huge pages: {error}");
            }
        }
        Ok(Self {
            pagemap,
            _pagewise: pagewise,
        })
    }

    /// What has been touched so far of `ram`, which is that of [`Recording::start`].
    pub fn working_set(&self, ram: &GuestRam) -> Result<WorkingSet, RecordingError> {
        let mut touched = Vec::new();
        let mut buffer = vec![0; (CHUNK * ENTRY) as usize];
        for (region, mapping) in regions(ram.size()).iter().zip(ram.memory().iter()) {
            let (first, pages) = (region.offset / PAGE_SIZE, region.size / PAGE_SIZE);
            let at = mapping.as_ptr() as u64 / PAGE_SIZE;
            let mut done = 0;
            while done < pages {
                let count = (pages - done).min(CHUNK);
                let entries = &mut buffer[..(count * ENTRY) as usize];
                self.pagemap
                    .read_exact_at(entries, (at + done) * ENTRY)
                    .map_err(RecordingError::PageMap)?;
                note_touched(entries, first + done, &mut touched);
                done += count;
            }
        }
        Ok(WorkingSet::bounded(&touched)?)
    }
}

/// Add the touched pages of `entries`, which are those of the pages from `first` on.
fn note_touched(entries: &[u8], first: u64, touched: &mut Vec<TouchedPages>) {
    let entries = entries
        .as_chunks()
        .0
        .iter()
        .copied()
        .map(u64::from_le_bytes);
    for (page, entry) in (first..).zip(entries) {
        let Some(written) = access(entry) else {
            continue;
        };
        match touched.last_mut() {
            Some(last)
                if last.written == written
                    && u64::from(last.first) + u64::from(last.count) == page =>
            {
                last.count += 1;
            }
            // A machine has 1 TiB at most, which is 2^28 pages.
            _ => touched.push(TouchedPages {
                first: page as u32,
                count: 1,
                written,
            }),
        }
    }
}

/// How the page with `entry` was accessed, if it was: whether it was written.
fn access(entry: u64) -> Option<bool> {
    if entry & SWAPPED != 0 {
        return Some(true);
    }
    (entry & PRESENT != 0).then_some(entry & OF_FILE == 0 && entry & EXCLUSIVE != 0)
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;

    fn pages(first: u32, count: u32, written: bool) -> TouchedPages {
        TouchedPages {
            first,
            count,
            written,
        }
    }

    #[test]
    fn test_page_map_entries_tell_reads_from_writes() {
        let entries = [
            0,
            PRESENT | OF_FILE,
            PRESENT | OF_FILE | EXCLUSIVE | 0x1234,
            PRESENT, // the zero page
            PRESENT | EXCLUSIVE,
            SWAPPED,
            EXCLUSIVE,
            PRESENT | EXCLUSIVE | 1 << 55,
        ];
        let bytes = entries.map(u64::to_le_bytes).concat();
        let mut touched = Vec::new();
        note_touched(&bytes, 100, &mut touched);
        let expected = [
            pages(101, 3, false),
            pages(104, 2, true),
            pages(107, 1, true),
        ];
        assert_eq!(touched, expected);
    }

    /// On kernels from 6.7 on; others say that they cannot.
    #[test]
    fn test_a_recording_has_the_touched_pages_and_no_neighbour_of_theirs() {
        let file = tempfile::tempfile().unwrap();
        let size = 128 << 20;
        let source = GuestRam::new(size).unwrap();
        let address = |page: u64| GuestAddress(page * PAGE_SIZE);
        source
            .memory()
            .write_slice(&[7; 400 << 12], address(0))
            .unwrap();
        let extents = source.save(&file).unwrap();
        // The neighbours are in the page cache, where a fault would find and map them.
        let ram = GuestRam::restore(size, &file, &extents).unwrap();
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let recording = match Recording::start(&ram, pagemap) {
            Ok(recording) => recording,
            Err(error) => return eprintln!("SKIPPED, needs Linux 6.7: {error}"),
        };
        assert!(recording.working_set(&ram).unwrap().is_empty());
        for page in [40, 41, 5000] {
            let _: u8 = ram.memory().read_obj(address(page)).unwrap();
        }
        for page in [42, 200, 201, 6000] {
            let _: u8 = ram.memory().read_obj(address(page)).unwrap();
            ram.memory().write_obj(1u8, address(page)).unwrap();
        }
        let expected = [
            pages(40, 2, false),
            pages(42, 1, true),
            pages(200, 2, true),
            pages(5000, 1, false),
            pages(6000, 1, true),
        ];
        assert_eq!(recording.working_set(&ram).unwrap().ranges(), expected);
    }
}
