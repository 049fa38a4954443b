//! Named points in thaw's programs at which a test can end the process that gets there, as if it had been
//! killed at that moment: to show that what it leaves behind is removed, and that its end is reported.
//!
//! Only builds with the feature `armed` have them, and those are never installed. A container arms one
//! point for its sandbox, by a variable of its environment, which all programs of the sandbox learn of:
//! `THAW_FAULT_POINT=vmm-restored`. [`point`] tells how points are named.
//!
//! After the first program is in the guest, its kernel panics when the agent gets to a point: an end of a
//! first process is nothing else.

/// The variable that arms a point, in the environment of a container.
pub const VARIABLE: &str = "THAW_FAULT_POINT";

// Its tests are run, and it is looked at, without the feature too.
#[cfg(any(feature = "armed", test))]
#[cfg_attr(not(feature = "armed"), allow(dead_code))]
mod armed;
#[cfg(feature = "armed")]
pub use armed::{arm_by_environment, arm_by_spec, environment, point};

#[cfg(not(feature = "armed"))]
mod disarmed {
    use std::ffi::CStr;

    /// End this process here, when the point `name` is armed. Names begin with the process that gets
    /// there: `start-`, `shim-`, `anchor-`, `vmm-`, `agent-`, `delete-`, and `cleanup-` for whoever
    /// removes a sandbox that is not its own.
    #[inline(always)]
    pub fn point(_name: &str) {}

    /// Arm the point that the environment in `spec`, an OCI spec in JSON, names.
    #[inline(always)]
    pub fn arm_by_spec(_spec: &[u8]) {}

    /// Arm the point that the environment of this process names.
    #[inline(always)]
    pub fn arm_by_environment() {}

    /// The variable, for the environment of a program that is about to be executed.
    #[inline(always)]
    pub fn environment() -> Option<&'static CStr> {
        None
    }
}
#[cfg(not(feature = "armed"))]
pub use disarmed::{arm_by_environment, arm_by_spec, environment, point};
