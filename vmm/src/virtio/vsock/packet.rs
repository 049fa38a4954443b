//! The header of a packet (virtio 1.2, section 5.10.6).
//!
//! It is read as the first 44 bytes of a chain, however the driver cut the chain: Linux puts header
//! and data into one buffer, into two, or the data into one for each page.

/// Bytes of a header.
pub const HEADER: usize = 44;

/// The host's address (5.10.4).
pub const HOST_CID: u64 = 2;

/// `VIRTIO_VSOCK_TYPE_STREAM`.
pub const STREAM: u16 = 1;

/// Flags of a [`Operation::Shutdown`]: the sender will receive no more data, or send no more.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// See [`SHUTDOWN_RECEIVE`].
pub const SHUTDOWN_SEND: u32 = 2;
/// Both flags: the sender is done with the stream.
pub const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// What a packet is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Operation {
    /// Open a stream.
    Request = 1,
    /// The stream is open.
    Response = 2,
    /// There is no such stream, or no longer.
    Reset = 3,
    /// One or both directions are finished.
    Shutdown = 4,
    /// Payload.
    Data = 5,
    /// Nothing but the sender's credit.
    CreditUpdate = 6,
    /// Send me your credit.
    CreditRequest = 7,
}

impl Operation {
    /// The operation with this number.
    pub fn new(number: u16) -> Option<Self> {
        Some(match number {
            1 => Operation::Request,
            2 => Operation::Response,
            3 => Operation::Reset,
            4 => Operation::Shutdown,
            5 => Operation::Data,
            6 => Operation::CreditUpdate,
            7 => Operation::CreditRequest,
            _ => return None,
        })
    }
}

/// `struct virtio_vsock_hdr`, in the host's byte order and not checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Sender.
    pub src_cid: u64,
    /// Receiver.
    pub dst_cid: u64,
    /// The sender's port.
    pub src_port: u32,
    /// The receiver's port.
    pub dst_port: u32,
    /// Bytes of payload that follow.
    pub len: u32,
    /// [`STREAM`] or something we do not offer.
    pub kind: u16,
    /// Number of an [`Operation`].
    pub operation: u16,
    /// Flags of a shutdown.
    pub flags: u32,
    /// Size of the sender's receive buffer for this stream.
    pub buf_alloc: u32,
    /// Bytes that have left that buffer since the stream was opened, modulo 2^32.
    pub fwd_cnt: u32,
}

impl Header {
    /// Decode.
    pub fn from_bytes(bytes: &[u8; HEADER]) -> Self {
        let mut rest = bytes.as_slice();
        Header {
            src_cid: u64::from_le_bytes(take(&mut rest)),
            dst_cid: u64::from_le_bytes(take(&mut rest)),
            src_port: u32::from_le_bytes(take(&mut rest)),
            dst_port: u32::from_le_bytes(take(&mut rest)),
            len: u32::from_le_bytes(take(&mut rest)),
            kind: u16::from_le_bytes(take(&mut rest)),
            operation: u16::from_le_bytes(take(&mut rest)),
            flags: u32::from_le_bytes(take(&mut rest)),
            buf_alloc: u32::from_le_bytes(take(&mut rest)),
            fwd_cnt: u32::from_le_bytes(take(&mut rest)),
        }
    }

    /// Encode.
    pub fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let mut rest = bytes.as_mut_slice();
        put(&mut rest, &self.src_cid.to_le_bytes());
        put(&mut rest, &self.dst_cid.to_le_bytes());
        put(&mut rest, &self.src_port.to_le_bytes());
        put(&mut rest, &self.dst_port.to_le_bytes());
        put(&mut rest, &self.len.to_le_bytes());
        put(&mut rest, &self.kind.to_le_bytes());
        put(&mut rest, &self.operation.to_le_bytes());
        put(&mut rest, &self.flags.to_le_bytes());
        put(&mut rest, &self.buf_alloc.to_le_bytes());
        put(&mut rest, &self.fwd_cnt.to_le_bytes());
        bytes
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let mut field = [0; N];
    // The fields add up to HEADER, so there is always enough left.
    if let Some((head, tail)) = rest.split_first_chunk() {
        field = *head;
        *rest = tail;
    }
    field
}

fn put(rest: &mut &mut [u8], field: &[u8]) {
    if let Some((head, tail)) = std::mem::take(rest).split_at_mut_checked(field.len()) {
        head.copy_from_slice(field);
        *rest = tail;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_specification_puts_them() {
        let header = Header {
            src_cid: 0x0101,
            dst_cid: 0x0202,
            src_port: 0x0303,
            dst_port: 0x0404,
            len: 0x0505,
            kind: 0x0606,
            operation: 0x0707,
            flags: 0x0808,
            buf_alloc: 0x0909,
            fwd_cnt: 0x0a0a,
        };
        let bytes = header.to_bytes();
        let offsets = [0, 8, 16, 20, 24, 28, 30, 32, 36, 40];
        for (number, offset) in offsets.into_iter().enumerate() {
            assert_eq!(bytes[offset..offset + 2], [number as u8 + 1; 2]);
        }
        assert_eq!(Header::from_bytes(&bytes), header);
    }

    #[test]
    fn operations_have_the_numbers_of_the_specification() {
        for number in 1..=7 {
            assert_eq!(Operation::new(number).unwrap() as u16, number);
        }
        assert_eq!(Operation::new(0), None);
        assert_eq!(Operation::new(8), None);
    }
}
