//! Names: rename, link, symbolic links, unlink, and names that are unusual.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::{Case, Failure, Outcome, done, words};

pub const CASES: &[Case] = &[
    ("rename and read", rename_and_read),
    ("rename over a file", rename_over_file),
    ("rename over an open file", rename_over_open),
    ("rename to itself", rename_to_itself),
    ("rename to another link of it", rename_to_other_link),
    ("rename a directory and look inside", rename_directory),
    ("rename a directory over an empty one", rename_over_empty),
    ("rename a directory over a full one", rename_over_full),
    ("rename a directory over a file", rename_directory_over_file),
    ("rename a file over a directory", rename_file_over_directory),
    ("rename a directory into itself", rename_into_itself),
    ("rename what is not there", || {
        Ok(done(fs::rename("no", "new")))
    }),
    ("rename without replacing", rename_no_replace),
    ("exchange two names", rename_exchange),
    ("exchange a file and a directory", rename_exchange_kinds),
    ("exchange with what is not there", rename_exchange_missing),
    ("leave a whiteout", rename_whiteout),
    ("two flags that exclude each other", rename_flags),
    ("hard link", hard_link),
    ("hard link that exists", hard_link_exists),
    ("hard link of a directory", hard_link_directory),
    ("hard link of a symbolic link", hard_link_symlink),
    ("first of two links unlinked while open", unlink_first_link),
    ("unlinked and open", unlinked_open),
    ("unlinked, open and truncated", unlinked_truncated),
    ("unlinked and made again", unlinked_again),
    ("symbolic link", symbolic_link),
    ("symbolic link to nowhere", symbolic_link_nowhere),
    ("symbolic links in a circle", symbolic_circle),
    ("symbolic link of 4095 bytes", symbolic_long),
    ("open of a symbolic link, not followed", symbolic_nofollow),
    ("create through a symbolic link to nowhere", symbolic_create),
    ("exclusive create on a symbolic link", symbolic_exclusive),
    ("name that is not UTF-8", name_not_utf8),
    ("names with spaces, newline, quotes", names_unusual),
    ("name of 255 bytes", || name_of_length(255)),
    ("name of 256 bytes", || name_of_length(256)),
    ("path of 100 directories", deep_path),
    ("exclusive create of what is there", exclusive_create),
    ("create of what is there", create_existing),
    ("create of a directory's name", || {
        fs::create_dir("d")?;
        Ok(done(File::create("d")))
    }),
    ("create below a file", || {
        File::create("f")?;
        Ok(done(File::create("f/g")))
    }),
    ("create with a slash at its end", || {
        Ok(done(File::create("f/")))
    }),
    ("unlink of a directory", || {
        fs::create_dir("d")?;
        Ok(done(fs::remove_file("d")))
    }),
    ("unlink twice", || {
        File::create("f")?;
        Ok(format!(
            "{} {}",
            done(fs::remove_file("f")),
            done(fs::remove_file("f"))
        ))
    }),
];

/// Writes a file with `content`.
fn put(name: &str, content: &str) -> Result<(), Failure> {
    Ok(fs::write(name, content)?)
}

/// What a file holds, or why it cannot be read.
fn get(name: &str) -> String {
    words(fs::read_to_string(name))
}

/// Names of the current directory, sorted.
fn list() -> Result<String, Failure> {
    let mut names = Vec::new();
    for entry in fs::read_dir(".")? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names.join(","))
}

fn rename_and_read() -> Outcome {
    put("t", "a")?;
    fs::rename("t", "n")?;
    Ok(format!("{} {} {}", get("n"), get("t"), list()?))
}

fn rename_over_file() -> Outcome {
    put("a", "new")?;
    put("b", "old, and longer")?;
    fs::rename("a", "b")?;
    Ok(format!("{} {}", get("b"), list()?))
}

fn rename_over_open() -> Outcome {
    put("a", "new")?;
    put("b", "old")?;
    let mut old = File::open("b")?;
    fs::rename("a", "b")?;
    let mut text = String::new();
    old.read_to_string(&mut text)?;
    Ok(format!(
        "{text} {} links {}",
        get("b"),
        old.metadata()?.nlink()
    ))
}

fn rename_to_itself() -> Outcome {
    put("a", "same")?;
    Ok(format!("{} {}", done(fs::rename("a", "a")), get("a")))
}

fn rename_to_other_link() -> Outcome {
    put("a", "same")?;
    fs::hard_link("a", "b")?;
    let renamed = done(fs::rename("a", "b"));
    Ok(format!("{renamed} {}", list()?))
}

fn rename_directory() -> Outcome {
    fs::create_dir_all("d/e")?;
    put("d/e/f", "deep")?;
    fs::rename("d", "g")?;
    put("g/e/h", "later")?;
    Ok(format!(
        "{} {} {}",
        get("g/e/f"),
        get("g/e/h"),
        get("d/e/f")
    ))
}

fn rename_over_empty() -> Outcome {
    fs::create_dir_all("d/e")?;
    fs::create_dir("empty")?;
    Ok(format!("{} {}", done(fs::rename("d", "empty")), list()?))
}

fn rename_over_full() -> Outcome {
    fs::create_dir("d")?;
    fs::create_dir_all("full/e")?;
    Ok(done(fs::rename("d", "full")))
}

fn rename_directory_over_file() -> Outcome {
    fs::create_dir("d")?;
    put("f", "")?;
    Ok(done(fs::rename("d", "f")))
}

fn rename_file_over_directory() -> Outcome {
    fs::create_dir("d")?;
    put("f", "")?;
    Ok(done(fs::rename("f", "d")))
}

fn rename_into_itself() -> Outcome {
    fs::create_dir_all("d/e")?;
    Ok(done(fs::rename("d", "d/e/f")))
}

fn renamed(old: &str, new: &str, flags: RenameFlags) -> String {
    done(renameat_with(CWD, old, CWD, new, flags))
}

fn rename_no_replace() -> Outcome {
    put("a", "a")?;
    put("b", "b")?;
    let first = renamed("a", "b", RenameFlags::NOREPLACE);
    let second = renamed("a", "c", RenameFlags::NOREPLACE);
    Ok(format!("{first} {second} {} {}", get("b"), list()?))
}

fn rename_exchange() -> Outcome {
    put("a", "one")?;
    put("b", "two")?;
    let result = renamed("a", "b", RenameFlags::EXCHANGE);
    Ok(format!("{result} {} {}", get("a"), get("b")))
}

fn rename_exchange_kinds() -> Outcome {
    put("a", "one")?;
    fs::create_dir("d")?;
    put("d/in", "two")?;
    let result = renamed("a", "d", RenameFlags::EXCHANGE);
    Ok(format!("{result} {} {}", get("a/in"), get("d")))
}

fn rename_exchange_missing() -> Outcome {
    put("a", "one")?;
    Ok(renamed("a", "b", RenameFlags::EXCHANGE))
}

fn rename_whiteout() -> Outcome {
    put("a", "one")?;
    let result = renamed("a", "b", RenameFlags::WHITEOUT);
    Ok(format!("{result} {}", get("b")))
}

fn rename_flags() -> Outcome {
    put("a", "one")?;
    put("b", "two")?;
    Ok(renamed(
        "a",
        "b",
        RenameFlags::EXCHANGE | RenameFlags::NOREPLACE,
    ))
}

fn hard_link() -> Outcome {
    put("a", "one")?;
    fs::hard_link("a", "b")?;
    put("b", "changed")?;
    let (a, b) = (fs::metadata("a")?, fs::metadata("b")?);
    Ok(format!(
        "{} links {} same {}",
        get("a"),
        a.nlink(),
        a.ino() == b.ino()
    ))
}

fn hard_link_exists() -> Outcome {
    put("a", "one")?;
    put("b", "two")?;
    Ok(done(fs::hard_link("a", "b")))
}

fn hard_link_directory() -> Outcome {
    fs::create_dir("d")?;
    Ok(done(fs::hard_link("d", "e")))
}

fn hard_link_symlink() -> Outcome {
    symlink("nowhere", "l")?;
    let linked = done(fs::hard_link("l", "m"));
    Ok(format!(
        "{linked} {}",
        words(fs::read_link("m").map(|path| path.display().to_string()))
    ))
}

fn unlink_first_link() -> Outcome {
    put("a", "one")?;
    fs::hard_link("a", "b")?;
    let mut open = fs::OpenOptions::new().read(true).write(true).open("a")?;
    fs::remove_file("a")?;
    open.write_all(b"two")?;
    Ok(format!("{} links {}", get("b"), open.metadata()?.nlink()))
}

fn unlinked_open() -> Outcome {
    put("a", "one")?;
    let mut open = fs::OpenOptions::new().read(true).write(true).open("a")?;
    fs::remove_file("a")?;
    open.seek(SeekFrom::End(0))?;
    open.write_all(b" and more")?;
    open.rewind()?;
    let mut text = String::new();
    open.read_to_string(&mut text)?;
    let metadata = open.metadata()?;
    Ok(format!(
        "{text} links {} size {} {}",
        metadata.nlink(),
        metadata.len(),
        list()?
    ))
}

fn unlinked_truncated() -> Outcome {
    let open = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open("u")?;
    fs::remove_file("u")?;
    let truncated = done(open.set_len(131_072));
    Ok(format!("{truncated} {}", open.metadata()?.len()))
}

fn unlinked_again() -> Outcome {
    put("a", "one")?;
    let mut open = File::open("a")?;
    fs::remove_file("a")?;
    put("a", "two")?;
    let mut text = String::new();
    open.read_to_string(&mut text)?;
    Ok(format!("{text} {}", get("a")))
}

fn symbolic_link() -> Outcome {
    put("a", "one")?;
    symlink("a", "l")?;
    let metadata = fs::symlink_metadata("l")?;
    Ok(format!(
        "{} mode {:o} size {}",
        get("l"),
        metadata.mode(),
        metadata.len()
    ))
}

fn symbolic_link_nowhere() -> Outcome {
    symlink("nowhere", "l")?;
    Ok(format!(
        "{} {}",
        get("l"),
        words(fs::read_link("l").map(|path| path.display().to_string()))
    ))
}

fn symbolic_circle() -> Outcome {
    symlink("b", "a")?;
    symlink("a", "b")?;
    Ok(get("a"))
}

fn symbolic_long() -> Outcome {
    let target = "x".repeat(4095);
    let made = done(symlink(&target, "l"));
    let read = fs::read_link("l").map(|path| path.as_os_str().len());
    Ok(format!("{made} {}", words(read)))
}

fn symbolic_nofollow() -> Outcome {
    use rustix::fs::{Mode, OFlags, open};
    put("a", "one")?;
    symlink("a", "l")?;
    Ok(done(open(
        "l",
        OFlags::RDONLY | OFlags::NOFOLLOW,
        Mode::empty(),
    )))
}

fn symbolic_create() -> Outcome {
    symlink("made", "l")?;
    put("l", "one")?;
    Ok(format!("{} {}", get("made"), list()?))
}

fn symbolic_exclusive() -> Outcome {
    symlink("made", "l")?;
    Ok(format!("{} {}", done(File::create_new("l")), list()?))
}

fn name_not_utf8() -> Outcome {
    let name = OsStr::from_bytes(b"\xff\xfe \x80");
    fs::write(name, "odd")?;
    let listed: Vec<Vec<u8>> = fs::read_dir(".")?
        .map(|entry| Ok(entry?.file_name().as_bytes().to_vec()))
        .collect::<Result<_, std::io::Error>>()?;
    Ok(format!("{} {listed:?}", words(fs::read_to_string(name))))
}

fn names_unusual() -> Outcome {
    for name in [
        " ",
        "a b",
        "new\nline",
        "\"",
        "'",
        "a,b:c",
        "*",
        "\\",
        "-rf",
    ] {
        put(name, name)?;
        if get(name) != name {
            return Ok(format!("{name:?} is {:?}", get(name)));
        }
    }
    Ok(format!("{:?}", list()?))
}

fn name_of_length(length: usize) -> Outcome {
    let name = "n".repeat(length);
    Ok(format!(
        "{} {}",
        done(fs::write(&name, "long")),
        list()?.len()
    ))
}

fn deep_path() -> Outcome {
    let mut path = std::path::PathBuf::new();
    for _ in 0..100 {
        path.push("directory");
    }
    fs::create_dir_all(&path)?;
    fs::write(path.join("f"), "deep")?;
    Ok(words(fs::read_to_string(path.join("f"))))
}

fn exclusive_create() -> Outcome {
    put("a", "one")?;
    let file = done(File::create_new("a"));
    fs::create_dir("d")?;
    Ok(format!(
        "{file} {} {}",
        done(File::create_new("d")),
        get("a")
    ))
}

fn create_existing() -> Outcome {
    put("a", "one")?;
    let options = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open("a");
    Ok(format!("{} {}", done(options), get("a")))
}
