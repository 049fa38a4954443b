//! Out-of-memory kills, told to whoever listens.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use std::os::fd::{AsFd, OwnedFd};
use tokio::io::Interest;
use tokio::sync::broadcast;
use tracing::warn;

use crate::container::Container;
use crate::sys;

/// How many events may wait for a slow listener.
const BACKLOG: usize = 64;

/// Watches the `memory.events` of all containers.
#[derive(Debug)]
pub struct MemoryWatch {
    events: broadcast::Sender<String>,
    watched: Mutex<Watched>,
}

#[derive(Debug, Default)]
struct Watched {
    /// Made with the first container, so that a template has none.
    inotify: Option<Arc<Inotify>>,
    containers: HashMap<WatchDescriptor, Weak<Container>>,
    /// Kills told so far, by container id.
    told: HashMap<String, u64>,
}

impl Default for MemoryWatch {
    fn default() -> Self {
        Self {
            events: broadcast::Sender::new(BACKLOG),
            watched: Mutex::default(),
        }
    }
}

impl MemoryWatch {
    /// Ids of containers in which the kernel kills for memory, from now on.
    pub fn subscribe(&self) -> broadcast::Receiver<String> {
        self.events.subscribe()
    }

    /// Watches one more.
    pub fn watch(self: &Arc<Self>, container: &Arc<Container>) {
        if let Err(error) = self.try_watch(container) {
            warn!("watch the memory of {}: {error}", container.place.id);
        }
    }

    fn try_watch(self: &Arc<Self>, container: &Arc<Container>) -> std::io::Result<()> {
        let file = container.cgroup.file("memory.events");
        if !file.exists() {
            return Ok(());
        }
        let mut watched = self.lock();
        let inotify = match &watched.inotify {
            Some(inotify) => Arc::clone(inotify),
            None => {
                let inotify = Arc::new(Inotify::init(
                    InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK,
                )?);
                let descriptor = inotify.as_fd().try_clone_to_owned()?;
                tokio::spawn(Arc::clone(self).follow(Arc::clone(&inotify), descriptor));
                watched.inotify = Some(Arc::clone(&inotify));
                inotify
            }
        };
        let descriptor = inotify.add_watch(&file, AddWatchFlags::IN_MODIFY)?;
        watched
            .containers
            .insert(descriptor, Arc::downgrade(container));
        Ok(())
    }

    async fn follow(self: Arc<Self>, inotify: Arc<Inotify>, descriptor: OwnedFd) {
        let Ok(readiness) = sys::register_for(descriptor, Interest::READABLE) else {
            return;
        };
        loop {
            let Ok(mut ready) = readiness.readable().await else {
                return;
            };
            match inotify.read_events() {
                Ok(events) => {
                    for event in events {
                        self.changed(event.wd, event.mask);
                    }
                }
                Err(Errno::EAGAIN) => ready.clear_ready(),
                Err(error) => return warn!("watch memory: {error}"),
            }
        }
    }

    fn changed(&self, descriptor: WatchDescriptor, mask: AddWatchFlags) {
        let container = {
            let mut watched = self.lock();
            if mask.contains(AddWatchFlags::IN_IGNORED) {
                watched.containers.remove(&descriptor);
                return;
            }
            watched.containers.get(&descriptor).and_then(Weak::upgrade)
        };
        if let Some(container) = container {
            self.check(&container);
        }
    }

    /// Tells of kills that have not been told yet.
    pub fn check(&self, container: &Container) {
        let Some(kills) = container.cgroup.value("memory.events", "oom_kill") else {
            return;
        };
        let id = &container.place.id;
        let told = self.lock().told.insert(id.clone(), kills).unwrap_or(0);
        for _ in told..kills {
            // Nobody may be listening.
            let _ = self.events.send(id.clone());
        }
    }

    /// Forgets a container; its cgroup's removal ends the watch.
    pub fn forget(&self, container: &Container) {
        self.lock().told.remove(&container.place.id);
    }

    fn lock(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
