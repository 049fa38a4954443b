//! Block devices and file system images of the host that become disks of a guest, through the VMM's block
//! slots.
//!
//! Slots are given their backing before a guest runs, so only the container that a sandbox is started for
//! can have any. A disk that is read-only is so by the VMM, and what the VMM gets cannot be opened anew:
//! not for writing where it is read-only, and not at all where it is a device.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use containerd_shim_protos::api::Mount as ApiMount;
use rustix::fs::{CWD, OFlags, major, minor};
use rustix::mount::{MountFlags, OpenTreeFlags, open_tree};
use thaw_vmm_control::BLOCK_SLOTS;

use crate::mounts::{Propagation, set_on_tree};
use crate::spec::{Mount, Spec, guest_device};

/// File systems that the guest's kernel has and that are kept in blocks.
const OF_GUEST: [&str; 3] = ["ext4", "erofs", "squashfs"];

/// A backing for a block slot.
#[derive(Debug)]
pub struct Disk {
    /// What backs it.
    pub file: File,
    /// Whether the guest may not write.
    pub read_only: bool,
    /// Its size, in units of 512 bytes.
    pub sectors: u64,
}

/// A file system on a disk that is a container's root.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RootDisk {
    /// The slot.
    pub slot: u8,
    /// Type of the file system.
    pub kind: String,
    /// Options, but for those that were about the host's device.
    pub options: Vec<String>,
}

/// What of a container is not files of the host's.
#[derive(Debug, Default)]
pub struct Special {
    /// The disks, by slot.
    pub disks: Vec<Disk>,
    /// The root, where that is a disk.
    pub root: Option<RootDisk>,
    /// Mounts of the spec, by their index, whose source is a device of the guest at this path.
    pub mounts: Vec<(usize, String)>,
    /// Devices of the spec, by their index, that are disks, by their slot.
    pub devices: Vec<(usize, u8)>,
    /// Devices of the spec, by their index, that the container does not get.
    pub left_out: Vec<usize>,
    /// By slot, the numbers on the host of what is a device there.
    pub on_host: Vec<Option<(u32, u32)>>,
}

impl Special {
    /// Look at the roots and sources of a container that `can_have_disks`. Relative paths are relative to
    /// `bundle`. What cannot be done is refused by the field's name.
    pub fn find(
        rootfs: &[ApiMount],
        spec: &Spec,
        bundle: &Path,
        can_have_disks: bool,
    ) -> io::Result<Self> {
        let mut found = Self::default();
        let mut slots = Slots {
            can_have_disks,
            ..Slots::default()
        };
        if let [root] = rootfs
            && let Some(wanted) = WantedRoot::of(root)
        {
            found.root = slots.root(&wanted)?;
        }
        for (index, mount) in spec.mounts.iter().enumerate() {
            let named = |error: io::Error| {
                let source = mount.source.display();
                io::Error::new(
                    error.kind(),
                    format!("mounts[{index}] from {source}: {error}"),
                )
            };
            if let Some(path) = slots.source(mount, bundle).map_err(named)? {
                found.mounts.push((index, path));
            }
        }
        for index in spec.disk_devices() {
            let device = &spec.linux.devices[index];
            let named = |error: io::Error| {
                let path = device.path.display();
                io::Error::new(
                    error.kind(),
                    format!("linux.devices[{index}]: {path}: {error}"),
                )
            };
            let slot = slots.device(device.major, device.minor, spec.may_write(device));
            found.devices.push((index, slot.map_err(named)?));
        }
        found.left_out = spec.devices_left_out();
        found.disks = slots.disks;
        found.on_host = slots.on_host;
        Ok(found)
    }

    /// Whether there may be anything to find: looking takes a thread that may block.
    pub fn is_possible(rootfs: &[ApiMount], spec: &Spec) -> bool {
        rootfs.iter().any(|mount| WantedRoot::of(mount).is_some())
            || spec.mounts.iter().any(may_be_special)
            || !spec.linux.devices.is_empty()
    }

    /// The disk, by its slot, that is the device of these numbers on the host.
    pub fn slot_of(&self, device: (i64, i64)) -> Option<u8> {
        let position = self.on_host.iter().position(|on_host| {
            on_host.is_some_and(|(major, minor)| (i64::from(major), i64::from(minor)) == device)
        });
        position.and_then(|slot| u8::try_from(slot).ok())
    }
}

/// A root that is kept in blocks.
struct WantedRoot<'a> {
    mount: &'a ApiMount,
    /// An image in a file, which the host would have to make a device of first.
    image: bool,
}

impl<'a> WantedRoot<'a> {
    fn of(mount: &'a ApiMount) -> Option<Self> {
        let image = mount
            .options
            .iter()
            .any(|option| option == "loop" || option.starts_with("loop="));
        let of_guest = OF_GUEST.contains(&mount.type_.as_str());
        // Another file system on a device is the host's to mount.
        (image || of_guest).then_some(Self { mount, image })
    }
}

/// Whether the source of a mount may be something else than files.
fn may_be_special(mount: &Mount) -> bool {
    mount.is_bind() || OF_GUEST.contains(&mount.kind.as_str())
}

/// Slots that are being given away.
#[derive(Debug, Default)]
struct Slots {
    disks: Vec<Disk>,
    on_host: Vec<Option<(u32, u32)>>,
    can_have_disks: bool,
}

impl Slots {
    /// The root's disk; nothing when the host can mount it as well.
    fn root(&mut self, wanted: &WantedRoot<'_>) -> io::Result<Option<RootDisk>> {
        let WantedRoot { mount, image } = *wanted;
        if !image && !self.can_have_disks {
            return Ok(None);
        }
        let named = |error: io::Error| {
            let (kind, source) = (&mount.type_, &mount.source);
            io::Error::new(
                error.kind(),
                format!("rootfs[0] of type {kind:?} from {source}: {error}"),
            )
        };
        if !OF_GUEST.contains(&mount.type_.as_str()) {
            return Err(named(io::Error::other(format!(
                "the guest's kernel has no such file system in blocks: use one of {}",
                OF_GUEST.join(", ")
            ))));
        }
        let writable = !mount.options.iter().any(|option| option == "ro");
        let slot = self
            .add(Path::new(&mount.source), writable)
            .map_err(named)?;
        let about_host = |option: &&String| *option != "loop" && !option.starts_with("loop=");
        Ok(Some(RootDisk {
            slot,
            kind: mount.type_.clone(),
            options: mount.options.iter().filter(about_host).cloned().collect(),
        }))
    }

    /// The guest's path of a mount's source, where that is a device.
    fn source(&mut self, mount: &Mount, bundle: &Path) -> io::Result<Option<String>> {
        if !may_be_special(mount) {
            return Ok(None);
        }
        let path = bundle.join(&mount.source);
        // What is not there is told by who mounts it.
        let Ok(metadata) = fs::metadata(&path) else {
            return Ok(None);
        };
        let kind = metadata.file_type();
        if kind.is_block_device() {
            let read_only = |option: &String| option == "ro" || option == "rro";
            let slot = self.add(&path, !mount.options.iter().any(read_only))?;
            return Ok(Some(thaw_agent_api::disk_path(slot.into())));
        }
        if kind.is_char_device() {
            let number = (major(metadata.rdev()), minor(metadata.rdev()));
            let (major, minor) = (i64::from(number.0), i64::from(number.1));
            let ours = guest_device(major, minor).ok_or_else(|| {
                io::Error::other(format!(
                    "a device of the host ({major}:{minor}), which cannot be given to a VM"
                ))
            })?;
            return Ok(Some(ours));
        }
        if kind.is_socket() {
            return Err(io::Error::other(
                "a socket of the host, which cannot be connected to from a VM: run without it",
            ));
        }
        Ok(None)
    }

    /// The slot of the host's block device of these numbers.
    fn device(&mut self, major: i64, minor: i64, writable: bool) -> io::Result<u8> {
        let path = find_block_device(major, minor)?;
        self.add(&path, writable)
    }

    /// A slot for what is at `path`, the same for the same device.
    fn add(&mut self, path: &Path, writable: bool) -> io::Result<u8> {
        let metadata = fs::metadata(path)?;
        let is_device = metadata.file_type().is_block_device();
        let device = is_device.then(|| (major(metadata.rdev()), minor(metadata.rdev())));
        if device.is_some()
            && let Some(slot) = self.on_host.iter().position(|on_host| *on_host == device)
        {
            if writable && self.disks[slot].read_only {
                return Err(io::Error::other(
                    "asked for both read-only and writable, which one disk cannot be",
                ));
            }
            return u8::try_from(slot).map_err(io::Error::other);
        }
        if !self.can_have_disks {
            return Err(io::Error::other(
                "a disk can only be given to the container that a sandbox is started for, not to one \
                 that is added: use files, or a sandbox of its own",
            ));
        }
        let slot = u8::try_from(self.disks.len()).unwrap_or(BLOCK_SLOTS);
        if slot >= BLOCK_SLOTS {
            return Err(io::Error::other(format!(
                "all {BLOCK_SLOTS} block slots of the VM are in use: give it fewer disks"
            )));
        }
        let (file, bytes) = open(path, writable)?;
        self.disks.push(Disk {
            file,
            read_only: !writable,
            sectors: bytes / 512,
        });
        self.on_host.push(device);
        Ok(slot)
    }
}

/// Open `path` so that whoever gets the descriptor has it and nothing more, and tell its size in bytes.
fn open(path: &Path, writable: bool) -> io::Result<(File, u64)> {
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    // A mount of its own, which goes with the descriptor and whose attributes nobody else can change.
    let mount: OwnedFd = open_tree(CWD, path, clone)?;
    if !writable {
        set_on_tree(mount.as_fd(), MountFlags::RDONLY, Propagation::Private)?;
    }
    let anew = format!("/proc/self/fd/{}", mount.as_raw_fd());
    let access = if writable {
        OFlags::RDWR
    } else {
        OFlags::RDONLY
    };
    let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file: File = rustix::fs::open(anew, flags, rustix::fs::Mode::empty())?.into();
    rustix::io::ioctl_fionbio(&file, false)?;
    set_on_tree(mount.as_fd(), MountFlags::NODEV, Propagation::Private)?;
    let bytes = io::Seek::seek(&mut &file, io::SeekFrom::End(0))?;
    Ok((file, bytes))
}

/// Where the host has the block device of these numbers.
fn find_block_device(major_number: i64, minor_number: i64) -> io::Result<PathBuf> {
    let described = format!("block device {major_number}:{minor_number}");
    let facts = format!("/sys/dev/block/{major_number}:{minor_number}/uevent");
    let text = fs::read_to_string(facts)
        .map_err(|_| io::Error::other(format!("the host has no {described}")))?;
    let name = text.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    let name = name.ok_or_else(|| io::Error::other(format!("{described} has no name")))?;
    let path = Path::new("/dev").join(name);
    let metadata = fs::metadata(&path)?;
    let number = (
        i64::from(major(metadata.rdev())),
        i64::from(minor(metadata.rdev())),
    );
    if !metadata.file_type().is_block_device() || number != (major_number, minor_number) {
        let text = format!("{} is not {described}", path.display());
        return Err(io::Error::other(text));
    }
    Ok(path)
}

#[cfg(test)]
mod tests;
