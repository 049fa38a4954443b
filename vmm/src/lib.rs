//! The virtual machine monitor of thaw: KVM, guest memory, PCI and virtio devices, file server,
//! snapshot and restore. Knows nothing of containers.

pub mod acpi;
pub mod generation;
pub mod jail;
pub mod kvm;
pub mod layout;
pub mod log;
pub mod machine;
pub mod memory;
pub mod pci;
pub mod phase;
pub mod serial;
pub mod service;
pub mod snapshot;
pub mod statistics;
pub mod vcpu;
pub mod virtio;
