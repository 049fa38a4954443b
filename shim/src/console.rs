//! What a guest prints on its console: kept for the moment at which it is needed, which is when the
//! guest has died.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use tracing::warn;

/// Bytes that are kept in memory.
const KEPT: usize = 64 << 10;

/// Size at which the file is begun anew with what is in memory.
const FILE_LIMIT: usize = 2 * KEPT;

/// What the kernel's panic begins with (kernel/panic.c), the lines that follow it at most, and what is
/// kept of its reason.
const PANIC: &str = "Kernel panic - not syncing: ";
const PANIC_LINES: usize = 200;
const PANIC_LENGTH: usize = 200;

/// The end of a guest's console output, in memory and in a file.
#[derive(Debug)]
pub struct Console {
    path: Option<PathBuf>,
    file: Option<File>,
    written: usize,
    tail: VecDeque<u8>,
    failed: bool,
}

impl Console {
    /// A console whose output goes to the file at `path`, which is made with the first output; without
    /// one it is in memory only.
    pub fn new(path: Option<PathBuf>) -> Self {
        Self {
            path,
            file: None,
            written: 0,
            tail: VecDeque::new(),
            failed: false,
        }
    }

    /// The guest printed `bytes`.
    pub fn push(&mut self, bytes: &[u8]) {
        let bytes = &bytes[bytes.len().saturating_sub(KEPT)..];
        let excess = (self.tail.len() + bytes.len()).saturating_sub(KEPT);
        self.tail.drain(..excess);
        self.tail.extend(bytes);
        if let Err(error) = self.write(bytes)
            && !self.failed
        {
            // Once: a full disk would fill the log too.
            self.failed = true;
            let path = self.path.as_deref().unwrap_or(Path::new(""));
            warn!(path = %path.display(), %error, "writing the guest's console output");
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(path) = &self.path else {
            return Ok(());
        };
        if self.file.is_none() || self.written + bytes.len() > FILE_LIMIT {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = options.open(path)?;
            let (front, back) = self.tail.as_slices();
            file.write_all(front)?;
            file.write_all(back)?;
            self.written = self.tail.len();
            self.file = Some(file);
            return Ok(());
        }
        if let Some(file) = &mut self.file {
            file.write_all(bytes)?;
            self.written += bytes.len();
        }
        Ok(())
    }

    /// What the guest's kernel has said of its panic, if it has: `Attempted to kill init! …`.
    pub fn panic(&self) -> Option<String> {
        let lines = self.last_lines(PANIC_LINES);
        let (_, words) = lines.rsplit_once(PANIC)?;
        let line = words.lines().next().unwrap_or_default();
        Some(line.trim().chars().take(PANIC_LENGTH).collect())
    }

    /// The last `count` lines, without what is no text.
    pub fn last_lines(&self, count: usize) -> String {
        let bytes: Vec<u8> = self.tail.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text
            .lines()
            .filter(|line| !line.trim().is_empty())
            .collect();
        let last = &lines[lines.len().saturating_sub(count)..];
        last.join("\n")
            .chars()
            .filter(|c| !c.is_control() || *c == '\n')
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_silent_guest_has_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console.log");
        let mut console = Console::new(Some(path.clone()));
        assert_eq!(console.last_lines(5), "");
        assert!(!path.exists());
        console.push(b"one\ntwo\r\n\nthr");
        console.push(b"ee\n");
        assert_eq!(console.last_lines(2), "two\nthree");
        assert_eq!(std::fs::read(&path).unwrap(), b"one\ntwo\r\n\nthree\n");
    }

    #[test]
    fn test_a_panic_is_found_and_told_without_its_stamp() {
        let directory = tempfile::tempdir().unwrap();
        let mut console = Console::new(Some(directory.path().join("console.log")));
        console.push(b"[    1.0] thaw-agent: no\n");
        assert_eq!(console.panic(), None);
        console.push(b"[    1.1] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00008900\r\n");
        console.push(b"[    1.1] CPU: 0 PID: 1 Comm: init\n");
        let panic = console.panic().unwrap();
        assert_eq!(panic, "Attempted to kill init! exitcode=0x00008900");
    }

    #[test]
    fn test_a_console_without_a_file_is_remembered_all_the_same() {
        let mut console = Console::new(None);
        console.push(b"one\ntwo\n");
        assert_eq!(console.last_lines(1), "two");
        assert!(console.file.is_none());
    }

    #[test]
    fn test_memory_and_file_are_bounded_and_end_alike() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console.log");
        let mut console = Console::new(Some(path.clone()));
        for number in 0..40_000 {
            console.push(format!("line {number}\n").as_bytes());
        }
        console.push(&vec![b'x'; 3 * KEPT]);
        console.push(b"\nlast\n");
        assert!(console.tail.len() <= KEPT);
        let file = std::fs::read(&path).unwrap();
        assert!(file.len() <= FILE_LIMIT);
        assert!(file.ends_with(b"x\nlast\n"));
        assert_eq!(console.last_lines(1), "last");
    }
}
