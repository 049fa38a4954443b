//! Requests of the driver (virtio 1.2, 5.15.6): each is checked against what is plugged and what is
//! requested, and does all that it asks for or nothing.

use std::ops::Range;

use crate::memory::{MemoryView, PluggableMemory};
use crate::virtio::buffers::Buffers;
use crate::virtio::guest_error::GuestErrors;
use crate::virtio::queue::{Chain, DeviceQueue, Round};

/// Bytes of a request: type, padding, address, number of blocks, padding (5.15.6).
const REQUEST: usize = 24;

/// Requests after which the worker looks up.
const SHARE: usize = 16;

const PLUG: u16 = 0;
const UNPLUG: u16 = 1;
const UNPLUG_ALL: u16 = 2;
const STATE: u16 = 3;

/// How a request was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Answer {
    Done = 0,
    Refused = 1,
    Error = 3,
}

/// What the blocks of a state request are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum BlockState {
    Plugged = 0,
    Unplugged = 1,
    Mixed = 2,
}

/// A request that concerns blocks which there are.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    Plug(Range<u32>),
    Unplug(Range<u32>),
    UnplugAll,
    State(Range<u32>),
}

impl Request {
    /// `None` where it makes no sense.
    fn parse(bytes: &[u8; REQUEST], memory: &PluggableMemory) -> Option<Self> {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let mut address = [0; 8];
        address.copy_from_slice(&bytes[8..16]);
        let blocks = || {
            memory
                .range()
                .blocks_at(u64::from_le_bytes(address), half(16))
        };
        Some(match half(0) {
            PLUG => Self::Plug(blocks()?),
            UNPLUG => Self::Unplug(blocks()?),
            UNPLUG_ALL => Self::UnplugAll,
            STATE => Self::State(blocks()?),
            _ => return None,
        })
    }
}

/// Serve requests. `requested` says how many bytes the driver may have plugged.
pub fn serve_round(
    queue: &mut DeviceQueue,
    view: &MemoryView,
    memory: &PluggableMemory,
    requested: impl Fn() -> u64,
) -> Round {
    for _ in 0..SHARE {
        let Some(chain) = queue.pop(view) else {
            return Round::Drained;
        };
        let head = chain.head_index();
        let written = answer(chain, view, memory, requested(), &mut queue.errors);
        queue.push_used(view, head, written);
    }
    Round::Share
}

/// Do what a chain asks for, and write the response. Returns the bytes of that.
fn answer(
    chain: Chain<'_>,
    view: &MemoryView,
    memory: &PluggableMemory,
    requested: u64,
    errors: &mut GuestErrors,
) -> u32 {
    let mut buffers = match Buffers::collect(view, chain, 4) {
        Ok(buffers) => buffers,
        Err(error) => {
            errors.report(&error);
            return 0;
        }
    };
    let request = buffers
        .readable
        .read_array::<REQUEST>()
        .and_then(|bytes| Request::parse(&bytes, memory));
    let (answer, state) = match request {
        Some(request) => carry_out(request, memory, requested, errors),
        None => {
            errors.report(&"a request about memory that is none");
            (Answer::Error, None)
        }
    };
    // Type, padding, state.
    let mut response = [0; 10];
    response[..2].copy_from_slice(&(answer as u16).to_le_bytes());
    response[8..].copy_from_slice(&state.map_or(0, |state| state as u16).to_le_bytes());
    buffers.writable.write(&response) as u32
}

fn carry_out(
    request: Request,
    memory: &PluggableMemory,
    requested: u64,
    errors: &mut GuestErrors,
) -> (Answer, Option<BlockState>) {
    let done = match request {
        Request::Plug(blocks) => {
            let more = blocks.len() as u64 * crate::memory::BLOCK_SIZE;
            if memory.plugged() + more > requested {
                return (Answer::Refused, None);
            }
            if memory.count(blocks.clone()) > 0 {
                return (Answer::Error, None);
            }
            memory.plug(blocks)
        }
        Request::Unplug(blocks) => {
            if memory.count(blocks.clone()) < blocks.len() {
                return (Answer::Error, None);
            }
            memory.unplug(blocks)
        }
        Request::UnplugAll => memory.unplug_all(),
        Request::State(blocks) => {
            let state = match memory.count(blocks.clone()) {
                0 => BlockState::Unplugged,
                count if count == blocks.len() => BlockState::Plugged,
                _ => BlockState::Mixed,
            };
            return (Answer::Done, Some(state));
        }
    };
    match done {
        Ok(()) => (Answer::Done, None),
        Err(error) => {
            errors.report_failure(&error);
            (Answer::Refused, None)
        }
    }
}
