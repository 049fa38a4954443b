//! From kernel and initramfs to a machine that can run.

use std::fs::File;
use std::sync::Arc;

use kvm_ioctls::VmFd;
use thaw_vmm_control::Shape;
use vmm_sys_util::eventfd::EventFd;

use super::bus::Bus;
use super::devices::{self, Environment};
use super::{Machine, MachineError, load};
use crate::acpi;
use crate::generation;
use crate::kvm::{Hypervisor, doing};
use crate::layout::SERIAL_GSI;
use crate::memory::GuestRam;
use crate::phase::Phases;
use crate::serial::SerialPort;
use crate::vcpu::{Vcpu, address_bits};

/// The word on a command line that asks for the debug serial port.
const SERIAL_CONSOLE: &str = "ttyS0";

/// What to boot.
pub struct BootSource {
    /// vCPUs and memory.
    pub shape: Shape,
    /// Kernel command line.
    pub command_line: String,
    /// ELF `vmlinux`.
    pub kernel: File,
    /// cpio archive, compressed with something that the kernel knows.
    pub initramfs: File,
}

impl Machine {
    /// Make a machine that will boot `source`.
    pub fn boot(
        hypervisor: &Hypervisor,
        mut source: BootSource,
        environment: Environment,
        phases: &mut Phases,
    ) -> Result<Self, MachineError> {
        hypervisor.check_capabilities()?;
        let shape = source.shape;
        let serial = source.command_line.contains(SERIAL_CONSOLE);
        let ram = GuestRam::new(shape.memory_bytes())?;
        let memory = ram.memory();
        let kernel = load::load_kernel(memory, &mut source.kernel)?;
        let initramfs =
            load::load_initramfs(memory, ram.size(), kernel.end, &mut source.initramfs)?;
        let rsdp = acpi::write_tables(memory, shape.vcpus(), serial)?;
        load::write_boot_parameters(memory, ram.size(), &source.command_line, initramfs, rsdp)?;
        generation::renew(memory)?;
        phases.mark("memory");

        let vm = hypervisor.create_vm(&ram)?;
        let supported = hypervisor.supported_cpuid()?;
        let address_bits = address_bits(&supported);
        let mut vcpus = Vec::new();
        for index in 0..shape.vcpus() {
            let vcpu = Vcpu::new(&vm, index)?;
            vcpu.prepare_boot(&supported, shape.vcpus(), kernel.entry)?;
            vcpus.push(vcpu);
        }
        phases.mark("kvm");

        let console = environment.console.clone();
        let serial = match serial {
            true => Some(SerialPort::new(serial_interrupt(&vm)?, console)),
            false => None,
        };
        let (pci, attachments) =
            devices::make(&vm, &ram, shape.vcpus(), address_bits, environment)?;
        let bus = Bus::new(pci, serial);
        phases.mark("devices");
        Self::assemble(shape, address_bits, false, vcpus, bus, attachments, vm, ram)
    }
}

/// An event that raises the serial port's interrupt.
pub(super) fn serial_interrupt(vm: &Arc<VmFd>) -> Result<EventFd, MachineError> {
    let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
        .map_err(doing("making an event descriptor"))?;
    vm.register_irqfd(&event, SERIAL_GSI)
        .map_err(doing("wiring the serial port"))?;
    Ok(event)
}
