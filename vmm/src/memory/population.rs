//! Pages of guest memory that are made ready before the guest runs, so that its first access to each
//! is no exit.

use std::io;

use thaw_vmm_control::{InvalidWorkingSet, WorkingSet};
use vm_memory::{GuestMemory, GuestMemoryMmap};

use super::extent::{self, Extent};
use super::{GuestRam, Region, mapping, regions};
use crate::layout::PAGE_SIZE;

/// The working set of a start, in the memory of one machine.
pub struct Population {
    /// Keeps it mapped.
    memory: GuestMemoryMmap,
    regions: Vec<Region>,
    read: Vec<Extent>,
    written: Vec<Extent>,
}

impl Population {
    /// Of `ram`. The working set is untrusted: it must lie in the memory.
    pub fn new(ram: &GuestRam, working_set: &WorkingSet) -> Result<Self, InvalidWorkingSet> {
        working_set.check_within(ram.size())?;
        let extents = |written: bool| {
            let ranges = working_set.ranges().iter();
            ranges
                .filter(move |range| range.written == written)
                .map(|range| Extent {
                    offset: u64::from(range.first) * PAGE_SIZE,
                    length: u64::from(range.count) * PAGE_SIZE,
                })
                .collect()
        };
        Ok(Self {
            memory: ram.memory().clone(),
            regions: regions(ram.size()),
            read: extents(false),
            written: extents(true),
        })
    }

    /// Give the guest pages of its own where it will write.
    pub fn copy_written(&self) -> io::Result<()> {
        for (region, mapped) in self.regions.iter().zip(self.memory.iter()) {
            for part in self
                .written
                .iter()
                .filter_map(|extent| extent.within(region))
            {
                mapping::populate_for_writing(mapped, part.offset - region.offset, part.length)?;
            }
        }
        Ok(())
    }

    /// All of it in guest-physical addresses: first address and length of each range, in order.
    pub fn guest_ranges(&self) -> Vec<(u64, u64)> {
        let mut all = [self.read.as_slice(), self.written.as_slice()].concat();
        all.sort_unstable_by_key(|extent| extent.offset);
        let all = extent::merge(&all, 0);
        let guest = |region: &Region, part: Extent| {
            (region.guest + (part.offset - region.offset), part.length)
        };
        self.regions
            .iter()
            .flat_map(|region| {
                all.iter()
                    .filter_map(move |extent| Some(guest(region, extent.within(region)?)))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use thaw_vmm_control::TouchedPages;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::layout::{HIGH_RAM_START, LOW_RAM_END};

    fn working_set(ranges: &[(u64, u32, bool)]) -> WorkingSet {
        let ranges = ranges.iter().map(|(first, count, written)| TouchedPages {
            first: *first as u32,
            count: *count,
            written: *written,
        });
        WorkingSet::new(ranges.collect()).unwrap()
    }

    fn own_bytes(ram: &GuestRam) -> u64 {
        let mut smaps = File::open("/proc/self/smaps").unwrap();
        let ranges = ram.memory().iter().map(|region| {
            let start = region.as_ptr() as u64;
            (start, start + region.size() as u64)
        });
        crate::statistics::anonymous_bytes(&mut smaps, &ranges.collect::<Vec<_>>())
    }

    #[test]
    fn test_memory_on_both_sides_of_the_hole_is_found_by_its_guest_addresses() {
        let ram = GuestRam::new(4 << 30).unwrap();
        let low_end = LOW_RAM_END / PAGE_SIZE;
        let ranges = [
            (1, 2, true),
            (3, 1, false),
            (9, 1, true),
            (low_end - 1, 3, false),
        ];
        let population = Population::new(&ram, &working_set(&ranges)).unwrap();
        let expected = [
            (PAGE_SIZE, 3 * PAGE_SIZE),
            (9 * PAGE_SIZE, PAGE_SIZE),
            (LOW_RAM_END - PAGE_SIZE, PAGE_SIZE),
            (HIGH_RAM_START, 2 * PAGE_SIZE),
        ];
        assert_eq!(population.guest_ranges(), expected);
    }

    #[test]
    fn test_a_working_set_outside_of_the_memory_is_refused() {
        let ram = GuestRam::new(128 << 20).unwrap();
        for range in [
            (32768, 1, false),
            (32767, 2, true),
            (u32::MAX.into(), 1, true),
        ] {
            assert!(Population::new(&ram, &working_set(&[range])).is_err());
        }
        assert!(Population::new(&ram, &working_set(&[(32767, 1, true)])).is_ok());
    }

    #[test]
    fn test_written_pages_become_the_guests_own_with_their_content() {
        let file = tempfile::tempfile().unwrap();
        let source = GuestRam::new(128 << 20).unwrap();
        source
            .memory()
            .write_slice(&[7; 8 << 12], GuestAddress(0))
            .unwrap();
        let extents = source.save(&file).unwrap();
        let ram = GuestRam::restore(128 << 20, &file, &extents).unwrap();
        // In the template's data, across its end, and in a hole.
        let ranges = [(0, 2, false), (2, 1, true), (6, 4, true), (5000, 1, true)];
        let population = Population::new(&ram, &working_set(&ranges)).unwrap();
        population.copy_written().unwrap();
        assert_eq!(own_bytes(&ram), 6 * PAGE_SIZE);
        for (page, expected) in [(0u64, 7u8), (2, 7), (7, 7), (8, 0), (5000, 0)] {
            let found: u8 = ram
                .memory()
                .read_obj(GuestAddress(page * PAGE_SIZE))
                .unwrap();
            assert_eq!(found, expected, "page {page}");
        }
    }
}
