//! The header of a stdio stream and the name under which requests refer to it.

use thiserror::Error;

/// The first bytes of a connection to [`crate::STREAM_PORT`]: `b"thaw"`, version, three zero bytes,
/// then the stream id, little endian. 16 bytes in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamHeader {
    /// The id by which a Create or Exec request names this stream; never zero.
    pub id: u64,
}

/// Bytes that are no [`StreamHeader`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("not the header of a stdio stream")]
pub struct InvalidHeader;

const MAGIC: [u8; 8] = [b't', b'h', b'a', b'w', 1, 0, 0, 0];

impl StreamHeader {
    /// Length on the wire.
    pub const LENGTH: usize = 16;

    /// As sent.
    pub fn encode(self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..].copy_from_slice(&self.id.to_le_bytes());
        bytes
    }

    /// As received.
    pub fn decode(bytes: [u8; Self::LENGTH]) -> Result<Self, InvalidHeader> {
        let (magic, id) = bytes.split_at(8);
        let id = u64::from_le_bytes(id.try_into().map_err(|_| InvalidHeader)?);
        if magic != MAGIC || id == 0 {
            return Err(InvalidHeader);
        }
        Ok(Self { id })
    }
}

/// How a request names stream `id`.
pub fn stream_uri(id: u64) -> String {
    format!("stream://{id}")
}

/// The stream that a request names; `None` for the empty string, which is no stream.
pub fn parse_stream_uri(uri: &str) -> Result<Option<u64>, InvalidHeader> {
    if uri.is_empty() {
        return Ok(None);
    }
    let id = uri.strip_prefix("stream://").and_then(|id| id.parse().ok());
    id.filter(|id| *id != 0).map(Some).ok_or(InvalidHeader)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_header_round_trip() {
        let header = StreamHeader {
            id: 0x0123_4567_89ab_cdef,
        };
        assert_eq!(StreamHeader::decode(header.encode()), Ok(header));
    }

    #[test]
    fn test_header_invalid_is_refused() {
        let good = StreamHeader { id: 7 }.encode();
        for position in 0..8 {
            let mut bad = good;
            bad[position] ^= 1;
            assert_eq!(StreamHeader::decode(bad), Err(InvalidHeader));
        }
        assert_eq!(
            StreamHeader::decode(StreamHeader { id: 0 }.encode()),
            Err(InvalidHeader)
        );
    }

    #[test]
    fn test_stream_uri() {
        assert_eq!(parse_stream_uri(&stream_uri(9)), Ok(Some(9)));
        assert_eq!(parse_stream_uri(""), Ok(None));
        for bad in [
            "stream://",
            "stream://0",
            "stream://-1",
            "/run/fifo",
            "stream://1x",
        ] {
            assert_eq!(parse_stream_uri(bad), Err(InvalidHeader), "{bad}");
        }
    }
}
