//! The file system device (virtio 1.2, 5.11): FUSE over a queue for messages with priority and one for
//! requests a vCPU, no DAX window.
//!
//! Linux sends a request in the queue of the vCPU that makes it, and that vCPU takes the interrupt for
//! the answer. With one queue for all, an answer would mostly interrupt another vCPU, which would have
//! to be woken first and then wake the right one: twice as many exits.
//!
//! The tree is served by virtiofsd's library ([`server`]), in one worker thread, so requests of a queue
//! are answered in the order in which the driver makes them available. The library sees
//! guest memory through [`view`] and the host through [`export`], which checks what the library
//! does not.
//!
//! A template holds this device probed but not mounted: the driver has read the tag and set up its
//! queues, no FUSE message has been sent, and nothing of the tree is in the guest. So every clone
//! mounts its own tree. A mounted device is not saved: the guest's inodes stand for open files of
//! this process.

//!
//! What the guest sees differs in a few things from a file system of its own. Each has its reason in
//! the host's kernel, which asks for some capabilities in the initial user namespace only, or in the
//! library:
//!
//! - Device nodes cannot be made (EPERM); FIFOs, sockets and everything else can.
//! - `trusted.*` attributes and security labels can neither be set (EPERM) nor seen (ENODATA).
//!   `user.*`, ACLs and `security.capability` are those of the host.
//! - A write takes the setuid and setgid bits and the capabilities of a file away, also when the guest's
//!   root writes, who would keep the bits elsewhere. So does a change of owner or length.
//! - O_TMPFILE, times of birth, file attributes (`chattr`), reflinks and other ioctls are not supported:
//!   the library knows none of them.
//! - Locks (flock, POSIX, those of open files), sockets and inotify are the guest's own: of all its containers
//!   that have the same directory mounted with the same options. The host, another VM, and a mount with other
//!   options or of a directory above know nothing of them. A lock there is granted, a connection refused
//!   (ECONNREFUSED), a change not told of.
//! - Names and attributes may be as old as a second; data is as old as the open.
//! - Each inode that the guest remembers holds a descriptor here. Beyond the process's limit of those
//!   (1,048,576 less a reserve), a lookup fails with ENFILE.

mod counts;
mod export;
mod freshness;
mod root;
mod server;
mod stale;
#[cfg(test)]
mod tests;
mod view;

use std::io;
use std::sync::Arc;

use nix::sched::{CloneFlags, unshare};
use thiserror::Error;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::epoll::EventSet;

pub use self::counts::FileCounts;
pub use self::root::FileServerRoot;
use self::server::FileServer;
use self::view::View;
use super::queue::{DeviceQueue, Round};
use super::worker::{Event, Poll, Wake, Worker};
use super::{Activation, ActiveQueue, Device, DeviceError, DeviceType, config_space};

/// Bytes of the tag in configuration space, zero-padded but not always zero-terminated.
const TAG_SIZE: usize = 36;

/// The most queues for requests: each costs event descriptors and an interrupt at each restore, while
/// the vCPUs of a guest that has more of them share queues.
const MOST_REQUEST_QUEUES: u8 = 8;

/// Size of the queue for messages with priority, which are FUSE_FORGETs.
const PRIORITY_QUEUE_SIZE: u16 = 128;

/// Size of a request queue. The driver puts no more pages into a request than the queue has
/// descriptors, less a few for headers, and 256 pages are the most that FUSE_INIT agrees on.
const REQUEST_QUEUE_SIZE: u16 = 512;

/// Requests of a queue that are served before the other queues and the stop event are looked at.
const SHARE: usize = 16;

/// Why a file system device could not be made.
#[derive(Debug, Error)]
pub enum FileSystemError {
    /// The tag is empty, too long or contains NUL.
    #[error("virtio-fs tag {0:?}: 1 to {TAG_SIZE} bytes without NUL")]
    Tag(String),
    /// The export could not be opened.
    #[error("preparing the file server for {directory:?}: {source}")]
    Server {
        /// The directory that was to be exported.
        directory: std::path::PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The file system device.
pub struct FileSystem {
    config: [u8; TAG_SIZE + 4],
    queue_sizes: Vec<u16>,
    server: Arc<FileServer>,
    worker: Option<Worker<Vec<ActiveQueue>>>,
}

impl FileSystem {
    /// A device called `tag` that exports `root` to a guest of `vcpus`. Clears the process's umask.
    pub fn new(tag: &str, root: FileServerRoot, vcpus: u8) -> Result<Self, FileSystemError> {
        if tag.is_empty() || tag.len() > TAG_SIZE || tag.contains('\0') {
            return Err(FileSystemError::Tag(tag.into()));
        }
        let mut config = [0; TAG_SIZE + 4];
        config[..tag.len()].copy_from_slice(tag.as_bytes());
        let request_queues = vcpus.clamp(1, MOST_REQUEST_QUEUES);
        config[TAG_SIZE..].copy_from_slice(&u32::from(request_queues).to_le_bytes());
        let mut queue_sizes = vec![PRIORITY_QUEUE_SIZE];
        queue_sizes.resize(1 + usize::from(request_queues), REQUEST_QUEUE_SIZE);
        let directory = root.directory.clone();
        let server = FileServer::new(root)
            .map_err(|source| FileSystemError::Server { directory, source })?;
        Ok(Self {
            config,
            queue_sizes,
            server: Arc::new(server),
            worker: None,
        })
    }

    /// Counts what is served, for the whole life of the device.
    pub fn counts(&self) -> Arc<FileCounts> {
        self.server.counts()
    }
}

impl Device for FileSystem {
    fn device_type(&self) -> DeviceType {
        DeviceType::FileSystem
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        config_space::read(&self.config, offset, data);
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), DeviceError> {
        let priority = DeviceQueue::take(&mut activation, 0, "fs")?;
        let mut queues = vec![priority, DeviceQueue::take(&mut activation, 1, "fs")?];
        // A driver need not use all of them.
        while let Some(queue) = activation.queues.first() {
            let index = queue.index;
            queues.push(DeviceQueue::take(&mut activation, index, "fs")?);
        }
        let mut service = Service {
            view: View::new(activation.memory)?,
            server: self.server.clone(),
            queues,
        };
        let poll = Poll::new()?;
        for (token, queue) in (0..).zip(&service.queues) {
            poll.add(queue.notify(), token, EventSet::IN)?;
        }
        let worker = Worker::start("thaw-fs", poll, move |poll| {
            // The library changes directory and umask for a moment in some requests.
            match unshare(CloneFlags::CLONE_FS) {
                Ok(()) => service.run(&poll),
                Err(error) => tracing::error!("the file server stops: unshare(CLONE_FS): {error}"),
            }
            service.into_queues()
        })?;
        self.worker = Some(worker);
        Ok(())
    }

    /// The tree stays mounted: a driver that resets the device and mounts anew drops what it had by
    /// its FUSE_INIT.
    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        self.worker
            .take()
            .and_then(Worker::stop)
            .unwrap_or_default()
    }

    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        if self.server.is_mounted() {
            return Err(DeviceError::State(
                "the guest has the file system mounted, and a mounted one cannot be saved: unmount \
                 it first"
                    .into(),
            ));
        }
        Ok(self.config.to_vec())
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        // All that there is of state is what the driver has read at probe.
        if state != self.config {
            return Err(DeviceError::State(
                "the file system has another tag or number of queues than the saved one".into(),
            ));
        }
        Ok(())
    }
}

/// The worker's side of an active device.
struct Service {
    view: View,
    server: Arc<FileServer>,
    queues: Vec<DeviceQueue>,
}

impl Service {
    fn run(&mut self, poll: &Poll) {
        let mut events: Vec<Event> = Vec::new();
        // What became available before activation is not notified again.
        let mut more = true;
        loop {
            let timeout = more.then_some(std::time::Duration::ZERO);
            if poll.wait(&mut events, timeout) == Wake::Stop {
                return;
            }
            if let Err(error) = self.view.refresh() {
                return tracing::error!("the file server stops: {error}");
            }
            for event in &events {
                // The token is the queue's place.
                self.queues[event.token as usize].acknowledge();
            }
            more = false;
            for queue in &mut self.queues {
                let memory = self.view.memory();
                queue.suppress(memory);
                more |= serve_share(&self.server, &self.view, queue) == Round::Share
                    || queue.listen(memory);
            }
        }
    }

    fn into_queues(self) -> Vec<ActiveQueue> {
        let memory = self.view.memory();
        let queues = self.queues.into_iter();
        queues.map(|queue| queue.into_active(memory)).collect()
    }
}

/// Serve up to [`SHARE`] messages of `queue`. Each is signalled at once, because others may wait for
/// it while the next is served.
fn serve_share(server: &FileServer, view: &View, queue: &mut DeviceQueue) -> Round {
    let memory = view.memory();
    for _ in 0..SHARE {
        let Some(chain) = queue.pop(memory) else {
            return Round::Drained;
        };
        let head = chain.head_index();
        let written = server.serve(view, chain).unwrap_or_else(|error| {
            queue.errors.report(&error);
            0
        });
        queue.push_used(memory, head, written);
        queue.signal(memory);
    }
    Round::Share
}
