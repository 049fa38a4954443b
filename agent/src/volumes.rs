//! What containers bind of the host, where the agent itself sees it.
//!
//! Below the share, each directory of another mount of the host's is a file system of its own, mounted
//! when somebody first goes there (fs/fuse/dir.c, `fuse_dentry_automount`): in the namespace of whoever
//! that is. If only containers did, each would get another file system for the same directory, and sockets
//! and locks of the one would mean nothing in the other. So the agent goes there first, before the
//! container has a namespace, and what is mounted then is in the namespaces of all containers that come
//! later.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::fcntl::{OFlag, open};
use nix::mount::{MntFlags, umount2};
use nix::sys::stat::Mode;
use serde::Deserialize;
use thaw_agent_api::{NAMES_VALID_MS, SHARE, VOLUMES};

/// How much longer than it may names are left alone: the kernel counts in its own ticks.
const LET_GO_MARGIN: Duration = Duration::from_millis(100);

/// How many containers use each volume.
#[derive(Debug, Default)]
pub struct Volumes {
    users: Mutex<HashMap<PathBuf, usize>>,
}

/// The volumes of one container.
#[derive(Debug)]
pub struct Held {
    volumes: Arc<Volumes>,
    paths: Mutex<Vec<PathBuf>>,
}

impl Volumes {
    /// Have those mounted that the runtime spec `spec` binds, for one more container.
    pub fn hold(self: &Arc<Self>, spec: &[u8]) -> Held {
        let paths = sources(spec);
        let mut users = self.lock();
        for path in &paths {
            let count = users.entry(path.clone()).or_default();
            *count += 1;
            if *count == 1 {
                // Goes into it, as looking at it would not. A file is no mount, and whatever else is
                // wrong is found, and named, when the container's own mount is made.
                let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
                let _ = open(path, flags, Mode::empty());
            }
        }
        drop(users);
        Held {
            volumes: Arc::clone(self),
            paths: Mutex::new(paths),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, usize>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    /// The container is gone. Harmless when it is said twice.
    pub fn release(&self) {
        let paths = std::mem::take(&mut *self.paths.lock().unwrap_or_else(PoisonError::into_inner));
        let mut users = self.volumes.lock();
        let mut gone = Vec::new();
        for path in paths {
            if let Some(count) = users.get_mut(&path) {
                *count -= 1;
                if *count == 0 {
                    users.remove(&path);
                    // A file is not mounted.
                    let flags = MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW;
                    let _ = umount2(&path, flags);
                    gone.push(path);
                }
            }
        }
        if !gone.is_empty() {
            tokio::spawn(forget(gone));
        }
    }
}

/// Has the kernel let go of what the host takes out of the share, so that the host can: it finds the
/// names gone when it looks at them after it may believe that they are still there.
pub async fn forget(paths: Vec<PathBuf>) {
    tokio::time::sleep(Duration::from_millis(NAMES_VALID_MS) + LET_GO_MARGIN).await;
    for path in paths {
        let _ = std::fs::metadata(path);
    }
}

/// The sources in `spec` that are volumes of the share.
fn sources(spec: &[u8]) -> Vec<PathBuf> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Spec {
        mounts: Vec<Mount>,
    }
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Mount {
        source: PathBuf,
    }
    let volumes = Path::new(SHARE).join(VOLUMES);
    let spec: Spec = serde_json::from_slice(spec).unwrap_or_default();
    let sources = spec.mounts.into_iter().map(|mount| mount.source);
    sources
        .filter(|source| source.starts_with(&volumes))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_volumes_are_the_sources_below_their_directory() {
        let spec = br#"{"mounts": [
            {"destination": "/a", "source": "/run/thaw/share/volumes/1"},
            {"destination": "/proc", "type": "proc"},
            {"destination": "/b", "source": "/run/thaw/share/volumes2/1"},
            {"destination": "/c", "source": "/run/thaw/share/volumes/2"}]}"#;
        let paths = ["1", "2"].map(|name| Path::new(SHARE).join(VOLUMES).join(name));
        assert_eq!(sources(spec), paths);
        assert!(sources(b"no spec").is_empty());
    }

    #[tokio::test]
    async fn test_a_volume_is_held_until_its_last_container_is_gone() {
        let volumes = Arc::<Volumes>::default();
        let spec = br#"{"mounts": [{"source": "/run/thaw/share/volumes/1"}]}"#;
        let held = [(); 2].map(|()| volumes.hold(spec));
        for (left, one) in [1, 0].into_iter().zip(&held) {
            one.release();
            one.release();
            let users = volumes.lock().values().sum::<usize>();
            assert_eq!(users, left);
        }
    }
}
