//! What of this host a template depends on: a snapshot is only restored on the very same kernel and
//! processor that it was taken on.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::digest::Digest;

/// The host's part of a template's key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostFacts {
    /// Release and build of the host's kernel, as `uname -rv` prints them.
    pub kernel: String,
    /// Revision of the processor's microcode, where the kernel shows it.
    pub microcode: Option<String>,
    /// Which of KVM's implementations serves.
    pub kvm: KvmFlavour,
    /// Digest of the CPUID leaves that are the same on every CPU of a host.
    pub cpuid: Digest,
    /// Frequency of the time stamp counter, where CPUID tells it.
    pub tsc_khz: Option<u64>,
}

/// Which hardware extension KVM has on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvmFlavour {
    /// Intel's VMX.
    Vmx,
    /// AMD's SVM.
    Svm,
    /// Neither: where there is a `/dev/kvm` all the same, it emulates.
    None,
}

impl HostFacts {
    /// The facts of the running host.
    pub fn gather() -> io::Result<Self> {
        let uname = nix::sys::utsname::uname()?;
        let kernel = format!(
            "{} {}",
            uname.release().to_string_lossy(),
            uname.version().to_string_lossy()
        );
        let microcode = Path::new("/sys/devices/system/cpu/cpu0/microcode/version");
        let microcode = std::fs::read_to_string(microcode)
            .ok()
            .map(|text| text.trim().to_owned());
        Ok(Self {
            kernel,
            microcode,
            kvm: KvmFlavour::detect(),
            cpuid: Digest::of(&cpuid_bytes()),
            tsc_khz: tsc_khz(),
        })
    }
}

impl KvmFlavour {
    /// The flavour of the processor that this runs on.
    pub fn detect() -> Self {
        let vmx = cpuid(1, 0)[ECX] & 1 << 5 != 0;
        let svm = cpuid(EXTENDED, 0)[EAX] > EXTENDED && cpuid(EXTENDED + 1, 0)[ECX] & 1 << 2 != 0;
        match (vmx, svm) {
            (true, _) => Self::Vmx,
            (_, true) => Self::Svm,
            _ => Self::None,
        }
    }
}

const EAX: usize = 0;
const EBX: usize = 1;
const ECX: usize = 2;

/// First of the extended leaves.
const EXTENDED: u32 = 0x8000_0000;

/// First of the leaves with which a hypervisor describes itself.
const HYPERVISOR: u32 = 0x4000_0000;

/// The four registers that CPUID gives for a leaf.
fn cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    #[allow(
        unused_unsafe,
        reason = "safe to call in newer compilers than the oldest supported"
    )]
    // SAFETY: every x86-64 processor has the instruction, and it has no effect on memory.
    let result = unsafe { core::arch::x86_64::__cpuid_count(leaf, subleaf) };
    [result.eax, result.ebx, result.ecx, result.edx]
}

/// Vendor, model and features: what differs between processors, without what differs between the
/// CPUs of one (APIC ids, and what depends on the state of the asking CPU).
fn cpuid_bytes() -> Vec<u8> {
    /// Leaf, subleaf, and the bits of each register that count.
    type Leaf = (u32, u32, [u32; 4]);
    const ALL: [u32; 4] = [u32::MAX; 4];
    const BASIC: &[Leaf] = &[
        (0, 0, ALL),
        // EBX: initial APIC id and the number of ids are the CPU's own.
        (1, 0, [u32::MAX, 0x0000_ff00, u32::MAX, u32::MAX]),
        (6, 0, [u32::MAX, 0, 0, 0]),
        (7, 0, ALL),
        (7, 1, ALL),
        (7, 2, ALL),
        // EBX: size of what is enabled now.
        (0xd, 0, [u32::MAX, 0, u32::MAX, u32::MAX]),
        (0xd, 1, [u32::MAX, 0, u32::MAX, u32::MAX]),
        (0x15, 0, ALL),
    ];
    const EXTENDED_LEAVES: &[Leaf] = &[
        (EXTENDED + 1, 0, ALL),
        (EXTENDED + 2, 0, ALL),
        (EXTENDED + 3, 0, ALL),
        (EXTENDED + 4, 0, ALL),
        (EXTENDED + 7, 0, ALL),
        (EXTENDED + 8, 0, ALL),
        (EXTENDED + 0xa, 0, ALL),
        (EXTENDED + 0x21, 0, ALL),
    ];
    const HYPERVISOR_LEAVES: &[Leaf] = &[(HYPERVISOR, 0, ALL), (HYPERVISOR + 1, 0, ALL)];

    let mut bytes = Vec::with_capacity(512);
    let mut group = |max: u32, leaves: &[Leaf]| {
        for (leaf, subleaf, masks) in leaves.iter().filter(|(leaf, ..)| *leaf <= max) {
            // A subleaf past the last reads as zero or as the last basic leaf; leaf 7 says how many.
            if *leaf == 7 && *subleaf > cpuid(7, 0)[EAX] {
                continue;
            }
            bytes.extend_from_slice(&leaf.to_le_bytes());
            bytes.extend_from_slice(&subleaf.to_le_bytes());
            for (register, mask) in cpuid(*leaf, *subleaf).into_iter().zip(masks) {
                bytes.extend_from_slice(&(register & mask).to_le_bytes());
            }
        }
    };
    group(cpuid(0, 0)[EAX], BASIC);
    group(cpuid(EXTENDED, 0)[EAX], EXTENDED_LEAVES);
    if is_virtual() {
        group(cpuid(HYPERVISOR, 0)[EAX].max(HYPERVISOR), HYPERVISOR_LEAVES);
    }
    bytes
}

/// Whether this host is itself a virtual machine.
fn is_virtual() -> bool {
    cpuid(1, 0)[ECX] & 1 << 31 != 0
}

/// Frequency of the time stamp counter: from the crystal's (Intel SDM, CPUID leaf 15H), else from
/// the timing leaf that hypervisors share. What the kernel has measured is no use here: it differs
/// a little from boot to boot.
fn tsc_khz() -> Option<u64> {
    let from_crystal = || {
        let leaf = (cpuid(0, 0)[EAX] >= 0x15).then(|| cpuid(0x15, 0))?;
        let (denominator, numerator, hertz) = (leaf[EAX], leaf[EBX], leaf[ECX]);
        (denominator != 0 && numerator != 0 && hertz != 0)
            .then(|| u64::from(hertz) * u64::from(numerator) / u64::from(denominator) / 1000)
    };
    let from_hypervisor = || {
        let timing = HYPERVISOR + 0x10;
        let max = is_virtual().then(|| cpuid(HYPERVISOR, 0)[EAX])?;
        let khz = (timing..HYPERVISOR + 0x100)
            .contains(&max)
            .then(|| cpuid(timing, 0)[EAX])?;
        (khz != 0).then_some(u64::from(khz))
    };
    from_crystal().or_else(from_hypervisor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_facts_are_the_same_on_every_cpu() {
        let reference = HostFacts::gather().unwrap();
        let pin = |cpu: usize| {
            let mut set = nix::sched::CpuSet::new();
            set.set(cpu)
                .and_then(|()| nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set))
        };
        // On a thread of its own, since the affinity stays.
        std::thread::spawn(move || {
            for cpu in 0..64 {
                if pin(cpu).is_ok() {
                    assert_eq!(HostFacts::gather().unwrap(), reference, "CPU {cpu}");
                }
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn test_cpuid_has_vendor_and_some_leaves() {
        let bytes = cpuid_bytes();
        assert!(bytes.len() >= 5 * 24, "{}", bytes.len());
        assert_ne!(cpuid(0, 0)[EBX], 0);
    }
}
