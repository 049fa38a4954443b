//! Guest memory as the file server's library wants it.
//!
//! The library's reader and writer work on memory whose writes are tracked in a bitmap of one
//! particular type, which ours are not. A [`View`] describes the same mappings once more with a
//! bitmap of that type, which tracks nothing.

use vhost_user_backend::bitmap::BitmapMmapRegion;
use vm_memory::{GuestMemory, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion};

use crate::memory::MemoryView;
use crate::virtio::DeviceError;

/// Memory of the type that the library works on.
pub type LibraryMemory = GuestMemoryMmap<BitmapMmapRegion>;

/// The guest's memory, seen a second time.
pub struct View {
    view: LibraryMemory,
    /// Keeps the mappings, which the view points into but does not own.
    memory: MemoryView,
}

impl View {
    /// A view of `memory`.
    pub fn new(memory: MemoryView) -> Result<Self, DeviceError> {
        let view = describe(&memory)?;
        Ok(Self { view, memory })
    }

    /// See the memory as it is now.
    pub fn refresh(&mut self) -> Result<(), DeviceError> {
        if self.memory.is_stale() {
            self.memory.refresh();
            self.view = describe(&self.memory)?;
        }
        Ok(())
    }

    /// The memory as the library takes it.
    pub fn library(&self) -> &LibraryMemory {
        &self.view
    }

    /// The memory itself.
    pub fn memory(&self) -> &MemoryView {
        &self.memory
    }
}

/// `memory` in the library's type. Whoever has it has the memory too.
fn describe(memory: &GuestMemoryMmap) -> Result<LibraryMemory, DeviceError> {
    let failed = |error: &dyn std::fmt::Display| DeviceError::System {
        doing: "describe the guest's memory to the file server",
        source: std::io::Error::other(error.to_string()),
    };
    let regions = memory
        .iter()
        .map(|region| {
            // SAFETY: pointer, size, protection and flags are those of a live mapping. It stays
            // where it is for as long as the view exists, because `View` holds the memory too
            // and drops it last; the region made here does not unmap it.
            let mapping = unsafe {
                MmapRegion::build_raw(
                    region.as_ptr(),
                    region.size(),
                    region.prot(),
                    region.flags(),
                )
            }
            .map_err(|error| failed(&error))?;
            GuestRegionMmap::new(mapping, region.start_addr())
                .ok_or_else(|| failed(&"a region ends beyond the address space"))
        })
        .collect::<Result<Vec<_>, _>>()?;
    GuestMemoryMmap::from_regions(regions).map_err(|error| failed(&error))
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;

    #[test]
    fn test_both_views_are_the_same_bytes() {
        let high = GuestAddress(0x10_0000);
        let memory =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x2000), (high, 0x1000)]).unwrap();
        let view = View::new(memory.clone().into()).unwrap();
        memory.write_obj(0x1234_5678u32, high).unwrap();
        assert_eq!(view.library().read_obj::<u32>(high).unwrap(), 0x1234_5678);
        view.library().write_obj(7u8, GuestAddress(0x1fff)).unwrap();
        assert_eq!(memory.read_obj::<u8>(GuestAddress(0x1fff)).unwrap(), 7);
        assert!(view.library().read_obj::<u8>(GuestAddress(0x2000)).is_err());
    }

    #[test]
    fn test_a_view_keeps_the_memory_mapped() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        let view = View::new(memory.into()).unwrap();
        view.library().write_obj(1u8, GuestAddress(0)).unwrap();
        assert_eq!(view.memory().read_obj::<u8>(GuestAddress(0)).unwrap(), 1);
    }
}
