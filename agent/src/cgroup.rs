//! A container's cgroup, version 2 (`Documentation/admin-guide/cgroup-v2.rst`).

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use tokio::io::Interest;

use crate::sys;

/// Where the hierarchy is mounted.
pub const ROOT: &str = "/sys/fs/cgroup";

/// One cgroup.
#[derive(Debug, Clone)]
pub struct Cgroup {
    directory: PathBuf,
}

impl Cgroup {
    /// Makes the parent of all containers' cgroups, with every controller there is handed down.
    pub fn prepare(parent: &str) -> io::Result<()> {
        let root = Path::new(ROOT);
        let parent = root.join(parent.trim_start_matches('/'));
        fs::create_dir_all(&parent)?;
        let controllers = fs::read_to_string(root.join("cgroup.controllers"))?;
        for directory in [root, &parent] {
            for controller in controllers.split_whitespace() {
                // One that the kernel refuses is missed when a spec asks for it.
                let _ = fs::write(
                    directory.join("cgroup.subtree_control"),
                    format!("+{controller}"),
                );
            }
        }
        Ok(())
    }

    /// The one at `path`, relative to the hierarchy's root.
    pub fn at(path: &str) -> Self {
        let directory = Path::new(ROOT).join(path.trim_start_matches('/'));
        Self { directory }
    }

    /// Makes one, `path` relative to the hierarchy's root.
    pub fn create(path: &str) -> io::Result<Self> {
        let cgroup = Self::at(path);
        match fs::create_dir(&cgroup.directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(cgroup),
        }
    }

    /// One of its files.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// The names of its files and of what is below it.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.directory).into_iter().flatten();
        let names = entries.flatten().map(|entry| entry.file_name());
        names.filter_map(|name| name.into_string().ok()).collect()
    }

    /// Reads one of its files.
    pub fn read(&self, name: &str) -> io::Result<String> {
        fs::read_to_string(self.file(name))
    }

    /// The value of a key in one of its flat keyed files.
    pub fn value(&self, name: &str, key: &str) -> Option<u64> {
        find(&self.read(name).ok()?, key)
    }

    /// Kills everything in it.
    pub fn kill(&self) -> io::Result<()> {
        fs::write(self.file("cgroup.kill"), "1")
    }

    /// Sends a signal to each process in it.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        if signal == libc::SIGKILL {
            return self.kill();
        }
        for pid in self.pids()? {
            match sys::kill(pid, signal) {
                Err(error) if error.raw_os_error() != Some(libc::ESRCH) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// The processes in it and below it.
    pub fn pids(&self) -> io::Result<Vec<i32>> {
        let mut pids = Vec::new();
        for directory in tree(&self.directory)? {
            let list = match fs::read_to_string(directory.join("cgroup.procs")) {
                Ok(list) => list,
                // The container removes what it has made when it likes, and may have threads there.
                Err(_) if directory != self.directory => continue,
                Err(error) => return Err(error),
            };
            pids.extend(list.lines().filter_map(|line| line.parse::<i32>().ok()));
        }
        Ok(pids)
    }

    /// Stops or continues everything in it; returns when that is so.
    pub async fn freeze(&self, frozen: bool) -> io::Result<()> {
        let value = if frozen { "1" } else { "0" };
        fs::write(self.file("cgroup.freeze"), value)?;
        self.event("frozen", u64::from(frozen)).await
    }

    /// Waits until no process is in it or below it.
    pub async fn emptied(&self) -> io::Result<()> {
        self.event("populated", 0).await
    }

    /// Removes it and what the container made below it.
    pub fn remove(&self) -> io::Result<()> {
        if !self.directory.exists() {
            return Ok(());
        }
        tree(&self.directory)?
            .iter()
            .rev()
            .try_for_each(fs::remove_dir)
    }

    /// Waits for a value in `cgroup.events`; the kernel signals each change with POLLPRI.
    async fn event(&self, key: &str, value: u64) -> io::Result<()> {
        let mut file = File::open(self.file("cgroup.events"))?;
        let watched = sys::register_for(OwnedFd::from(file.try_clone()?), Interest::PRIORITY)?;
        loop {
            let mut events = String::new();
            file.seek(SeekFrom::Start(0))?;
            file.read_to_string(&mut events)?;
            if find(&events, key) == Some(value) {
                return Ok(());
            }
            watched.ready(Interest::PRIORITY).await?.clear_ready();
        }
    }
}

/// A directory and those below it, each after its parent.
fn tree(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = vec![directory.to_owned()];
    let mut next = 0;
    while next < found.len() {
        for entry in fs::read_dir(&found[next])? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                found.push(entry.path());
            }
        }
        next += 1;
    }
    Ok(found)
}

/// The value of a key in the text of a flat keyed file.
pub fn find(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(' ')?;
        if name == key {
            value.trim().parse().ok()
        } else {
            None
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_find_takes_whole_keys_only() {
        let text = "oom 1\noom_kill 2\nbad x\nempty\n";
        assert_eq!(find(text, "oom"), Some(1));
        assert_eq!(find(text, "oom_kill"), Some(2));
        assert_eq!(find(text, "bad"), None);
        assert_eq!(find(text, "empty"), None);
        assert_eq!(find(text, "oom_"), None);
    }

    #[test]
    fn test_tree_lists_parents_first() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("a/b")).unwrap();
        fs::write(root.path().join("file"), "").unwrap();
        let expected = [
            root.path().to_owned(),
            root.path().join("a"),
            root.path().join("a/b"),
        ];
        assert_eq!(tree(root.path()).unwrap(), expected);
    }
}
