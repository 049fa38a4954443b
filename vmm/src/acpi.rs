//! ACPI tables of a hardware-reduced machine (ACPI 6.4): no fixed hardware, so no PIC, PM timer or
//! system control interrupt to emulate. They describe processors and the IOAPIC (MADT), the PCI bus,
//! and the generation id of the machine with the generic event device that announces its change
//! ("Virtual Machine Generation ID", Microsoft, 2018; Linux' drivers/virt/vmgenid.c).

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Arg, Device, EISAName, Equal, IO, If, Interrupt, Method,
    Name, Notify, Package, Path, ResourceTemplate,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace as Space, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::layout::{
    ACPI_TABLES, ACPI_TABLES_SIZE, GENERATION_ID, GENERIC_EVENT_GSI, IOAPIC, LOCAL_APIC,
    PCI_WINDOW, PCI_WINDOW_SIZE, RESET_PORT, RESET_VALUE, SERIAL_GSI, SERIAL_PORT, SERIAL_PORTS,
    SLEEP_CONTROL_PORT, SLEEP_STATUS_PORT, SLEEP_TYPE_OFF,
};

const OEM: [u8; 6] = *b"THAW  ";
const TABLE: [u8; 8] = *b"THAWVM  ";
const REVISION: u32 = 1;

/// `IAPC_BOOT_ARCH` of the FADT: no VGA to probe, no CMOS clock. The other bits say that there are
/// no legacy devices and no keyboard controller.
const BOOT_ARCHITECTURE: u16 = 1 << 2 | 1 << 5;

/// The value by which a device is told that something about it has changed.
const NOTIFY_STATUS_CHANGE: u8 = 0x80;

/// Why the tables could not be written.
#[derive(Debug, Error)]
pub enum AcpiError {
    /// More tables than there is room for.
    #[error("the ACPI tables do not fit their {ACPI_TABLES_SIZE} bytes")]
    Room,
    /// Their place is not in guest memory.
    #[error("writing ACPI tables: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
}

/// Write the tables of a machine with `vcpus` vCPUs, whose APIC ids are their numbers, and a debug
/// serial port if `serial`. Returns the address of the root pointer.
pub fn write_tables(memory: &GuestMemoryMmap, vcpus: u8, serial: bool) -> Result<u64, AcpiError> {
    // The root pointer is first but is known last.
    let mut place = Place {
        memory,
        next: ACPI_TABLES + Rsdp::len().next_multiple_of(16) as u64,
    };
    let dsdt = place.write(&dsdt(serial))?;
    let fadt = place.write(&fadt(dsdt))?;
    let madt = place.write(&madt(vcpus))?;
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = place.write(&bytes(&xsdt))?;
    memory.write_slice(&bytes(&Rsdp::new(OEM, xsdt)), GuestAddress(ACPI_TABLES))?;
    Ok(ACPI_TABLES)
}

struct Place<'a> {
    memory: &'a GuestMemoryMmap,
    next: u64,
}

impl Place<'_> {
    /// Write one table and return its address.
    fn write(&mut self, table: &[u8]) -> Result<u64, AcpiError> {
        let address = self.next;
        self.next = (address + table.len() as u64).next_multiple_of(16);
        if self.next > ACPI_TABLES + ACPI_TABLES_SIZE {
            return Err(AcpiError::Room);
        }
        self.memory.write_slice(table, GuestAddress(address))?;
        Ok(address)
    }
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn port(number: u16) -> GAS {
    GAS::new(Space::SystemIo, 8, 0, AccessSize::ByteAccess, number.into())
}

fn fadt(dsdt: u64) -> Vec<u8> {
    let mut fadt = FADTBuilder::new(OEM, TABLE, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    fadt.iapc_boot_arch = BOOT_ARCHITECTURE.into();
    fadt.reset_reg = port(RESET_PORT);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = port(SLEEP_CONTROL_PORT);
    fadt.sleep_status_reg = port(SLEEP_STATUS_PORT);
    bytes(&fadt.finalize())
}

fn madt(vcpus: u8) -> Vec<u8> {
    let mut madt = MADT::new(
        OEM,
        TABLE,
        REVISION,
        LocalInterruptController::Address(LOCAL_APIC),
    );
    for id in 0..vcpus {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, IOAPIC, 0));
    bytes(&madt)
}

fn dsdt(serial: bool) -> Vec<u8> {
    let mut definitions = pci_root();
    definitions.extend(generation_id());
    definitions.extend(generic_event_device());
    if serial {
        definitions.extend(serial_port());
    }
    definitions.extend(power_off());
    // Revision 2 and later: integers have 64 bits.
    let mut dsdt = Sdt::new(*b"DSDT", 36, 2, OEM, TABLE, REVISION);
    dsdt.append_slice(&definitions);
    dsdt.as_slice().to_vec()
}

/// The one PCI bus with its window for memory BARs. No interrupt routing: there are no INTx lines.
fn pci_root() -> Vec<u8> {
    let last = (PCI_WINDOW + PCI_WINDOW_SIZE - 1) as u32;
    let window = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        PCI_WINDOW as u32,
        last,
        None,
    );
    bytes(&Device::new(
        "\\_SB_.PCI0".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0A03")),
            &Name::new("_UID".into(), &0u8),
            &Name::new("_SEG".into(), &0u8),
            &Name::new("_BBN".into(), &0u8),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![
                    &AddressSpace::new_bus_number(0u16, 0u16),
                    &IO::new(0xcf8, 0xcf8, 1, 8),
                    &window,
                ]),
            ),
        ],
    ))
}

/// The device that says where the generation id is. Linux up to 6.9 looks at the first eight
/// characters of the compatible id only, hence the hardware id.
fn generation_id() -> Vec<u8> {
    let low = GENERATION_ID as u32;
    bytes(&Device::new(
        "\\_SB_.VGEN".into(),
        vec![
            &Name::new("_HID".into(), &"VMGENCTR"),
            &Name::new("_CID".into(), &"VM_GEN_COUNTER"),
            &Name::new("_DDN".into(), &"VM_GEN_COUNTER"),
            &Name::new("_UID".into(), &0u8),
            &Name::new("ADDR".into(), &Package::new(vec![&low, &0u8])),
        ],
    ))
}

/// The device whose interrupt says that the generation id has changed (ACPI 6.4, 5.6.9).
fn generic_event_device() -> Vec<u8> {
    let interrupt = Interrupt::new(true, true, false, false, GENERIC_EVENT_GSI);
    let generation_id = Path::new("\\_SB_.VGEN");
    bytes(&Device::new(
        "\\_SB_.GED_".into(),
        vec![
            &Name::new("_HID".into(), &"ACPI0013"),
            &Name::new("_UID".into(), &0u8),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&interrupt])),
            &Method::new(
                "_EVT".into(),
                1,
                true,
                vec![&If::new(
                    &Equal::new(&Arg(0), &GENERIC_EVENT_GSI),
                    vec![&Notify::new(&generation_id, &NOTIFY_STATUS_CHANGE)],
                )],
            ),
        ],
    ))
}

fn serial_port() -> Vec<u8> {
    bytes(&Device::new(
        "\\_SB_.COM1".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0501")),
            &Name::new("_UID".into(), &0u8),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![
                    &Interrupt::new(true, true, false, false, SERIAL_GSI),
                    &IO::new(SERIAL_PORT, SERIAL_PORT, 1, SERIAL_PORTS as u8),
                ]),
            ),
        ],
    ))
}

fn power_off() -> Vec<u8> {
    bytes(&Name::new(
        "\\_S5_".into(),
        &Package::new(vec![&SLEEP_TYPE_OFF]),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()
    }

    fn read(memory: &GuestMemoryMmap, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    /// The table at `at`, after its checksum.
    fn table(memory: &GuestMemoryMmap, at: u64) -> Vec<u8> {
        let length: u32 = memory.read_obj(GuestAddress(at + 4)).unwrap();
        let table = read(memory, at, length as usize);
        assert_eq!(
            table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)),
            0
        );
        table
    }

    #[test]
    fn test_the_root_pointer_leads_to_every_table() {
        let memory = memory();
        let rsdp = write_tables(&memory, 2, true).unwrap();
        assert_eq!(read(&memory, rsdp, 8), b"RSD PTR ");
        let xsdt = table(&memory, memory.read_obj(GuestAddress(rsdp + 24)).unwrap());
        let entries: Vec<u64> = xsdt[36..]
            .chunks(8)
            .map(|entry| u64::from_le_bytes(entry.try_into().unwrap()))
            .collect();
        let [fadt, madt] = entries[..] else {
            panic!("{entries:?}")
        };
        let fadt = table(&memory, fadt);
        assert_eq!(fadt[..4], *b"FACP");
        let dsdt = table(
            &memory,
            u64::from_le_bytes(fadt[140..148].try_into().unwrap()),
        );
        assert_eq!(dsdt[..4], *b"DSDT");
        let madt = table(&memory, madt);
        assert_eq!(madt[..4], *b"APIC");
        // Header, two local APICs of 8 bytes, one IOAPIC of 12.
        assert_eq!(madt.len(), 44 + 2 * 8 + 12);
    }

    #[test]
    fn test_sixteen_vcpus_fit() {
        write_tables(&memory(), 16, true).unwrap();
    }
}
