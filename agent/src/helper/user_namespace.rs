//! Mappings of ids, and user namespaces for id-mapped mounts.

use std::fmt::Write;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;

use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use super::description::IdMapping;
use crate::sys;

/// Writes the mappings of users and groups of a process that is alone in a new user namespace.
pub fn write_mappings(pid: i32, mappings: [&[IdMapping]; 2]) -> io::Result<()> {
    for (name, list) in ["uid_map", "gid_map"].into_iter().zip(mappings) {
        fs::write(format!("/proc/{pid}/{name}"), text(list))?;
    }
    Ok(())
}

/// As the kernel reads them (user_namespaces(7)).
fn text(mappings: &[IdMapping]) -> String {
    mappings.iter().fold(
        String::new(),
        |mut text,
         IdMapping {
             container,
             host,
             size,
         }| {
            let _ = writeln!(text, "{container} {host} {size}");
            text
        },
    )
}

/// A user namespace with these mappings, in which nothing runs.
pub fn make(mappings: [&[IdMapping]; 2]) -> io::Result<OwnedFd> {
    // It only has to be there until its namespace is open.
    let pid = sys::fork_paused(libc::CLONE_NEWUSER)?;
    let namespace =
        write_mappings(pid, mappings).and_then(|()| File::open(format!("/proc/{pid}/ns/user")));
    let _ = sys::kill(pid, libc::SIGKILL);
    let _ = waitpid(Pid::from_raw(pid), None);
    Ok(namespace?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_mappings_are_one_a_line() {
        let list = [
            IdMapping {
                container: 0,
                host: 1000,
                size: 1,
            },
            IdMapping {
                container: 1,
                host: 7,
                size: 65535,
            },
        ];
        assert_eq!(text(&list), "0 1000 1\n1 7 65535\n");
    }
}
