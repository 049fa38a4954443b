//! The options of a mount: which are flags, which are changed afterwards, and which are its file
//! system's own (runtime-spec, `config.md`, "Linux mount options").

use nix::mount::MsFlags;

use crate::sys::MountAttributes;

/// The options of one mount.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct MountOptions {
    /// For `mount(2)`.
    pub flags: Flags,
    /// Whether an option said what a flag is to be, even that it is not to be set.
    pub says_flags: bool,
    /// How mounts and unmounts are passed on, in their order.
    pub propagation: Vec<MsFlags>,
    /// What the mount and all below it get.
    pub recursive: MountAttributes,
    /// Whether what lies below is copied into it.
    pub copy_up: bool,
    /// Whether ids are mapped, and below it too.
    pub id_map: Option<IdMap>,
    /// The rest, for the file system.
    pub data: String,
}

/// Of an id-mapped mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdMap {
    /// The mount alone.
    Single,
    /// And all below it.
    Recursive,
}

/// Flags of `mount(2)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flags(pub MsFlags);

impl Default for Flags {
    fn default() -> Self {
        Self(MsFlags::empty())
    }
}

const SYMFOLLOW: MsFlags = MsFlags::from_bits_retain(256);

/// Names, whether they take a flag away, and the flag.
const FLAGS: [(&str, bool, MsFlags); 37] = [
    ("defaults", false, MsFlags::empty()),
    ("acl", false, MsFlags::MS_POSIXACL),
    ("noacl", true, MsFlags::MS_POSIXACL),
    ("async", true, MsFlags::MS_SYNCHRONOUS),
    ("sync", false, MsFlags::MS_SYNCHRONOUS),
    ("atime", true, MsFlags::MS_NOATIME),
    ("noatime", false, MsFlags::MS_NOATIME),
    ("bind", false, MsFlags::MS_BIND),
    ("rbind", false, MsFlags::MS_BIND.union(MsFlags::MS_REC)),
    ("dev", true, MsFlags::MS_NODEV),
    ("nodev", false, MsFlags::MS_NODEV),
    ("diratime", true, MsFlags::MS_NODIRATIME),
    ("nodiratime", false, MsFlags::MS_NODIRATIME),
    ("dirsync", false, MsFlags::MS_DIRSYNC),
    ("exec", true, MsFlags::MS_NOEXEC),
    ("noexec", false, MsFlags::MS_NOEXEC),
    ("iversion", false, MsFlags::MS_I_VERSION),
    ("noiversion", true, MsFlags::MS_I_VERSION),
    ("lazytime", false, MsFlags::MS_LAZYTIME),
    ("nolazytime", true, MsFlags::MS_LAZYTIME),
    ("loud", true, MsFlags::MS_SILENT),
    ("silent", false, MsFlags::MS_SILENT),
    ("mand", false, MsFlags::MS_MANDLOCK),
    ("nomand", true, MsFlags::MS_MANDLOCK),
    ("relatime", false, MsFlags::MS_RELATIME),
    ("norelatime", true, MsFlags::MS_RELATIME),
    ("strictatime", false, MsFlags::MS_STRICTATIME),
    ("nostrictatime", true, MsFlags::MS_STRICTATIME),
    ("suid", true, MsFlags::MS_NOSUID),
    ("nosuid", false, MsFlags::MS_NOSUID),
    ("symfollow", true, SYMFOLLOW),
    ("nosymfollow", false, SYMFOLLOW),
    ("remount", false, MsFlags::MS_REMOUNT),
    ("ro", false, MsFlags::MS_RDONLY),
    ("rw", true, MsFlags::MS_RDONLY),
    ("nofail", false, MsFlags::empty()),
    ("nouser", false, MsFlags::empty()),
];

/// How mounts are passed on.
const PROPAGATION: [(&str, MsFlags); 8] = [
    ("private", MsFlags::MS_PRIVATE),
    ("rprivate", MsFlags::MS_PRIVATE.union(MsFlags::MS_REC)),
    ("shared", MsFlags::MS_SHARED),
    ("rshared", MsFlags::MS_SHARED.union(MsFlags::MS_REC)),
    ("slave", MsFlags::MS_SLAVE),
    ("rslave", MsFlags::MS_SLAVE.union(MsFlags::MS_REC)),
    ("unbindable", MsFlags::MS_UNBINDABLE),
    ("runbindable", MsFlags::MS_UNBINDABLE.union(MsFlags::MS_REC)),
];

/// Attributes that a mount and all below it get: what is set, and what is cleared.
const RECURSIVE: [(&str, u64, u64); 18] = [
    ("rro", libc::MOUNT_ATTR_RDONLY, 0),
    ("rrw", 0, libc::MOUNT_ATTR_RDONLY),
    ("rnosuid", libc::MOUNT_ATTR_NOSUID, 0),
    ("rsuid", 0, libc::MOUNT_ATTR_NOSUID),
    ("rnodev", libc::MOUNT_ATTR_NODEV, 0),
    ("rdev", 0, libc::MOUNT_ATTR_NODEV),
    ("rnoexec", libc::MOUNT_ATTR_NOEXEC, 0),
    ("rexec", 0, libc::MOUNT_ATTR_NOEXEC),
    ("rnodiratime", libc::MOUNT_ATTR_NODIRATIME, 0),
    ("rdiratime", 0, libc::MOUNT_ATTR_NODIRATIME),
    (
        "rrelatime",
        libc::MOUNT_ATTR_RELATIME,
        libc::MOUNT_ATTR__ATIME,
    ),
    (
        "rnorelatime",
        libc::MOUNT_ATTR_STRICTATIME,
        libc::MOUNT_ATTR__ATIME,
    ),
    (
        "rnoatime",
        libc::MOUNT_ATTR_NOATIME,
        libc::MOUNT_ATTR__ATIME,
    ),
    ("ratime", libc::MOUNT_ATTR_RELATIME, libc::MOUNT_ATTR__ATIME),
    (
        "rstrictatime",
        libc::MOUNT_ATTR_STRICTATIME,
        libc::MOUNT_ATTR__ATIME,
    ),
    (
        "rnostrictatime",
        libc::MOUNT_ATTR_RELATIME,
        libc::MOUNT_ATTR__ATIME,
    ),
    ("rnosymfollow", libc::MOUNT_ATTR_NOSYMFOLLOW, 0),
    ("rsymfollow", 0, libc::MOUNT_ATTR_NOSYMFOLLOW),
];

/// The flags of a propagation by its name.
pub fn propagation(name: &str) -> Option<MsFlags> {
    PROPAGATION
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, flags)| *flags)
}

impl MountOptions {
    /// Sorts options. Later ones win.
    pub fn parse(options: &[String]) -> Self {
        let mut result = Self::default();
        let mut data: Vec<&str> = Vec::new();
        for option in options {
            let option = option.as_str();
            if let Some((_, clears, flag)) = FLAGS.iter().find(|(name, ..)| *name == option) {
                result.flags.0.set(*flag, !clears);
                // Binding alone says nothing of what the mount is to be like.
                result.says_flags |= !matches!(option, "bind" | "rbind" | "defaults");
            } else if let Some(flags) = propagation(option) {
                result.propagation.push(flags);
            } else if let Some((_, set, clear)) =
                RECURSIVE.iter().find(|(name, ..)| *name == option)
            {
                result.recursive.set = (result.recursive.set & !clear) | set;
                result.recursive.clear = (result.recursive.clear & !set) | clear;
            } else {
                match option {
                    "tmpcopyup" => result.copy_up = true,
                    "idmap" => result.id_map = Some(IdMap::Single),
                    "ridmap" => result.id_map = Some(IdMap::Recursive),
                    _ => data.push(option),
                }
            }
        }
        result.data = data.join(",");
        result
    }

    /// Whether it is a bind mount.
    pub fn is_bind(&self) -> bool {
        self.flags.0.contains(MsFlags::MS_BIND)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &[&str]) -> MountOptions {
        let options: Vec<String> = options.iter().map(ToString::to_string).collect();
        MountOptions::parse(&options)
    }

    #[test]
    fn test_later_options_win() {
        assert_eq!(parse(&["ro", "rw"]).flags.0, MsFlags::empty());
        assert_eq!(parse(&["rw", "ro"]).flags.0, MsFlags::MS_RDONLY);
        assert_eq!(
            parse(&["rro", "rrw"]).recursive,
            MountAttributes {
                set: 0,
                clear: libc::MOUNT_ATTR_RDONLY
            }
        );
        assert_eq!(
            parse(&["rrw", "rro"]).recursive,
            MountAttributes {
                set: libc::MOUNT_ATTR_RDONLY,
                clear: 0
            }
        );
    }

    #[test]
    fn test_what_is_no_option_of_ours_is_the_file_system_s() {
        let options = parse(&["nosuid", "size=1m", "rslave", "mode=755", "tmpcopyup"]);
        assert_eq!(options.data, "size=1m,mode=755");
        assert_eq!(options.propagation, [MsFlags::MS_SLAVE | MsFlags::MS_REC]);
        assert!(options.copy_up);
    }

    #[test]
    fn test_binding_alone_changes_no_flag() {
        assert!(!parse(&["rbind"]).says_flags);
        assert!(parse(&["bind", "rw"]).says_flags);
        assert!(parse(&["bind"]).is_bind() && !parse(&[]).is_bind());
    }
}
