use virtio_queue::Queue;
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::mock::MockSplitQueue;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::GuestAddress;

use super::*;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x2_0000)]).unwrap()
}

fn collect<'m>(
    memory: &'m GuestMemoryMmap,
    descriptors: &[(u64, u32, u16, u16)],
    limit: usize,
) -> Result<Buffers<'m>, ChainError> {
    let ring = MockSplitQueue::new(memory, 16);
    for (index, &(address, len, flags, next)) in descriptors.iter().enumerate() {
        ring.desc_table()
            .store(
                index as u16,
                RawDescriptor::from(Descriptor::new(address, len, flags, next)),
            )
            .unwrap();
    }
    ring.avail().ring().ref_at(0).unwrap().store(0);
    ring.avail().idx().store(1);
    let mut queue: Queue = ring.create_queue().unwrap();
    queue.set_ready(true);
    let chain = queue.iter(memory).unwrap().next().unwrap();
    Buffers::collect(memory, chain, limit)
}

#[test]
fn buffers_are_sorted_by_direction() {
    let memory = memory();
    let buffers = collect(
        &memory,
        &[
            (0x1_0000, 8, NEXT, 1),
            (0x1_1000, 0, NEXT, 2),
            (0x1_2000, 4, NEXT | WRITE, 3),
            (0x1_3000, 2, WRITE, 0),
        ],
        4,
    )
    .unwrap();
    assert_eq!(buffers.readable.len(), 8);
    assert_eq!(buffers.readable.parts().len(), 1);
    assert_eq!(buffers.writable.len(), 6);
}

#[test]
fn a_buffer_outside_of_memory_is_refused() {
    let memory = memory();
    for (address, len) in [(0x2_0000, 1), (0x1_ffff, 2), (u64::MAX, 1), (0, u32::MAX)] {
        assert_eq!(
            collect(&memory, &[(address, len, 0, 0)], 4).unwrap_err(),
            ChainError::Address { address, len }
        );
    }
}

#[test]
fn a_chain_in_a_circle_is_refused() {
    let memory = memory();
    let circle = [(0x1_0000, 8, NEXT, 1), (0x1_0000, 8, NEXT, 0)];
    assert_eq!(
        collect(&memory, &circle, 8).unwrap_err(),
        ChainError::TooLong(8)
    );
}

#[test]
fn a_readable_buffer_after_a_writable_one_is_refused() {
    let memory = memory();
    let chain = [(0x1_0000, 8, NEXT | WRITE, 1), (0x1_0000, 8, 0, 0)];
    assert_eq!(collect(&memory, &chain, 8).unwrap_err(), ChainError::Order);
}

#[test]
fn segments_are_cut_at_any_byte() {
    let memory = memory();
    memory
        .write_slice(b"abcdefgh", GuestAddress(0x1_0000))
        .unwrap();
    let chain = [
        (0x1_0000, 3, NEXT, 1),
        (0x1_0003, 1, NEXT, 2),
        (0x1_0004, 4, 0, 0),
    ];
    let text = |mut segments: Segments<'_>| {
        let mut bytes = vec![0; segments.len()];
        assert_eq!(segments.read(&mut bytes), bytes.len());
        assert!(segments.is_empty() && segments.parts().is_empty());
        String::from_utf8(bytes).unwrap()
    };
    for cut in 0..=9 {
        let whole = "abcdefgh";
        let kept = cut.min(8);
        let mut front = collect(&memory, &chain, 8).unwrap().readable;
        front.truncate(cut);
        assert_eq!(text(front), whole[..kept]);
        let mut back = collect(&memory, &chain, 8).unwrap().readable;
        back.advance(cut);
        assert_eq!(text(back), whole[kept..]);
    }
}

#[test]
fn the_last_byte_is_found_across_parts() {
    let memory = memory();
    let chain = [(0x1_0000, 2, NEXT | WRITE, 1), (0x1_0800, 1, WRITE, 0)];
    let mut segments = collect(&memory, &chain, 8).unwrap().writable;
    for (left, address) in [(2, 0x1_0800), (1, 0x1_0001), (0, 0x1_0000)] {
        let last = segments.split_last().unwrap();
        write_byte(&last, 7);
        assert_eq!(segments.len(), left);
        assert_eq!(memory.read_obj::<u8>(GuestAddress(address)).unwrap(), 7);
    }
    assert!(segments.split_last().is_none());
}

#[test]
fn writes_stop_where_the_room_ends() {
    let memory = memory();
    let chain = [(0x1_0000, 2, NEXT | WRITE, 1), (0x1_0800, 1, WRITE, 0)];
    let mut segments = collect(&memory, &chain, 8).unwrap().writable;
    assert_eq!(segments.write(b"xyzw"), 3);
    assert_eq!(memory.read_obj::<u8>(GuestAddress(0x1_0800)).unwrap(), b'z');
    assert_eq!(memory.read_obj::<u8>(GuestAddress(0x1_0801)).unwrap(), 0);
}
