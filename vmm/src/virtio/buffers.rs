//! The buffers of one descriptor chain, checked.
//!
//! A chain comes from the guest: [`Buffers::collect`] reads each descriptor once, checks that its
//! buffer is guest memory, and keeps the number of buffers bounded. What follows works on
//! [`Segments`], which cannot reach outside of them. How a driver cuts its data into descriptors
//! means nothing (virtio 1.2, 2.7.4), and nothing here depends on it.

use thiserror::Error;
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestMemory, GuestMemoryMmap, VolatileSlice};

/// What is wrong with a chain. The driver's fault.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ChainError {
    /// Not within one region of guest memory.
    #[error("the buffer of {len} bytes at {address:#x} is not guest memory")]
    Address {
        /// Guest physical address.
        address: u64,
        /// Length in bytes.
        len: u32,
    },
    /// More descriptors than the device takes, or a chain that goes in circles.
    #[error("a chain of more than {0} descriptors")]
    TooLong(usize),
    /// Virtio 1.2, 2.7.4.2: what the device reads comes before what it writes.
    #[error("a readable buffer after a writable one")]
    Order,
}

/// The buffers of one chain.
#[derive(Debug, Default)]
pub struct Buffers<'m> {
    /// What the driver wrote for the device.
    pub readable: Segments<'m>,
    /// What the device may write.
    pub writable: Segments<'m>,
}

impl<'m> Buffers<'m> {
    /// Take the buffers of `chain`, of which it may have at most `limit`.
    pub fn collect(
        memory: &'m GuestMemoryMmap,
        chain: DescriptorChain<&'m GuestMemoryMmap>,
        limit: usize,
    ) -> Result<Self, ChainError> {
        let mut buffers = Buffers::default();
        for (position, descriptor) in chain.enumerate() {
            if position == limit {
                return Err(ChainError::TooLong(limit));
            }
            let (address, len) = (descriptor.addr(), descriptor.len());
            let side = if descriptor.is_write_only() {
                &mut buffers.writable
            } else if buffers.writable.parts.is_empty() {
                &mut buffers.readable
            } else {
                return Err(ChainError::Order);
            };
            if len == 0 {
                continue;
            }
            let slice =
                memory
                    .get_slice(address, len as usize)
                    .map_err(|_| ChainError::Address {
                        address: address.0,
                        len,
                    })?;
            side.parts.push(slice);
            side.len += len as usize;
        }
        Ok(buffers)
    }
}

/// Pieces of guest memory that follow each other in a chain.
#[derive(Debug, Clone, Default)]
pub struct Segments<'m> {
    parts: Vec<VolatileSlice<'m>>,
    /// The parts before this one are used up.
    first: usize,
    /// Bytes in the parts that are left.
    len: usize,
}

impl<'m> Segments<'m> {
    /// Bytes left.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether none is left.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What is left, none of it empty.
    pub fn parts(&self) -> &[VolatileSlice<'m>] {
        &self.parts[self.first..]
    }

    /// Leave out the first `count` bytes (or all).
    pub fn advance(&mut self, count: usize) {
        self.walk(count, |_| {});
    }

    /// Leave out all but the first `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        let mut room = len;
        let mut keep = self.first;
        while let Some(part) = self.parts.get_mut(keep).filter(|_| room > 0) {
            if part.len() > room
                && let Ok(start) = part.subslice(0, room)
            {
                *part = start;
            }
            room -= part.len();
            keep += 1;
        }
        self.parts.truncate(keep);
        self.len = len - room;
    }

    /// Take the first `count` bytes (or all) away.
    pub fn split_front(&mut self, count: usize) -> Self {
        let mut front = Segments::default();
        self.walk(count, |part| {
            front.parts.push(*part);
            front.len += part.len();
        });
        front
    }

    /// Take the last byte away. `None` when there is none.
    pub fn split_last(&mut self) -> Option<VolatileSlice<'m>> {
        let part = *self.parts[self.first..].last()?;
        let (rest, last) = part.split_at(part.len().checked_sub(1)?).ok()?;
        if rest.is_empty() {
            self.parts.pop();
        } else if let Some(part) = self.parts.last_mut() {
            *part = rest;
        }
        self.len -= 1;
        Some(last)
    }

    /// Copy bytes out and leave them out: as many as there are, at most `data` long.
    pub fn read(&mut self, data: &mut [u8]) -> usize {
        let mut done = 0;
        self.walk(data.len(), |part| {
            part.copy_to(&mut data[done..done + part.len()]);
            done += part.len();
        });
        done
    }

    /// Copy a value of exactly `N` bytes out, or leave everything as it is.
    pub fn read_array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut array = [0; N];
        (self.len >= N).then(|| {
            self.read(&mut array);
            array
        })
    }

    /// Copy bytes in and leave them out: as many as there is room for, at most `data`.
    pub fn write(&mut self, data: &[u8]) -> usize {
        let mut done = 0;
        self.walk(data.len(), |part| {
            part.copy_from(&data[done..done + part.len()]);
            done += part.len();
        });
        done
    }

    /// Show the first `count` bytes (or all) to `each`, piece by piece, and leave them out.
    fn walk(&mut self, count: usize, mut each: impl FnMut(&VolatileSlice<'m>)) {
        let mut left = count;
        while let Some(part) = self.parts.get_mut(self.first).filter(|_| left > 0) {
            let Ok((head, tail)) = part.split_at(part.len().min(left)) else {
                return;
            };
            each(&head);
            left -= head.len();
            self.len -= head.len();
            if tail.is_empty() {
                self.first += 1;
            } else {
                *part = tail;
            }
        }
    }
}

/// Write one byte of guest memory.
pub fn write_byte(byte: &VolatileSlice<'_>, value: u8) {
    // A slice of at least one byte takes it.
    let _ = byte.write_obj(value, 0);
}

#[cfg(test)]
mod tests;
