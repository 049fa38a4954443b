use std::io::Write;
use std::os::unix::fs::FileExt;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;
use crate::virtio::test_driver::{
    DriverQueue, FEATURES, INDIRECT, NEXT, PATIENCE, TestInterrupt, WRITE, activation, memory,
};

/// Where the request header, the data and the status of the tests' requests lie.
const HEADER: u64 = 0x1_0000;
const DATA: u64 = 0x2_0000;
const STATUS: u64 = 0x1_8000;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPPORTED: u8 = 2;

struct Bench {
    memory: GuestMemoryMmap,
    interrupt: Arc<TestInterrupt>,
    queue: DriverQueue,
    block: Block,
    slot: BlockSlot,
}

impl Bench {
    fn new() -> Self {
        let memory = memory(4 << 20);
        let interrupt = Arc::new(TestInterrupt::default());
        let queue = DriverQueue::new(&memory, &interrupt, 0, QUEUE_SIZE, 0);
        let (block, slot) = Block::new(3);
        Bench {
            memory,
            interrupt,
            queue,
            block,
            slot,
        }
    }

    /// A bench with a running device of `sectors`, each filled with its number.
    fn running(sectors: u64, read_only: bool) -> (Self, File) {
        let mut bench = Bench::new();
        let file = image(sectors);
        bench
            .slot
            .attach(file.try_clone().unwrap(), read_only)
            .unwrap();
        bench.activate();
        (bench, file)
    }

    fn activate(&mut self) {
        let features = FEATURES | 1 << VIRTIO_BLK_F_FLUSH;
        let queues = vec![self.queue.device_side()];
        self.block
            .activate(activation(&self.memory, &self.interrupt, queues, features))
            .unwrap();
    }

    fn header(&self, kind: u32, sector: u64) {
        self.memory.write_obj(kind, GuestAddress(HEADER)).unwrap();
        self.memory
            .write_obj(sector, GuestAddress(HEADER + 8))
            .unwrap();
        self.memory.write_obj(0xffu8, GuestAddress(STATUS)).unwrap();
    }

    fn status(&self) -> u8 {
        self.memory.read_obj(GuestAddress(STATUS)).unwrap()
    }

    fn data(&self, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.memory
            .read_slice(&mut data, GuestAddress(DATA))
            .unwrap();
        data
    }

    /// One request with `data` between header and status: status and bytes written.
    fn request(&mut self, kind: u32, sector: u64, data: &[(u64, u32, bool)]) -> (u8, u32) {
        self.header(kind, sector);
        let mut chain = vec![(HEADER, 16, false)];
        chain.extend(data);
        chain.push((STATUS, 1, true));
        self.queue.submit(&chain);
        let (_, written) = self.queue.wait_used();
        (self.status(), written)
    }
}

fn image(sectors: u64) -> File {
    let mut file = tempfile::tempfile().unwrap();
    for sector in 0..sectors {
        file.write_all(&[sector as u8; SECTOR as usize]).unwrap();
    }
    file
}

#[test]
fn sectors_are_read_into_scattered_buffers() {
    let (mut bench, _) = Bench::running(8, false);
    let buffers = [
        (DATA, 512, true),
        (DATA + 512, 100, true),
        (DATA + 612, 412, true),
    ];
    assert_eq!(bench.request(IN, 2, &buffers), (OK, 1025));
    let expected: Vec<u8> = [[2; 512], [3; 512]].concat();
    assert_eq!(bench.data(1024), expected);
}

#[test]
fn sectors_are_written_from_scattered_buffers() {
    let (mut bench, file) = Bench::running(8, false);
    bench
        .memory
        .write_slice(&[0xab; 1024], GuestAddress(DATA))
        .unwrap();
    let buffers = [(DATA, 1000, false), (DATA + 1000, 24, false)];
    assert_eq!(bench.request(OUT, 6, &buffers), (OK, 1));
    let mut written = [0; 1024];
    file.read_exact_at(&mut written, 6 * SECTOR).unwrap();
    assert_eq!(written, [0xab; 1024]);
    assert_eq!(bench.request(FLUSH, 0, &[]), (OK, 1));
}

#[test]
fn many_requests_at_once_are_all_served() {
    let (mut bench, _) = Bench::running(8, false);
    bench.header(IN, 5);
    for _ in 0..10 {
        for _ in 0..80 {
            bench
                .queue
                .submit(&[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)]);
        }
        for _ in 0..80 {
            assert_eq!(bench.queue.wait_used().1, 513);
        }
    }
    assert!(bench.interrupt.of_queue(0) < 800, "interrupts are batched");
}

#[test]
fn the_serial_names_the_slot() {
    let (mut bench, _) = Bench::running(1, true);
    assert_eq!(bench.request(GET_ID, 0, &[(DATA, 20, true)]), (OK, 21));
    assert_eq!(bench.data(20), b"thaw-block-3\0\0\0\0\0\0\0\0");
    // A short buffer gets what fits.
    assert_eq!(bench.request(GET_ID, 0, &[(DATA, 4, true)]), (OK, 5));
}

#[test]
fn a_read_only_backing_refuses_writes() {
    let (mut bench, file) = Bench::running(4, true);
    assert_eq!(bench.request(OUT, 1, &[(DATA, 512, false)]).0, IOERR);
    assert_eq!(bench.request(FLUSH, 0, &[]).0, OK);
    assert_eq!(bench.request(IN, 1, &[(DATA, 512, true)]).0, OK);
    let mut sector = [0; 512];
    file.read_exact_at(&mut sector, SECTOR).unwrap();
    assert_eq!(sector, [1; 512]);
}

#[test]
fn requests_beyond_the_end_or_of_odd_length_fail() {
    let (mut bench, _) = Bench::running(4, false);
    let whole = [(DATA, 512, true)];
    for (sector, buffers) in [
        (4, &whole[..]),
        (u64::MAX, &whole),
        (u64::MAX / 512, &whole),
        (3, &[(DATA, 1024, true)]),
        (0, &[(DATA, 511, true)]),
        (0, &[]),
        (0, &[(DATA, 0, true)]),
        // The wrong direction leaves nothing to read into.
        (0, &[(DATA, 512, false)]),
    ] {
        assert_eq!(bench.request(IN, sector, buffers), (IOERR, 1), "{sector}");
    }
    assert_eq!(bench.request(OUT, 0, &[(DATA, 512, true)]).0, IOERR);
    assert_eq!(bench.request(77, 0, &[]).0, UNSUPPORTED);
    // And the device still works.
    assert_eq!(bench.request(IN, 3, &whole), (OK, 513));
}

#[test]
fn a_backing_that_became_shorter_gives_an_error() {
    let (mut bench, file) = Bench::running(4, false);
    file.set_len(512).unwrap();
    assert_eq!(bench.request(IN, 0, &[(DATA, 1024, true)]).0, IOERR);
}

#[test]
fn malformed_chains_are_given_back_unused() {
    let (mut bench, _) = Bench::running(4, false);
    bench.header(IN, 0);
    let good = [(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)];
    for chain in [
        // No status byte.
        &[(HEADER, 16, false)][..],
        &[(HEADER, 16, false), (STATUS, 0, true)],
        // Not guest memory.
        &[
            (HEADER, 16, false),
            (0x40_0000, 512, true),
            (STATUS, 1, true),
        ],
        &[(u64::MAX, 16, false), (STATUS, 1, true)],
        &[
            (HEADER, 16, false),
            (DATA, u32::MAX, true),
            (STATUS, 1, true),
        ],
        // The wrong order.
        &[(STATUS, 1, true), (HEADER, 16, false)],
    ] {
        bench.queue.submit(chain);
        assert_eq!(bench.queue.wait_used().1, 0);
    }
    // A header that is too short can still be answered.
    bench
        .queue
        .submit(&[(HEADER, 15, false), (STATUS, 1, true)]);
    assert_eq!(bench.queue.wait_used().1, 1);
    assert_eq!(bench.status(), IOERR);
    bench.queue.submit(&good);
    assert_eq!(bench.queue.wait_used().1, 513);
}

#[test]
fn circles_and_indirect_tables_out_of_place_are_survived() {
    let (mut bench, _) = Bench::running(4, false);
    bench.header(IN, 0);
    let queue = &mut bench.queue;
    // Descriptors 250.. are beyond those that the driver's allocator will hand out.
    queue.set_descriptor(250, HEADER, 16, NEXT, 251);
    queue.set_descriptor(251, DATA, 512, NEXT | WRITE, 250);
    queue.set_descriptor(252, HEADER, 16, NEXT, 999);
    queue.set_descriptor(253, u64::MAX, 64, INDIRECT, 0);
    queue.set_descriptor(254, HEADER, 7, INDIRECT, 0);
    queue.set_descriptor(255, 16 * 255, 16, INDIRECT, 0);
    for head in 250..=255 {
        queue.offer(head);
        queue.kick();
        assert_eq!(queue.wait_used(), (head, 0));
    }
    assert_eq!(bench.request(IN, 0, &[(DATA, 512, true)]), (OK, 513));
}

#[test]
fn a_ring_that_contradicts_itself_stops_the_device_and_nothing_else() {
    for broken in [
        |queue: &mut DriverQueue| queue.offer(QUEUE_SIZE),
        |queue: &mut DriverQueue| queue.set_avail_index(QUEUE_SIZE + 1),
    ] {
        let (mut bench, _) = Bench::running(4, false);
        broken(&mut bench.queue);
        bench.queue.kick();
        assert_eq!(bench.block.deactivate().len(), 1);
    }
}

#[test]
fn a_slot_without_backing_has_no_capacity_and_no_thread() {
    let mut bench = Bench::new();
    let mut config = [0xff; 8];
    bench.block.read_config(0, &mut config);
    assert_eq!(config, [0; 8]);
    bench.activate();
    assert!(matches!(bench.block.work, Work::Idle(_)));
    assert!(matches!(
        bench.slot.attach(image(1), false),
        Err(AttachError::Active(3))
    ));
    let queues = bench.block.deactivate();
    assert_eq!(queues.len(), 1);
    assert_eq!(bench.block.deactivate().len(), 0);
}

#[test]
fn a_restored_driver_is_told_of_the_new_capacity() {
    let template = Block::new(3).0.save().unwrap();
    let mut bench = Bench::new();
    bench.block.restore(&template).unwrap();
    bench.slot.attach(image(6), true).unwrap();
    bench.activate();
    assert_eq!(bench.interrupt.of_config(), 1);
    let mut config = [0; 64];
    bench.block.read_config(0, &mut config);
    assert_eq!(config[0..8], 6u64.to_le_bytes());
    assert_eq!(config[12..16], 254u32.to_le_bytes());
    assert_eq!(config[20..24], 512u32.to_le_bytes());
    // The same capacity again is no news.
    let saved = {
        bench.block.deactivate();
        bench.block.save().unwrap()
    };
    bench.block.restore(&saved).unwrap();
    bench.activate();
    assert_eq!(bench.interrupt.of_config(), 1);
}

#[test]
fn an_unrestored_driver_reads_the_capacity_by_itself() {
    let (bench, _) = Bench::running(1, false);
    assert_eq!(bench.interrupt.of_config(), 0);
}

#[test]
fn only_one_backing_with_blocks_can_be_attached() {
    let (_block, slot) = Block::new(0);
    assert!(matches!(
        slot.attach(File::open("/dev/null").unwrap(), true),
        Err(AttachError::NotBlocks(0))
    ));
    slot.attach(image(1), true).unwrap();
    assert!(matches!(
        slot.attach(image(1), true),
        Err(AttachError::Occupied(0))
    ));
}

#[test]
fn damaged_state_is_refused() {
    let (mut block, _slot) = Block::new(0);
    assert!(block.restore(&[]).is_err());
    assert!(block.restore(&[0xff; 3]).is_err());
}

#[test]
fn deactivation_gives_back_the_indices_and_work_goes_on_after_it() {
    let (mut bench, _) = Bench::running(4, false);
    for _ in 0..3 {
        assert_eq!(bench.request(IN, 0, &[(DATA, 512, true)]), (OK, 513));
    }
    let queues = bench.block.deactivate();
    assert_eq!(virtio_queue::QueueT::next_avail(&queues[0].queue), 3);
    // Made available while no one looks, without a notification that survives.
    bench.header(IN, 1);
    bench
        .queue
        .add(&[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)]);
    bench
        .block
        .activate(activation(
            &bench.memory,
            &bench.interrupt,
            queues,
            FEATURES,
        ))
        .unwrap();
    assert_eq!(bench.queue.wait_used_for(PATIENCE).unwrap().1, 513);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever the rings, descriptors and headers hold: no panic, no hang, no write to a
    /// read-only backing.
    #[test]
    fn random_rings_are_survived(
        bytes in prop::collection::vec(any::<u8>(), 64..2048),
        descriptors in prop::collection::vec(
            (0u64..0x5000, prop_oneof![0u32..1024, any::<u32>()], 0u16..8, 0u16..20), 1..16),
        heads in prop::collection::vec(0u16..20, 1..16),
    ) {
        let memory = memory(0x4000);
        let interrupt = Arc::new(TestInterrupt::default());
        memory.write_slice(&bytes, GuestAddress(0x1000)).unwrap();
        let mut driver = DriverQueue::new(&memory, &interrupt, 0, 16, 0);
        for (at, &(address, len, flags, next)) in descriptors.iter().enumerate() {
            driver.set_descriptor(at as u16, address, len, flags, next);
        }
        for &head in &heads {
            driver.offer(head);
        }
        let file = image(4);
        let medium = Medium {
            file: file.try_clone().unwrap(),
            read_only: true,
            sectors: 4,
            serial: "fuzz".into(),
        };
        let mut activation = activation(&memory, &interrupt, vec![driver.device_side()], FEATURES);
        let mut queue = DeviceQueue::take(&mut activation, 0, "block").unwrap();
        while serve_round(&mut queue, &activation.memory, &medium, false) == crate::virtio::queue::Round::Share {}
        prop_assert_eq!(file.metadata().unwrap().len(), 4 * SECTOR);
    }
}
