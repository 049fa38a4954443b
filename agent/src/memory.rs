//! What the kernel says about memory: kills for want of it, told to whoever listens, and when all
//! containers together want more.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use std::os::fd::{AsFd, OwnedFd};
use tokio::io::Interest;
use tokio::sync::broadcast;
use tracing::warn;

use crate::container::Container;
use crate::growth::Growth;
use crate::sys;

/// How many events may wait for a slow listener.
const BACKLOG: usize = 64;

/// Watches the `memory.events` of all containers, and of the cgroup above them.
#[derive(Debug)]
pub struct MemoryWatch {
    growth: Growth,
    events: broadcast::Sender<String>,
    watched: Mutex<Watched>,
}

#[derive(Debug, Default)]
struct Watched {
    /// Made with the first container, so that a template has none.
    inotify: Option<Arc<Inotify>>,
    containers: HashMap<WatchDescriptor, Weak<Container>>,
    /// The cgroup above them, once the guest may grow.
    parent: Option<WatchDescriptor>,
    /// Kills told so far, by container id.
    told: HashMap<String, u64>,
}

impl MemoryWatch {
    /// Of a guest that grows as `growth` says.
    pub fn new(growth: Growth) -> Self {
        Self {
            growth,
            events: broadcast::Sender::new(BACKLOG),
            watched: Mutex::default(),
        }
    }

    /// The guest's growth.
    pub fn growth(&self) -> &Growth {
        &self.growth
    }

    /// The guest may have `bytes` of memory beside what it had at first.
    pub fn allow_growth(self: &Arc<Self>, bytes: u64) -> io::Result<()> {
        let events = self.growth.events();
        if !events.exists() || (bytes == 0 && self.lock().parent.is_none()) {
            return Ok(());
        }
        self.growth.allow(bytes)?;
        let mut watched = self.lock();
        if bytes > 0 && watched.parent.is_none() {
            let inotify = self.inotify(&mut watched)?;
            let parent = inotify.add_watch(&events, AddWatchFlags::IN_MODIFY)?;
            watched.parent = Some(parent);
        }
        Ok(())
    }

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

    fn try_watch(self: &Arc<Self>, container: &Arc<Container>) -> io::Result<()> {
        let file = container.cgroup.file("memory.events");
        if !file.exists() {
            return Ok(());
        }
        let mut watched = self.lock();
        let inotify = self.inotify(&mut watched)?;
        let descriptor = inotify.add_watch(&file, AddWatchFlags::IN_MODIFY)?;
        watched
            .containers
            .insert(descriptor, Arc::downgrade(container));
        Ok(())
    }

    fn inotify(self: &Arc<Self>, watched: &mut Watched) -> io::Result<Arc<Inotify>> {
        if let Some(inotify) = &watched.inotify {
            return Ok(Arc::clone(inotify));
        }
        let flags = InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK;
        let inotify = Arc::new(Inotify::init(flags)?);
        let descriptor = inotify.as_fd().try_clone_to_owned()?;
        tokio::spawn(Arc::clone(self).follow(Arc::clone(&inotify), descriptor));
        watched.inotify = Some(Arc::clone(&inotify));
        Ok(inotify)
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
            if watched.parent == Some(descriptor) {
                drop(watched);
                return self.growth.check();
            }
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
