//! `file-cases DIRECTORY...`, `file-cases listen SOCKET`, `file-cases connect SOCKET`, `file-cases lock FILE`,
//! `file-cases exercise FILE SEED STEPS`.
//!
//! The first does with files in each DIRECTORY what programs do, and prints what came
//! of it, one line a case: `DIRECTORY CASE: OUTCOME`.
//!
//! An outcome says what a program could tell: what it read, or the name of the error. It holds nothing that
//! differs from run to run (times, inode numbers), so the same program on another kernel or file system
//! prints the same lines, and each line that differs is a difference for programs. To be run as root, in
//! a container.
//!
//! The next are the two ends of a socket: one line each way, or the error's name. `lock` prints whether it has
//! FILE's lock, and holds it until its input ends. The last makes STEPS random
//! operations on a new FILE, and fails at the first that does not come to what memory says.

mod attributes;
mod data;
mod directories;
mod exercise;
mod locks;
mod mapping;
mod names;
mod permissions;
mod sockets;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::unistd::{Gid, Uid, setegid, seteuid, setgroups};

/// A system call's error, whichever crate made the call.
#[derive(Debug)]
struct Failure(Errno);

impl From<Errno> for Failure {
    fn from(error: Errno) -> Self {
        Self(error)
    }
}

impl From<rustix::io::Errno> for Failure {
    fn from(error: rustix::io::Errno) -> Self {
        Self(Errno::from_raw(error.raw_os_error()))
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self(Errno::from_raw(error.raw_os_error().unwrap_or(0)))
    }
}

/// What a case came to.
type Outcome = Result<String, Failure>;

/// A name, and what is done in an empty directory, the current one.
type Case = (&'static str, fn() -> Outcome);

/// In words: what came out, or the name of the error.
fn words<T: std::fmt::Display>(result: Result<T, impl Into<Failure>>) -> String {
    match result {
        Ok(text) => text.to_string(),
        Err(failure) => format!("{:?}", failure.into().0),
    }
}

/// Like [`words`], for calls that return nothing of interest.
fn done<T>(result: Result<T, impl Into<Failure>>) -> String {
    words(result.map(|_| "done"))
}

/// Does it as a user without privileges, who has the group of the same number and `groups` too.
fn as_user<T>(id: u32, groups: &[u32], act: impl FnOnce() -> T) -> Result<T, Failure> {
    let groups: Vec<Gid> = groups.iter().copied().map(Gid::from_raw).collect();
    setgroups(&groups)?;
    setegid(Gid::from_raw(id))?;
    seteuid(Uid::from_raw(id))?;
    let result = act();
    seteuid(Uid::from_raw(0))?;
    setegid(Gid::from_raw(0))?;
    setgroups(&[])?;
    Ok(result)
}

fn main() -> io::Result<()> {
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
    let groups = [
        names::CASES,
        directories::CASES,
        data::CASES,
        attributes::CASES,
        permissions::CASES,
        locks::CASES,
        sockets::CASES,
    ];
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .as_slice()
    {
        ["listen", socket] => return sockets::listen(socket),
        ["lock", file] => return locks::hold(file),
        ["exercise", file, seed, steps] => {
            let number = |text: &str| text.parse().map_err(io::Error::other);
            return exercise::exercise(file, number(seed)?, number(steps)? as usize);
        }
        ["connect", socket] => {
            println!("{}", words(sockets::connect(socket)));
            return Ok(());
        }
        _ => {}
    }
    for directory in arguments {
        let place = PathBuf::from(&directory).join("cases");
        for (name, act) in groups.iter().copied().flatten() {
            let outcome = in_fresh_directory(&place, *act)?;
            println!("{directory} {name}: {}", words(outcome));
        }
    }
    Ok(())
}

fn in_fresh_directory(place: &Path, act: fn() -> Outcome) -> io::Result<Outcome> {
    fs::create_dir(place)?;
    std::env::set_current_dir(place)?;
    let outcome = act();
    std::env::set_current_dir("/")?;
    fs::remove_dir_all(place)?;
    Ok(outcome)
}
