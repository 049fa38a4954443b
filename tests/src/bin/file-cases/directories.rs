//! Directories: making, removing, listing while they change, and being told of changes.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::os::unix::fs::MetadataExt;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

use crate::{Case, Failure, Outcome, done};

pub const CASES: &[Case] = &[
    ("make a directory twice", || {
        Ok(format!(
            "{} {}",
            done(fs::create_dir("d")),
            done(fs::create_dir("d"))
        ))
    }),
    ("make a directory on a file", || {
        File::create("f")?;
        Ok(done(fs::create_dir("f")))
    }),
    ("make a directory below nothing", || {
        Ok(done(fs::create_dir("no/d")))
    }),
    ("remove a full directory", || {
        fs::create_dir_all("d/e")?;
        Ok(done(fs::remove_dir("d")))
    }),
    ("remove a file as a directory", || {
        File::create("f")?;
        Ok(done(fs::remove_dir("f")))
    }),
    ("remove the dot", || Ok(done(fs::remove_dir(".")))),
    ("remove the current directory and make a file", || {
        fs::create_dir("d")?;
        std::env::set_current_dir("d")?;
        fs::remove_dir("../d")?;
        let made = done(File::create("f"));
        std::env::set_current_dir("..").ok();
        Ok(made)
    }),
    ("links of a directory with three", || {
        fs::create_dir_all("d/a")?;
        fs::create_dir_all("d/b")?;
        fs::create_dir_all("d/c")?;
        let before = fs::metadata("d")?.nlink();
        fs::remove_dir("d/b")?;
        Ok(format!("{before} {}", fs::metadata("d")?.nlink()))
    }),
    (
        "times of a directory in which a file is made",
        directory_times,
    ),
    ("list 120 entries", list_many),
    (
        "list while entries are removed and made",
        list_while_changed,
    ),
    ("remove what is listed", remove_listed),
    ("list again what was removed", list_after_unlink),
    ("inotify", inotify_events),
];

fn names(path: &str) -> Result<Vec<String>, Failure> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

fn directory_times() -> Outcome {
    fs::create_dir("d")?;
    let stamp = |path: &str| fs::metadata(path).map(|data| (data.mtime(), data.mtime_nsec()));
    let times = rustix::fs::Timestamps {
        last_access: rustix::fs::Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        },
        last_modification: rustix::fs::Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        },
    };
    rustix::fs::utimensat(rustix::fs::CWD, "d", &times, rustix::fs::AtFlags::empty())?;
    let before = stamp("d")?;
    File::create("d/f")?;
    let created = stamp("d")? > before;
    rustix::fs::utimensat(rustix::fs::CWD, "d", &times, rustix::fs::AtFlags::empty())?;
    fs::rename("d/f", "d/g")?;
    let renamed = stamp("d")? > before;
    rustix::fs::utimensat(rustix::fs::CWD, "d", &times, rustix::fs::AtFlags::empty())?;
    fs::remove_file("d/g")?;
    Ok(format!("{created} {renamed} {}", stamp("d")? > before))
}

/// More than one reply of a file server holds.
const MANY: usize = 120;

/// Links to one file: a tenth of what as many files take.
fn make_many(count: usize) -> Result<(), Failure> {
    fs::create_dir("d")?;
    File::create("one")?;
    for number in 0..count {
        fs::hard_link("one", format!("d/{number}"))?;
    }
    Ok(())
}

fn list_many() -> Outcome {
    make_many(MANY)?;
    let listed = names("d")?;
    let different: BTreeSet<&String> = listed.iter().collect();
    Ok(format!(
        "{} {} links {}",
        listed.len(),
        different.len(),
        fs::metadata("one")?.nlink()
    ))
}

fn list_while_changed() -> Outcome {
    let many = 100;
    make_many(many)?;
    let mut listed = Vec::new();
    for (position, entry) in fs::read_dir("d")?.enumerate() {
        listed.push(entry?.file_name().to_string_lossy().into_owned());
        if position == 10 {
            for number in 0..many / 2 {
                fs::hard_link("one", format!("d/new{number}"))?;
            }
        }
    }
    // What is there all the time is listed, and exactly once.
    let old: Vec<&String> = listed
        .iter()
        .filter(|name| !name.starts_with("new"))
        .collect();
    let different: BTreeSet<&&String> = old.iter().collect();
    Ok(format!("{} {}", old.len(), different.len()))
}

fn remove_listed() -> Outcome {
    make_many(MANY)?;
    for entry in fs::read_dir("d")? {
        fs::remove_file(entry?.path())?;
    }
    Ok(format!(
        "{} {}",
        names("d")?.len(),
        done(fs::remove_dir("d"))
    ))
}

fn list_after_unlink() -> Outcome {
    fs::create_dir("d")?;
    for name in ["a", "b", "c"] {
        File::create(format!("d/{name}"))?;
    }
    let before = names("d")?.len();
    fs::remove_file("d/b")?;
    let mut after = names("d")?;
    after.sort();
    Ok(format!("{before} {}", after.join(",")))
}

fn inotify_events() -> Outcome {
    fs::create_dir("d")?;
    let watcher = inotify::init(CreateFlags::NONBLOCK)?;
    let wanted = WatchFlags::CREATE
        | WatchFlags::CLOSE_WRITE
        | WatchFlags::MOVED_FROM
        | WatchFlags::MOVED_TO
        | WatchFlags::DELETE;
    inotify::add_watch(&watcher, "d", wanted)?;
    fs::write("d/a", "one")?;
    fs::rename("d/a", "d/b")?;
    fs::remove_file("d/b")?;
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(&watcher, &mut buffer);
    let mut seen = Vec::new();
    loop {
        match reader.next() {
            Ok(event) => {
                let name = event
                    .file_name()
                    .map(|name| name.to_string_lossy().into_owned());
                let kind = event.events() - ReadFlags::ISDIR;
                seen.push(format!("{:x} {}", kind.bits(), name.unwrap_or_default()));
            }
            Err(rustix::io::Errno::AGAIN) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(seen.join(", "))
}
