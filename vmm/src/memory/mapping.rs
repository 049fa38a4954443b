//! The one place that changes how guest memory is mapped.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use vm_memory::MmapRegion;

/// Replace `length` bytes of `region` from `at` on by a private mapping of `file` from `offset` on.
/// Writes to it stay in this process. Errors: the range is not in the region, or `mmap(2)` fails.
pub fn map_over(
    region: &MmapRegion,
    at: u64,
    length: u64,
    file: &File,
    offset: u64,
) -> io::Result<()> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    if at
        .checked_add(length)
        .is_none_or(|end| end > region.size() as u64)
    {
        return Err(invalid());
    }
    let offset = libc::off_t::try_from(offset).map_err(|_| invalid())?;
    // SAFETY: the range was checked to lie in a mapping that `region` owns and unmaps as a whole,
    // so MAP_FIXED replaces nothing else. Guest memory is only ever accessed as volatile bytes, and
    // any bytes are valid in it, so its change of content invalidates no reference.
    let address = unsafe {
        libc::mmap(
            region.as_ptr().add(at as usize).cast(),
            length as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_NORESERVE,
            file.as_raw_fd(),
            offset,
        )
    };
    if address == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Keep guest memory out of core dumps. It also keeps the kernel from joining it with a neighbouring
/// mapping of the VMM's own, so that what is counted of it is the guest's.
pub fn exclude_from_dumps(region: &MmapRegion) -> io::Result<()> {
    let advice = rustix::mm::Advice::LinuxDontDump;
    // SAFETY: the range is the whole of the mapping that `region` owns, and this advice leaves its
    // content alone.
    unsafe { rustix::mm::madvise(region.as_ptr().cast(), region.size(), advice) }?;
    Ok(())
}

/// Keep the kernel from backing guest memory with huge pages.
pub fn forbid_huge_pages(region: &MmapRegion) -> io::Result<()> {
    let advice = rustix::mm::Advice::LinuxNoHugepage;
    // SAFETY: as above.
    unsafe { rustix::mm::madvise(region.as_ptr().cast(), region.size(), advice) }?;
    Ok(())
}

/// Make `length` bytes of `region` from `at` on pages of this process' own, as a write to each of
/// them would. Errors: the range is not in the region, or `madvise(2)` fails.
pub fn populate_for_writing(region: &MmapRegion, at: u64, length: u64) -> io::Result<()> {
    if at
        .checked_add(length)
        .is_none_or(|end| end > region.size() as u64)
    {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let advice = rustix::mm::Advice::LinuxPopulateWrite;
    // SAFETY: the range was checked to lie in the mapping that `region` owns, and this advice leaves
    // its content alone.
    unsafe {
        let start = region.as_ptr().add(at as usize);
        rustix::mm::madvise(start.cast(), length as usize, advice)
    }?;
    Ok(())
}
