//! Memory that a guest is given beside the RAM that its template has, in blocks.
//!
//! The blocks lie in a range of guest-physical addresses above the RAM, which is as large as the host
//! may ever have to give. A block that is not plugged is in none of KVM's memory slots, so that a guest
//! which reads or writes there reaches nothing, and in no device's view of the memory. Each plugged
//! block is a slot of its own, since a slot cannot grow without going away for a moment. Until
//! something is plugged there is not even a mapping.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use super::{LiveMemory, MemoryError, mapping, regions, system};
use crate::layout::HIGH_RAM_START;

/// Bytes of a block: Linux' memory block on x86 (arch/x86/mm/init_64.c, `MIN_MEMORY_BLOCK_SIZE`), in
/// which a kernel takes memory in and gives it back.
pub const BLOCK_SIZE: u64 = 128 << 20;

/// What the range begins at a multiple of: the largest memory block of Linux on x86.
const ALIGNMENT: u64 = 2 << 30;

/// The largest range.
const MOST_BYTES: u64 = 1 << 40;

/// KVM's memory slots, of which those below are the RAM's.
const FIRST_SLOT: u32 = 16;

/// The calls to KVM that plugging takes. A trait so that it is tested without KVM.
pub trait MemorySlots: Send + Sync {
    /// Let the guest have `size` bytes of `region` from `at` on, at the guest-physical address `guest`.
    fn add(&self, slot: u32, guest: u64, region: &MmapRegion, at: u64, size: u64)
    -> io::Result<()>;
    /// Undo [`MemorySlots::add`].
    fn remove(&self, slot: u32, guest: u64) -> io::Result<()>;
}

/// The range of addresses in which blocks may be plugged, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PluggableRange {
    /// First guest-physical address.
    pub start: u64,
    /// Bytes, whole blocks; none where the guest has no addresses left.
    pub size: u64,
}

impl PluggableRange {
    /// Above `ram` bytes of RAM, for vCPUs with `address_bits` bits of a physical address.
    pub fn above(ram: u64, address_bits: u8) -> Self {
        let end = regions(ram)
            .last()
            .map_or(0, |region| region.guest + region.size);
        let start = end.max(HIGH_RAM_START).next_multiple_of(ALIGNMENT);
        let room = (1u64 << address_bits.min(52)).saturating_sub(start);
        let size = room.min(MOST_BYTES) / BLOCK_SIZE * BLOCK_SIZE;
        Self { start, size }
    }

    /// The number of its blocks.
    fn blocks(&self) -> u32 {
        // At most 2^13.
        (self.size / BLOCK_SIZE) as u32
    }

    /// The blocks from `address` on, `count` of them, if they are blocks of this range.
    pub fn blocks_at(&self, address: u64, count: u16) -> Option<Range<u32>> {
        let offset = address.checked_sub(self.start)?;
        let first = offset / BLOCK_SIZE;
        let end = first + u64::from(count);
        let whole = offset % BLOCK_SIZE == 0 && count > 0 && end <= u64::from(self.blocks());
        whole.then_some(first as u32..end as u32)
    }
}

#[derive(Default)]
struct State {
    /// Addresses of this process for the whole range, made with the first block.
    reservation: Option<Arc<MmapRegion>>,
    plugged: BTreeSet<u32>,
}

/// The blocks of one machine.
pub struct PluggableMemory {
    range: PluggableRange,
    slots: Arc<dyn MemorySlots>,
    /// What the machine has in any case.
    ram: GuestMemoryMmap,
    live: LiveMemory,
    state: Mutex<State>,
}

impl PluggableMemory {
    /// No block of `range` is plugged. Those that will be appear in `live`, beside `ram`.
    pub fn new(
        range: PluggableRange,
        slots: Arc<dyn MemorySlots>,
        ram: GuestMemoryMmap,
        live: LiveMemory,
    ) -> Self {
        Self {
            range,
            slots,
            ram,
            live,
            state: Mutex::default(),
        }
    }

    /// Where blocks may be.
    pub fn range(&self) -> PluggableRange {
        self.range
    }

    /// Bytes that are plugged.
    pub fn plugged(&self) -> u64 {
        self.lock().plugged.len() as u64 * BLOCK_SIZE
    }

    /// How many of `blocks` are plugged.
    pub fn count(&self, blocks: Range<u32>) -> usize {
        self.lock().plugged.range(blocks).count()
    }

    /// Plug `blocks`, none of which is. All of them or, with an error, none.
    pub fn plug(&self, blocks: Range<u32>) -> Result<(), MemoryError> {
        let mut state = self.lock();
        let reservation = match &state.reservation {
            Some(reservation) => reservation.clone(),
            None => {
                let made = Arc::new(reserve(self.range.size)?);
                state.reservation.insert(made).clone()
            }
        };
        let at = u64::from(blocks.start) * BLOCK_SIZE;
        let length = u64::from(blocks.end - blocks.start) * BLOCK_SIZE;
        mapping::allow_access(&reservation, at, length)
            .map_err(|error| MemoryError::Map(length, error))?;
        for block in blocks.clone() {
            let at = u64::from(block) * BLOCK_SIZE;
            let guest = self.range.start + at;
            let slot = FIRST_SLOT + block;
            if let Err(error) = self.slots.add(slot, guest, &reservation, at, BLOCK_SIZE) {
                for added in blocks.start..block {
                    self.remove_slot(added)?;
                }
                return Err(system("giving more memory to the VM")(error));
            }
        }
        state.plugged.extend(blocks);
        self.publish(&state.plugged, reservation)
    }

    /// Unplug `blocks`, all of which are plugged. What was in them is gone.
    pub fn unplug(&self, blocks: Range<u32>) -> Result<(), MemoryError> {
        let mut state = self.lock();
        let Some(reservation) = state.reservation.clone() else {
            return Ok(());
        };
        for block in blocks {
            self.remove_slot(block)?;
            state.plugged.remove(&block);
        }
        self.publish(&state.plugged, reservation.clone())?;
        // All that is not plugged: a device that was at work may have written to what was unplugged
        // before, after that had been given back.
        for gap in gaps(&state.plugged, self.range.blocks()) {
            let at = u64::from(gap.start) * BLOCK_SIZE;
            let length = u64::from(gap.end - gap.start) * BLOCK_SIZE;
            mapping::discard(&reservation, at, length)
                .map_err(system("giving unplugged memory back"))?;
        }
        Ok(())
    }

    /// Unplug everything.
    pub fn unplug_all(&self) -> Result<(), MemoryError> {
        let runs = runs(&self.lock().plugged);
        runs.into_iter().try_for_each(|run| self.unplug(run))
    }

    fn remove_slot(&self, block: u32) -> Result<(), MemoryError> {
        let guest = self.range.start + u64::from(block) * BLOCK_SIZE;
        self.slots
            .remove(FIRST_SLOT + block, guest)
            .map_err(system("taking memory from the VM"))
    }

    /// Show the devices what is plugged now.
    fn publish(
        &self,
        plugged: &BTreeSet<u32>,
        reservation: Arc<MmapRegion>,
    ) -> Result<(), MemoryError> {
        let mut memory = self.ram.clone();
        for run in runs(plugged) {
            let at = u64::from(run.start) * BLOCK_SIZE;
            let length = u64::from(run.end - run.start) * BLOCK_SIZE;
            let part = mapping::part(&reservation, at, length)?;
            let region = GuestRegionMmap::new(part, GuestAddress(self.range.start + at))
                .ok_or_else(|| MemoryError::Map(length, io::ErrorKind::InvalidInput.into()))?;
            memory = memory
                .insert_region(Arc::new(region))
                .map_err(|error| system("collecting guest memory")(io::Error::other(error)))?;
        }
        self.live.publish(memory, reservation);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Addresses without memory. Not accounted until they are made accessible, whatever the host's
/// policy of overcommitment is.
fn reserve(size: u64) -> Result<MmapRegion, MemoryError> {
    let region = MmapRegionBuilder::new(size as usize)
        .with_mmap_prot(libc::PROT_NONE)
        .with_mmap_flags(libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_PRIVATE)
        .build()?;
    mapping::exclude_from_dumps(&region).map_err(system("advising on guest memory"))?;
    Ok(region)
}

/// `blocks` as ranges, as few as there are.
fn runs(blocks: &BTreeSet<u32>) -> Vec<Range<u32>> {
    let mut runs: Vec<Range<u32>> = Vec::new();
    for block in blocks {
        match runs.last_mut() {
            Some(last) if last.end == *block => last.end += 1,
            _ => runs.push(*block..*block + 1),
        }
    }
    runs
}

/// What of the first `count` blocks is not among `blocks`.
fn gaps(blocks: &BTreeSet<u32>, count: u32) -> Vec<Range<u32>> {
    let mut gaps = Vec::new();
    let mut end = 0;
    for run in runs(blocks) {
        if run.start > end {
            gaps.push(end..run.start);
        }
        end = run.end;
    }
    if end < count {
        gaps.push(end..count);
    }
    gaps
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use vm_memory::{Bytes, GuestMemory};

    use super::*;
    use crate::statistics::anonymous_bytes;

    /// Slots that are only written down, and of which only `room` can be added.
    pub struct Slots {
        pub added: Mutex<BTreeMap<u32, u64>>,
        pub room: usize,
    }

    impl MemorySlots for Slots {
        fn add(
            &self,
            slot: u32,
            guest: u64,
            region: &MmapRegion,
            at: u64,
            size: u64,
        ) -> io::Result<()> {
            assert!(at + size <= region.size() as u64);
            let mut added = self.added.lock().unwrap();
            if added.len() == self.room {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            assert_eq!(added.insert(slot, guest), None);
            Ok(())
        }

        fn remove(&self, slot: u32, guest: u64) -> io::Result<()> {
            assert_eq!(self.added.lock().unwrap().remove(&slot), Some(guest));
            Ok(())
        }
    }

    /// A machine's memory of 1 MiB and eight blocks, of which KVM takes `room`.
    pub fn pluggable(room: usize) -> (PluggableMemory, LiveMemory, Arc<Slots>) {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let live = LiveMemory::new(ram.clone());
        let added = Mutex::default();
        let slots = Arc::new(Slots { added, room });
        let range = PluggableRange {
            start: 4 << 30,
            size: 8 * BLOCK_SIZE,
        };
        let memory = PluggableMemory::new(range, slots.clone(), ram, live.clone());
        (memory, live, slots)
    }

    fn at(block: u64, offset: u64) -> GuestAddress {
        GuestAddress((4 << 30) + block * BLOCK_SIZE + offset)
    }

    #[test]
    fn test_the_range_is_above_the_ram_and_within_the_addresses() {
        let range = |ram, bits| {
            let range = PluggableRange::above(ram, bits);
            (range.start >> 30, range.size >> 30)
        };
        assert_eq!(range(2 << 30, 40), (4, 1020));
        assert_eq!(range(4 << 30, 40), (6, 1018));
        assert_eq!(range(64 << 30, 39), (66, 446));
        assert_eq!(range(1 << 40, 40), (1026, 0));
        assert_eq!(range(2 << 30, 52), (4, 1024));
        assert_eq!(range(2 << 30, 255), (4, 1024));
    }

    #[test]
    fn test_blocks_outside_of_the_range_or_cut_are_none() {
        let range = PluggableRange::above(2 << 30, 40);
        let start = 4 << 30;
        assert_eq!(range.blocks_at(start, 2), Some(0..2));
        assert_eq!(range.blocks_at(start + BLOCK_SIZE, 1), Some(1..2));
        let last = start + range.size - BLOCK_SIZE;
        assert_eq!(range.blocks_at(last, 1), Some(8159..8160));
        for (address, count) in [
            (start, 0),
            (start + 1, 1),
            (start - BLOCK_SIZE, 1),
            (last, 2),
            (start, u16::MAX),
            (u64::MAX, 1),
            (0, 1),
        ] {
            assert_eq!(
                range.blocks_at(address, count),
                None,
                "{address:#x} {count}"
            );
        }
    }

    #[test]
    fn test_devices_see_what_is_plugged_and_a_buffer_across_blocks_is_one() {
        let (memory, live, slots) = pluggable(8);
        let mut view = live.view();
        memory.plug(1..3).unwrap();
        assert!(view.refresh());
        assert_eq!(memory.plugged(), 2 * BLOCK_SIZE);
        assert_eq!(slots.added.lock().unwrap().len(), 2);
        view.get_slice(at(1, BLOCK_SIZE - 8), 16).unwrap();
        view.write_obj(7u64, at(2, 0)).unwrap();
        for address in [at(0, 0), at(3, 0), at(3, 0)] {
            assert!(view.read_obj::<u8>(address).is_err());
        }
        assert_eq!(memory.count(0..8), 2);
        assert_eq!(memory.count(2..8), 1);
        // The RAM is what it was.
        view.write_obj(1u8, GuestAddress(0)).unwrap();
        assert_eq!(live.view().read_obj::<u8>(GuestAddress(0)).unwrap(), 1);
    }

    #[test]
    fn test_what_is_unplugged_is_the_hosts_again_and_comes_back_empty() {
        let (memory, live, slots) = pluggable(8);
        memory.plug(0..2).unwrap();
        let mut before = live.view();
        before.write_obj(7u64, at(0, 0)).unwrap();
        before.write_obj(7u64, at(1, 0)).unwrap();
        memory.unplug(0..1).unwrap();
        assert_eq!(slots.added.lock().unwrap().len(), 1);
        assert!(live.view().read_obj::<u8>(at(0, 0)).is_err());
        // A device that is still at work reaches memory that is nobody's, and does no harm.
        before.write_obj(9u64, at(0, 0)).unwrap();
        let start = memory.lock().reservation.as_ref().unwrap().as_ptr() as u64;
        let used = || {
            let mut smaps = std::fs::File::open("/proc/self/smaps").unwrap();
            anonymous_bytes(&mut smaps, &[(start, start + 8 * BLOCK_SIZE)])
        };
        assert_eq!(used(), 8192);
        memory.plug(4..5).unwrap();
        memory.unplug(4..5).unwrap();
        assert_eq!(used(), 4096);
        memory.plug(0..1).unwrap();
        before.refresh();
        assert_eq!(before.read_obj::<u64>(at(0, 0)).unwrap(), 0);
        assert_eq!(before.read_obj::<u64>(at(1, 0)).unwrap(), 7);
        memory.unplug_all().unwrap();
        assert_eq!(memory.plugged(), 0);
        assert_eq!(used(), 0);
    }

    #[test]
    fn test_blocks_that_kvm_does_not_take_are_not_plugged() {
        let (memory, live, slots) = pluggable(3);
        memory.plug(0..2).unwrap();
        memory.plug(4..6).unwrap_err();
        assert_eq!(memory.plugged(), 2 * BLOCK_SIZE);
        assert_eq!(slots.added.lock().unwrap().len(), 2);
        assert!(live.view().read_obj::<u8>(at(4, 0)).is_err());
        memory.plug(7..8).unwrap();
    }

    #[test]
    fn test_runs_and_gaps_are_each_others_complement() {
        let blocks = BTreeSet::from([0, 1, 4, 6, 7]);
        assert_eq!(runs(&blocks), [0..2, 4..5, 6..8]);
        assert_eq!(gaps(&blocks, 9), [2..4, 5..6, 8..9]);
        assert_eq!(gaps(&BTreeSet::from([2]), 3).first(), Some(&(0..2)));
    }
}
