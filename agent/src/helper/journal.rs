//! What libcontainer logs about a failure.
//!
//! Its errors leave out what failed: "failed to prepare rootfs" says neither which mount it was nor
//! why. That it only logs, and in the processes that it forks. So the log goes to a file in memory,
//! which they inherit.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use nix::sys::memfd::{MFdFlags, memfd_create};
use tracing_subscriber::filter::LevelFilter;

/// Most bytes of a log that are told.
const MOST: usize = 2 << 10;

/// Most lines. The first say what failed and why, the others where that was noticed.
const LINES: usize = 2;

/// Errors by whose words clients choose an exit status, as they are logged and as they are said.
const WORDS: [(&str, &str); 3] = [
    ("e=ENOENT", "no such file or directory"),
    ("e=EACCES", "permission denied"),
    ("e=ENOTDIR", "not a directory"),
];

/// The log of one helper.
pub struct Journal(Arc<File>);

impl Journal {
    /// Take what is logged as an error from here on.
    pub fn install() -> io::Result<Self> {
        let file = memfd_create(c"journal", MFdFlags::MFD_CLOEXEC)?;
        let file = Arc::new(File::from(file));
        // Fails where there is one already; then that one gets it.
        let _ = tracing_subscriber::fmt()
            .with_max_level(LevelFilter::ERROR)
            .with_writer(file.clone())
            .with_ansi(false)
            .with_level(false)
            .with_target(false)
            .without_time()
            .try_init();
        Ok(Self(file))
    }

    /// `message`, and in parentheses what has been logged.
    pub fn explain(&self, message: String) -> String {
        let mut buffer = [0; MOST];
        let length = self.0.read_at(&mut buffer, 0).unwrap_or(0);
        let text = String::from_utf8_lossy(&buffer[..length]);
        let lines: Vec<String> = text.lines().take(LINES).map(in_words).collect();
        if lines.is_empty() {
            return message;
        }
        format!("{message} ({})", lines.join("; "))
    }
}

/// A line of the log, with the kernel's error in words.
fn in_words(line: &str) -> String {
    let found = WORDS
        .iter()
        .find(|(logged, _)| line.split_whitespace().any(|word| word == *logged));
    match found {
        Some((_, words)) => format!("{line}: {words}"),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn test_the_kernel_s_error_is_said_in_words() {
        let logged = in_words("failed to chdir e=ENOENT");
        assert_eq!(
            logged,
            "failed to chdir e=ENOENT: no such file or directory"
        );
        assert_eq!(in_words("size=ENOENTS"), "size=ENOENTS");
    }

    fn journal() -> Journal {
        Journal(Arc::new(tempfile::tempfile().unwrap()))
    }

    #[test]
    fn test_nothing_logged_adds_nothing() {
        assert_eq!(journal().explain("failed".into()), "failed");
    }

    #[test]
    fn test_what_was_logged_follows_the_error() {
        let journal = journal();
        let mut file = &*journal.0;
        file.write_all(b"mount /x: failed\nrootfs: ENODEV\nno init\n")
            .unwrap();
        assert_eq!(
            journal.explain("create".into()),
            "create (mount /x: failed; rootfs: ENODEV)"
        );
    }

    #[test]
    fn test_a_long_log_is_cut() {
        let journal = journal();
        (&*journal.0).write_all(&[b'x'; 2 * MOST]).unwrap();
        assert_eq!(journal.explain(String::new()).len(), MOST + 3);
    }
}
