//! KVM's counters of a vCPU (`KVM_GET_STATS_FD`, Documentation/virt/kvm/api.rst 4.133): a file with a
//! header, descriptors that name the counters, and the counters.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

use kvm_ioctls::VcpuFd;

use crate::kvm::{KvmError, doing};

/// `_IO(KVMIO, 0xce)`.
const KVM_GET_STATS_FD: libc::c_ulong = 0xaece;

/// Size of `struct kvm_stats_header`.
const HEADER_SIZE: usize = 24;
/// Size of `struct kvm_stats_desc` without the name.
const DESCRIPTOR_SIZE: usize = 16;
/// `KVM_STATS_TYPE_MASK`; the type of a counter that only grows is 0.
const TYPE_MASK: u32 = 0xf;
const TYPE_CUMULATIVE: u32 = 0;
/// More than this is not a statistics file.
const MAX_DESCRIPTORS: usize = 1024;
const MAX_NAME: usize = 256;

/// The counters of one vCPU.
pub struct VcpuCounters(File);

impl VcpuCounters {
    #[allow(unsafe_code)]
    pub(super) fn of(fd: &VcpuFd) -> Result<Self, KvmError> {
        // SAFETY: the call takes no argument and changes no memory; its result is checked.
        let descriptor = unsafe { libc::ioctl(fd.as_raw_fd(), KVM_GET_STATS_FD) };
        if descriptor < 0 {
            return Err(doing("opening a vCPU's counters")(
                io::Error::last_os_error(),
            ));
        }
        // SAFETY: a new descriptor that nobody else owns.
        Ok(Self(unsafe { File::from_raw_fd(descriptor) }))
    }

    /// All cumulative counters with their names.
    pub fn read(&self) -> io::Result<Vec<(String, u64)>> {
        let mut header = [0; HEADER_SIZE];
        self.0.read_exact_at(&mut header, 0)?;
        let field = |index: usize| word(&header, index * 4) as usize;
        let (name_size, count) = (field(1), field(2));
        let (descriptors_at, data_at) = (field(4), field(5));
        if count > MAX_DESCRIPTORS || name_size > MAX_NAME {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        let stride = DESCRIPTOR_SIZE + name_size;
        let mut descriptors = vec![0; stride * count];
        self.0
            .read_exact_at(&mut descriptors, descriptors_at as u64)?;
        descriptors
            .chunks_exact(stride)
            .filter(|descriptor| {
                let values = u16::from_le_bytes([descriptor[6], descriptor[7]]);
                word(descriptor, 0) & TYPE_MASK == TYPE_CUMULATIVE && values == 1
            })
            .map(|descriptor| {
                let name = descriptor[DESCRIPTOR_SIZE..]
                    .split(|byte| *byte == 0)
                    .next();
                let name = String::from_utf8_lossy(name.unwrap_or_default()).into_owned();
                let mut value = [0; 8];
                let at = data_at as u64 + u64::from(word(descriptor, 8));
                self.0.read_exact_at(&mut value, at)?;
                Ok((name, u64::from_le_bytes(value)))
            })
            .collect()
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}
