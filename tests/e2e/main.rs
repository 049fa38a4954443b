//! End-to-end tests: containers through real containerd, of three versions.
//!
//! `run`, `exec`, `stdio`, `files` and most of `tasks` hold for every runtime, and `make e2e-runc` shows that they do
//! with runc; the others are about what only thaw does.

mod cleanup;
mod containerd_client;
mod exec;
mod files;
mod identity;
mod restore;
mod run;
mod soak;
mod stdio;
mod tasks;
mod template;
