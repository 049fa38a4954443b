//! Guest RAM: made empty for a boot, made from a template for a restore, written out for a snapshot.
//!
//! The memory file of a snapshot is a flat image: RAM below the 32-bit hole, then RAM above it. It
//! is sparse, and the state file lists its data as [`Extent`]s. A restore maps those extents
//! privately over anonymous memory and leaves the rest anonymous: mapping a hole of the file would
//! allocate page cache for every page that a guest writes there. Nothing is read from the file; the
//! guest's first touch of a page finds it in the page cache, which all guests of a template share.

mod extent;
mod live;
mod mapping;
mod pluggable;
mod population;
mod reclaim;
mod recording;
#[cfg(test)]
mod tests;
mod userfault;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};

use thiserror::Error;
use vm_memory::mmap::{MmapRegionBuilder, MmapRegionError};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use crate::layout::{HIGH_RAM_START, LOW_RAM_END, PAGE_SIZE};
pub use extent::{Extent, InvalidExtents, validate as validate_extents};
pub use live::{LiveMemory, MemoryView};
#[cfg(test)]
pub(crate) use pluggable::tests::pluggable as test_pluggable;
pub use pluggable::{BLOCK_SIZE, MemorySlots, PluggableMemory, PluggableRange};
pub use population::Population;
pub use reclaim::give_back;
pub use recording::{Recording, RecordingError};

/// Holes up to this size between two extents of data become part of one extent: a mapping costs
/// about as much as the page cache of a few pages that nobody writes.
const MERGE_GAP: u64 = 64 * PAGE_SIZE;

/// Bytes that a snapshot looks at at once.
const CHUNK: usize = 1 << 20;

/// Why guest memory could not be made or written.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The kernel refused a mapping.
    #[error("mapping {0} bytes of guest memory: {1}")]
    Map(u64, io::Error),
    /// vm-memory refused a region.
    #[error("mapping guest memory: {0}")]
    Region(#[from] MmapRegionError),
    /// The memory file does not have the size of the machine's memory.
    #[error("the template's memory file has {found} bytes instead of {expected}")]
    FileSize {
        /// Size of the file.
        found: u64,
        /// Memory of the machine.
        expected: u64,
    },
    /// The memory image is not a plain file.
    #[error("the template's memory is not a regular file")]
    NotAFile,
    /// Extents that do not describe this memory.
    #[error(transparent)]
    Extents(#[from] InvalidExtents),
    /// Reading or writing an image.
    #[error("{doing}: {source}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// An access of the VMM's own that is not in guest memory.
    #[error("guest memory: {0}")]
    Access(#[from] vm_memory::GuestMemoryError),
}

fn system<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> MemoryError {
    move |source| MemoryError::System {
        doing,
        source: source.into(),
    }
}

/// One contiguous piece of guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// First guest-physical address.
    pub guest: u64,
    /// Where it is in a memory file.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// The pieces of a machine with `size` bytes of RAM, in the order of their addresses.
pub fn regions(size: u64) -> Vec<Region> {
    let low = size.min(LOW_RAM_END);
    let mut regions = vec![Region {
        guest: 0,
        offset: 0,
        size: low,
    }];
    if size > low {
        regions.push(Region {
            guest: HIGH_RAM_START,
            offset: low,
            size: size - low,
        });
    }
    regions
}

/// Where the bytes of a guest's RAM come from.
enum Backing {
    /// A memory file of its own, whose holes are the pages that the guest has never touched.
    Own(File),
    /// Anonymous, over parts of which a template is mapped.
    Template,
}

/// The RAM of one guest.
pub struct GuestRam {
    memory: GuestMemoryMmap,
    live: LiveMemory,
    size: u64,
    backing: Backing,
}

impl GuestRam {
    /// Empty RAM of `size` bytes for a machine that boots. It lies in a memory file of its own, so
    /// that a snapshot finds the pages in use without touching the others.
    pub fn new(size: u64) -> Result<Self, MemoryError> {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let descriptor: OwnedFd = rustix::fs::memfd_create("guest-ram", flags)
            .map_err(system("making a memory file for the guest"))?;
        let file = File::from(descriptor);
        file.set_len(size)
            .map_err(system("sizing the guest's memory file"))?;
        let mut mapped = Vec::new();
        for region in regions(size) {
            let clone = file
                .try_clone()
                .map_err(system("duplicating a memory file"))?;
            let mapping = MmapRegionBuilder::new(region.size as usize)
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
                .with_file_offset(FileOffset::new(clone, region.offset))
                .build()?;
            mapped.push(guest_region(mapping, region)?);
        }
        let memory = collection(mapped)?;
        Ok(Self {
            live: LiveMemory::new(memory.clone()),
            memory,
            size,
            backing: Backing::Own(file),
        })
    }

    /// RAM of `size` bytes with the content that a snapshot has in `file`, of which `extents` are
    /// data. The file is mapped, not read, and is never written.
    pub fn restore(size: u64, file: &File, extents: &[Extent]) -> Result<Self, MemoryError> {
        let metadata = file
            .metadata()
            .map_err(system("looking at the memory file"))?;
        if !metadata.is_file() {
            return Err(MemoryError::NotAFile);
        }
        // A guest's access past the end of a mapped file would kill the VMM with SIGBUS.
        if metadata.size() != size {
            return Err(MemoryError::FileSize {
                found: metadata.size(),
                expected: size,
            });
        }
        extent::validate(extents, size)?;
        let mut mapped = Vec::new();
        for region in regions(size) {
            let mapping = MmapRegionBuilder::new(region.size as usize)
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_mmap_flags(libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_PRIVATE)
                .build()?;
            for extent in extents.iter().filter_map(|extent| extent.within(&region)) {
                let at = extent.offset - region.offset;
                mapping::map_over(&mapping, at, extent.length, file, extent.offset)
                    .map_err(|error| MemoryError::Map(extent.length, error))?;
            }
            mapped.push(guest_region(mapping, region)?);
        }
        let memory = collection(mapped)?;
        Ok(Self {
            live: LiveMemory::new(memory.clone()),
            memory,
            size,
            backing: Backing::Template,
        })
    }

    /// The RAM. Clones share it.
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// The memory as devices use it: the RAM, and what is plugged beside it.
    pub fn live(&self) -> &LiveMemory {
        &self.live
    }

    /// Bytes of RAM.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Write every page that is not all zeros to `file`, which is empty and becomes a sparse file of
    /// this RAM's size. Nothing may write guest memory meanwhile. Returns what is data in it.
    pub fn save(&self, file: &File) -> Result<Vec<Extent>, MemoryError> {
        file.set_len(0)
            .map_err(system("emptying the memory file"))?;
        file.set_len(self.size)
            .map_err(system("sizing the memory file"))?;
        let mut extents = Vec::new();
        let mut buffer = vec![0; CHUNK];
        for region in regions(self.size) {
            for used in self.used(region)? {
                let mut at = used.offset;
                while at < used.end() {
                    let length = (used.end() - at).min(CHUNK as u64);
                    let bytes = &mut buffer[..length as usize];
                    let guest = region.guest + (at - region.offset);
                    self.memory.read_slice(bytes, GuestAddress(guest))?;
                    write_data(file, bytes, at, &mut extents)?;
                    at += length;
                }
            }
        }
        Ok(extent::merge(&extents, MERGE_GAP))
    }

    /// The parts of `region` that may hold something else than zeros.
    fn used(&self, region: Region) -> Result<Vec<Extent>, MemoryError> {
        let whole = Extent {
            offset: region.offset,
            length: region.size,
        };
        match &self.backing {
            Backing::Own(file) => extent::data(file, whole).map_err(system("seeking guest memory")),
            Backing::Template => Ok(vec![whole]),
        }
    }
}

/// Write the pages of `bytes` that are not all zeros to `file` at `at`, runs of them at once, and
/// note them in `extents`.
fn write_data(
    file: &File,
    bytes: &[u8],
    at: u64,
    extents: &mut Vec<Extent>,
) -> Result<(), MemoryError> {
    let page = PAGE_SIZE as usize;
    let zero = |page: &[u8]| page.iter().all(|byte| *byte == 0);
    let mut pages = bytes.chunks(page).enumerate().peekable();
    while let Some((first, content)) = pages.next() {
        if zero(content) {
            continue;
        }
        let mut end = first + 1;
        while pages.next_if(|(_, content)| !zero(content)).is_some() {
            end += 1;
        }
        let run = &bytes[first * page..(end * page).min(bytes.len())];
        let offset = at + (first * page) as u64;
        file.write_all_at(run, offset)
            .map_err(system("writing guest memory"))?;
        extents.push(Extent {
            offset,
            length: run.len() as u64,
        });
    }
    Ok(())
}

fn guest_region(
    mapping: vm_memory::MmapRegion,
    region: Region,
) -> Result<GuestRegionMmap, MemoryError> {
    mapping::exclude_from_dumps(&mapping).map_err(system("advising on guest memory"))?;
    GuestRegionMmap::new(mapping, GuestAddress(region.guest))
        .ok_or_else(|| MemoryError::Map(region.size, io::Error::from(io::ErrorKind::InvalidInput)))
}

fn collection(regions: Vec<GuestRegionMmap>) -> Result<GuestMemoryMmap, MemoryError> {
    GuestMemoryMmap::from_regions(regions).map_err(|error| MemoryError::System {
        doing: "collecting guest memory",
        source: io::Error::other(error),
    })
}
