//! Mount options as fstab and containerd write them: flags of the mount and data for the file system,
//! mixed.

use rustix::mount::MountFlags;

use super::attributes::Propagation;

/// Options, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Flags of the mount.
    pub flags: MountFlags,
    /// A bind mount, with all that is mounted below or without.
    pub bind: Option<Recursion>,
    /// What later mounts below it are shared with.
    pub propagation: Option<Propagation>,
    /// What the file system gets, in the order given.
    pub data: Vec<String>,
}

/// Whether a bind mount takes the mounts below its source along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recursion {
    /// The source's own file system only.
    No,
    /// All below.
    Yes,
}

/// What one option does to the flags.
enum Effect {
    Set(MountFlags),
    Clear(MountFlags),
    Bind(Recursion),
    Propagate(Propagation),
    Nothing,
}

/// `MS_NOSYMFOLLOW` (linux/mount.h), Linux 5.10.
const NOSYMFOLLOW: MountFlags = MountFlags::from_bits_retain(1 << 8);

/// `MS_STRICTATIME` (linux/mount.h).
const STRICTATIME: MountFlags = MountFlags::from_bits_retain(1 << 24);

fn effect(option: &str) -> Option<Effect> {
    use Effect::{Bind, Clear, Nothing, Propagate, Set};
    Some(match option {
        "defaults" | "" => Nothing,
        "ro" | "rro" => Set(MountFlags::RDONLY),
        "rw" | "rrw" => Clear(MountFlags::RDONLY),
        "nosuid" | "rnosuid" => Set(MountFlags::NOSUID),
        "suid" | "rsuid" => Clear(MountFlags::NOSUID),
        "nodev" | "rnodev" => Set(MountFlags::NODEV),
        "dev" | "rdev" => Clear(MountFlags::NODEV),
        "noexec" | "rnoexec" => Set(MountFlags::NOEXEC),
        "exec" | "rexec" => Clear(MountFlags::NOEXEC),
        "sync" => Set(MountFlags::SYNCHRONOUS),
        "async" => Clear(MountFlags::SYNCHRONOUS),
        "dirsync" => Set(MountFlags::DIRSYNC),
        "mand" | "nomand" | "remount" => Nothing,
        "noatime" | "rnoatime" => Set(MountFlags::NOATIME),
        "atime" | "ratime" => Clear(MountFlags::NOATIME),
        "nodiratime" | "rnodiratime" => Set(MountFlags::NODIRATIME),
        "diratime" | "rdiratime" => Clear(MountFlags::NODIRATIME),
        "relatime" | "rrelatime" => Set(MountFlags::RELATIME),
        "norelatime" | "rnorelatime" => Clear(MountFlags::RELATIME),
        "strictatime" | "rstrictatime" => Set(STRICTATIME),
        "nostrictatime" | "rnostrictatime" => Clear(STRICTATIME),
        "nosymfollow" | "rnosymfollow" => Set(NOSYMFOLLOW),
        "symfollow" | "rsymfollow" => Clear(NOSYMFOLLOW),
        "bind" => Bind(Recursion::No),
        "rbind" => Bind(Recursion::Yes),
        "private" | "rprivate" => Propagate(Propagation::Private),
        "slave" | "rslave" => Propagate(Propagation::Slave),
        // What the guest mounts never comes back to the host, so the best there is.
        "shared" | "rshared" => Propagate(Propagation::Slave),
        "unbindable" | "runbindable" => Propagate(Propagation::Private),
        _ => return None,
    })
}

impl Options {
    /// Take `options` apart.
    pub fn parse<'a>(options: impl IntoIterator<Item = &'a str>) -> Self {
        let mut parsed = Self {
            flags: MountFlags::empty(),
            bind: None,
            propagation: None,
            data: Vec::new(),
        };
        for option in options {
            match effect(option) {
                Some(Effect::Set(flag)) => parsed.flags |= flag,
                Some(Effect::Clear(flag)) => parsed.flags -= flag,
                Some(Effect::Bind(recursion)) => parsed.bind = Some(recursion),
                Some(Effect::Propagate(propagation)) => parsed.propagation = Some(propagation),
                Some(Effect::Nothing) => {}
                // For whoever made the mount, not for the kernel (mount(8), "X-").
                None if option.starts_with("x-") || option.starts_with("X-") => {}
                None => parsed.data.push(option.to_owned()),
            }
        }
        parsed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &str) -> Options {
        Options::parse(options.split(','))
    }

    #[test]
    fn test_flags_and_data_of_an_overlay_mount() {
        let options = parse("index=off,ro,workdir=/w,upperdir=/u,lowerdir=/a:/b,nosuid");
        assert_eq!(options.flags, MountFlags::RDONLY | MountFlags::NOSUID);
        assert_eq!(
            options.data,
            ["index=off", "workdir=/w", "upperdir=/u", "lowerdir=/a:/b"]
        );
        assert_eq!(options.bind, None);
    }

    #[test]
    fn test_the_last_of_two_opposites_holds() {
        let read_only = |options| parse(options).flags.contains(MountFlags::RDONLY);
        assert!(!read_only("ro,rw"));
        assert!(read_only("rw,ro"));
        assert!(read_only("rw,rro"));
    }

    #[test]
    fn test_options_of_a_bind_mount() {
        let options = parse("rbind,rprivate,ro");
        assert_eq!(options.bind, Some(Recursion::Yes));
        assert_eq!(options.propagation, Some(Propagation::Private));
        assert!(options.data.is_empty());
        assert_eq!(parse("bind,rshared").propagation, Some(Propagation::Slave));
    }

    #[test]
    fn test_comments_and_defaults_are_no_data() {
        let options = parse("defaults,x-systemd.automount,X-containerd.dmverity=/x,,nouuid");
        assert_eq!(options.data, ["nouuid"]);
        assert!(options.flags.is_empty());
    }
}
