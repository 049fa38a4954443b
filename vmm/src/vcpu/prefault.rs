//! `KVM_PRE_FAULT_MEMORY` (Documentation/virt/kvm/api.rst 4.143, Linux 6.11), which kvm-ioctls lacks:
//! KVM maps pages for the guest without the exit that an access of the guest's would be.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;

use kvm_bindings::kvm_pre_fault_memory;
use kvm_ioctls::VcpuFd;

/// `_IOWR(KVMIO, 0xd5, struct kvm_pre_fault_memory)`.
const KVM_PRE_FAULT_MEMORY: libc::c_ulong = 0xc040_aed5;

/// Map guest memory at `ranges` (address and length, in whole pages), as a read by the guest would.
/// Fails where KVM cannot: before Linux 6.11, and without two-dimensional paging.
pub fn prefault(vcpu: &VcpuFd, ranges: &[(u64, u64)]) -> io::Result<()> {
    for (address, length) in ranges {
        let mut range = kvm_pre_fault_memory {
            gpa: *address,
            size: *length,
            ..Default::default()
        };
        // KVM writes back what is left when it has done a part.
        while range.size > 0 {
            let before = range.size;
            // SAFETY: the argument is the structure that the request takes, alive and exclusive. What
            // is mapped is what the guest has access to in any case.
            let result =
                unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_PRE_FAULT_MEMORY, &raw mut range) };
            if result < 0 {
                return Err(io::Error::last_os_error());
            }
            if range.size >= before {
                return Err(io::Error::from(io::ErrorKind::InvalidData));
            }
        }
    }
    Ok(())
}
