//! How many descriptors the shim may have open.
//!
//! A service manager gives a daemon's children 1024 as a rule, with leave to take more. An exec takes up
//! to twelve: two for each of its FIFOs and two for each connection.

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::warn;

/// What the shim was started with.
static ORIGINAL: OnceLock<Rlimit> = OnceLock::new();

/// Take as many as are to be had.
pub fn raise_limit() {
    let original = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: original.maximum,
        maximum: original.maximum,
    };
    // Set once, by the one call.
    let _ = ORIGINAL.set(original);
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        warn!(%error, "raising the shim's limit of open descriptors");
    }
}

/// The limit that other programs are to be started with: some close, or look through, all descriptors
/// there may be. `None` when it is the shim's own.
pub fn original_limit() -> Option<libc::rlimit> {
    let value = |limit: Option<u64>| limit.unwrap_or(libc::RLIM_INFINITY);
    ORIGINAL.get().map(|original| libc::rlimit {
        rlim_cur: value(original.current),
        rlim_max: value(original.maximum),
    })
}
