//! What shim and agent say to each other, over vsock.
//!
//! On [`CONTROL_PORT`] the agent serves ttrpc: containerd's Task service (from
//! `containerd-shim-protos`, under the v2 name) and the [`agent_ttrpc::Sandbox`] service of
//! `protos/agent.proto`. On [`STREAM_PORT`] it takes stdio streams: each connection begins with a
//! [`StreamHeader`] and then carries the raw bytes of one stream; end of file is a half-close.
//!
//! How containerd's messages are used:
//!
//! * `CreateTaskRequest.options` is an `Any` of [`SPEC_TYPE_URL`] with the OCI runtime spec as JSON,
//!   all paths in it already those of the guest (`root.path` included); `rootfs` is empty. A root
//!   that is a disk is mounted at [`ROOT_DISK`] by `Configure`.
//! * `path` of a namespace in the spec is [`NAMESPACE_OF`] and the id of another container of the
//!   guest, whose namespace of that type is joined.
//! * `stdin`, `stdout`, `stderr` of Create and Exec are `stream://<id>` (see [`stream_uri`]), or
//!   empty for none. The shim connects the streams at the same time as it sends the request; the
//!   agent waits for them (bounded) before it answers.
//! * pids in answers are those of the guest; the shim puts its own there.

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/mod.rs"));
}
mod stream;

pub use generated::{agent, agent_ttrpc};
pub use stream::{InvalidHeader, StreamHeader, parse_stream_uri, stream_uri};

/// vsock port of the ttrpc services.
pub const CONTROL_PORT: u32 = 1024;

/// What the agent prints on the guest's console, as a line, once it listens on both ports. A template
/// build waits for it.
pub const READY_LINE: &str = "thaw-agent: ready";

/// vsock port of the stdio streams.
pub const STREAM_PORT: u32 = 1025;

/// Most processes in an answer to `Processes`.
pub const MOST_PROCESSES: usize = 1024;

/// Most bytes of a text about one of them.
pub const MOST_COMMAND_BYTES: usize = 256;

/// Where the guest mounts the sandbox's file tree.
pub const SHARE: &str = "/run/thaw/share";

/// Name of the directory below [`SHARE`] with what containers bind of the host.
pub const VOLUMES: &str = "volumes";

/// Where the guest mounts a disk that is a container's root.
pub const ROOT_DISK: &str = "/run/thaw/root";

/// The guest's device of block slot `slot`: its kernel finds the slots, which are all there when the
/// template boots, in their order.
pub fn disk_path(slot: u32) -> String {
    let letter = char::from_u32(u32::from('a') + slot).filter(char::is_ascii_lowercase);
    format!("/dev/vd{}", letter.unwrap_or('?'))
}

/// What stands before a container's id in the `path` of a namespace: the guest has other paths than
/// the host, and pids that the host does not know.
pub const NAMESPACE_OF: &str = "container:";

/// How long the guest takes names and attributes of the file tree to be as they were, in
/// milliseconds. The VMM's file server says so with each of its answers.
pub const NAMES_VALID_MS: u64 = 1000;

/// Type URL of an OCI runtime spec (JSON) in `CreateTaskRequest.options`.
pub const SPEC_TYPE_URL: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";
