//! The messages of the control channel.

use serde::{Deserialize, Serialize};

use crate::{Shape, WorkingSet};

/// What the owner asks of the VMM. Descriptors that belong to a request are named in its text, in
/// the order in which they are sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Boot a guest from nothing, for a template. Descriptors: kernel (ELF `vmlinux`), initramfs.
    /// vCPUs run when this is answered.
    Boot {
        /// vCPUs and memory of the machine.
        shape: Shape,
        /// Kernel command line.
        command_line: String,
    },
    /// Make the machine of a snapshot, vCPUs stopped. Descriptors: state file, memory file, both
    /// read-only.
    Restore {
        /// Pages that are made ready before the guest runs: when [`Request::Populate`] asks for it,
        /// else by the last vCPU's thread. A hint: it changes nothing but the time that a start
        /// takes and how much memory the guest has of its own.
        working_set: WorkingSet,
    },
    /// Make the working set of a restored machine ready now. For an owner that has time before it
    /// wants the guest to run, and by when the VMM is where its memory is to be charged.
    Populate,
    /// As [`Request::Restore`], but record which pages of its memory the guest touches. Descriptors:
    /// state file, memory file, `/proc/PID/pagemap` of the VMM, which finds no procfs in its jail.
    Rehearse,
    /// Give block slot `slot` its backing, before the vCPUs of a restored machine run.
    /// Descriptors: the file or block device. One that others use too is opened by a
    /// [`crate::ReadOnlyView`], because `read_only` binds the guest but not a VMM taken over by it.
    AttachBlock {
        /// Slot number, below [`crate::BLOCK_SLOTS`].
        slot: u8,
        /// Refuse writes.
        read_only: bool,
    },
    /// Run the vCPUs of a restored machine.
    Run,
    /// Let the guest have `bytes` of memory beside that of its shape, in all. Answered at once; the guest
    /// plugs or unplugs blocks of 128 MiB by itself, as far as it can. Refused where that is more than it
    /// has addresses for.
    Memory {
        /// Rounded up to blocks.
        bytes: u64,
    },
    /// Open a vsock connection from the host to `port` of the guest and move bytes between it and
    /// the descriptor sent along (one end of a `SOCK_STREAM` socket pair), until both directions
    /// have ended. Answered as soon as the request is queued; when the guest refuses, the other end
    /// of the pair sees end of file.
    ConnectVsock {
        /// Port of the listening guest socket.
        port: u32,
    },
    /// Stop the vCPUs and write the machine. Descriptors: state file, memory file, both empty,
    /// writable and seekable. The machine stays stopped.
    Snapshot,
    /// Ask for the counters of [`Statistics`].
    Statistics,
    /// Ask for what a guest made by [`Request::Rehearse`] has touched so far. Refused where it could
    /// not be recorded.
    WorkingSet,
}

/// The one answer to a [`Request`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Done.
    Done,
    /// The answer to [`Request::Statistics`].
    Statistics(Statistics),
    /// The answer to [`Request::WorkingSet`].
    WorkingSet(WorkingSet),
    /// Not done: what was being done, with what, and why it failed.
    Failed(String),
}

/// What the VMM says unasked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The guest is no more; the VMM exits after this.
    GuestExit(GuestExit),
    /// Output of the guest's console, as it came.
    Console(Vec<u8>),
}

/// How a guest ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GuestExit {
    /// It asked for a reset or power-off, as a kernel does after a panic too.
    Reset,
    /// Triple fault.
    Shutdown,
    /// KVM or a device could not go on.
    Failed(String),
}

/// A packet from the VMM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromVmm {
    /// Answer to the outstanding request.
    Reply(Reply),
    /// Something that happened.
    Event(Event),
}

/// One step of the VMM's start, with the CLOCK_MONOTONIC time at which it was complete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    /// Name, as `thaw trace` prints it.
    pub name: String,
    /// CLOCK_MONOTONIC in nanoseconds.
    pub monotonic_ns: u64,
}

/// What a VMM counts about its guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// Steps of the start, in order.
    pub phases: Vec<Phase>,
    /// Sums over all vCPUs of KVM's own counters (`KVM_GET_STATS_FD`), by KVM's names.
    pub kvm: Vec<(String, u64)>,
    /// Requests that the file server has answered.
    pub file_requests: u64,
    /// Those of them that tell of a closed file or directory, for which no program waits.
    pub file_releases: u64,
    /// How often the guest has reported memory that it does not use.
    pub reports: u64,
    /// Bytes that went back to the host by that, each time they did.
    pub reported_bytes: u64,
    /// Bytes that the guest has plugged beside the memory of its shape.
    pub plugged_bytes: u64,
    /// Bytes of guest memory that differ from the template (private pages), from `/proc/self/smaps`
    /// like data; zero where it could not be read.
    pub guest_dirty_bytes: u64,
}

impl Statistics {
    /// How often the guest has left its vCPUs, where KVM counts that.
    pub fn exits(&self) -> Option<u64> {
        let mut counters = self.kvm.iter();
        let exits = counters.find(|(name, _)| name == "exits");
        exits.map(|(_, count)| *count)
    }
}
