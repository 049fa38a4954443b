//! The guest-physical address space, the I/O ports and the GSIs of a machine.
//!
//! ```text
//! 0x0000_0000  RAM (below 1 MiB: boot structures, ACPI tables)
//! 0xc000_0000  nothing: the 32-bit hole
//! 0xd000_0000  PCI window: memory BARs of the virtio functions
//! 0xfec0_0000  IOAPIC
//! 0xfee0_0000  local APICs
//! 0xfffb_c000  identity map page and TSS that KVM needs on VMX
//! 0x1_0000_0000  RAM that does not fit below the hole
//! ```
//!
//! None of it depends on the host, so that a snapshot needs no addresses of its own.

/// Size of a page, the unit of everything below.
pub const PAGE_SIZE: u64 = 4096;

/// End of the RAM below the 32-bit hole.
pub const LOW_RAM_END: u64 = 0xc000_0000;
/// Start of the RAM above the 32-bit hole.
pub const HIGH_RAM_START: u64 = 0x1_0000_0000;

/// Memory BARs of PCI functions.
pub const PCI_WINDOW: u64 = 0xd000_0000;
/// Size of [`PCI_WINDOW`].
pub const PCI_WINDOW_SIZE: u64 = 0x1000_0000;

/// Registers of the IOAPIC, where KVM's own emulates them.
pub const IOAPIC: u32 = 0xfec0_0000;
/// Registers of each vCPU's local APIC.
pub const LOCAL_APIC: u32 = 0xfee0_0000;
/// Three pages for `KVM_SET_TSS_ADDR`; the page below is KVM's identity map.
pub const TSS: u64 = 0xfffb_d000;

/// Segment descriptors of the boot vCPU.
pub const BOOT_GDT: u64 = 0x500;
/// Interrupt descriptors of the boot vCPU: none.
pub const BOOT_IDT: u64 = 0x520;
/// The `boot_params` page of the 64-bit Linux boot protocol.
pub const BOOT_PARAMETERS: u64 = 0x7000;
/// Top-level page table of the boot vCPU; the next levels are in the pages that follow.
pub const BOOT_PAGE_TABLES: u64 = 0x9000;
/// The kernel command line.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Longest command line with its terminating zero: `COMMAND_LINE_SIZE` of Linux on x86.
pub const COMMAND_LINE_SIZE: usize = 2048;
/// End of the RAM that a kernel may use below 1 MiB.
pub const BASE_RAM_END: u64 = 0x9_f000;

/// ACPI tables; the root pointer (RSDP) comes first.
pub const ACPI_TABLES: u64 = 0xe_0000;
/// Room for the ACPI tables.
pub const ACPI_TABLES_SIZE: u64 = 0x1_f000;
/// The page that holds the VM generation id. Not RAM to the guest.
pub const GENERATION_ID: u64 = 0xf_f000;

/// End of the first MiB, where RAM goes on.
pub const EXTENDED_RAM_START: u64 = 0x10_0000;

/// Pins of the IOAPIC are GSIs `0..IOAPIC_PINS`; MSI routes come after.
pub const IOAPIC_PINS: u32 = 24;
/// Interrupt of the debug serial port.
pub const SERIAL_GSI: u32 = 4;
/// Interrupt of the generic event device: the generation id has changed.
pub const GENERIC_EVENT_GSI: u32 = 5;

/// First I/O port of the debug serial port, a 16550.
pub const SERIAL_PORT: u16 = 0x3f8;
/// Number of its ports.
pub const SERIAL_PORTS: u16 = 8;
/// System control port B: its upper bits say why a board raised an NMI.
pub const NMI_STATUS_PORT: u16 = 0x61;
/// Command port of the keyboard controller, of which there is only its reset line.
pub const RESET_PORT: u16 = 0x64;
/// What a guest writes to [`RESET_PORT`] to be reset.
pub const RESET_VALUE: u8 = 0xfe;
/// Sleep control register of hardware-reduced ACPI (ACPI 6.4, 4.8.3.7).
pub const SLEEP_CONTROL_PORT: u16 = 0x600;
/// Sleep status register of hardware-reduced ACPI.
pub const SLEEP_STATUS_PORT: u16 = 0x601;
/// The sleep type by which the guest asks for power-off (`\_S5`).
pub const SLEEP_TYPE_OFF: u8 = 5;
