//! What a file has beside its content: mode, owner, times, extended attributes, ACLs.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use rustix::fs::{
    AtFlags, CWD, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, XattrFlags, getxattr,
    listxattr, removexattr, setxattr, statx, utimensat,
};

use crate::{Case, Failure, Outcome, as_user, done, words};

pub const CASES: &[Case] = &[
    ("mode of a new file", || {
        File::create("f")?;
        fs::create_dir("d")?;
        Ok(format!("{} {}", mode("f")?, mode("d")?))
    }),
    ("all bits of a mode", || {
        File::create("f")?;
        Ok(format!("{} {}", done(set_mode("f", 0o7777)), mode("f")?))
    }),
    ("setuid after a write by root", || {
        after("write", || append("f"))
    }),
    ("setuid after a write by its owner", || {
        after("write", || as_user(1000, &[], || append("f"))?)
    }),
    ("setuid after truncate by its owner", || {
        after("truncate", || {
            as_user(1000, &[], || {
                Ok(File::options().write(true).open("f")?.set_len(0)?)
            })?
        })
    }),
    ("setuid after chown by root", || {
        after("chown", || Ok(chown("f", Some(1001), None)?))
    }),
    ("setuid after chown to nothing new by its owner", || {
        after("chown", || {
            as_user(1000, &[], || Ok(chown("f", None, Some(1000))?))?
        })
    }),
    ("setgid without execute after chown", || {
        File::create("f")?;
        set_mode("f", 0o2644)?;
        chown("f", Some(1001), None)?;
        mode("f")
    }),
    ("setgid by a user outside of the group", || {
        File::create("f")?;
        chown("f", Some(1000), Some(3000))?;
        let set = as_user(1000, &[], || done(set_mode("f", 0o2755)))?;
        Ok(format!("{set} {}", mode("f")?))
    }),
    ("setgid directory", || {
        fs::create_dir("d")?;
        chown("d", None, Some(3000))?;
        set_mode("d", 0o2777)?;
        as_user(1000, &[], || -> Result<(), Failure> {
            File::create("d/f")?;
            Ok(fs::create_dir("d/e")?)
        })??;
        let group = |path: &str| fs::metadata(path).map(|data| data.gid());
        Ok(format!(
            "{} {} {}",
            group("d/f")?,
            group("d/e")?,
            mode("d/e")?
        ))
    }),
    ("owner by root and by others", || {
        File::create("f")?;
        let root = done(chown("f", Some(1000), Some(1000)));
        let away = as_user(1000, &[], || done(chown("f", Some(1001), None)))?;
        let group = as_user(1000, &[2000], || done(chown("f", None, Some(2000))))?;
        let other_group = as_user(1000, &[2000], || done(chown("f", None, Some(4000))))?;
        let data = fs::metadata("f")?;
        Ok(format!(
            "{root} {away} {group} {other_group} {} {}",
            data.uid(),
            data.gid()
        ))
    }),
    ("owner of 32 bits", || {
        File::create("f")?;
        chown("f", Some(4_000_000_000), Some(3_999_999_999))?;
        let data = fs::metadata("f")?;
        Ok(format!("{} {}", data.uid(), data.gid()))
    }),
    ("owner of a symbolic link", || {
        std::os::unix::fs::symlink("nowhere", "l")?;
        std::os::unix::fs::lchown("l", Some(7), Some(8))?;
        let data = fs::symlink_metadata("l")?;
        Ok(format!("{} {}", data.uid(), data.gid()))
    }),
    ("times that are set", || {
        File::create("f")?;
        times("f", timespec(1_000_000_000, 123_456_789), timespec(-5, 1))?;
        let data = fs::metadata("f")?;
        Ok(format!(
            "{}.{} {}.{}",
            data.atime(),
            data.atime_nsec(),
            data.mtime(),
            data.mtime_nsec()
        ))
    }),
    ("one time of two", || {
        File::create("f")?;
        times("f", timespec(1, 0), timespec(2, 0))?;
        times("f", timespec(0, UTIME_OMIT), timespec(3, 0))?;
        let data = fs::metadata("f")?;
        Ok(format!("{} {}", data.atime(), data.mtime()))
    }),
    ("times by who is not the owner", || {
        File::create("f")?;
        set_mode("f", 0o666)?;
        let now = timespec(0, UTIME_NOW);
        as_user(1000, &[], || {
            format!(
                "{} {}",
                done(times("f", now, now)),
                done(times("f", timespec(1, 0), timespec(1, 0)))
            )
        })
    }),
    ("times of a symbolic link", || {
        std::os::unix::fs::symlink("nowhere", "l")?;
        let at = Timestamps {
            last_access: timespec(1, 0),
            last_modification: timespec(2, 0),
        };
        utimensat(CWD, "l", &at, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(fs::symlink_metadata("l")?.mtime().to_string())
    }),
    ("time of a write", || {
        let mut file = File::create("f")?;
        times("f", timespec(1, 0), timespec(1, 0))?;
        file.write_all(b"x")?;
        let data = fs::metadata("f")?;
        Ok(format!("{} {}", data.mtime() > 1, data.ctime() > 1))
    }),
    ("statx", || {
        fs::write("f", "four")?;
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let data = statx(CWD, "f", AtFlags::empty(), wanted)?;
        let basic =
            data.stx_mask & StatxFlags::BASIC_STATS.bits() == StatxFlags::BASIC_STATS.bits();
        Ok(format!(
            "{basic} {} {} {:o}",
            data.stx_size, data.stx_nlink, data.stx_mode
        ))
    }),
    ("time of birth", || {
        File::create("f")?;
        let data = statx(CWD, "f", AtFlags::empty(), StatxFlags::BTIME)?;
        Ok(format!("{}", data.stx_mask & StatxFlags::BTIME.bits() != 0))
    }),
    ("size of a block", || {
        fs::write("f", vec![1; 5000])?;
        let data = fs::metadata("f")?;
        Ok(format!("{} {}", data.blksize(), data.blocks() >= 10))
    }),
    ("attribute user.*", || attribute("f", "user.test")),
    ("attribute trusted.*", || attribute("f", "trusted.test")),
    ("attribute security.*", || attribute("f", "security.test")),
    ("attribute system.*", || attribute("f", "system.test")),
    ("attribute of a directory", || {
        fs::create_dir("d")?;
        attribute("d", "user.test")
    }),
    ("attribute user.* of a symbolic link", || {
        std::os::unix::fs::symlink("nowhere", "l")?;
        Ok(done(rustix::fs::lsetxattr(
            "l",
            "user.test",
            b"x",
            XattrFlags::empty(),
        )))
    }),
    ("attribute: create and replace", || {
        File::create("f")?;
        let set = |flags| done(setxattr("f", "user.test", b"x", flags));
        let (replace, create) = (set(XattrFlags::REPLACE), set(XattrFlags::CREATE));
        Ok(format!("{replace} {create} {}", set(XattrFlags::CREATE)))
    }),
    ("attribute: buffer that is too small", || {
        File::create("f")?;
        setxattr("f", "user.test", b"12345", XattrFlags::empty())?;
        let mut small = [0; 3];
        let mut none = [0; 0];
        let got = words(getxattr("f", "user.test", &mut small));
        Ok(format!(
            "{got} {}",
            words(getxattr("f", "user.test", &mut none))
        ))
    }),
    ("attribute without prefix", || {
        File::create("f")?;
        Ok(done(setxattr("f", "test", b"x", XattrFlags::empty())))
    }),
    ("capabilities of a file", || {
        File::create("f")?;
        // VFS_CAP_REVISION_2, effective; CAP_NET_RAW permitted.
        let capability = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        let set = done(setxattr(
            "f",
            "security.capability",
            capability,
            XattrFlags::empty(),
        ));
        let mut back = [0; 24];
        let size = words(getxattr("f", "security.capability", &mut back));
        append("f")?;
        Ok(format!(
            "{set} {size} {}",
            words(getxattr("f", "security.capability", &mut back))
        ))
    }),
    ("ACL lets a user in", || {
        fs::write("f", "content")?;
        set_mode("f", 0o600)?;
        let before = as_user(1000, &[], || done(fs::read("f")))?;
        let set = done(setxattr(
            "f",
            "system.posix_acl_access",
            &acl(),
            XattrFlags::empty(),
        ));
        let after = as_user(1000, &[], || done(fs::read("f")))?;
        let other = as_user(1001, &[], || done(fs::read("f")))?;
        Ok(format!("{before} {set} {after} {other} {}", mode("f")?))
    }),
    ("ACL that new files inherit", || {
        fs::create_dir("d")?;
        let set = done(setxattr(
            "d",
            "system.posix_acl_default",
            &acl(),
            XattrFlags::empty(),
        ));
        fs::write("d/f", "content")?;
        let read = as_user(1000, &[], || done(fs::read("d/f")))?;
        let mut back = [0; 100];
        let size = words(getxattr("d/f", "system.posix_acl_access", &mut back));
        Ok(format!("{set} {read} {size} {}", mode("d/f")?))
    }),
    ("ACL and mode", || {
        File::create("f")?;
        setxattr("f", "system.posix_acl_access", &acl(), XattrFlags::empty())?;
        set_mode("f", 0o600)?;
        let masked = as_user(1000, &[], || done(fs::read("f")))?;
        Ok(format!("{masked} {}", mode("f")?))
    }),
];

fn timespec(tv_sec: i64, tv_nsec: i64) -> Timespec {
    Timespec { tv_sec, tv_nsec }
}

fn times(path: &str, last_access: Timespec, last_modification: Timespec) -> Result<(), Failure> {
    let times = Timestamps {
        last_access,
        last_modification,
    };
    Ok(utimensat(CWD, path, &times, AtFlags::empty())?)
}

fn mode(path: &str) -> Outcome {
    Ok(format!("{:o}", fs::metadata(path)?.mode()))
}

fn set_mode(path: &str, mode: u32) -> Result<(), Failure> {
    Ok(fs::set_permissions(path, Permissions::from_mode(mode))?)
}

fn append(path: &str) -> Result<(), Failure> {
    Ok(File::options().append(true).open(path)?.write_all(b"x")?)
}

/// The mode of a file of user 1000 with all of its bits after `act` on "f".
fn after(what: &str, act: impl FnOnce() -> Result<(), Failure>) -> Outcome {
    File::create("f")?;
    chown("f", Some(1000), Some(1000))?;
    set_mode("f", 0o6755)?;
    let result = done(act());
    Ok(format!("{what} {result} {}", mode("f")?))
}

fn attribute(path: &str, name: &str) -> Outcome {
    if fs::metadata(path).is_err() {
        File::create(path)?;
    }
    let set = done(setxattr(path, name, b"value", XattrFlags::empty()));
    let mut value = [0; 100];
    let got = words(getxattr(path, name, &mut value));
    let mut names = [0; 1000];
    let length = listxattr(path, &mut names)?;
    let listed = String::from_utf8_lossy(&names[..length])
        .split('\0')
        .any(|other| other == name);
    Ok(format!(
        "{set} {got} {listed} {}",
        done(removexattr(path, name))
    ))
}

/// user::rw-, user:1000:r--, group::---, mask::r--, other::---
fn acl() -> Vec<u8> {
    const NOBODY: u32 = u32::MAX;
    let entries: [(u16, u16, u32); 5] = [
        (0x01, 6, NOBODY),
        (0x02, 4, 1000),
        (0x04, 0, NOBODY),
        (0x10, 4, NOBODY),
        (0x20, 0, NOBODY),
    ];
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}
