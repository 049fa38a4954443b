//! The shape of a VM: what distinguishes one template from another apart from the host.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// vCPU count and memory class of a VM. Always valid: made by [`Shape::new`] only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "RawShape", into = "RawShape")]
pub struct Shape {
    vcpus: u8,
    memory_mib: u32,
}

/// A shape as it was read from outside: unchecked.
#[derive(Serialize, Deserialize)]
struct RawShape {
    vcpus: u8,
    memory_mib: u32,
}

/// Why a vCPU count or a memory size is not a shape.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum InvalidShape {
    /// vCPU count outside of 1..=16.
    #[error("{0} vCPUs: a sandbox has 1 to 16")]
    Vcpus(u8),
    /// Memory that is not a power of two of MiB between 128 MiB and 1 TiB.
    #[error("{0} MiB: the memory of a sandbox is a power of two from 128 MiB to 1 TiB")]
    Memory(u32),
}

impl Shape {
    /// Most vCPUs a VM can have.
    pub const MAX_VCPUS: u8 = 16;

    /// A shape of `vcpus` vCPUs (1 to 16) and `memory_mib` MiB (a power of two, 128 MiB to 1 TiB).
    pub fn new(vcpus: u8, memory_mib: u32) -> Result<Self, InvalidShape> {
        if !(1..=Self::MAX_VCPUS).contains(&vcpus) {
            return Err(InvalidShape::Vcpus(vcpus));
        }
        if !memory_mib.is_power_of_two() || !(128..=1 << 20).contains(&memory_mib) {
            return Err(InvalidShape::Memory(memory_mib));
        }
        Ok(Self { vcpus, memory_mib })
    }

    /// Number of vCPUs.
    pub fn vcpus(self) -> u8 {
        self.vcpus
    }

    /// Guest memory in MiB.
    pub fn memory_mib(self) -> u32 {
        self.memory_mib
    }

    /// Guest memory in bytes.
    pub fn memory_bytes(self) -> u64 {
        u64::from(self.memory_mib) << 20
    }
}

impl TryFrom<RawShape> for Shape {
    type Error = InvalidShape;

    fn try_from(raw: RawShape) -> Result<Self, InvalidShape> {
        Self::new(raw.vcpus, raw.memory_mib)
    }
}

impl From<Shape> for RawShape {
    fn from(shape: Shape) -> Self {
        Self {
            vcpus: shape.vcpus,
            memory_mib: shape.memory_mib,
        }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}M", self.vcpus, self.memory_mib)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_shape_bounds() {
        assert_eq!(Shape::new(0, 256), Err(InvalidShape::Vcpus(0)));
        assert_eq!(Shape::new(17, 256), Err(InvalidShape::Vcpus(17)));
        assert_eq!(Shape::new(1, 300), Err(InvalidShape::Memory(300)));
        assert_eq!(Shape::new(1, 64), Err(InvalidShape::Memory(64)));
        assert_eq!(Shape::new(2, 2048).unwrap().to_string(), "2x2048M");
    }
}
