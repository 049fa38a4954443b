use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;
use crate::virtio::test_driver::{DriverQueue, FEATURES, TestInterrupt, activation, memory};

const ALL: u64 = FEATURES | REPORTING;
const SIZE: usize = 1 << 20;

struct Bench {
    memory: GuestMemoryMmap,
    interrupt: Arc<TestInterrupt>,
    inflate: DriverQueue,
    reports: DriverQueue,
    balloon: Balloon,
}

impl Bench {
    fn new() -> Self {
        let memory = memory(SIZE);
        let interrupt = Arc::new(TestInterrupt::default());
        Bench {
            inflate: DriverQueue::new(&memory, &interrupt, 0, IDLE_QUEUE_SIZE, 0),
            reports: DriverQueue::new(&memory, &interrupt, REPORTS, REPORT_QUEUE_SIZE, 0x8000),
            balloon: Balloon::default(),
            memory,
            interrupt,
        }
    }

    fn activate(&mut self, queues: Vec<ActiveQueue>) -> Result<(), DeviceError> {
        let activation = activation(&self.memory, &self.interrupt, queues, ALL);
        self.balloon.activate(activation)
    }

    fn running() -> Self {
        let mut bench = Bench::new();
        let queues = vec![bench.inflate.device_side(), bench.reports.device_side()];
        bench.activate(queues).unwrap();
        bench
    }

    fn fill(&self) {
        let bytes = vec![9; SIZE - 0x2_0000];
        self.memory
            .write_slice(&bytes, GuestAddress(0x2_0000))
            .unwrap();
    }

    fn byte(&self, address: u64) -> u8 {
        self.memory.read_obj(GuestAddress(address)).unwrap()
    }

    fn reported(&self) -> (u64, u64) {
        let reported = self.balloon.reported();
        (reported.reports(), reported.bytes())
    }
}

#[test]
fn reported_pages_go_back_and_no_others() {
    let mut bench = Bench::running();
    bench.fill();
    bench
        .reports
        .submit(&[(0x4_0000, 0x2000, true), (0x6_0000, 0x1000, true)]);
    assert_eq!(bench.reports.wait_used().1, 0);
    for (address, byte) in [
        (0x3_ffff, 9),
        (0x4_0000, 0),
        (0x4_1fff, 0),
        (0x4_2000, 9),
        (0x6_0000, 0),
        (0x6_1000, 9),
    ] {
        assert_eq!(bench.byte(address), byte, "{address:#x}");
    }
    assert_eq!(bench.reported(), (1, 0x3000));
}

#[test]
fn a_report_of_what_is_not_memory_is_answered_and_does_nothing() {
    let mut bench = Bench::running();
    bench.fill();
    for part in [
        (u64::MAX, 8, true),
        (SIZE as u64 - 4096, 8192, true),
        (0x4_0000, u32::MAX, true),
        (0x4_0000, 0, true),
        (0x4_0001, 4095, true),
    ] {
        bench.reports.submit(&[part]);
        bench.reports.wait_used();
    }
    assert_eq!(bench.byte(0x4_0000), 9);
    assert_eq!(bench.reported(), (5, 0));
    // And the next that is in order is served.
    bench.reports.submit(&[(0x4_0000, 0x1000, true)]);
    bench.reports.wait_used();
    assert_eq!(bench.byte(0x4_0000), 0);
}

#[test]
fn a_chain_that_is_its_own_successor_ends() {
    let mut bench = Bench::running();
    bench.reports.set_descriptor(20, 0x4_0000, 0x1000, 3, 20);
    bench.reports.offer(20);
    bench.reports.kick();
    bench.reports.wait_used();
    let (reports, bytes) = bench.reported();
    assert_eq!(reports, 1);
    assert!(bytes <= u64::from(REPORT_QUEUE_SIZE) * 0x1000, "{bytes}");
}

#[test]
fn the_queues_of_inflation_are_left_alone() {
    let mut bench = Bench::running();
    bench.fill();
    bench.inflate.submit(&[(0x4_0000, 1024, false)]);
    bench.reports.submit(&[(0x6_0000, 0x1000, true)]);
    bench.reports.wait_used();
    assert_eq!(bench.inflate.take_used(), None);
    let indices: Vec<_> = bench
        .balloon
        .deactivate()
        .iter()
        .map(|queue| queue.index)
        .collect();
    assert_eq!(indices, [0, REPORTS]);
}

#[test]
fn what_is_reported_between_snapshot_and_restore_is_not_lost() {
    let mut bench = Bench::running();
    bench.fill();
    let queues = bench.balloon.deactivate();
    bench.reports.submit(&[(0x4_0000, 0x1000, true)]);
    bench.activate(queues).unwrap();
    bench.reports.wait_used();
    assert_eq!(bench.byte(0x4_0000), 0);
}

#[test]
fn a_driver_that_does_not_report_has_no_such_queue() {
    let mut bench = Bench::new();
    let queues = vec![bench.inflate.device_side()];
    let without = activation(&bench.memory, &bench.interrupt, queues, FEATURES);
    bench.balloon.activate(without).unwrap();
    let queues = vec![bench.inflate.device_side()];
    assert!(matches!(
        bench.activate(queues),
        Err(DeviceError::MissingQueue(REPORTS))
    ));
}

#[test]
fn it_wants_no_memory_and_has_no_state() {
    let mut balloon = Balloon::default();
    let mut config = [9; 16];
    balloon.read_config(0, &mut config);
    assert_eq!(config, [0; 16]);
    let saved = balloon.save().unwrap();
    balloon.restore(&saved).unwrap();
    assert!(balloon.restore(&[0]).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn random_rings_are_survived(
        descriptors in prop::collection::vec(
            (0u64..0x5000, prop_oneof![0u32..0x3000, any::<u32>()], 0u16..8, 0u16..20), 1..16),
        heads in prop::collection::vec(0u16..20, 1..16),
    ) {
        let memory = memory(0x4000);
        let interrupt = Arc::new(TestInterrupt::default());
        let mut driver = DriverQueue::new(&memory, &interrupt, REPORTS, 16, 0);
        for (at, &(address, len, flags, next)) in descriptors.iter().enumerate() {
            driver.set_descriptor(at as u16, address, len, flags, next);
        }
        for &head in &heads {
            driver.offer(head);
        }
        let mut activation = activation(&memory, &interrupt, vec![driver.device_side()], ALL);
        let mut queue = DeviceQueue::take(&mut activation, REPORTS, "balloon").unwrap();
        // What is reported may be the ring itself.
        let mut rounds = 0;
        while report_round(&mut queue, &activation.memory, &Reported::default()) == Round::Share {
            rounds += 1;
            prop_assert!(rounds < 1 << 14);
        }
    }
}
