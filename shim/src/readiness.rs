//! Waiting for a descriptor in tokio's event loop.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// What owns or borrows one descriptor and names the same one, open, for as long as it exists.
///
/// # Safety
///
/// `as_raw_fd` must always return that descriptor.
pub unsafe trait OneDescriptor: AsRawFd {}

// SAFETY: owns its descriptor, which no safe code can exchange.
unsafe impl OneDescriptor for File {}

// SAFETY: as for a file.
unsafe impl OneDescriptor for OwnedFd {}

// SAFETY: the lifetime is that of what owns the descriptor.
unsafe impl OneDescriptor for BorrowedFd<'_> {}

/// `inner`, to be waited for. Must be called within the runtime; fails for what is always ready.
pub fn register<T: OneDescriptor>(inner: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: the descriptor stays open and the same, which is what the trait says.
    Ok(unsafe { AsyncFd::register_with_interest(inner, interest) }?)
}
