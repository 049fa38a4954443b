//! The file tree of a sandbox, `export`, as its guest sees it:
//!
//! ```text
//! containers/<id>/rootfs  what containerd mounts as the container's root
//! volumes/<n>             what one container or several bind of the host
//! ```
//!
//! It is a tmpfs in the shim's own mount namespace, so none of its mounts is ever seen on the host and
//! all go with the shim. The tmpfs is a shared mount: the VMM's namespace is a slave of it, and
//! gets each mount made here later. Bind mounts are made detached, get their attributes (read-only
//! among them), and only then become visible, so that the VMM never sees one that is writable for a
//! moment; since its namespace belongs to another user namespace it cannot take the attributes off.

mod attributes;
mod options;
mod overlay;
mod volumes;

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use containerd_shim_protos::api::Mount as ApiMount;
use rustix::fs::CWD;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount,
    mount_change, move_mount, open_tree, unmount,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::spec::Mount as SpecMount;
pub use attributes::{Propagation, set_on_tree};
use options::{Options, Recursion};
pub use volumes::Volumes;

/// Most bytes of data that `mount(2)` takes: a page, with its end.
const MOST_DATA: usize = 4095;

/// Give the calling thread, which must be the process' only one, a mount namespace of its own that
/// the host's mounts still come into but nothing leaves.
#[allow(unsafe_code)]
pub fn enter_own_namespace() -> io::Result<()> {
    // SAFETY: descriptors stay shared; only the mount namespace is separated.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }
        .map_err(|errno| failed("making a mount namespace", errno))?;
    mount_change(
        "/",
        MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
    )
    .map_err(|errno| failed("cutting the mount namespace off the host's", errno))
}

/// Mount the tmpfs that becomes the export at `path`, which is made.
pub fn make_export(path: &Path) -> io::Result<()> {
    let what = || format!("mounting the sandbox's file tree at {}", path.display());
    fs::DirBuilder::new()
        .mode(0o755)
        .recursive(true)
        .create(path)
        .map_err(|error| failed(what(), error))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("thaw", path, "tmpfs", flags, c"mode=755,size=1m")
        .map_err(|errno| failed(what(), errno))?;
    mount_change(path, MountPropagationFlags::SHARED).map_err(|errno| failed(what(), errno))
}

/// Take the export at `path` away, with what is in it, and leave the empty directory.
pub fn remove_export(path: &Path) -> io::Result<()> {
    match unmount(path, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH) {
        // Not mounted, or not there.
        Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed(format!("unmounting {}", path.display()), errno)),
    }
}

/// The mounts of one container.
#[derive(Debug)]
pub struct ContainerMounts {
    directory: PathBuf,
    volumes: Arc<Volumes>,
    /// Those of the volumes that it uses.
    used: Mutex<Vec<u64>>,
}

impl ContainerMounts {
    /// Container `id` below `export`, which has `volumes`; nothing is made yet.
    pub fn new(export: &Path, id: &str, volumes: Arc<Volumes>) -> Self {
        Self {
            directory: export.join("containers").join(id),
            volumes,
            used: Mutex::default(),
        }
    }

    /// Mount the container's root: `rootfs` as containerd's request has it or, when that is empty,
    /// the directory `root` of the host.
    pub fn mount_root(&self, rootfs: &[ApiMount], root: &Path) -> io::Result<()> {
        let target = self.directory.join("rootfs");
        fs::create_dir_all(&target)?;
        if rootfs.is_empty() {
            let options = Options::parse(["rbind"]);
            return bind(root, &target, &options)
                .map_err(|error| failed(format!("root.path {}", root.display()), error));
        }
        for (index, mount) in rootfs.iter().enumerate() {
            mount_one(mount, &target).map_err(|error| {
                failed(format!("rootfs[{index}] of type {:?}", mount.type_), error)
            })?;
        }
        Ok(())
    }

    /// Bind the sources of the bind mounts among `mounts`, but for those at the indexes `special`, and
    /// return the indexes of those and where each source is in the export. Relative sources are relative
    /// to `bundle`.
    pub fn bind_sources(
        &self,
        mounts: &[SpecMount],
        special: &[usize],
        bundle: &Path,
    ) -> io::Result<Vec<(usize, PathBuf)>> {
        let mut done = Vec::new();
        for (index, mount) in mounts
            .iter()
            .enumerate()
            .filter(|(index, mount)| mount.is_bind() && !special.contains(index))
        {
            let source = bundle.join(&mount.source);
            let options = Options::parse(mount.options.iter().map(String::as_str));
            let number = self.volumes.add(&source, &options).map_err(|error| {
                let source = source.display();
                failed(format!("mounts[{index}] from {source}"), error)
            })?;
            self.lock_used().push(number);
            done.push((index, Volumes::name(number)));
        }
        Ok(done)
    }

    /// Take all mounts of the container away that no other has. The VMM must have ended, or they stay in
    /// use.
    pub fn unmount(&self) -> io::Result<()> {
        let mut result = take_away(&self.directory.join("rootfs"));
        for number in std::mem::take(&mut *self.lock_used()) {
            result = result.and(self.volumes.release(number));
        }
        let _ = fs::remove_dir(&self.directory);
        result
    }

    fn lock_used(&self) -> MutexGuard<'_, Vec<u64>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Unmount all that is mounted at `target`, and remove it. Never what is in a directory: of a mount that
/// is still there it would be its owner's.
fn take_away(target: &Path) -> io::Result<()> {
    let failed = |errno| Err(failed(format!("unmounting {}", target.display()), errno));
    // One at a time, the topmost first: a root may consist of several.
    let result = loop {
        match unmount(target, UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            // Mounts below, or still in use: they go when the last user does.
            Err(rustix::io::Errno::BUSY) => {
                let lazy = UnmountFlags::NOFOLLOW | UnmountFlags::DETACH;
                if let Err(errno) = unmount(target, lazy) {
                    break failed(errno);
                }
            }
            // No mount (any more).
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => break Ok(()),
            Err(errno) => break failed(errno),
        }
    };
    let _ = fs::remove_dir(target).or_else(|_| fs::remove_file(target));
    result
}

/// Make an empty file or directory at `target`, whichever `source` is.
fn make_like(source: &Path, target: &Path) -> io::Result<()> {
    if fs::metadata(source)?.is_dir() {
        fs::create_dir(target)
    } else {
        fs::File::create_new(target).map(drop)
    }
}

/// One mount of a request.
fn mount_one(request: &ApiMount, target: &Path) -> io::Result<()> {
    let options = Options::parse(request.options.iter().map(String::as_str));
    if request.type_ == "bind" || options.bind.is_some() {
        return bind(Path::new(&request.source), target, &options);
    }
    if !request.target.is_empty() {
        return Err(io::Error::other(format!(
            "its target {:?} is not the root",
            request.target
        )));
    }
    if request.type_.contains('/') {
        return Err(io::Error::other(
            "containerd's mount manager must resolve it; is it disabled for this runtime?",
        ));
    }
    if options
        .data
        .iter()
        .any(|option| option == "loop" || option.starts_with("loop="))
    {
        return Err(io::Error::other(
            "option \"loop\": an image can only be the whole root; use the overlayfs snapshotter",
        ));
    }
    let mounted = |data: &[String]| {
        let data = CString::new(data.join(",")).map_err(io::Error::other)?;
        let flags = options.flags;
        Ok(mount(
            request.source.as_str(),
            target,
            request.type_.as_str(),
            flags,
            &*data,
        )?)
    };
    let length_of = |data: &[String]| data.iter().map(|option| option.len() + 1).sum::<usize>();
    let length = length_of(&options.data);
    if length <= MOST_DATA {
        return mounted(&options.data);
    }
    match overlay::shorten(&options.data) {
        Some((directory, data)) if length_of(&data) <= MOST_DATA => {
            overlay::in_directory(Path::new(&directory), || mounted(&data))
        }
        _ => Err(io::Error::other(format!(
            "{length} bytes of options, of which the kernel takes {MOST_DATA}"
        ))),
    }
}

/// Bind `source` at `target` with all attributes in place from the first moment.
fn bind(source: &Path, target: &Path, options: &Options) -> io::Result<()> {
    let tree = clone_tree(source, options.bind.unwrap_or(Recursion::Yes))?;
    let propagation = options.propagation.unwrap_or(Propagation::Private);
    set_on_tree(tree.as_fd(), options.flags, propagation)?;
    Ok(move_mount(
        &tree,
        "",
        CWD,
        target,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )?)
}

/// A copy of the mounts at `source` that is attached nowhere.
fn clone_tree(source: &Path, recursion: Recursion) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if recursion == Recursion::Yes {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    Ok(open_tree(CWD, source, flags)?)
}

/// `error`, with what was being done before it.
fn failed(doing: impl std::fmt::Display, error: impl Into<io::Error>) -> io::Error {
    let error = error.into();
    // The kind of the original, and the text that its number has in C: others read it.
    io::Error::new(error.kind(), format!("{doing}: {}", plain(&error)))
}

/// The text of an error without Rust's " (os error N)".
fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error ") {
        Some(end) => {
            let mut text = text[..end].to_owned();
            // "No such file or directory": inside of a sentence, as Go prints it.
            if let Some(first) = text.get_mut(..1) {
                first.make_ascii_lowercase();
            }
            text
        }
        None => text,
    }
}

#[cfg(test)]
mod tests;
