//! Kernel, initramfs and boot parameters in guest memory, by the 64-bit Linux boot protocol
//! (Documentation/arch/x86/boot.rst and zero-page.rst).

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use linux_loader::loader::KernelLoader;
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use linux_loader::loader::elf::Elf;
use thiserror::Error;
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryMmap};

use crate::layout::{
    BASE_RAM_END, BOOT_GDT, BOOT_PAGE_TABLES, BOOT_PARAMETERS, COMMAND_LINE, COMMAND_LINE_SIZE,
    EXTENDED_RAM_START, LOW_RAM_END, PAGE_SIZE,
};
use crate::memory::{Region, regions};
use crate::vcpu::BOOT_GDT_ENTRIES;

/// Kinds of memory in the map that firmware hands to a kernel.
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

const BOOT_FLAG: u16 = 0xaa55;
/// `HdrS`.
const HEADER_MAGIC: u32 = 0x5372_6448;
/// A boot loader without a number of its own.
const LOADER_UNDEFINED: u8 = 0xff;
const KERNEL_ALIGNMENT: u32 = 0x100_0000;

/// Page table entry: present, writable.
const PRESENT: u64 = 1 << 0 | 1 << 1;
/// Page table entry: a large page.
const LARGE: u64 = 1 << 7;

/// Why a guest could not be loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The kernel is not an ELF image that fits.
    #[error("loading the guest kernel: {0}; an uncompressed ELF image (vmlinux) is needed")]
    Kernel(linux_loader::loader::Error),
    /// The initramfs cannot be read.
    #[error("loading the initramfs: {0}")]
    Initramfs(std::io::Error),
    /// Kernel and initramfs are too large for the machine.
    #[error("kernel and initramfs do not fit the machine's memory of {0} bytes")]
    Room(u64),
    /// The command line is too long, or has a zero in it.
    #[error("a kernel command line of {0} bytes: at most {max} are possible", max = COMMAND_LINE_SIZE - 1)]
    CommandLine(usize),
    /// Something is not in guest memory.
    #[error("loading the guest: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
}

/// `boot_params` as bytes.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
struct ZeroPage(boot_params);

// SAFETY: a packed structure of integers, of which all values are valid.
#[allow(unsafe_code)]
unsafe impl ByteValued for ZeroPage {}

/// Load `kernel` and return its entry point.
pub fn load_kernel(memory: &GuestMemoryMmap, kernel: &mut File) -> Result<LoadedKernel, LoadError> {
    let start = Some(GuestAddress(EXTENDED_RAM_START));
    let loaded = Elf::load(memory, None, kernel, start).map_err(LoadError::Kernel)?;
    Ok(LoadedKernel {
        entry: loaded.kernel_load.0,
        end: loaded.kernel_end,
    })
}

/// A kernel in guest memory.
pub struct LoadedKernel {
    /// 64-bit entry point.
    pub entry: u64,
    /// The address after its last byte, zeroed data included.
    pub end: u64,
}

/// Put `initramfs` at the end of the RAM below the 32-bit hole, away from the kernel, which unpacks
/// and frees it. Returns its address and size.
pub fn load_initramfs(
    memory: &GuestMemoryMmap,
    ram: u64,
    kernel_end: u64,
    initramfs: &mut File,
) -> Result<(u32, u32), LoadError> {
    let size = initramfs.metadata().map_err(LoadError::Initramfs)?.size();
    let start = ram
        .min(LOW_RAM_END)
        .checked_sub(size)
        .map(|start| start & !(PAGE_SIZE - 1));
    let start = start
        .filter(|start| *start >= kernel_end)
        .ok_or(LoadError::Room(ram))?;
    memory.read_exact_volatile_from(GuestAddress(start), initramfs, size as usize)?;
    // Both are below 3 GiB.
    Ok((start as u32, size as u32))
}

/// Write command line, boot parameters, segments and page tables.
pub fn write_boot_parameters(
    memory: &GuestMemoryMmap,
    ram: u64,
    command_line: &str,
    initramfs: (u32, u32),
    rsdp: u64,
) -> Result<(), LoadError> {
    let length = command_line.len();
    if length >= COMMAND_LINE_SIZE || command_line.contains('\0') {
        return Err(LoadError::CommandLine(length));
    }
    memory.write_slice(command_line.as_bytes(), GuestAddress(COMMAND_LINE))?;
    memory.write_obj(0u8, GuestAddress(COMMAND_LINE + length as u64))?;

    let mut page = ZeroPage::default();
    let parameters = &mut page.0;
    parameters.hdr.type_of_loader = LOADER_UNDEFINED;
    parameters.hdr.boot_flag = BOOT_FLAG;
    parameters.hdr.header = HEADER_MAGIC;
    parameters.hdr.kernel_alignment = KERNEL_ALIGNMENT;
    parameters.hdr.cmd_line_ptr = COMMAND_LINE as u32;
    parameters.hdr.cmdline_size = length as u32;
    (parameters.hdr.ramdisk_image, parameters.hdr.ramdisk_size) = initramfs;
    parameters.acpi_rsdp_addr = rsdp;
    let map = memory_map(ram);
    parameters.e820_entries = map.len() as u8;
    parameters.e820_table[..map.len()].copy_from_slice(&map);
    memory.write_obj(page, GuestAddress(BOOT_PARAMETERS))?;

    for (index, entry) in BOOT_GDT_ENTRIES.iter().enumerate() {
        memory.write_obj(*entry, GuestAddress(BOOT_GDT + index as u64 * 8))?;
    }
    write_page_tables(memory)
}

/// RAM, and the part of the first MiB that holds ACPI tables and the generation id.
fn memory_map(ram: u64) -> Vec<boot_e820_entry> {
    let entry = |addr, end: u64, type_| boot_e820_entry {
        addr,
        size: end - addr,
        type_,
    };
    let mut map = vec![
        entry(0, BASE_RAM_END, E820_RAM),
        entry(BASE_RAM_END, EXTENDED_RAM_START, E820_RESERVED),
    ];
    for Region { guest, size, .. } in regions(ram) {
        map.push(entry(guest.max(EXTENDED_RAM_START), guest + size, E820_RAM));
    }
    map
}

/// Map the first GiB onto itself in pages of 2 MiB.
fn write_page_tables(memory: &GuestMemoryMmap) -> Result<(), LoadError> {
    let (level4, level3, level2) = (
        BOOT_PAGE_TABLES,
        BOOT_PAGE_TABLES + PAGE_SIZE,
        BOOT_PAGE_TABLES + 2 * PAGE_SIZE,
    );
    memory.write_obj(level3 | PRESENT, GuestAddress(level4))?;
    memory.write_obj(level2 | PRESENT, GuestAddress(level3))?;
    for index in 0..512u64 {
        memory.write_obj(
            index << 21 | LARGE | PRESENT,
            GuestAddress(level2 + index * 8),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_the_memory_map_leaves_the_acpi_tables_out() {
        let map = memory_map(4 << 30);
        let entries: Vec<_> = map.iter().map(|e| (e.addr, e.size, e.type_)).collect();
        assert_eq!(
            entries,
            [
                (0, 0x9_f000, E820_RAM),
                (0x9_f000, 0x6_1000, E820_RESERVED),
                (1 << 20, (3 << 30) - (1 << 20), E820_RAM),
                (4 << 30, 1 << 30, E820_RAM),
            ]
        );
    }

    #[test]
    fn test_an_initramfs_larger_than_memory_is_refused() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.set_len(2 << 20).unwrap();
        let error = load_initramfs(&memory, 1 << 20, 0, &mut file).unwrap_err();
        assert!(matches!(error, LoadError::Room(_)));
    }

    #[test]
    fn test_a_command_line_that_is_too_long_is_refused() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let line = "x".repeat(COMMAND_LINE_SIZE);
        let error = write_boot_parameters(&memory, 1 << 20, &line, (0, 0), 0).unwrap_err();
        assert!(matches!(error, LoadError::CommandLine(2048)));
    }

    #[test]
    fn test_a_file_that_is_no_kernel_is_refused() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        assert!(matches!(
            load_kernel(&memory, &mut file),
            Err(LoadError::Kernel(_))
        ));
    }
}
