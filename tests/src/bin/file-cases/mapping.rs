//! Memory that is a file.

use std::fs::File;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};

/// A file mapped from its start, shared, for reading and writing.
pub struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

impl Mapping {
    /// Maps `length` bytes of `file`, which must have as many: an access past its end is a signal.
    pub fn new(file: &File, length: usize) -> rustix::io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the place, so nothing else is mapped over.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                length,
                protection,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { start, length })
    }

    /// Byte `offset`.
    pub fn get(&self, offset: usize) -> u8 {
        assert!(offset < self.length);
        // SAFETY: inside of the mapping, which lives as long as `self`. Volatile, as others change it.
        unsafe { self.start.add(offset).read_volatile() }
    }

    /// Sets byte `offset`.
    pub fn set(&self, offset: usize, value: u8) {
        assert!(offset < self.length);
        // SAFETY: as in `get`.
        unsafe { self.start.add(offset).write_volatile(value) }
    }

    /// Has what was set written to the file.
    pub fn sync(&self) -> rustix::io::Result<()> {
        // SAFETY: the range is that of the mapping.
        unsafe { msync(self.start.as_ptr().cast(), self.length, MsyncFlags::SYNC) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is that of the mapping, of which nothing is left after this.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}
