use std::sync::mpsc;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;
use crate::virtio::test_driver::{
    DriverQueue, FEATURES, PATIENCE, TestInterrupt, activation, memory,
};

const TEXT: u64 = 0x2_0000;

struct Bench {
    memory: GuestMemoryMmap,
    interrupt: Arc<TestInterrupt>,
    receive: DriverQueue,
    transmit: DriverQueue,
    console: Console,
    printed: mpsc::Receiver<Vec<u8>>,
}

impl Bench {
    fn new() -> Self {
        let memory = memory(1 << 20);
        let interrupt = Arc::new(TestInterrupt::default());
        let (sender, printed) = mpsc::channel();
        let output = Box::new(move |text: &[u8]| sender.send(text.to_vec()).unwrap());
        Bench {
            receive: DriverQueue::new(&memory, &interrupt, RECEIVE, QUEUE_SIZE, 0),
            transmit: DriverQueue::new(&memory, &interrupt, TRANSMIT, QUEUE_SIZE, 0x8000),
            console: Console::new(output),
            memory,
            interrupt,
            printed,
        }
    }

    fn running() -> Self {
        let mut bench = Bench::new();
        let queues = vec![bench.receive.device_side(), bench.transmit.device_side()];
        bench
            .console
            .activate(activation(
                &bench.memory,
                &bench.interrupt,
                queues,
                FEATURES,
            ))
            .unwrap();
        bench
    }

    fn printed(&self, len: usize) -> Vec<u8> {
        let mut text = Vec::new();
        while text.len() < len {
            text.extend(self.printed.recv_timeout(PATIENCE).unwrap());
        }
        text
    }
}

#[test]
fn text_is_printed_in_order() {
    let mut bench = Bench::running();
    for (text, address) in [(b"hello, ", TEXT), (b"world! ", TEXT + 64)] {
        bench
            .memory
            .write_slice(text, GuestAddress(address))
            .unwrap();
        bench
            .transmit
            .submit(&[(address, 3, false), (address + 3, 4, false)]);
        assert_eq!(bench.transmit.wait_used().1, 0);
    }
    assert_eq!(bench.printed(14), b"hello, world! ");
}

#[test]
fn a_huge_chain_is_cut() {
    let mut bench = Bench::running();
    bench.transmit.submit(&[(TEXT, 0x4_0000, false)]);
    bench.transmit.wait_used();
    bench.transmit.submit(&[(TEXT, 1, false)]);
    bench.transmit.wait_used();
    assert_eq!(bench.printed(MAX_CHAIN + 1).len(), MAX_CHAIN + 1);
}

#[test]
fn input_buffers_are_accepted_and_left_alone() {
    let mut bench = Bench::running();
    bench.receive.submit(&[(TEXT, 64, true)]);
    bench.transmit.submit(&[(TEXT, 1, false)]);
    bench.transmit.wait_used();
    assert_eq!(bench.receive.take_used(), None);
    let queues = bench.console.deactivate();
    let indices: Vec<u16> = queues.iter().map(|queue| queue.index).collect();
    assert_eq!(indices, [RECEIVE, TRANSMIT]);
    assert_eq!(bench.console.deactivate().len(), 0);
}

#[test]
fn malformed_chains_print_nothing() {
    let mut bench = Bench::running();
    for chain in [
        (u64::MAX, 8, false),
        (0xf_ffff, 2, false),
        (TEXT, u32::MAX, false),
        (TEXT, 0, false),
        // The wrong direction.
        (TEXT, 8, true),
    ] {
        bench.transmit.submit(&[chain]);
        assert_eq!(bench.transmit.wait_used().1, 0);
    }
    bench.transmit.set_descriptor(60, TEXT, 1, 1, 60);
    bench.transmit.offer(60);
    bench.transmit.kick();
    bench.transmit.wait_used();
    bench.console.deactivate();
    // A descriptor that is its own successor is as long as the ring, at most.
    assert!(
        bench
            .printed
            .try_iter()
            .map(|piece| piece.len())
            .sum::<usize>()
            <= 64
    );
}

#[test]
fn a_driver_without_transmit_queue_is_refused() {
    let mut bench = Bench::new();
    let queues = vec![bench.receive.device_side()];
    let activation = activation(&bench.memory, &bench.interrupt, queues, FEATURES);
    assert!(matches!(
        bench.console.activate(activation),
        Err(DeviceError::MissingQueue(TRANSMIT))
    ));
}

#[test]
fn the_output_survives_a_reset() {
    let mut bench = Bench::running();
    let queues = bench.console.deactivate();
    bench.transmit.add(&[(TEXT, 5, false)]);
    bench
        .console
        .activate(activation(
            &bench.memory,
            &bench.interrupt,
            queues,
            FEATURES,
        ))
        .unwrap();
    assert_eq!(bench.printed(5).len(), 5);
}

#[test]
fn state_that_is_not_empty_is_refused() {
    let mut bench = Bench::new();
    let saved = bench.console.save().unwrap();
    bench.console.restore(&saved).unwrap();
    assert!(bench.console.restore(&[0]).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_rings_are_survived(
        descriptors in prop::collection::vec(
            (0u64..0x5000, prop_oneof![0u32..1024, any::<u32>()], 0u16..8, 0u16..20), 1..16),
        heads in prop::collection::vec(0u16..20, 1..16),
    ) {
        let memory = memory(0x4000);
        let interrupt = Arc::new(TestInterrupt::default());
        let mut driver = DriverQueue::new(&memory, &interrupt, TRANSMIT, 16, 0);
        for (at, &(address, len, flags, next)) in descriptors.iter().enumerate() {
            driver.set_descriptor(at as u16, address, len, flags, next);
        }
        for &head in &heads {
            driver.offer(head);
        }
        let mut activation = activation(&memory, &interrupt, vec![driver.device_side()], FEATURES);
        let mut queue = DeviceQueue::take(&mut activation, TRANSMIT, "console").unwrap();
        let mut output: Output = Box::new(|text| assert!(text.len() <= PIECE));
        while print_round(&mut queue, &activation.memory, &mut output) == Round::Share {}
    }
}
