//! Console device (virtio 1.2, section 5.3): one port, output only.
//!
//! It carries what the guest's kernel and agent print. Nothing is typed into it: the receive queue
//! is accepted, because drivers insist on it, and its buffers stay unused.

use std::sync::{Arc, Mutex, PoisonError};

use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::epoll::EventSet;

use super::buffers::Buffers;
use super::queue::{DeviceQueue, Round, serve};
use super::worker::{Poll, Worker};
use super::{Activation, ActiveQueue, Device, DeviceError, DeviceType};
use crate::memory::MemoryView;

/// Takes what the guest prints, in pieces of at most 4 KiB. It may block, and the guest's output
/// waits with it.
pub type Output = Box<dyn FnMut(&[u8]) + Send>;

/// Queue of port 0 towards the guest (5.3.2).
const RECEIVE: u16 = 0;
/// Queue of port 0 from the guest.
const TRANSMIT: u16 = 1;

/// Descriptors of either queue.
const QUEUE_SIZE: u16 = 64;

/// The most bytes that are printed of one chain; drivers send a page at most.
const MAX_CHAIN: usize = 64 << 10;

/// Bytes and chains after which the driver is interrupted and the worker looks up.
const SHARE_BYTES: usize = 64 << 10;
const SHARE_CHAINS: usize = 64;

/// What one call of the output gets.
const PIECE: usize = 4 << 10;

/// A virtio console of one port.
pub struct Console {
    output: Arc<Mutex<Output>>,
    /// The thread, and the queue that it leaves alone.
    work: Option<(Worker<ActiveQueue>, Vec<ActiveQueue>)>,
}

impl Console {
    /// A console that prints to `output`.
    pub fn new(output: Output) -> Self {
        Console {
            output: Arc::new(Mutex::new(output)),
            work: None,
        }
    }
}

impl Device for Console {
    fn device_type(&self) -> DeviceType {
        DeviceType::Console
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE, QUEUE_SIZE]
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        // All of it belongs to features that are not offered: size, ports, emergency write.
        data.fill(0);
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), DeviceError> {
        let mut queue = DeviceQueue::take(&mut activation, TRANSMIT, "console")?;
        let mut memory = activation.memory;
        let output = self.output.clone();
        let poll = Poll::new()?;
        poll.add(queue.notify(), 0, EventSet::IN)?;
        let worker = Worker::start("thaw-console", poll, move |poll| {
            // Held as long as the device is active; nobody else wants it then.
            let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
            serve(&poll, &mut queue, &mut memory, |queue, memory| {
                print_round(queue, memory, &mut output)
            });
            queue.into_active(&memory)
        })?;
        activation.queues.retain(|queue| queue.index == RECEIVE);
        self.work = Some((worker, activation.queues));
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let Some((worker, mut queues)) = self.work.take() else {
            return Vec::new();
        };
        queues.extend(worker.stop());
        queues
    }

    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        Ok(Vec::new())
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        if state.is_empty() {
            Ok(())
        } else {
            Err(DeviceError::State("a console has none".to_owned()))
        }
    }
}

fn print_round(queue: &mut DeviceQueue, memory: &MemoryView, output: &mut Output) -> Round {
    let mut printed = 0;
    for _ in 0..SHARE_CHAINS {
        if printed >= SHARE_BYTES {
            return Round::Share;
        }
        let Some(chain) = queue.pop(memory) else {
            return Round::Drained;
        };
        let head = chain.head_index();
        match Buffers::collect(memory, chain, usize::from(QUEUE_SIZE)) {
            Ok(buffers) => {
                let mut text = buffers.readable;
                if text.len() > MAX_CHAIN {
                    queue.errors.report(&format_args!(
                        "{} bytes printed at once; the first {MAX_CHAIN} are shown",
                        text.len()
                    ));
                    text.truncate(MAX_CHAIN);
                }
                printed += text.len();
                let mut piece = [0; PIECE];
                while !text.is_empty() {
                    let len = text.read(&mut piece);
                    output(&piece[..len]);
                }
            }
            Err(error) => queue.errors.report(&error),
        }
        queue.push_used(memory, head, 0);
    }
    Round::Share
}

#[cfg(test)]
mod tests;
