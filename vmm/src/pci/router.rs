//! From event descriptors to guest interrupts and from guest notifications to event descriptors.
//!
//! KVM's interrupt routing table is replaced whole by each `KVM_SET_GSI_ROUTING`, so one object
//! owns it: the fixed routes of the PIC and the IOAPIC, and one MSI route per MSI-X vector.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry,
    kvm_irq_routing_entry__bindgen_ty_1, kvm_irq_routing_irqchip, kvm_irq_routing_msi,
};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::EventFd;

/// First GSI that is not a pin of the IOAPIC.
const FIRST_MSI_GSI: u32 = 24;

/// Pins of the PIC pair, which share their GSIs with the first pins of the IOAPIC.
const PIC_PINS: u32 = 16;

/// Where one MSI goes: what the guest wrote into a vector of an MSI-X table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsiRoute {
    /// Message address.
    pub address: u64,
    /// Message data.
    pub data: u32,
}

/// The calls to KVM that wiring a device takes. A trait so that the PCI code is tested without KVM.
pub trait Wiring: Send + Sync {
    /// Replace the MSI part of the routing table.
    fn set_routes(&self, routes: &BTreeMap<u32, MsiRoute>) -> io::Result<()>;
    /// Let `event` raise `gsi`.
    fn assign_interrupt(&self, event: &EventFd, gsi: u32) -> io::Result<()>;
    /// Undo [`Wiring::assign_interrupt`].
    fn release_interrupt(&self, event: &EventFd, gsi: u32) -> io::Result<()>;
    /// Let a guest write of any length to `address` signal `event`.
    fn assign_notification(&self, event: &EventFd, address: u64) -> io::Result<()>;
    /// Undo [`Wiring::assign_notification`].
    fn release_notification(&self, event: &EventFd, address: u64) -> io::Result<()>;
}

impl Wiring for VmFd {
    fn set_routes(&self, routes: &BTreeMap<u32, MsiRoute>) -> io::Result<()> {
        let mut entries = irqchip_routes();
        entries.extend(routes.iter().map(|(gsi, route)| msi_route(*gsi, *route)));
        let table = KvmIrqRouting::from_entries(&entries)
            .map_err(|_| io::Error::other("too many interrupt routes"))?;
        Ok(self.set_gsi_routing(&table)?)
    }

    fn assign_interrupt(&self, event: &EventFd, gsi: u32) -> io::Result<()> {
        Ok(self.register_irqfd(event, gsi)?)
    }

    fn release_interrupt(&self, event: &EventFd, gsi: u32) -> io::Result<()> {
        Ok(self.unregister_irqfd(event, gsi)?)
    }

    fn assign_notification(&self, event: &EventFd, address: u64) -> io::Result<()> {
        Ok(self.register_ioevent(event, &IoEventAddress::Mmio(address), NoDatamatch)?)
    }

    fn release_notification(&self, event: &EventFd, address: u64) -> io::Result<()> {
        Ok(self.unregister_ioevent(event, &IoEventAddress::Mmio(address), NoDatamatch)?)
    }
}

/// The routes that KVM has by itself after `KVM_CREATE_IRQCHIP`
/// (arch/x86/kvm/irq_comm.c, `default_routing`).
fn irqchip_routes() -> Vec<kvm_irq_routing_entry> {
    let entry = |gsi, irqchip, pin| kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        u: kvm_irq_routing_entry__bindgen_ty_1 {
            irqchip: kvm_irq_routing_irqchip { irqchip, pin },
        },
        ..Default::default()
    };
    let pic = (0..PIC_PINS).map(|gsi| {
        let chip = if gsi < 8 {
            KVM_IRQCHIP_PIC_MASTER
        } else {
            KVM_IRQCHIP_PIC_SLAVE
        };
        entry(gsi, chip, gsi % 8)
    });
    let ioapic = (0..FIRST_MSI_GSI).map(|gsi| entry(gsi, KVM_IRQCHIP_IOAPIC, gsi));
    pic.chain(ioapic).collect()
}

fn msi_route(gsi: u32, route: MsiRoute) -> kvm_irq_routing_entry {
    let msi = kvm_irq_routing_msi {
        address_lo: route.address as u32,
        address_hi: (route.address >> 32) as u32,
        data: route.data,
        ..Default::default()
    };
    kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        u: kvm_irq_routing_entry__bindgen_ty_1 { msi },
        ..Default::default()
    }
}

/// Owner of the routing table and giver of GSIs.
pub struct InterruptRouter {
    wiring: Arc<dyn Wiring>,
    table: Mutex<Table>,
}

struct Table {
    next_gsi: u32,
    routes: BTreeMap<u32, MsiRoute>,
}

impl InterruptRouter {
    /// A router over the VM's table, which has the irqchip's routes only so far.
    pub fn new(wiring: Arc<dyn Wiring>) -> Self {
        let table = Table {
            next_gsi: FIRST_MSI_GSI,
            routes: BTreeMap::new(),
        };
        Self {
            wiring,
            table: Mutex::new(table),
        }
    }

    /// The calls to KVM.
    pub fn wiring(&self) -> &dyn Wiring {
        self.wiring.as_ref()
    }

    /// `count` GSIs of one's own, consecutive; the first is returned.
    pub fn allocate(&self, count: u32) -> u32 {
        let mut table = self.lock();
        let first = table.next_gsi;
        table.next_gsi += count;
        first
    }

    /// Set routes and tell KVM, in one call however many there are. Nothing is said to KVM when
    /// nothing changes.
    pub fn route(&self, routes: impl IntoIterator<Item = (u32, MsiRoute)>) -> io::Result<()> {
        let mut table = self.lock();
        let mut changed = false;
        for (gsi, route) in routes {
            changed |= table.routes.insert(gsi, route) != Some(route);
        }
        if changed {
            self.wiring.set_routes(&table.routes)
        } else {
            Ok(())
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
