//! What the agent and its helper say to each other: one request and one reply over a socket pair
//! of type `SOCK_SEQPACKET`, JSON, with descriptors beside it.
//!
//! Specs go by file, not in the message: they may be larger than one message can be.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The name by which the program is the helper.
pub const HELPER_NAME: &str = "thaw-container";

/// The name by which the program ends at once, successfully.
pub const NOTHING_NAME: &str = "thaw-nothing";

/// Longest message.
pub const MESSAGE_LIMIT: usize = 64 << 10;

/// Where a created container waits for its start, in its directory of states.
pub const START_SOCKET: &str = "start";

/// The runtime spec as received, in the bundle.
pub const RECEIVED_SPEC: &str = "received.json";

/// The runtime spec as it is carried out, in the bundle.
pub const SPEC: &str = "config.json";

/// Where the process of an exec is described, in the bundle.
pub fn process_file(exec_id: &str) -> String {
    format!("exec-{exec_id}.json")
}

/// Where a container is kept in the guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Place {
    /// The container's id; a checked file name.
    pub id: String,
    /// Its directory for what the agent writes.
    pub bundle: PathBuf,
    /// The directory below which each container has a directory with the socket that its start is told at.
    pub states: PathBuf,
    /// Its cgroup, relative to the root of the hierarchy, with a leading slash.
    pub cgroup: String,
}

/// What the helper is to do.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Make the container, with its first process stopped before exec. Descriptors: the report
    /// pipe's write end, then standard input, output and error unless there is a terminal. The reply
    /// is [`Reply::Started`], with the terminal's master.
    Create {
        /// Which.
        place: Place,
        /// Whether the process gets a terminal.
        terminal: bool,
        /// Rows and columns of the terminal, if a client has asked for a size already.
        window: Option<(u16, u16)>,
        /// The first processes of the other containers, whose namespaces may be joined, by id.
        others: BTreeMap<String, i32>,
    },
    /// Start another process in it; descriptors and reply as for [`Request::Create`].
    Exec {
        /// Where.
        place: Place,
        /// Names the file that describes the process, see [`process_file`].
        exec_id: String,
        /// The container's first process, whose namespaces it joins.
        first: i32,
        /// Whether the process gets a terminal.
        terminal: bool,
        /// Rows and columns of the terminal, if a client has asked for a size already.
        window: Option<(u16, u16)>,
    },
    /// Apply `LinuxResources` (JSON) to the cgroup.
    Update {
        /// Whose.
        place: Place,
        /// What.
        resources: String,
    },
    /// Write back the file system of the container's root.
    Sync {
        /// Whose.
        place: Place,
    },
}

/// What came of it.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The process is there; the agent is its parent.
    Started {
        /// Its pid in the agent's namespace.
        pid: i32,
    },
    /// Done.
    Done,
    /// Not done.
    Refused {
        /// A gRPC code.
        code: i32,
        /// One line.
        message: String,
    },
}
