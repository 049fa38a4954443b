//! containerd's side of thaw.

pub mod command;
pub mod paths;
pub mod template;
pub mod trace;
