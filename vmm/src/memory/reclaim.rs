//! What a guest does not use goes back to the host.

use std::io;

use vm_memory::{GuestAddress, GuestMemory, GuestMemoryMmap, GuestMemoryRegion};

use super::mapping;
use crate::layout::PAGE_SIZE;

/// Give the whole pages of the range of `length` bytes at `address` of `memory` back to the host, and
/// return how many bytes those were. A guest that says that it does not use them must take any content
/// of them afterwards (virtio 1.2, 5.5.6.7): they are zeros, or, where a template's page is below, what
/// the template has there. That page is shared and costs nothing, and the mapping stays as it is: no
/// guest can make the process have more mappings by what it gives back, or where.
///
/// `None`: the range is not within one region of the guest's memory.
pub fn give_back(
    memory: &GuestMemoryMmap,
    address: GuestAddress,
    length: u32,
) -> Option<io::Result<u64>> {
    let (region, start) = memory.to_region_addr(address)?;
    let end = start.0.checked_add(u64::from(length))?;
    if end > region.len() {
        return None;
    }
    // Regions begin and end with a page.
    let first = start.0.next_multiple_of(PAGE_SIZE);
    let pages = (end / PAGE_SIZE * PAGE_SIZE).saturating_sub(first);
    if pages == 0 {
        return Some(Ok(0));
    }
    Some(mapping::discard(region, first, pages).map(|()| pages))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use vm_memory::Bytes;

    use super::super::GuestRam;
    use super::*;

    const SIZE: u64 = 128 << 20;

    fn own_bytes(ram: &GuestRam) -> u64 {
        let start = ram.memory().iter().next().unwrap().as_ptr() as u64;
        let mut smaps = File::open("/proc/self/smaps").unwrap();
        crate::statistics::anonymous_bytes(&mut smaps, &[(start, start + SIZE)])
    }

    fn mappings() -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().count()
    }

    fn page(number: u64) -> GuestAddress {
        GuestAddress(number * PAGE_SIZE)
    }

    #[test]
    fn test_restored_memory_goes_back_and_shows_zeros_or_the_template() {
        let file = tempfile::tempfile().unwrap();
        let source = GuestRam::new(SIZE).unwrap();
        source
            .memory()
            .write_slice(&[7; 64 << 12], page(0))
            .unwrap();
        let extents = source.save(&file).unwrap();
        let ram = GuestRam::restore(SIZE, &file, &extents).unwrap();
        let memory = ram.memory();
        // Half of it in the template's data, half in a hole.
        memory.write_slice(&[9; 64 << 12], page(32)).unwrap();
        assert_eq!(own_bytes(&ram), 64 * PAGE_SIZE);
        let before = mappings();
        let given = give_back(memory, page(32), 62 << 12).unwrap().unwrap();
        assert_eq!(given, 62 * PAGE_SIZE);
        assert_eq!(own_bytes(&ram), 2 * PAGE_SIZE);
        for (number, expected) in [(31, 7u8), (32, 7), (63, 7), (64, 0), (93, 0), (94, 9)] {
            assert_eq!(memory.read_obj::<u8>(page(number)).unwrap(), expected);
        }
        // Every second page of it: the tests beside this one make mappings of their own.
        for number in (0..SIZE / PAGE_SIZE).step_by(2) {
            give_back(memory, page(number), 4096).unwrap().unwrap();
        }
        assert!(mappings() < before + 1000, "{}", mappings());
    }

    #[test]
    fn test_memory_of_a_booted_machine_leaves_its_file() {
        let ram = GuestRam::new(SIZE).unwrap();
        ram.memory().write_slice(&[9; 64 << 12], page(0)).unwrap();
        give_back(ram.memory(), page(0), 63 << 12).unwrap().unwrap();
        let snapshot = tempfile::tempfile().unwrap();
        let extents = ram.save(&snapshot).unwrap();
        let data: Vec<_> = extents.iter().map(|e| (e.offset, e.length)).collect();
        assert_eq!(data, [(63 * PAGE_SIZE, PAGE_SIZE)]);
    }

    #[test]
    fn test_parts_of_pages_stay() {
        let ram = GuestRam::new(SIZE).unwrap();
        let memory = ram.memory();
        memory.write_slice(&[9; 3 << 12], page(0)).unwrap();
        for (start, length, given) in [(1, 4095, 0), (1, 8190, 0), (1, 8191, 4096), (5, 0, 0)] {
            let result = give_back(memory, GuestAddress(start), length);
            assert_eq!(result.unwrap().unwrap(), given, "{start} {length}");
        }
        assert_eq!(memory.read_obj::<u8>(GuestAddress(4095)).unwrap(), 9);
        assert_eq!(memory.read_obj::<u8>(page(1)).unwrap(), 0);
        assert_eq!(memory.read_obj::<u8>(page(2)).unwrap(), 9);
    }

    #[test]
    fn test_what_is_not_memory_is_refused() {
        let ram = GuestRam::new(SIZE).unwrap();
        for (start, length) in [(SIZE, 1), (SIZE - 4096, 4097), (u64::MAX, 1), (0, u32::MAX)] {
            let result = give_back(ram.memory(), GuestAddress(start), length);
            assert!(result.is_none(), "{start:#x} {length}");
        }
    }
}
