//! Digests of files, and what a file's metadata says about whether it is still the same one.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest; as text, 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

/// Text that is no [`Digest`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a SHA-256 digest in lower-case hexadecimal")]
pub struct InvalidDigest;

impl Digest {
    /// The digest of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The digest of a whole file, as `sha256sum` gives it.
    pub fn of_file(file: &File) -> io::Result<Self> {
        let mut hash = Sha256::new();
        let mut buffer = vec![0; CHUNK];
        let mut offset = 0;
        loop {
            let length = read_at(file, &mut buffer, offset)?;
            if length == 0 {
                return Ok(Self(hash.finalize().into()));
            }
            hash.update(&buffer[..length]);
            offset += length as u64;
        }
    }

    /// The digest of a sparse file's content, the same however the file system stores it: the
    /// file's size, then offset and bytes of each 4 KiB page that is not all zero. Holes are
    /// skipped, not read.
    pub fn of_sparse_file(file: &File) -> io::Result<Self> {
        let size = file.metadata()?.len();
        let mut hash = Sha256::new();
        hash.update(size.to_le_bytes());
        let mut buffer = vec![0; CHUNK];
        let mut position = 0;
        while let Some(extent) = next_data(file, position, size)? {
            // Whole pages, so that the result does not depend on the granularity of extents.
            let mut offset = extent.start - extent.start % PAGE;
            offset = offset.max(position);
            let end = extent.end.div_ceil(PAGE).saturating_mul(PAGE).min(size);
            while offset < end {
                let want = CHUNK.min((end - offset) as usize);
                let length = read_at(file, &mut buffer[..want], offset)?;
                if length != want {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                for page in buffer[..length].chunks(PAGE as usize) {
                    if page.iter().any(|byte| *byte != 0) {
                        hash.update(offset.to_le_bytes());
                        hash.update(page);
                    }
                    offset += page.len() as u64;
                }
            }
            position = end;
        }
        Ok(Self(hash.finalize().into()))
    }

    /// The first 12 digits, enough for people.
    pub fn short(self) -> String {
        let mut text = self.to_string();
        text.truncate(12);
        text
    }
}

/// Bytes read at once; a multiple of [`PAGE`].
const CHUNK: usize = 1 << 20;
const PAGE: u64 = 4096;

/// Fill `buffer` from `offset` on; short only at the end of the file.
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(length) => done += length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// The next range of `file` from `position` on that is no hole, or `None`.
fn next_data(file: &File, position: u64, size: u64) -> io::Result<Option<std::ops::Range<u64>>> {
    use nix::errno::Errno;
    use nix::unistd::{Whence, lseek};
    if position >= size {
        return Ok(None);
    }
    let seek = |offset: u64, whence| -> Result<u64, Errno> {
        let offset = i64::try_from(offset).map_err(|_| Errno::EOVERFLOW)?;
        Ok(lseek(file, offset, whence)?.unsigned_abs())
    };
    let start = match seek(position, Whence::SeekData) {
        Ok(start) => start,
        Err(Errno::ENXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let end = seek(start, Whence::SeekHole)?.min(size);
    Ok((start < end).then_some(start..end))
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl std::str::FromStr for Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, InvalidDigest> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(InvalidDigest),
        };
        let mut bytes = [0; 32];
        if text.len() != 2 * bytes.len() {
            return Err(InvalidDigest);
        }
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            *byte = digit(digits[0])? << 4 | digit(digits[1])?;
        }
        Ok(Self(bytes))
    }
}

impl TryFrom<String> for Digest {
    type Error = InvalidDigest;

    fn try_from(text: String) -> Result<Self, InvalidDigest> {
        text.parse()
    }
}

/// What tells a file from another, or from itself after a change, without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
    size: u64,
    mtime_ns: i64,
    ctime_ns: i64,
}

impl FileIdentity {
    /// The identity of an open file.
    pub fn of(file: &File) -> io::Result<Self> {
        Ok(Self::from_metadata(&file.metadata()?))
    }

    /// The identity that `metadata` shows.
    pub fn from_metadata(metadata: &std::fs::Metadata) -> Self {
        let ns = |seconds: i64, ns: i64| seconds.wrapping_mul(1_000_000_000).wrapping_add(ns);
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            mtime_ns: ns(metadata.mtime(), metadata.mtime_nsec()),
            ctime_ns: ns(metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Time of the last change of content, in nanoseconds since 1970.
    pub fn mtime_ns(&self) -> i64 {
        self.mtime_ns
    }

    /// Whether the file has been changed so recently that another change could leave the same
    /// times behind (they are as coarse as the kernel's tick, or a second on old file systems).
    pub fn is_fresh(&self, now_ns: i64) -> bool {
        let age = now_ns.saturating_sub(self.mtime_ns.max(self.ctime_ns));
        (0..2_000_000_000).contains(&age)
    }
}

/// A descriptor's path in procfs, to open what it refers to anew with other flags.
pub(super) fn descriptor_path(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file_with(size: u64, pieces: &[(u64, &[u8])]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        for (offset, bytes) in pieces {
            file.write_all_at(bytes, *offset).unwrap();
        }
        file
    }

    #[test]
    fn test_text_form_round_trips_and_other_text_is_refused() {
        let digest = Digest::of(b"abc");
        let text = digest.to_string();
        assert_eq!(
            text,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(text.parse(), Ok(digest));
        for bad in [
            "",
            &text[1..],
            &text.to_uppercase(),
            &format!("{}g", &text[1..]),
        ] {
            assert_eq!(bad.parse::<Digest>(), Err(InvalidDigest), "{bad}");
        }
    }

    #[test]
    fn test_plain_digest_of_file_is_that_of_its_bytes() {
        let mut file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..CHUNK as u32 + 77).map(|i| i as u8).collect();
        file.write_all(&bytes).unwrap();
        assert_eq!(Digest::of_file(&file).unwrap(), Digest::of(&bytes));
    }

    #[test]
    fn test_sparse_digest_does_not_depend_on_how_zeros_are_stored() {
        let size = 16 << 20;
        let sparse = file_with(size, &[(5000, b"hello"), (8 << 20, &[7; 9000])]);
        let dense = tempfile::tempfile().unwrap();
        dense.write_all_at(&vec![0; size as usize], 0).unwrap();
        dense.write_all_at(b"hello", 5000).unwrap();
        dense.write_all_at(&[7; 9000], 8 << 20).unwrap();
        assert_eq!(
            Digest::of_sparse_file(&sparse).unwrap(),
            Digest::of_sparse_file(&dense).unwrap()
        );
    }

    #[test]
    fn test_sparse_digest_sees_size_place_and_content() {
        let reference = Digest::of_sparse_file(&file_with(1 << 20, &[(8192, b"x")])).unwrap();
        for other in [
            file_with((1 << 20) + 4096, &[(8192, b"x")]),
            file_with(1 << 20, &[(8193, b"x")]),
            file_with(1 << 20, &[(12288, b"x")]),
            file_with(1 << 20, &[(8192, b"y")]),
            file_with(1 << 20, &[]),
        ] {
            assert_ne!(Digest::of_sparse_file(&other).unwrap(), reference);
        }
    }

    #[test]
    fn test_sparse_digest_of_an_odd_size() {
        let a = Digest::of_sparse_file(&file_with(10_001, &[(10_000, b"x")])).unwrap();
        let b = Digest::of_sparse_file(&file_with(10_001, &[(10_000, b"y")])).unwrap();
        assert_ne!(a, b);
        Digest::of_sparse_file(&file_with(0, &[])).unwrap();
    }

    #[test]
    fn test_identity_changes_with_content_and_fresh_files_are_known_as_such() {
        let file = file_with(10, &[]);
        let before = FileIdentity::of(&file).unwrap();
        assert!(before.is_fresh(before.mtime_ns + 1));
        assert!(!before.is_fresh(before.mtime_ns + 3_000_000_000));
        file.set_len(11).unwrap();
        assert_ne!(FileIdentity::of(&file).unwrap(), before);
    }
}
