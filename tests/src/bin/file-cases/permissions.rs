//! What users without privileges may do: mostly which error they get.

use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};

use rustix::fs::{Access, CWD, FileType, Mode, access, mknodat};

use crate::{Case, Failure, Outcome, as_user, done};

const USER: u32 = 1000;
const OTHER: u32 = 1001;

pub const CASES: &[Case] = &[
    ("open by mode: owner, group, others", || {
        let mut outcomes = Vec::new();
        for mode in [0o400, 0o040, 0o004, 0o200, 0o020, 0o002, 0o000] {
            fs::write("f", "x")?;
            chown("f", Some(USER), Some(2000))?;
            set_mode("f", mode)?;
            let tries = |id, groups: &[u32]| {
                as_user(id, groups, || {
                    let write = OpenOptions::new().write(true).open("f");
                    format!("{}/{}", done(File::open("f")), done(write))
                })
            };
            outcomes.push(format!(
                "{} {} {}",
                tries(USER, &[])?,
                tries(OTHER, &[2000])?,
                tries(OTHER, &[])?
            ));
            fs::remove_file("f")?;
        }
        Ok(outcomes.join(", "))
    }),
    ("root and mode 000", || {
        fs::write("f", "x")?;
        set_mode("f", 0)?;
        Ok(format!(
            "{} {}",
            done(fs::read("f")),
            done(OpenOptions::new().write(true).open("f"))
        ))
    }),
    ("search a directory without x", || {
        in_directory(0o766, || {
            format!("{} {}", done(fs::metadata("d/f")), done(fs::read_dir("d")))
        })
    }),
    ("list a directory without r", || {
        in_directory(0o711, || {
            format!("{} {}", done(fs::metadata("d/f")), done(fs::read_dir("d")))
        })
    }),
    ("in a directory without w", || {
        in_directory(0o755, change_all)
    }),
    ("in a directory with w alone", || {
        in_directory(0o722, change_all)
    }),
    ("in a directory with all", || {
        in_directory(0o777, change_all)
    }),
    ("in a sticky directory of another", || {
        in_directory(0o1777, change_all)
    }),
    ("in a sticky directory, files of one's own", || {
        fs::create_dir("d")?;
        set_mode("d", 0o1777)?;
        as_user(USER, &[], || -> Outcome {
            File::create("d/mine")?;
            Ok(format!(
                "{} {}",
                done(fs::rename("d/mine", "d/still")),
                done(fs::remove_file("d/still"))
            ))
        })?
    }),
    ("in a sticky directory, onto a file of another", || {
        fs::create_dir("d")?;
        set_mode("d", 0o1777)?;
        File::create("d/theirs")?;
        as_user(USER, &[], || -> Outcome {
            File::create("d/mine")?;
            Ok(done(fs::rename("d/mine", "d/theirs")))
        })?
    }),
    ("write of another's file", || {
        fs::write("f", "x")?;
        as_user(USER, &[], || {
            let truncate = rustix::fs::open(
                "f",
                rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::TRUNC,
                Mode::empty(),
            );
            format!(
                "{} {}",
                done(OpenOptions::new().append(true).open("f")),
                done(truncate)
            )
        })
    }),
    ("mode of another's file", || {
        File::create("f")?;
        as_user(USER, &[], || done(set_mode("f", 0o777)))
    }),
    ("owner of another's file", || {
        File::create("f")?;
        as_user(USER, &[], || done(chown("f", Some(USER), None)))
    }),
    ("attribute of another's file", || {
        File::create("f")?;
        as_user(USER, &[], || {
            done(rustix::fs::setxattr(
                "f",
                "user.x",
                b"x",
                rustix::fs::XattrFlags::empty(),
            ))
        })
    }),
    ("access as a user", || {
        File::create("f")?;
        set_mode("f", 0o641)?;
        // Asks with the real ids, which are root's, and then with those in effect.
        let real = as_user(USER, &[], || {
            done(access("f", Access::READ_OK | Access::WRITE_OK))
        })?;
        let effective = as_user(USER, &[], || {
            let flags = rustix::fs::AtFlags::EACCESS;
            let ask = |what| done(rustix::fs::accessat(CWD, "f", what, flags));
            format!(
                "{} {} {}",
                ask(Access::READ_OK),
                ask(Access::WRITE_OK),
                ask(Access::EXEC_OK)
            )
        })?;
        Ok(format!("{real} {effective}"))
    }),
    ("execute without x", || {
        fs::copy("/proc/self/exe", "f")?;
        set_mode("f", 0o644)?;
        let root = done(std::process::Command::new("./f").output());
        set_mode("f", 0o755)?;
        Ok(format!(
            "{root} {}",
            done(std::process::Command::new("./f").output())
        ))
    }),
    ("execute while it is written", || {
        fs::copy("/proc/self/exe", "f")?;
        set_mode("f", 0o755)?;
        let _writer = OpenOptions::new().write(true).open("f")?;
        Ok(done(std::process::Command::new("./f").output()))
    }),
    ("link of a file that cannot be read", || {
        fs::create_dir("d")?;
        set_mode("d", 0o777)?;
        fs::write("f", "secret")?;
        set_mode("f", 0o600)?;
        // As the sysctl protected_hardlinks says, which is the same on both sides or not.
        as_user(USER, &[], || {
            let linked = done(fs::hard_link("f", "d/f"));
            if linked == "done" || linked == "EPERM" {
                "as the sysctl says".to_owned()
            } else {
                linked
            }
        })
    }),
    ("new file below another's directory by group", || {
        fs::create_dir("d")?;
        chown("d", None, Some(2000))?;
        set_mode("d", 0o770)?;
        let with = as_user(USER, &[2000], || done(File::create("d/with")))?;
        let without = as_user(USER, &[], || done(File::create("d/without")))?;
        Ok(format!("{with} {without}"))
    }),
    ("owner and group of a new file", || {
        use std::os::unix::fs::MetadataExt;
        fs::create_dir("d")?;
        set_mode("d", 0o777)?;
        as_user(USER, &[2000], || -> Outcome {
            File::create("d/f")?;
            symlink("f", "d/l")?;
            let (file, link) = (fs::metadata("d/f")?, fs::symlink_metadata("d/l")?);
            Ok(format!(
                "{} {} {} {}",
                file.uid(),
                file.gid(),
                link.uid(),
                link.gid()
            ))
        })?
    }),
];

fn set_mode(path: &str, mode: u32) -> Result<(), Failure> {
    Ok(fs::set_permissions(path, Permissions::from_mode(mode))?)
}

/// What a user finds who does `act` where "d" is a directory of root with `mode` in which root has a file "f".
fn in_directory(mode: u32, act: fn() -> String) -> Outcome {
    fs::create_dir("d")?;
    fs::write("d/f", "root's")?;
    fs::create_dir("d/e")?;
    set_mode("d", mode)?;
    as_user(USER, &[], act)
}

/// Everything that changes a directory, by error.
fn change_all() -> String {
    let pipe = mknodat(CWD, "d/p", FileType::Fifo, Mode::from_raw_mode(0o644), 0);
    [
        done(File::create("d/new")),
        done(fs::create_dir("d/newd")),
        done(symlink("f", "d/newl")),
        done(pipe),
        done(std::os::unix::net::UnixListener::bind("d/s")),
        done(fs::rename("d/f", "d/g")),
        done(fs::remove_file("d/f")),
        done(fs::remove_dir("d/e")),
    ]
    .join(" ")
}
