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
mod consoles;
mod container;
mod counters;
mod daemon;
mod descriptors;
mod disks;
mod error;
mod events;
pub mod facts;
mod flags;
mod hooks;
mod host_program;
mod log;
mod mounts;
mod network;
mod operator;
pub mod paths;
mod process;
pub mod process_identity;
mod readiness;
mod room;
mod sandbox;
mod settings;
mod spec;
mod stdio;
mod task;
pub mod template;
mod terminal;
pub mod trace;
mod vmm;
