//! A guest that does one operation with files many times, to count what each costs the host.
//!
//! The guest's only program is [`serve`]'s, as process 1: see [`FileGuest`] for the host's side. Under any
//! other VMM the same program does all operations and prints how long they took ([`serve`] says when).

mod guest;
mod host;

pub use guest::{is_guest, serve};
pub use host::{Cost, FileGuest, initramfs};

/// Where the guest listens, on vsock.
const PORT: u32 = 5000;

/// What the guest says on its console once it listens.
const READY: &str = "files are mounted";

/// The tag of the file system.
pub const TAG: &str = thaw_vmm_control::FILE_SYSTEM_TAG;

/// All operations, in an order in which each finds what it needs. "MiB" are counted in those.
pub const OPERATIONS: &[&str] = &[
    "create",
    "stat",
    "stat again",
    "open",
    "write",
    "read",
    "read again",
    "rename",
    "remove",
    "write MiB",
    "read MiB",
    "read MiB again",
    "read MiB of memory",
];
