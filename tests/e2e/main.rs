//! End-to-end tests: containers through real containerd, of three versions.
//!
//! `run`, `exec`, `stdio`, `terminal`, `signals`, `files` and most of `limits`, `tasks` and `group` hold for
//! every runtime, and `make e2e-runc` shows that they do with runc; the others are about what only thaw does.

mod cleanup;
mod containerd_client;
mod crash;
mod differences;
mod exec;
mod file_cases;
mod file_counts;
mod files;
mod git;
mod group;
mod identity;
mod idle;
mod limits;
mod memory;
mod operator;
mod protocol;
mod restore;
mod run;
mod shortage;
mod signals;
mod soak;
mod stdio;
mod survival;
mod tasks;
mod template;
mod terminal;
mod volumes;
