//! The generation id of a machine: 128 random bits in guest memory that change when the machine is
//! restored, so that its guest stops to trust the random state that it shares with its siblings.

use kvm_ioctls::VmFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::layout::{GENERATION_ID, GENERIC_EVENT_GSI};

/// Why the id could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum GenerationError {
    /// No random bytes.
    #[error("getting random bytes for the generation id: {0}")]
    Random(rustix::io::Errno),
    /// Its place is not in guest memory.
    #[error("writing the generation id: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
    /// KVM did not take the interrupt.
    #[error("announcing the generation id: {0}")]
    Interrupt(#[from] vmm_sys_util::errno::Error),
}

/// Give the machine a new id. The guest looks at it when it is told to.
pub fn renew(memory: &GuestMemoryMmap) -> Result<(), GenerationError> {
    let mut id = [0u8; 16];
    let flags = rustix::rand::GetRandomFlags::empty();
    // Sixteen bytes come whole or not at all (getrandom(2)).
    rustix::rand::getrandom(&mut id, flags).map_err(GenerationError::Random)?;
    Ok(memory.write_slice(&id, GuestAddress(GENERATION_ID))?)
}

/// Tell the guest that the id has changed. After the interrupt controllers are restored: restoring
/// them would wipe the interrupt out.
pub fn announce(vm: &VmFd) -> Result<(), GenerationError> {
    // An edge: up and down again.
    vm.set_irq_line(GENERIC_EVENT_GSI, true)?;
    Ok(vm.set_irq_line(GENERIC_EVENT_GSI, false)?)
}
