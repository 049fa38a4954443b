//! containerd's side of thaw.
