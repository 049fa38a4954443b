//! Input and output straight between guest memory and a file descriptor.
//!
//! The kernel copies from and to the guest's pages, so the bytes pass through no buffer of ours and
//! are never looked at: it does no harm that the guest may change them meanwhile.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use vm_memory::VolatileSlice;

/// The most segments that the kernel takes in one call (`UIO_MAXIOV`).
const MAX_SEGMENTS: usize = 1024;

/// Read from `file` at byte `offset` into `segments`, as `preadv(2)`: possibly less than they hold.
pub fn read_at(file: &impl AsFd, segments: &[VolatileSlice<'_>], offset: u64) -> io::Result<usize> {
    let (iovecs, offset) = (io_vectors(segments), file_offset(offset)?);
    // SAFETY: every vector describes guest memory that stays mapped for the slices' lifetime, and
    // that nobody but the guest and volatile accesses like this one use.
    result(unsafe {
        libc::preadv(
            file.as_fd().as_raw_fd(),
            iovecs.as_ptr(),
            count(&iovecs),
            offset,
        )
    })
}

/// Write `segments` to `file` at byte `offset`, as `pwritev(2)`: possibly less than they hold.
pub fn write_at(
    file: &impl AsFd,
    segments: &[VolatileSlice<'_>],
    offset: u64,
) -> io::Result<usize> {
    let (iovecs, offset) = (io_vectors(segments), file_offset(offset)?);
    // SAFETY: as in `read_at`; the kernel only reads the vectors' memory.
    result(unsafe {
        libc::pwritev(
            file.as_fd().as_raw_fd(),
            iovecs.as_ptr(),
            count(&iovecs),
            offset,
        )
    })
}

/// Receive from a stream socket into `segments` without waiting; 0 is the end of the stream.
pub fn receive(socket: &impl AsFd, segments: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let mut iovecs = io_vectors(segments);
    let mut message = message(&mut iovecs);
    // SAFETY: `message` points to nothing but `iovecs`, which live until the call returns and
    // describe guest memory as in `read_at`.
    result(unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &mut message, libc::MSG_DONTWAIT) })
}

/// Send `segments` to a stream socket without waiting and without a signal when it is closed.
pub fn send(socket: &impl AsFd, segments: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let mut iovecs = io_vectors(segments);
    let message = message(&mut iovecs);
    // SAFETY: as in `receive`; the kernel only reads the vectors' memory.
    result(unsafe {
        libc::sendmsg(
            socket.as_fd().as_raw_fd(),
            &message,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    })
}

/// Send bytes of our own as [`send`] does, the second slice after the first.
pub fn send_bytes(socket: &impl AsFd, bytes: (&[u8], &[u8])) -> io::Result<usize> {
    let mut iovecs = [bytes.0, bytes.1].map(|part| libc::iovec {
        iov_base: part.as_ptr().cast_mut().cast(),
        iov_len: part.len(),
    });
    let message = message(&mut iovecs);
    // SAFETY: the vectors describe the two borrowed slices, which the kernel only reads.
    result(unsafe {
        libc::sendmsg(
            socket.as_fd().as_raw_fd(),
            &message,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    })
}

/// Whether bytes wait to be received from a stream socket.
pub fn has_bytes(socket: &impl AsFd) -> bool {
    let mut byte = 0u8;
    // SAFETY: the buffer is one byte and outlives the call.
    let peeked = unsafe {
        libc::recv(
            socket.as_fd().as_raw_fd(),
            (&raw mut byte).cast(),
            1,
            libc::MSG_DONTWAIT | libc::MSG_PEEK,
        )
    };
    peeked == 1
}

fn io_vectors(segments: &[VolatileSlice<'_>]) -> Vec<libc::iovec> {
    segments
        .iter()
        .take(MAX_SEGMENTS)
        .map(|segment| libc::iovec {
            // The guard has no work to do for memory that is mapped all the time, as ours is.
            iov_base: segment.ptr_guard_mut().as_ptr().cast(),
            iov_len: segment.len(),
        })
        .collect()
}

fn message(iovecs: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: a message header of zeroes is a valid one, without address, vectors and control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iovecs.as_mut_ptr();
    message.msg_iovlen = iovecs.len();
    message
}

fn count(iovecs: &[libc::iovec]) -> libc::c_int {
    // At most MAX_SEGMENTS.
    iovecs.len() as libc::c_int
}

fn file_offset(offset: u64) -> io::Result<libc::off_t> {
    offset
        .try_into()
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

fn result(returned: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(returned).map_err(|_| io::Error::last_os_error())
}
