//! `thaw logs`: what a guest has printed on its console.
//!
//! The file is of bounded length: when it is full, it is begun anew with the end of what it had (see
//! [`crate::console`]). Who follows it takes that apart again, so that each line is shown once.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::inotify;

use super::output::json;
use super::sandboxes;
use crate::consoles;
use crate::facts;
use crate::terminal;

/// Most bytes of a console that are read: more than its file ever has.
const MOST_BYTES: u64 = 1 << 20;

/// Bytes of the end of what was shown that are remembered, to find it in a file that was begun anew.
const REMEMBERED: usize = 64 << 10;

/// How output looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// As the guest has printed it, for files and programs.
    Raw,
    /// So that it does nothing to a terminal.
    Terminal,
    /// A list of lines.
    Json,
}

/// Show the console of the guest of sandbox or container `id`, and what comes until its end if `follow`.
pub(super) fn run(
    id: &str,
    namespace: Option<&str>,
    follow: bool,
    as_json: bool,
    output: &mut dyn Write,
) -> Result<bool> {
    let form = match (as_json, io::stdout().is_terminal()) {
        (true, _) => Form::Json,
        (false, true) => Form::Terminal,
        (false, false) => Form::Raw,
    };
    let root = facts::root();
    let directory = match sandboxes::one(root, namespace, id) {
        Ok((directory, _)) => directory,
        Err(error) => {
            let Some(kept) = kept(root, namespace, id)? else {
                bail!(
                    "{error}; nor is the console of an ended one kept, which it is where console = \
                     \"keep\" is set"
                );
            };
            write(&read(&kept)?.unwrap_or_default(), form, output)?;
            return Ok(true);
        }
    };
    if follow {
        Follower::new(directory)?.run(form, output)?;
    } else {
        let text = read(&directory.join(facts::CONSOLE))?;
        write(&text.unwrap_or_default(), form, output)?;
    }
    Ok(true)
}

/// The newest console of an ended sandbox `id`.
fn kept(root: &Path, namespace: Option<&str>, id: &str) -> Result<Option<PathBuf>> {
    let directory = consoles::directory(root);
    let entries = match fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            return Err(error).with_context(|| format!("reading {}", directory.display()));
        }
    };
    let ending = format!("@{id}.log");
    let meant = |name: &str| match namespace {
        Some(namespace) => *name == format!("{namespace}{ending}"),
        None => name.ends_with(&ending),
    };
    let newest = entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(meant))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .max();
    Ok(newest.map(|(_, path)| path))
}

/// What is in the file at `path`; `None` where there is none.
fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MOST_BYTES).read_to_end(&mut bytes));
    match read {
        Ok(_) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("reading {}", path.display())),
    }
}

fn write(bytes: &[u8], form: Form, output: &mut dyn Write) -> io::Result<()> {
    match form {
        Form::Raw => output.write_all(bytes),
        Form::Terminal => {
            output.write_all(terminal::lines(&String::from_utf8_lossy(bytes)).as_bytes())
        }
        Form::Json => {
            let text = terminal::lines(&String::from_utf8_lossy(bytes));
            json(output, &text.lines().collect::<Vec<_>>())
        }
    }
}

/// Shows what comes to a console until its sandbox is gone. Woken by changes of the directory and what
/// is in it.
struct Follower {
    directory: PathBuf,
    changes: OwnedFd,
    shown: Shown,
}

impl Follower {
    fn new(directory: PathBuf) -> Result<Self> {
        let watch = || {
            let changes = inotify::init(inotify::CreateFlags::CLOEXEC)?;
            let flags = inotify::WatchFlags::CREATE
                | inotify::WatchFlags::MODIFY
                | inotify::WatchFlags::DELETE
                | inotify::WatchFlags::MOVED_FROM
                | inotify::WatchFlags::DELETE_SELF
                | inotify::WatchFlags::ONLYDIR;
            inotify::add_watch(&changes, &directory, flags)?;
            Ok::<_, rustix::io::Errno>(changes)
        };
        let changes = watch().with_context(|| format!("watching {}", directory.display()))?;
        Ok(Self {
            directory,
            changes,
            shown: Shown::default(),
        })
    }

    fn run(mut self, form: Form, output: &mut dyn Write) -> Result<()> {
        let mut file: Option<File> = None;
        loop {
            if file.is_none() {
                // Kept open: what is in it can be read when it is gone, too.
                file = File::open(self.directory.join(facts::CONSOLE)).ok();
            }
            if let Some(file) = &file {
                let now = contents(file).context("reading the console")?;
                write(self.shown.news(&now), form, output)?;
                output.flush()?;
            }
            if !self.wait()? {
                if let Some(file) = &file {
                    let now = contents(file).context("reading the console")?;
                    write(self.shown.news(&now), form, output)?;
                }
                return Ok(());
            }
        }
    }

    /// Wait until something has changed; `false` when the sandbox is gone.
    fn wait(&self) -> Result<bool> {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(&self.changes, &mut buffer);
        let mut there = true;
        loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("watching {}", self.directory.display()));
                }
            };
            let flags = event.events();
            let end = inotify::ReadFlags::DELETE_SELF | inotify::ReadFlags::IGNORED;
            // The directory itself ends only when nobody has a file of it open, which this process has.
            let taken_away = inotify::ReadFlags::DELETE | inotify::ReadFlags::MOVED_FROM;
            let name = event.file_name().map(CStr::to_bytes);
            let last = [facts::CONSOLE, facts::FILE].map(|name| Some(name.as_bytes()));
            let gone = flags.intersects(taken_away) && last.contains(&name);
            if gone || flags.intersects(end) {
                there = false;
            }
            if reader.is_buffer_empty() {
                return Ok(there);
            }
        }
    }
}

/// All that is in an open file.
fn contents(file: &File) -> io::Result<Vec<u8>> {
    use std::os::unix::fs::FileExt;
    let mut bytes = Vec::new();
    let mut buffer = [0; 16 << 10];
    while (bytes.len() as u64) < MOST_BYTES {
        match file.read_at(&mut buffer, bytes.len() as u64)? {
            0 => break,
            count => bytes.extend_from_slice(&buffer[..count]),
        }
    }
    Ok(bytes)
}

/// What was shown of a console.
#[derive(Debug, Default)]
struct Shown {
    /// Bytes of the file that were.
    length: usize,
    /// The last of them.
    end: Vec<u8>,
}

impl Shown {
    /// What is new in a file that has `now` in it.
    fn news<'a>(&mut self, now: &'a [u8]) -> &'a [u8] {
        let begun_anew = now.len() < self.length || !now[..self.length].ends_with(&self.end);
        let known = if begun_anew {
            // It begins with the last of what was there before, of which a part was shown.
            let most = self.end.len().min(now.len());
            (0..=most)
                .rev()
                .find(|length| self.end.ends_with(&now[..*length]))
        } else {
            Some(self.length)
        };
        self.length = now.len();
        self.end = now[now.len().saturating_sub(REMEMBERED)..].to_vec();
        &now[known.unwrap_or(0)..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::Console;

    #[test]
    fn test_each_line_is_shown_once_though_the_file_is_begun_anew() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console.log");
        let mut console = Console::new(Some(path.clone()));
        let (mut shown, mut seen, mut all) = (Shown::default(), Vec::new(), Vec::new());
        for number in 0..40_000 {
            let line = format!("line {number}\n");
            console.push(line.as_bytes());
            all.extend_from_slice(line.as_bytes());
            if number % 997 == 0 {
                seen.extend_from_slice(shown.news(&fs::read(&path).unwrap()));
            }
        }
        seen.extend_from_slice(shown.news(&fs::read(&path).unwrap()));
        assert!(seen == all, "{} bytes of {}", seen.len(), all.len());
    }

    #[test]
    fn test_following_ends_with_the_sandbox() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("default/web");
        fs::create_dir_all(&directory).unwrap();
        let mut console = Console::new(Some(directory.join(facts::CONSOLE)));
        let follower = Follower::new(directory.clone()).unwrap();
        let seen = std::thread::scope(|scope| {
            let following = scope.spawn(move || {
                let mut output = Vec::new();
                follower.run(Form::Raw, &mut output).unwrap();
                output
            });
            for number in 0..100 {
                console.push(format!("line {number}\n").as_bytes());
            }
            facts::remove_directory(&directory).unwrap();
            following.join().unwrap()
        });
        let text = String::from_utf8(seen).unwrap();
        // All, or, when the follower came late, nothing of a file that was gone by then.
        assert!(text.is_empty() || text.ends_with("line 99\n"), "{text}");
    }

    #[test]
    fn test_a_terminal_is_not_moved_and_json_is_lines() {
        let bytes = b"one\r\n\x1b[2Jtwo\n";
        let form = |form| {
            let mut output = Vec::new();
            write(bytes, form, &mut output).unwrap();
            output
        };
        assert_eq!(form(Form::Raw), bytes);
        assert_eq!(form(Form::Terminal), b"one\n?[2Jtwo\n");
        let value: Vec<String> = serde_json::from_slice(&form(Form::Json)).unwrap();
        assert_eq!(value, ["one", "?[2Jtwo"]);
    }

    #[test]
    fn test_the_newest_kept_console_of_a_name_is_found() {
        let root = tempfile::tempdir().unwrap();
        assert!(kept(root.path(), None, "web").unwrap().is_none());
        fs::create_dir(consoles::directory(root.path())).unwrap();
        for (namespace, seconds) in [("a", 10), ("b", 20), ("c", 15)] {
            let path = consoles::path(root.path(), namespace, "web");
            let file = File::create(&path).unwrap();
            let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
            file.set_modified(time).unwrap();
        }
        let found = |namespace| kept(root.path(), namespace, "web").unwrap();
        assert_eq!(found(None), Some(consoles::path(root.path(), "b", "web")));
        assert_eq!(
            found(Some("a")),
            Some(consoles::path(root.path(), "a", "web"))
        );
        assert_eq!(kept(root.path(), None, "eb").unwrap(), None);
    }
}
