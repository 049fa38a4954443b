//! Names that the host has given to other files, or to none, while the guest believes them.
//!
//! The guest does not ask for a name again within the time that an answer is valid. Until then it would
//! open a file that the host has removed or replaced, and what it writes there is lost. Such a file has
//! no links, so its open is answered with ESTALE, at which the guest's kernel looks the name up anew and
//! opens, or makes, what is there now (fs/namei.c, `do_filp_open`: LOOKUP_REVAL).
//!
//! A file without links may also be one that a program in the guest has removed and opens again through
//! `/proc/self/fd`. No lookup leads away from that one, so the same open comes again, and is served.

use std::collections::HashSet;
use std::io;
use std::sync::{Mutex, PoisonError};

/// The inodes without links whose open has been answered with ESTALE once.
#[derive(Debug, Default)]
pub struct StaleNames {
    told: Mutex<HashSet<u64>>,
}

impl StaleNames {
    /// `inode`, which has `links` links, is about to be opened.
    ///
    /// # Errors
    ///
    /// ESTALE where the name that led to it may be another file's by now.
    pub fn check(&self, inode: u64, links: u32) -> io::Result<()> {
        if links > 0 {
            return Ok(());
        }
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        match told.insert(inode) {
            true => Err(io::Error::from_raw_os_error(libc::ESTALE)),
            false => Ok(()),
        }
    }

    /// The guest has forgotten `inode`.
    pub fn forget(&self, inode: u64) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.remove(&inode);
    }

    /// The guest has forgotten all.
    pub fn clear(&self) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        *told = HashSet::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_file_without_links_is_told_of_once() {
        let names = StaleNames::default();
        assert!(names.check(1, 1).is_ok());
        for forget in [|n: &StaleNames| n.forget(1), |n: &StaleNames| n.clear()] {
            let told = names.check(1, 0).map_err(|error| error.raw_os_error());
            assert_eq!(told, Err(Some(libc::ESTALE)));
            assert!(names.check(1, 0).is_ok());
            forget(&names);
        }
    }
}
