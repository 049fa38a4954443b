//! The agent's container engine end to end: real processes, over ttrpc and streams, without a VM.
//!
//! Needs root and busybox-static. Where `/sys/fs/cgroup` is not version 2 the agent gets a mount
//! namespace in which it is; tests of limits then say that they show nothing.
//! `THAW_TESTS_MUST_RUN` in the environment makes every skip a failure.

mod confinement;
mod exec;
mod group;
mod guest;
mod life;
mod limits;
mod stdio;
