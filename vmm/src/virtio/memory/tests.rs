use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

use super::*;
use crate::memory::{LiveMemory, test_pluggable};
use crate::virtio::test_driver::{DriverQueue, FEATURES, TestInterrupt};

const START: u64 = 4 << 30;
const REQUEST: u64 = 0x2_0000;
const RESPONSE: u64 = 0x2_1000;

const PLUG: u16 = 0;
const UNPLUG: u16 = 1;
const UNPLUG_ALL: u16 = 2;
const STATE: u16 = 3;

struct Bench {
    memory: Arc<PluggableMemory>,
    live: LiveMemory,
    interrupt: Arc<TestInterrupt>,
    driver: DriverQueue,
    device: MemoryDevice,
    slot: MemorySlot,
}

impl Bench {
    /// Eight blocks, none plugged, and KVM takes `room` of them.
    fn new(room: usize) -> Self {
        let (memory, live, _) = test_pluggable(room);
        let memory = Arc::new(memory);
        let interrupt = Arc::new(TestInterrupt::default());
        let (device, slot) = MemoryDevice::new(memory.clone());
        Bench {
            driver: DriverQueue::new(&live.view(), &interrupt, 0, QUEUE_SIZE, 0),
            memory,
            live,
            interrupt,
            device,
            slot,
        }
    }

    fn activate(&mut self, queues: Vec<ActiveQueue>) {
        let activation = Activation {
            memory: self.live.view(),
            queues,
            interrupt: self.interrupt.clone(),
            features: FEATURES,
        };
        self.device.activate(activation).unwrap();
    }

    fn running(blocks: u64) -> Self {
        let mut bench = Bench::new(8);
        bench.slot.request(blocks * BLOCK_SIZE).unwrap();
        let queues = vec![bench.driver.device_side()];
        bench.activate(queues);
        bench
    }

    /// Send a request about `count` blocks from `address` on: how it was answered, and the state.
    fn ask_at(&mut self, kind: u16, address: u64, count: u16) -> (u16, u16) {
        let view = self.live.view();
        let mut bytes = [0; 24];
        bytes[..2].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&address.to_le_bytes());
        bytes[16..18].copy_from_slice(&count.to_le_bytes());
        view.write_slice(&bytes, GuestAddress(REQUEST)).unwrap();
        self.driver
            .submit(&[(REQUEST, 24, false), (RESPONSE, 10, true)]);
        assert_eq!(self.driver.wait_used().1, 10);
        let half = |at| view.read_obj::<u16>(GuestAddress(RESPONSE + at)).unwrap();
        (half(0), half(8))
    }

    fn ask(&mut self, kind: u16, block: u64, count: u16) -> u16 {
        self.ask_at(kind, START + block * BLOCK_SIZE, count).0
    }

    fn config(&self, field: u64) -> u64 {
        let mut bytes = [0; 8];
        self.device.read_config(field * 8, &mut bytes);
        u64::from_le_bytes(bytes)
    }
}

#[test]
fn a_driver_plugs_what_is_requested_and_no_more() {
    let mut bench = Bench::running(3);
    assert_eq!(bench.ask(PLUG, 0, 2), 0);
    assert_eq!(bench.ask(PLUG, 5, 2), 1, "one too many");
    assert_eq!(bench.ask(PLUG, 5, 1), 0);
    assert_eq!(bench.ask(PLUG, 7, 1), 1);
    assert_eq!(bench.slot.plugged(), 3 * BLOCK_SIZE);
    assert_eq!(bench.config(5), 3 * BLOCK_SIZE);
    let plugged = GuestAddress(START + 5 * BLOCK_SIZE);
    bench.live.view().write_obj(1u8, plugged).unwrap();
    let states: Vec<_> = [(0, 2), (0, 3), (2, 3), (4, 2), (5, 1), (7, 1)]
        .map(|(block, count)| bench.ask_at(STATE, START + block * BLOCK_SIZE, count))
        .into();
    assert_eq!(states, [(0, 0), (0, 2), (0, 1), (0, 2), (0, 0), (0, 1)]);
}

#[test]
fn the_owner_may_ask_for_more_and_for_less() {
    let mut bench = Bench::running(1);
    let before = bench.interrupt.of_config();
    assert_eq!(bench.config(6), BLOCK_SIZE);
    bench.slot.request(2 * BLOCK_SIZE - 1).unwrap();
    assert_eq!(bench.config(6), 2 * BLOCK_SIZE);
    assert_eq!(bench.interrupt.of_config(), before + 1);
    assert_eq!(bench.ask(PLUG, 0, 2), 0);
    bench.slot.request(0).unwrap();
    assert_eq!(bench.interrupt.of_config(), before + 2);
    // The driver gives back what it can, when it can.
    assert_eq!(bench.ask(UNPLUG, 1, 1), 0);
    assert_eq!(bench.ask(UNPLUG, 1, 1), 3);
    assert_eq!(bench.ask(UNPLUG, 0, 2), 3);
    assert_eq!(bench.ask(PLUG, 1, 1), 1);
    assert_eq!(bench.slot.plugged(), BLOCK_SIZE);
    assert_eq!(bench.ask(UNPLUG_ALL, 0, 0), 0);
    assert_eq!(bench.slot.plugged(), 0);
    bench.slot.request(9 * BLOCK_SIZE).unwrap_err();
    bench.slot.request(u64::MAX).unwrap_err();
}

#[test]
fn nothing_is_at_work_before_something_is_requested() {
    let mut bench = Bench::new(8);
    assert!(!bench.device.has_backing());
    assert_eq!(bench.config(3), 8 * BLOCK_SIZE);
    assert_eq!(bench.config(6), 0);
    bench.slot.request(BLOCK_SIZE).unwrap();
    assert!(bench.device.has_backing());
    let queues = vec![bench.driver.device_side()];
    bench.activate(queues);
    // The driver, which knows of nothing yet, hears of it.
    assert_eq!(bench.interrupt.of_config(), 1);
}

#[test]
fn requests_that_make_no_sense_change_nothing() {
    let mut bench = Bench::running(8);
    assert_eq!(bench.ask(PLUG, 2, 1), 0);
    for (kind, address, count) in [
        (PLUG, START, 0),
        (PLUG, START, 9),
        (PLUG, START, u16::MAX),
        (PLUG, START + 1, 1),
        (PLUG, START - BLOCK_SIZE, 1),
        (PLUG, START + 8 * BLOCK_SIZE, 1),
        (PLUG, u64::MAX, 1),
        (PLUG, START + BLOCK_SIZE, 2), // one of which is plugged
        (UNPLUG, START + BLOCK_SIZE, 2),
        (UNPLUG, 0, 1),
        (STATE, START, 0),
        (4, START, 1),
        (u16::MAX, START, 1),
    ] {
        let answer = bench.ask_at(kind, address, count).0;
        assert_eq!(answer, 3, "{kind} {address:#x} {count}");
    }
    assert_eq!(bench.slot.plugged(), BLOCK_SIZE);
}

#[test]
fn chains_that_are_no_requests_are_given_back() {
    let mut bench = Bench::running(8);
    for parts in [
        vec![(REQUEST, 8, false)],
        vec![(RESPONSE, 10, true)],
        vec![(REQUEST, 23, false), (RESPONSE, 10, true)],
        vec![(REQUEST, 24, false), (RESPONSE, 2, true)],
        vec![(u64::MAX, 24, false), (RESPONSE, 10, true)],
        vec![(START, 24, false), (RESPONSE, 10, true)],
    ] {
        bench.driver.submit(&parts);
        bench.driver.wait_used();
    }
    assert_eq!(bench.slot.plugged(), 0);
}

#[test]
fn a_host_that_cannot_refuses() {
    let mut bench = Bench::new(2);
    bench.slot.request(8 * BLOCK_SIZE).unwrap();
    let queues = vec![bench.driver.device_side()];
    bench.activate(queues);
    assert_eq!(bench.ask(PLUG, 0, 3), 1);
    assert_eq!(bench.slot.plugged(), 0);
    assert_eq!(bench.ask(PLUG, 0, 2), 0);
}

#[test]
fn a_request_may_lie_in_memory_that_was_plugged_before() {
    let mut bench = Bench::running(8);
    assert_eq!(bench.ask(PLUG, 0, 1), 0);
    let mut bytes = [0; 24];
    bytes[..2].copy_from_slice(&STATE.to_le_bytes());
    bytes[8..16].copy_from_slice(&START.to_le_bytes());
    bytes[16] = 1;
    let view = bench.live.view();
    view.write_slice(&bytes, GuestAddress(START)).unwrap();
    bench
        .driver
        .submit(&[(START, 24, false), (START + 4096, 10, true)]);
    assert_eq!(bench.driver.wait_used().1, 10);
    let state: u16 = view.read_obj(GuestAddress(START + 4096 + 8)).unwrap();
    assert_eq!(state, 0);
}

#[test]
fn a_snapshot_keeps_the_range_and_takes_no_plugged_memory() {
    let mut bench = Bench::running(1);
    let saved = bench.device.save().unwrap();
    bench.device.restore(&saved).unwrap();
    assert!(bench.device.restore(&[]).is_err());
    let other = postcard::to_stdvec(&State {
        start: START,
        size: BLOCK_SIZE,
    });
    assert!(bench.device.restore(&other.unwrap()).is_err());
    assert_eq!(bench.ask(PLUG, 0, 1), 0);
    let queues = bench.device.deactivate();
    assert_eq!(queues.len(), 1);
    assert!(bench.device.save().is_err());
    // A driver that starts anew gives everything back first.
    bench.activate(queues);
    assert_eq!(bench.ask(UNPLUG_ALL, 0, 0), 0);
    bench.device.deactivate();
    assert_eq!(bench.device.save().unwrap(), saved);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn random_requests_never_plug_more_than_is_requested(
        requests in prop::collection::vec(
            (0u16..5, 0u64..10, prop_oneof![0u64..2, Just(0)], 0u16..10), 1..40),
        most in 0u64..9,
    ) {
        let mut bench = Bench::running(most);
        for (kind, block, offset, count) in requests {
            let (answer, _) = bench.ask_at(kind, START + block * BLOCK_SIZE + offset, count);
            prop_assert!(answer <= 3);
            prop_assert!(bench.slot.plugged() <= most * BLOCK_SIZE);
            let view = bench.live.view();
            let seen = (0..8).filter(|block| {
                view.check_range(GuestAddress(START + block * BLOCK_SIZE), 1)
            }).count() as u64;
            prop_assert_eq!(seen * BLOCK_SIZE, bench.memory.plugged());
        }
    }
}
