//! The one place that changes how guest memory is mapped.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use vm_memory::MmapRegion;

use super::MemoryError;

/// Replace `length` bytes of `region` from `at` on by a private mapping of `file` from `offset` on.
/// Writes to it stay in this process. Errors: the range is not in the region, or `mmap(2)` fails.
pub fn map_over(
    region: &MmapRegion,
    at: u64,
    length: u64,
    file: &File,
    offset: u64,
) -> io::Result<()> {
    check(region, at, length)?;
    let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
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
    check(region, at, length)?;
    let advice = rustix::mm::Advice::LinuxPopulateWrite;
    // SAFETY: the range was checked to lie in the mapping that `region` owns, and this advice leaves
    // its content alone.
    unsafe {
        let start = region.as_ptr().add(at as usize);
        rustix::mm::madvise(start.cast(), length as usize, advice)
    }?;
    Ok(())
}

/// Let this process read and write `length` bytes of `region` from `at` on. Errors: the range is not in
/// the region, or `mprotect(2)` fails.
pub fn allow_access(region: &MmapRegion, at: u64, length: u64) -> io::Result<()> {
    check(region, at, length)?;
    let access = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
    // SAFETY: the range was checked to lie in the mapping that `region` owns. More access invalidates
    // nothing.
    unsafe {
        let start = region.as_ptr().add(at as usize);
        rustix::mm::mprotect(start.cast(), length as usize, access)
    }?;
    Ok(())
}

/// `length` bytes of `region` from `at` on, which [`allow_access`] has made accessible, as a region that
/// does not own its mapping: it must not outlive `region`.
pub fn part(region: &MmapRegion, at: u64, length: u64) -> Result<MmapRegion, MemoryError> {
    check(region, at, length).map_err(|error| MemoryError::Map(length, error))?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the range was checked to lie in a live mapping, and is accessible. Those who hold the
    // part hold `region` too: see `LiveMemory`.
    let part = unsafe {
        let start = region.as_ptr().add(at as usize);
        MmapRegion::build_raw(start, length as usize, access, region.flags())
    };
    Ok(part?)
}

/// Give `length` bytes of `region` from `at` on, in whole pages, back to the host. What is in them
/// afterwards is what is behind them: zeros, or the template's content. Errors: the range is not in the
/// region, or `madvise(2)` fails.
pub fn discard(region: &MmapRegion, at: u64, length: u64) -> io::Result<()> {
    check(region, at, length)?;
    // A memory file of the machine's own is what holds its pages.
    let advice = match region.file_offset() {
        Some(_) => rustix::mm::Advice::LinuxRemove,
        None => rustix::mm::Advice::LinuxDontNeed,
    };
    // SAFETY: the range was checked to lie in the mapping that `region` owns. Guest memory is only ever
    // accessed as volatile bytes, and any bytes are valid in it.
    unsafe {
        let start = region.as_ptr().add(at as usize);
        rustix::mm::madvise(start.cast(), length as usize, advice)
    }?;
    Ok(())
}

/// Refuse a range that is not in `region`.
fn check(region: &MmapRegion, at: u64, length: u64) -> io::Result<()> {
    match at.checked_add(length) {
        Some(end) if end <= region.size() as u64 => Ok(()),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}
