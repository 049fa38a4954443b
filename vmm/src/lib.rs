//! The virtual machine monitor of thaw: KVM, guest memory, PCI and virtio devices, file server,
//! snapshot and restore. Knows nothing of containers.

pub mod jail;
pub mod layout;
pub mod pci;
pub mod virtio;
