//! Model-specific registers: which ones are a vCPU's state, reading and writing them.

use kvm_bindings::{KVM_MAX_MSR_ENTRIES, Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

use super::VcpuStateError;
use crate::kvm::doing;

/// `IA32_TSC`.
pub const TSC: u32 = 0x10;
/// `IA32_TSC_DEADLINE`.
pub const TSC_DEADLINE: u32 = 0x6e0;
/// `IA32_MISC_ENABLE`.
pub const MISC_ENABLE: u32 = 0x1a0;
/// `IA32_MTRR_DEF_TYPE`.
pub const MTRR_DEF_TYPE: u32 = 0x2ff;

/// `MCG_CTL`: machine checks that are reported. KVM lists it whether or not it takes it.
const MCG_CTL: u32 = 0x17b;
/// `MSR_KVM_WALL_CLOCK` and its newer number. A write makes KVM store the wall clock in guest
/// memory, and that is all it does.
const KVM_WALL_CLOCK: [u32; 2] = [0x11, 0x4b56_4d00];

/// Memory type ranges; KVM has them, but its list of MSRs has not in every version.
const MTRRS: [u32; 11] = [
    0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f,
];
/// Base and mask of the eight variable memory type ranges.
const VARIABLE_MTRRS: std::ops::RangeInclusive<u32> = 0x200..=0x20f;

/// Registers of features that no guest is offered: VMX capabilities, and Hyper-V's.
fn is_foreign(index: u32) -> bool {
    matches!(index, 0x480..=0x491 | 0x4000_0000..=0x4000_ffff)
}

/// The MSRs that a snapshot keeps, of those that KVM lists.
pub fn indices_to_save(listed: &[u32]) -> Vec<u32> {
    let mut indices = listed.to_vec();
    indices.extend(VARIABLE_MTRRS.chain(MTRRS).chain([MTRR_DEF_TYPE]));
    indices.retain(|index| *index != MCG_CTL && !KVM_WALL_CLOCK.contains(index));
    indices.retain(|index| !is_foreign(*index));
    indices.sort_unstable();
    indices.dedup();
    indices
}

/// Read `indices`, leaving out those that this vCPU does not have.
pub fn read(fd: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, VcpuStateError> {
    let entries: Vec<_> = indices
        .iter()
        .map(|&index| kvm_msr_entry {
            index,
            ..Default::default()
        })
        .collect();
    let mut read = Vec::with_capacity(entries.len());
    let mut rest = &entries[..];
    while !rest.is_empty() {
        let chunk = &rest[..rest.len().min(KVM_MAX_MSR_ENTRIES)];
        let mut msrs = wrap(chunk)?;
        let count = fd
            .get_msrs(&mut msrs)
            .map_err(doing("reading MSRs"))?
            .min(chunk.len());
        read.extend_from_slice(&msrs.as_slice()[..count]);
        // KVM stops at the first one that it cannot read: go on after it.
        rest = rest.get(chunk.len().min(count + 1)..).unwrap_or_default();
    }
    Ok(read)
}

/// Write `entries` in their order.
pub fn write(fd: &VcpuFd, entries: &[kvm_msr_entry]) -> Result<(), VcpuStateError> {
    for chunk in entries.chunks(KVM_MAX_MSR_ENTRIES) {
        let count = fd.set_msrs(&wrap(chunk)?).map_err(doing("writing MSRs"))?;
        if let Some(refused) = chunk.get(count) {
            return Err(VcpuStateError::Msr {
                index: refused.index,
                value: refused.data,
            });
        }
    }
    Ok(())
}

/// Of `entries`, which were read from this vCPU, those that it also lets one write. The others are
/// constants of the host, and a restore that tried to write them would fail. The vCPU's state does
/// not change: each gets the value that it has.
pub fn writable(
    fd: &VcpuFd,
    entries: Vec<kvm_msr_entry>,
) -> Result<Vec<kvm_msr_entry>, VcpuStateError> {
    let mut writable = Vec::with_capacity(entries.len());
    let mut rest = &entries[..];
    while let Some(first) = rest.first() {
        // Time goes on while it is looked at; both are writable by the architecture.
        if matches!(first.index, TSC | TSC_DEADLINE) {
            writable.push(*first);
            rest = &rest[1..];
            continue;
        }
        let until = rest
            .iter()
            .position(|entry| matches!(entry.index, TSC | TSC_DEADLINE));
        let chunk = &rest[..until.unwrap_or(rest.len()).min(KVM_MAX_MSR_ENTRIES)];
        let count = fd
            .set_msrs(&wrap(chunk)?)
            .map_err(doing("probing MSRs"))?
            .min(chunk.len());
        writable.extend_from_slice(&chunk[..count]);
        if let Some(refused) = chunk.get(count) {
            tracing::debug!("MSR {:#x} cannot be written: left out", refused.index);
        }
        rest = &rest[chunk.len().min(count + 1)..];
    }
    Ok(writable)
}

fn wrap(entries: &[kvm_msr_entry]) -> Result<Msrs, VcpuStateError> {
    Msrs::from_entries(entries).map_err(|_| VcpuStateError::TooMany("MSRs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_memory_types_are_kept_once_and_side_effects_are_not() {
        let indices = indices_to_save(&[TSC, MTRR_DEF_TYPE, 0x277, MCG_CTL, 0x11, 0x4b56_4d00]);
        assert_eq!(
            indices
                .iter()
                .filter(|index| **index == MTRR_DEF_TYPE)
                .count(),
            1
        );
        assert!(indices.contains(&0x277) && indices.contains(&0x200) && indices.contains(&0x26f));
        assert!(!indices.contains(&MCG_CTL));
        assert!(!indices.contains(&0x11) && !indices.contains(&0x4b56_4d00));
    }
}
