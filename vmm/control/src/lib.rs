//! The control channel of `thaw-vmm`: what its owner may ask, what it answers, how both travel, and
//! how the process is started in its jail.
//!
//! One `SOCK_SEQPACKET` socket pair connects the owner of a sandbox (the shim, a test, a benchmark)
//! with one `thaw-vmm`. Each packet is one message; descriptors travel beside it (`SCM_RIGHTS`). The
//! owner has at most one request outstanding and gets exactly one [`Reply`] for it; [`Event`]s may
//! arrive at any time. When the owner's end closes, the VMM exits.
//!
//! This crate knows nothing of KVM or virtio, so that the shim does not link them.

mod channel;
mod launch;
mod message;
mod owner;
mod read_only;
mod shape;
mod working_set;

pub use channel::{Channel, ChannelError, MAX_DESCRIPTORS, MAX_MESSAGE};
pub use launch::{Launch, LaunchError, Launched};
pub use message::{Event, FromVmm, GuestExit, Phase, Reply, Request, Statistics};
pub use owner::Owner;
pub use read_only::ReadOnlyView;
pub use shape::{InvalidShape, Shape};
pub use working_set::{InvalidWorkingSet, PAGE_SIZE, TouchedPages, WorkingSet};

/// The virtio-fs tag of the one file tree a sandbox exports to its guest.
pub const FILE_SYSTEM_TAG: &str = "thaw";

/// The guest's vsock context id: constant, since each VMM is a vsock host of its own.
pub const GUEST_CONTEXT_ID: u64 = 3;

/// Number of virtio-block slots that every template has.
pub const BLOCK_SLOTS: u8 = 8;

/// The descriptor on which `thaw-vmm` finds its end of the control channel.
pub const CONTROL_DESCRIPTOR: i32 = 3;

/// The descriptor on which `thaw-vmm` finds `/dev/kvm`, opened by whoever started it.
pub const KVM_DESCRIPTOR: i32 = 4;

/// The format of snapshots that this build writes and reads. Part of every template's key; it
/// changes with the meaning of a snapshot's state or of its manifest.
pub const FORMAT_EPOCH: u32 = 3;

/// The kernel command line of a template's guest. `tsc=reliable` and `no_timer_check` leave out
/// checks of hardware that KVM vouches for; a guest that panics resets at once, and a reset is a
/// triple fault, which needs no device. Memory that is plugged later is used at once, and free memory is reported in
/// blocks of 512 KiB (a kernel reports none while it has not 32 blocks to spare: with the 2 MiB that are
/// its default, small guests would never).
pub const COMMAND_LINE: &str = "console=hvc0 quiet panic=-1 reboot=t tsc=reliable no_timer_check \
     pci=conf1 8250.nr_uarts=0 random.trust_cpu=on memhp_default_state=online \
     page_reporting.page_reporting_order=7";
