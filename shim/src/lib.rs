//! containerd's side of thaw.

pub mod paths;
pub mod template;
