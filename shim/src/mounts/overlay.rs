//! Overlay mounts of many layers. `mount(2)` takes one page of data, and the paths of containerd's
//! snapshots are long; where they do not fit, they are given relative to what they have in common.

use std::io;
use std::path::Path;

use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Options whose values are paths, or lists of them with colons between.
const PATHS: [&str; 3] = ["lowerdir=", "upperdir=", "workdir="];

/// `data` in a shorter form that means the same to a mount made in the directory that is returned
/// with it; `None` when the paths have no directory in common.
pub fn shorten(data: &[String]) -> Option<(String, Vec<String>)> {
    let paths: Vec<&str> = data
        .iter()
        .flat_map(|option| option_paths(option))
        .collect();
    let (first, others) = paths.split_first()?;
    let mut common = first.rfind('/')?;
    for path in others {
        let same = first
            .bytes()
            .zip(path.bytes())
            .take_while(|(a, b)| a == b)
            .count();
        common = common.min(first[..same.min(first.len())].rfind('/')?);
    }
    if common == 0 {
        return None;
    }
    let directory = first[..common].to_owned();
    let cut = |path: &str| path[common + 1..].to_owned();
    let shortened = data
        .iter()
        .map(
            |option| match PATHS.iter().find(|name| option.starts_with(**name)) {
                Some(name) => {
                    let paths: Vec<_> = option_paths(option).map(cut).collect();
                    format!("{name}{}", paths.join(":"))
                }
                None => option.clone(),
            },
        )
        .collect();
    Some((directory, shortened))
}

/// The paths in an option; none when it has none, or one with an escaped character, which is not
/// worth the parsing.
fn option_paths(option: &str) -> impl Iterator<Item = &str> {
    let value = PATHS.iter().find_map(|name| option.strip_prefix(name));
    value.into_iter().flat_map(|value| value.split(':'))
}

/// Do `work` in the working directory `directory`, without moving the rest of the process there.
pub fn in_directory<T: Send>(
    directory: &Path,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, || {
            leave_shared_directory()?;
            rustix::process::chdir(directory)?;
            work()
        })?;
        thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("a mounting thread panicked")))
    })
}

/// Give this thread a working directory of its own.
#[allow(unsafe_code)]
fn leave_shared_directory() -> io::Result<()> {
    // SAFETY: descriptors stay shared; only working directory, root and umask are separated.
    Ok(unsafe { unshare_unsafe(UnshareFlags::FS) }?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn test_paths_are_given_relative_to_what_they_share() {
        let data = strings(&[
            "index=off",
            "workdir=/var/lib/snapshots/30/work",
            "upperdir=/var/lib/snapshots/30/fs",
            "lowerdir=/var/lib/snapshots/3/fs:/var/lib/snapshots/2/fs",
        ]);
        let (directory, short) = shorten(&data).unwrap();
        assert_eq!(directory, "/var/lib/snapshots");
        assert_eq!(
            short,
            [
                "index=off",
                "workdir=30/work",
                "upperdir=30/fs",
                "lowerdir=3/fs:2/fs"
            ]
        );
    }

    #[test]
    fn test_common_part_ends_at_a_whole_name() {
        let (directory, short) = shorten(&strings(&["lowerdir=/a/bc/1:/a/bd/2"])).unwrap();
        assert_eq!(
            (directory.as_str(), short[0].as_str()),
            ("/a", "lowerdir=bc/1:bd/2")
        );
        let (directory, short) = shorten(&strings(&["lowerdir=/a/b:/a/b/c"])).unwrap();
        assert_eq!(
            (directory.as_str(), short[0].as_str()),
            ("/a", "lowerdir=b:b/c")
        );
    }

    #[test]
    fn test_nothing_in_common() {
        assert_eq!(shorten(&strings(&["lowerdir=/a/1:/b/2"])), None);
        assert_eq!(shorten(&strings(&["size=1m"])), None);
        assert_eq!(shorten(&strings(&["lowerdir=a:b"])), None);
    }

    #[test]
    fn test_work_is_done_elsewhere_and_the_process_stays() {
        let before = std::env::current_dir().unwrap();
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("here"), "").unwrap();
        let found = in_directory(directory.path(), || std::fs::metadata("here").map(|_| ()));
        found.unwrap();
        assert_eq!(std::env::current_dir().unwrap(), before);
    }
}
