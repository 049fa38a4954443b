//! What a vCPU is told by CPUID: all that KVM supports on this host, less what a snapshot cannot
//! carry or a guest has no use for, with the machine's own topology.
//!
//! Sources: Intel SDM volume 2, CPUID; AMD APM volume 3, appendix E; Linux'
//! Documentation/virt/kvm/x86/cpuid.rst. Linux reads the topology in arch/x86/kernel/cpu/topology*.c.

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// State components that XSAVE keeps only for processes that have asked for them (AMX tiles). They
/// double a vCPU's state, and a guest of ours has no business with them.
const DYNAMIC_XSTATE: u32 = 1 << 17 | 1 << 18;

/// Paravirtual features that are not offered: asynchronous page faults (`KVM_FEATURE_ASYNC_PF`,
/// `_VMEXIT`, `_INT`) keep requests in flight that no snapshot can hold.
const ASYNC_PAGE_FAULTS: u32 = 1 << 4 | 1 << 10 | 1 << 14;

/// CPUID of vCPU `index` of `count`, from what KVM supports.
pub fn normalise(supported: &[kvm_cpuid_entry2], index: u8, count: u8) -> Vec<kvm_cpuid_entry2> {
    let topology = Topology::new(index, count);
    let mut entries: Vec<_> = supported
        .iter()
        .filter(|entry| !is_dropped(entry))
        .copied()
        .collect();
    let has_x2apic_leaf = entries.iter().any(|entry| entry.function == 0xb);
    entries.retain(|entry| !matches!(entry.function, 0xb | 0x1f));
    for entry in &mut entries {
        features(entry);
        topology.describe(entry);
    }
    if has_x2apic_leaf {
        entries.extend(topology.x2apic_leaf(0xb));
    }
    set_xsave_size(&mut entries);
    entries
}

/// The width of a physical address of vCPUs with these leaves.
pub fn address_bits(entries: &[kvm_cpuid_entry2]) -> u8 {
    let leaf = entries.iter().find(|entry| entry.function == 0x8000_0008);
    // What a CPU without that leaf has.
    leaf.map_or(36, |entry| entry.eax as u8)
}

/// Leaves that are left out as a whole; a leaf that is not there reads as zeros.
fn is_dropped(entry: &kvm_cpuid_entry2) -> bool {
    match entry.function {
        // The host's performance counters, AMX tiles, AMD's SVM, counters, SEV, and its own
        // description of the topology, which would contradict the one made here.
        0xa | 0x1d | 0x1e | 0x8000_000a | 0x8000_001f | 0x8000_0022 | 0x8000_0026 => true,
        0xd => entry.index >= 2 && DYNAMIC_XSTATE >> entry.index & 1 != 0 && entry.index < 32,
        _ => false,
    }
}

/// Take away, or give, single features.
fn features(entry: &mut kvm_cpuid_entry2) {
    match (entry.function, entry.index) {
        (1, _) => {
            // No MONITOR/MWAIT, VMX, PDCM: nothing to wait with, no nesting, no counters.
            entry.ecx &= !(1 << 3 | 1 << 5 | 1 << 15);
            // The local APIC's TSC deadline mode, which KVM has but leaves to user space to offer,
            // and the bit that says that this is a virtual machine.
            entry.ecx |= 1 << 24 | 1 << 31;
        }
        // Power management of the host. ARAT alone: the timer does not stop in deep sleep.
        (6, _) => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (1 << 2, 0, 0, 0),
        // AMX.
        (7, 0) => entry.edx &= !(1 << 22 | 1 << 24 | 1 << 25),
        (7, 1) => {
            entry.eax &= !(1 << 21);
            entry.edx &= !(1 << 8);
        }
        (0xd, 0) => entry.eax &= !DYNAMIC_XSTATE,
        // XFD, which exists for dynamic state only.
        (0xd, 1) => entry.eax &= !(1 << 4),
        (0x4000_0001, _) => entry.eax &= !ASYNC_PAGE_FAULTS,
        // SVM and the extended performance counters.
        (0x8000_0001, _) => entry.ecx &= !(1 << 2 | 1 << 23 | 1 << 24),
        _ => {}
    }
}

/// Leaf 0xd tells how large the XSAVE area of all supported components is. It follows from the
/// components that are left.
fn set_xsave_size(entries: &mut [kvm_cpuid_entry2]) {
    let component = |entry: &&kvm_cpuid_entry2| entry.function == 0xd && entry.index >= 2;
    // ECX bit 0: a component of IA32_XSS, not of XCR0.
    let end = |entry: &kvm_cpuid_entry2| match entry.ecx & 1 {
        0 => entry.ebx.saturating_add(entry.eax),
        _ => 0,
    };
    // The legacy area and the header are always there.
    let size = entries
        .iter()
        .filter(component)
        .map(end)
        .fold(512 + 64, u32::max);
    for entry in entries
        .iter_mut()
        .filter(|entry| entry.function == 0xd && entry.index == 0)
    {
        entry.ecx = size;
    }
}

/// One package with one thread a core.
struct Topology {
    index: u32,
    count: u32,
    /// Bits of the APIC id that number a core.
    core_bits: u32,
}

impl Topology {
    fn new(index: u8, count: u8) -> Self {
        let count = u32::from(count.max(1));
        Self {
            index: index.into(),
            count,
            core_bits: count.next_power_of_two().trailing_zeros(),
        }
    }

    fn describe(&self, entry: &mut kvm_cpuid_entry2) {
        let ids = 1u32 << self.core_bits;
        match entry.function {
            1 => {
                entry.ebx = entry.ebx & 0xffff | ids << 16 | self.index << 24;
                // HTT: more than one logical processor in the package.
                entry.edx = entry.edx & !(1 << 28) | u32::from(self.count > 1) << 28;
            }
            // Intel's caches: cores of the package, and how many share this cache.
            4 if entry.eax & 0x1f != 0 => {
                entry.eax =
                    entry.eax & 0x3fff | self.sharers(entry) << 14 | (ids - 1).min(63) << 26;
            }
            0x8000_0008 => {
                entry.ecx = entry.ecx & !0xf0ff | self.core_bits << 12 | (self.count - 1)
            }
            // AMD's caches.
            0x8000_001d if entry.eax & 0x1f != 0 => {
                entry.eax = entry.eax & 0x3fff | self.sharers(entry) << 14;
            }
            // AMD's extended APIC id, core id with one thread a core, and node 0.
            0x8000_001e => {
                (entry.eax, entry.ebx, entry.ecx, entry.edx) = (self.index, self.index, 0, 0);
            }
            _ => {}
        }
    }

    /// Ids that share a cache, less one: caches of the third level and up are the package's.
    fn sharers(&self, entry: &kvm_cpuid_entry2) -> u32 {
        if entry.eax >> 5 & 7 >= 3 {
            (1 << self.core_bits) - 1
        } else {
            0
        }
    }

    /// The extended topology leaf: a level of threads, one of cores, and the one that ends it.
    fn x2apic_leaf(&self, function: u32) -> [kvm_cpuid_entry2; 3] {
        let level = |index, shift, processors, kind: u32| kvm_cpuid_entry2 {
            function,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: shift,
            ebx: processors,
            ecx: index | kind << 8,
            edx: self.index,
            ..Default::default()
        };
        [
            level(0, 0, 1, 1),
            level(1, self.core_bits, self.count, 2),
            level(2, 0, 0, 0),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32) -> kvm_cpuid_entry2 {
        let all = u32::MAX;
        let registers = kvm_cpuid_entry2 {
            eax: all,
            ebx: all,
            ecx: all,
            edx: all,
            ..Default::default()
        };
        kvm_cpuid_entry2 {
            function,
            index,
            ..registers
        }
    }

    fn component(index: u32, size: u32, offset: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            eax: size,
            ebx: offset,
            ecx: 0,
            edx: 0,
            ..entry(0xd, index)
        }
    }

    fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
        *entries
            .iter()
            .find(|e| (e.function, e.index) == (function, index))
            .unwrap()
    }

    #[test]
    fn test_each_vcpu_finds_its_own_id_in_every_leaf_that_has_one() {
        let supported = [entry(1, 0), entry(0xb, 0), entry(0x8000_001e, 0)];
        let entries = normalise(&supported, 5, 6);
        assert_eq!(find(&entries, 1, 0).ebx >> 24, 5);
        assert_eq!(find(&entries, 0xb, 0).edx, 5);
        assert_eq!(find(&entries, 0xb, 1).edx, 5);
        assert_eq!(find(&entries, 0x8000_001e, 0).eax, 5);
        // Six cores need three bits.
        assert_eq!(find(&entries, 0xb, 1).eax, 3);
        assert_eq!(find(&entries, 0xb, 1).ebx, 6);
        assert_eq!(find(&entries, 1, 0).ebx >> 16 & 0xff, 8);
    }

    #[test]
    fn test_a_single_vcpu_has_no_siblings() {
        let entries = normalise(&[entry(1, 0), entry(0x8000_0008, 0)], 0, 1);
        assert_eq!(find(&entries, 1, 0).edx >> 28 & 1, 0);
        assert_eq!(find(&entries, 0x8000_0008, 0).ecx & 0xff, 0);
    }

    #[test]
    fn test_nesting_counters_and_dynamic_state_are_not_offered() {
        let supported = [
            entry(1, 0),
            entry(7, 0),
            entry(0xa, 0),
            component(2, 256, 576),
            component(9, 8, 2688),
            component(18, 8192, 2752),
            entry(0xd, 0),
            entry(0xd, 1),
            entry(0x1d, 0),
            entry(0x8000_0001, 0),
        ];
        let entries = normalise(&supported, 0, 1);
        assert_eq!(find(&entries, 1, 0).ecx & (1 << 5), 0, "VMX");
        assert_eq!(find(&entries, 0x8000_0001, 0).ecx & (1 << 2), 0, "SVM");
        assert_eq!(find(&entries, 7, 0).edx & (1 << 24), 0, "AMX");
        assert_eq!(find(&entries, 0xd, 0).eax & DYNAMIC_XSTATE, 0);
        // The area ends with the last component that is left.
        assert_eq!(find(&entries, 0xd, 0).ecx, 2696);
        for function in [0xa, 0x1d] {
            assert!(!entries.iter().any(|entry| entry.function == function));
        }
        assert!(
            !entries
                .iter()
                .any(|entry| entry.function == 0xd && entry.index == 18)
        );
    }

    #[test]
    fn test_a_guest_knows_that_it_is_virtual_and_has_a_deadline_timer() {
        let none = kvm_cpuid_entry2 {
            function: 1,
            ..Default::default()
        };
        let entries = normalise(&[none], 0, 1);
        assert_eq!(entries[0].ecx, 1 << 24 | 1 << 31);
    }
}
