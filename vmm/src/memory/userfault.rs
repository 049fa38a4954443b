//! `userfaultfd(2)`, for the one thing that is asked of it: that the kernel maps no page of guest
//! memory but the one that is touched.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::mm::UserfaultfdFlags;
use vm_memory::MmapRegion;

/// `UFFD_USER_MODE_ONLY`: allowed to everybody, since it gives no power over the kernel's accesses.
const USER_MODE_ONLY: u32 = 1;
/// `UFFD_API`.
const API: u64 = 0xaa;
/// `UFFD_FEATURE_WP_ASYNC` (Linux 6.7): the kernel resolves faults on protected pages by itself, and
/// any kind of mapping may be registered.
const FEATURE_WP_ASYNC: u64 = 1 << 15;
/// `UFFDIO_REGISTER_MODE_WP`.
const MODE_WRITE_PROTECT: u64 = 1 << 1;
/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
/// `_IOWR(0xaa, 0x00, struct uffdio_register)`.
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;

/// `struct uffdio_api`.
#[repr(C)]
struct ApiRequest {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct RegisterRequest {
    start: u64,
    length: u64,
    mode: u64,
    ioctls: u64,
}

/// Mappings whose pages are mapped one by one, as long as the value lives.
pub struct PagewiseMapping(OwnedFd);

impl PagewiseMapping {
    /// One that no mapping belongs to yet.
    pub fn new() -> io::Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY);
        // SAFETY: the descriptor does nothing until mappings are registered with it, see `add`.
        let descriptor = unsafe { rustix::mm::userfaultfd(flags) }?;
        let mut request = ApiRequest {
            api: API,
            features: FEATURE_WP_ASYNC,
            ioctls: 0,
        };
        // SAFETY: the argument is the structure that the request takes, alive and exclusive.
        check(unsafe { libc::ioctl(descriptor.as_raw_fd(), UFFDIO_API, &raw mut request) })?;
        Ok(Self(descriptor))
    }

    /// Add all of `region`. It is registered for write protection, which keeps the kernel from
    /// mapping pages around a touched one (mm/memory.c, `should_fault_around`), and nothing in it is
    /// ever protected, so that no fault waits for an answer.
    pub fn add(&self, region: &MmapRegion) -> io::Result<()> {
        let mut request = RegisterRequest {
            start: region.as_ptr() as u64,
            length: region.size() as u64,
            mode: MODE_WRITE_PROTECT,
            ioctls: 0,
        };
        // SAFETY: as above. The range is a mapping that `region` owns; its content and protection
        // stay as they are.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_REGISTER, &raw mut request) })
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
