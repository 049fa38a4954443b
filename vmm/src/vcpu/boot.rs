//! The state in which a vCPU starts a kernel: the 64-bit entry of the Linux boot protocol
//! (Documentation/arch/x86/boot.rst, "64-bit Boot Protocol"). The other vCPUs wait for INIT and SIPI.

use kvm_bindings::{
    Msrs, kvm_cpuid_entry2, kvm_fpu, kvm_lapic_state, kvm_msr_entry, kvm_regs, kvm_segment,
};

use super::{Vcpu, VcpuStateError, cpuid, msr};
use crate::kvm::doing;
use crate::layout::{BOOT_GDT, BOOT_IDT, BOOT_PAGE_TABLES, BOOT_PARAMETERS};

/// Flat segments of the boot vCPU, as in the table at [`BOOT_GDT`]: null, code, data, task state.
pub const GDT: [u64; 4] = [
    0,
    0x00af_9b00_0000_ffff,
    0x00cf_9300_0000_ffff,
    0x008f_8b00_0000_ffff,
];

const CR0_PROTECTED: u64 = 1 << 0;
const CR0_PAGING: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LONG_MODE: u64 = 1 << 8 | 1 << 10;

/// Offsets of the local APIC's LINT0 and LINT1 registers.
const LINT0: usize = 0x350;
const LINT1: usize = 0x360;
/// Delivery modes of an LVT entry.
const MODE_EXTINT: u8 = 7;
const MODE_NMI: u8 = 4;

/// Write-back caching where no range says otherwise, ranges enabled. Linux takes a machine whose
/// ranges are all off for one with broken firmware.
const MTRR_WRITE_BACK: u64 = 1 << 11 | 6;

impl Vcpu {
    /// Prepare this vCPU, one of `count`, for a boot. Vcpu 0 will start at `entry`.
    pub fn prepare_boot(
        &self,
        supported: &[kvm_cpuid_entry2],
        count: u8,
        entry: u64,
    ) -> Result<(), VcpuStateError> {
        self.set_cpuid(&cpuid::normalise(supported, self.index, count))?;
        self.set_boot_msrs()?;
        self.set_local_interrupts()?;
        if self.index == 0 {
            self.set_boot_registers(entry)?;
        }
        Ok(())
    }

    fn set_boot_msrs(&self) -> Result<(), VcpuStateError> {
        let entry = |index, data| kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        // Fast string operations, as firmware leaves them.
        let values = [
            entry(msr::MISC_ENABLE, 1),
            entry(msr::MTRR_DEF_TYPE, MTRR_WRITE_BACK),
        ];
        for value in values {
            // One at a time: a KVM that does not have one of them has the other.
            let msrs = Msrs::from_entries(&[value]).map_err(|_| VcpuStateError::TooMany("MSRs"))?;
            self.fd
                .set_msrs(&msrs)
                .map_err(doing("writing boot MSRs"))?;
        }
        Ok(())
    }

    /// LINT0 takes the PIC's interrupts and LINT1 NMIs, as the MP specification has it.
    fn set_local_interrupts(&self) -> Result<(), VcpuStateError> {
        let mut lapic = self
            .fd
            .get_lapic()
            .map_err(doing("reading a vCPU's local APIC"))?;
        set_delivery_mode(&mut lapic, LINT0, MODE_EXTINT);
        set_delivery_mode(&mut lapic, LINT1, MODE_NMI);
        Ok(self
            .fd
            .set_lapic(&lapic)
            .map_err(doing("writing a vCPU's local APIC"))?)
    }

    fn set_boot_registers(&self, entry: u64) -> Result<(), VcpuStateError> {
        let fpu = kvm_fpu {
            fcw: 0x37f,
            mxcsr: 0x1f80,
            ..Default::default()
        };
        self.fd
            .set_fpu(&fpu)
            .map_err(doing("writing the boot vCPU's FPU"))?;

        let mut sregs = self
            .fd
            .get_sregs()
            .map_err(doing("reading the boot vCPU's state"))?;
        sregs.gdt.base = BOOT_GDT;
        sregs.gdt.limit = (size_of_val(&GDT) - 1) as u16;
        sregs.idt.base = BOOT_IDT;
        sregs.idt.limit = 0;
        sregs.cs = segment(1, 0xb, true);
        let data = segment(2, 0x3, false);
        (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
        sregs.tr = kvm_segment {
            s: 0,
            db: 0,
            ..segment(3, 0xb, false)
        };
        sregs.cr0 |= CR0_PROTECTED | CR0_PAGING;
        sregs.cr3 = BOOT_PAGE_TABLES;
        sregs.cr4 |= CR4_PAE;
        sregs.efer |= EFER_LONG_MODE;
        self.fd
            .set_sregs(&sregs)
            .map_err(doing("writing the boot vCPU's state"))?;

        let regs = kvm_regs {
            // Bit 1 is always set; interrupts are off.
            rflags: 2,
            rip: entry,
            rsi: BOOT_PARAMETERS,
            rsp: BOOT_PARAMETERS + crate::layout::PAGE_SIZE,
            ..Default::default()
        };
        Ok(self
            .fd
            .set_regs(&regs)
            .map_err(doing("writing the boot vCPU's registers"))?)
    }
}

/// Segment `index` of [`GDT`] as KVM has it: flat, present, ring 0.
fn segment(index: u16, kind: u8, code: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector: index * 8,
        type_: kind,
        present: 1,
        dpl: 0,
        db: u8::from(!code),
        s: 1,
        l: u8::from(code),
        g: 1,
        ..Default::default()
    }
}

fn set_delivery_mode(lapic: &mut kvm_lapic_state, register: usize, mode: u8) {
    // Bits 8 to 10 of the register.
    let byte = &mut lapic.regs[register + 1];
    *byte = *byte & !7 | mode as libc::c_char;
}
