use std::io::Read;

use vm_memory::GuestMemory;

use super::*;

const MIB: u64 = 1 << 20;

fn extent(page: u64, pages: u64) -> Extent {
    Extent {
        offset: page * PAGE_SIZE,
        length: pages * PAGE_SIZE,
    }
}

/// RAM of 128 MiB with a byte in pages 0, 10, 11 and 20000.
fn ram_with_data() -> GuestRam {
    let ram = GuestRam::new(128 * MIB).unwrap();
    for page in [0, 10, 11, 20_000u64] {
        ram.memory()
            .write_obj(page as u8 | 1, GuestAddress(page * PAGE_SIZE + 7))
            .unwrap();
    }
    ram
}

fn private_dirty_kib(ram: &GuestRam) -> u64 {
    let start = ram.memory().iter().next().unwrap().as_ptr() as u64;
    crate::statistics::anonymous_bytes(&mut smaps(), &[(start, start + ram.size())]) >> 10
}

fn smaps() -> File {
    File::open("/proc/self/smaps").unwrap()
}

#[test]
fn test_ram_beyond_three_gib_goes_on_above_the_hole() {
    assert_eq!(
        regions(MIB),
        [Region {
            guest: 0,
            offset: 0,
            size: MIB
        }]
    );
    assert_eq!(
        regions(8 << 30),
        [
            Region {
                guest: 0,
                offset: 0,
                size: 3 << 30
            },
            Region {
                guest: 4 << 30,
                offset: 3 << 30,
                size: 5 << 30
            },
        ]
    );
}

#[test]
fn test_a_snapshot_holds_the_pages_that_are_not_zero_and_nothing_else() {
    let ram = ram_with_data();
    // Touched, but zero.
    ram.memory().write_obj(0u8, GuestAddress(64 * MIB)).unwrap();
    let file = tempfile::tempfile().unwrap();
    let extents = ram.save(&file).unwrap();
    assert_eq!(extents, [extent(0, 12), extent(20_000, 1)]);
    let metadata = file.metadata().unwrap();
    assert_eq!(metadata.size(), 128 * MIB);
    assert!(
        metadata.blocks() * 512 <= 64 * PAGE_SIZE,
        "{} blocks",
        metadata.blocks()
    );
}

#[test]
fn test_restored_ram_has_the_content_and_writes_stay_out_of_the_file() {
    let file = tempfile::tempfile().unwrap();
    let extents = ram_with_data().save(&file).unwrap();
    let mut before = Vec::new();
    (&file).read_to_end(&mut before).unwrap();

    let ram = GuestRam::restore(128 * MIB, &file, &extents).unwrap();
    for page in [0, 10, 11, 20_000u64] {
        let byte: u8 = ram
            .memory()
            .read_obj(GuestAddress(page * PAGE_SIZE + 7))
            .unwrap();
        assert_eq!(byte, page as u8 | 1);
    }
    // One write into an extent, one into a merged gap, one into a hole.
    for page in [11, 5, 12_345u64] {
        ram.memory()
            .write_obj(0xa5u8, GuestAddress(page * PAGE_SIZE))
            .unwrap();
    }
    let mut after = vec![0; before.len()];
    file.read_exact_at(&mut after, 0).unwrap();
    assert!(before == after, "a guest's write reached the template");
    let blocks = file.metadata().unwrap().blocks();
    assert!(
        blocks * 512 <= 64 * PAGE_SIZE,
        "a guest's write filled a hole of the template"
    );
}

#[test]
fn test_a_restore_touches_no_page_by_itself() {
    let file = tempfile::tempfile().unwrap();
    let extents = ram_with_data().save(&file).unwrap();
    let ram = GuestRam::restore(128 * MIB, &file, &extents).unwrap();
    assert_eq!(private_dirty_kib(&ram), 0);
    ram.memory().write_obj(1u8, GuestAddress(0)).unwrap();
    ram.memory()
        .write_obj(1u8, GuestAddress(100 * MIB))
        .unwrap();
    assert_eq!(private_dirty_kib(&ram), 8);
}

#[test]
fn test_ram_on_both_sides_of_the_hole_survives_a_snapshot() {
    let size = 4 << 30;
    let ram = GuestRam::new(size).unwrap();
    let addresses = [
        LOW_RAM_END - PAGE_SIZE,
        HIGH_RAM_START,
        HIGH_RAM_START + (1 << 30) - 8,
    ];
    for (index, address) in addresses.iter().enumerate() {
        ram.memory()
            .write_obj(index as u64 + 1, GuestAddress(*address))
            .unwrap();
    }
    let file = tempfile::tempfile().unwrap();
    let extents = ram.save(&file).unwrap();
    // Neighbours in the file, though not in the guest, are one extent.
    assert_eq!(extents.len(), 2);
    let ram = GuestRam::restore(size, &file, &extents).unwrap();
    for (index, address) in addresses.iter().enumerate() {
        let found: u64 = ram.memory().read_obj(GuestAddress(*address)).unwrap();
        assert_eq!(found, index as u64 + 1);
    }
}

#[test]
fn test_a_restored_ram_can_be_saved_again() {
    let file = tempfile::tempfile().unwrap();
    let extents = ram_with_data().save(&file).unwrap();
    let ram = GuestRam::restore(128 * MIB, &file, &extents).unwrap();
    ram.memory()
        .write_obj(9u8, GuestAddress(127 * MIB))
        .unwrap();
    let second = tempfile::tempfile().unwrap();
    let extents = ram.save(&second).unwrap();
    assert_eq!(
        extents,
        [extent(0, 12), extent(20_000, 1), extent(127 * 256, 1)]
    );
}

#[test]
fn test_a_memory_file_of_another_size_is_refused() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(128 * MIB - PAGE_SIZE).unwrap();
    let error = GuestRam::restore(128 * MIB, &file, &[]).err().unwrap();
    assert!(matches!(error, MemoryError::FileSize { .. }), "{error}");
}

#[test]
fn test_a_memory_file_that_is_no_file_is_refused() {
    let directory = File::open("/").unwrap();
    let error = GuestRam::restore(128 * MIB, &directory, &[]).err().unwrap();
    assert!(matches!(error, MemoryError::NotAFile), "{error}");
}

#[test]
fn test_extents_out_of_place_are_refused() {
    let size = 100 * PAGE_SIZE;
    let cases = [
        (vec![extent(0, 0)], InvalidExtents::Alignment(0)),
        (
            vec![Extent {
                offset: 1,
                length: PAGE_SIZE,
            }],
            InvalidExtents::Alignment(0),
        ),
        (
            vec![Extent {
                offset: 0,
                length: 1,
            }],
            InvalidExtents::Alignment(0),
        ),
        (vec![extent(0, 2), extent(1, 2)], InvalidExtents::Order(1)),
        (vec![extent(5, 2), extent(0, 2)], InvalidExtents::Order(1)),
        (vec![extent(99, 2)], InvalidExtents::Outside(0)),
        (
            vec![extent(u64::MAX / PAGE_SIZE, 1)],
            InvalidExtents::Outside(0),
        ),
    ];
    for (extents, expected) in cases {
        assert_eq!(extent::validate(&extents, size), Err(expected));
    }
    assert_eq!(
        extent::validate(&[extent(0, 1), extent(1, 99)], size),
        Ok(())
    );
}

#[test]
fn test_only_near_extents_are_merged() {
    let extents = [extent(0, 1), extent(3, 1), extent(7, 1)];
    assert_eq!(
        extent::merge(&extents, 2 * PAGE_SIZE),
        [extent(0, 4), extent(7, 1)]
    );
}
