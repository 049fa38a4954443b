//! One request of a block device: parsed, checked, carried out (virtio 1.2, section 5.2.6).

use std::fmt::Display;
use std::fs::File;
use std::io;

use thiserror::Error;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};
use vm_memory::{GuestMemoryMmap, VolatileSlice};

use super::{SECTOR, SEG_MAX};
use crate::memory::MemoryView;
use crate::virtio::buffers::{Buffers, ChainError, Segments, write_byte};
use crate::virtio::guest_io;
use crate::virtio::queue::{Chain, DeviceQueue, Round};

/// The most bytes of one request. Far beyond what drivers send, and little enough for a device to
/// be stopped in reasonable time.
const MAX_DATA: usize = 64 << 20;

/// Requests and bytes after which the driver is interrupted and the worker looks up.
const SHARE_REQUESTS: usize = 32;
const SHARE_BYTES: usize = 4 << 20;

/// Request header, data segments, status.
const MAX_DESCRIPTORS: usize = SEG_MAX as usize + 2;

/// The backing of a device.
#[derive(Debug)]
pub(super) struct Medium {
    pub file: File,
    pub read_only: bool,
    pub sectors: u64,
    pub serial: String,
}

/// What makes a request fail.
#[derive(Debug, Error)]
enum RequestError {
    #[error("request header of less than 16 bytes")]
    Header,
    #[error("{0} bytes of data are no whole number of sectors, none, or too many")]
    Length(usize),
    #[error("{bytes} bytes at sector {sector} are beyond the end")]
    Range { sector: u64, bytes: usize },
    #[error("request type {0} is not known")]
    Type(u32),
    #[error("write to a read-only device")]
    ReadOnly,
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl RequestError {
    fn status(&self) -> u8 {
        match self {
            RequestError::Type(_) => VIRTIO_BLK_S_UNSUPP as u8,
            _ => VIRTIO_BLK_S_IOERR as u8,
        }
    }
}

/// A chain with a place for its status.
struct Request<'m> {
    readable: Segments<'m>,
    /// Without the status byte.
    writable: Segments<'m>,
    status: VolatileSlice<'m>,
}

impl<'m> Request<'m> {
    /// `Ok(None)` when there is no byte to write the status to.
    fn parse(memory: &'m GuestMemoryMmap, chain: Chain<'m>) -> Result<Option<Self>, ChainError> {
        let Buffers {
            readable,
            mut writable,
        } = Buffers::collect(memory, chain, MAX_DESCRIPTORS)?;
        Ok(writable.split_last().map(|status| Request {
            readable,
            writable,
            status,
        }))
    }

    /// Carry the request out. Returns the number of bytes written to guest memory.
    fn execute(&mut self, medium: &Medium, write_through: bool) -> Result<usize, RequestError> {
        // struct virtio_blk_req: le32 type, le32 reserved, le64 sector.
        let header: [u8; 16] = self.readable.read_array().ok_or(RequestError::Header)?;
        let [a, b, c, d, _, _, _, _, sector @ ..] = header;
        let sector = u64::from_le_bytes(sector);
        match u32::from_le_bytes([a, b, c, d]) {
            VIRTIO_BLK_T_IN => {
                let offset = medium.range(sector, &self.writable)?;
                let bytes = self.writable.len();
                transfer(&mut self.writable, offset, |segments, offset| {
                    guest_io::read_at(&medium.file, segments, offset)
                })?;
                Ok(bytes)
            }
            VIRTIO_BLK_T_OUT => {
                let offset = medium.range(sector, &self.readable)?;
                if medium.read_only {
                    return Err(RequestError::ReadOnly);
                }
                transfer(&mut self.readable, offset, |segments, offset| {
                    guest_io::write_at(&medium.file, segments, offset)
                })?;
                if write_through {
                    medium.file.sync_data()?;
                }
                Ok(0)
            }
            VIRTIO_BLK_T_FLUSH => {
                if !medium.read_only {
                    medium.file.sync_data()?;
                }
                Ok(0)
            }
            VIRTIO_BLK_T_GET_ID => {
                let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
                for (place, byte) in id.iter_mut().zip(medium.serial.bytes()) {
                    *place = byte;
                }
                Ok(self.writable.write(&id))
            }
            other => Err(RequestError::Type(other)),
        }
    }
}

impl Medium {
    /// The byte offset of `data` at `sector`, when all of it is within the device.
    fn range(&self, sector: u64, data: &Segments<'_>) -> Result<u64, RequestError> {
        let bytes = data.len();
        if bytes == 0 || bytes > MAX_DATA || !(bytes as u64).is_multiple_of(SECTOR) {
            return Err(RequestError::Length(bytes));
        }
        sector
            .checked_add(bytes as u64 / SECTOR)
            .filter(|&end| end <= self.sectors)
            .and_then(|_| sector.checked_mul(SECTOR))
            .ok_or(RequestError::Range { sector, bytes })
    }
}

/// Repeat `call` until all of `data` is done.
fn transfer(
    data: &mut Segments<'_>,
    mut offset: u64,
    mut call: impl FnMut(&[VolatileSlice<'_>], u64) -> io::Result<usize>,
) -> io::Result<()> {
    while !data.is_empty() {
        match call(data.parts(), offset) {
            // The file has become shorter than it was.
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(done) => {
                data.advance(done);
                offset += done as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Carry out requests until there are no more or the share of one round is done.
pub(super) fn serve_round(
    queue: &mut DeviceQueue,
    memory: &MemoryView,
    medium: &Medium,
    write_through: bool,
) -> Round {
    let mut bytes = 0;
    for _ in 0..SHARE_REQUESTS {
        if bytes >= SHARE_BYTES {
            return Round::Share;
        }
        let Some(chain) = queue.pop(memory) else {
            return Round::Drained;
        };
        let head = chain.head_index();
        let written = match Request::parse(memory, chain) {
            Ok(Some(mut request)) => {
                bytes += request.readable.len() + request.writable.len();
                let outcome = request.execute(medium, write_through);
                let (status, written) = match &outcome {
                    Ok(written) => (VIRTIO_BLK_S_OK as u8, *written),
                    Err(error) => (error.status(), 0),
                };
                write_byte(&request.status, status);
                if let Err(error) = outcome {
                    complain(queue, medium, &error);
                }
                // The status byte is written, too. MAX_DATA keeps this small.
                written as u32 + 1
            }
            Ok(None) => malformed(queue, &"a request without a status byte"),
            Err(error) => malformed(queue, &error),
        };
        queue.push_used(memory, head, written);
    }
    Round::Share
}

fn malformed(queue: &mut DeviceQueue, error: &dyn Display) -> u32 {
    queue.errors.report(error);
    0
}

fn complain(queue: &mut DeviceQueue, medium: &Medium, error: &RequestError) {
    match error {
        RequestError::Io(error) => queue
            .errors
            .report_failure(&format_args!("{}: {error}", medium.serial)),
        // What a device does not know or allow is found out by asking.
        RequestError::ReadOnly | RequestError::Type(_) => {
            tracing::debug!(device = medium.serial, "{error}");
        }
        _ => queue.errors.report(error),
    }
}
