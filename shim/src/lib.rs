//! containerd's side of thaw: the shim, the templates that it restores guests from, and the `thaw`
//! command.
//!
//! `README.md` tells how it works; each module says what it is for.

mod agent;
mod anchor;
pub mod bootstrap;
mod cgroup;
pub mod cleanup;
pub mod command;
mod console;
mod container;
mod daemon;
mod error;
mod events;
pub mod facts;
mod flags;
mod host_program;
mod log;
mod mounts;
mod network;
pub mod paths;
mod process;
pub mod process_identity;
mod readiness;
mod sandbox;
mod spec;
mod stdio;
mod task;
pub mod template;
pub mod trace;
mod vmm;
