//! The files clock: what one operation costs over virtio-fs, in counts, and beside QEMU with a file server
//! of its own.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use thaw_tests::file_guest::{Cost, FileGuest, OPERATIONS, initramfs};

/// How often an operation is done, and how many MiB are moved.
const COUNT: u32 = 200;
const MIB: u32 = 16;

/// One operation.
#[derive(Debug, Serialize)]
pub struct Operation {
    /// Its name; for those with "MiB" in it figures are for one.
    pub name: &'static str,
    /// Requests that its caller waits for.
    pub waits: f64,
    /// Requests that nobody waits for.
    pub releases: f64,
    /// Exits of the guest, where KVM counts them.
    pub exits: Option<f64>,
    /// Microseconds in thaw's guest.
    pub thaw_us: f64,
    /// Microseconds in QEMU's, where that was measured.
    pub peer_us: Option<f64>,
}

impl Operation {
    /// How many times as long it takes there.
    pub fn ratio(&self) -> Option<f64> {
        self.peer_us.map(|peer| peer / self.thaw_us)
    }
}

/// Measures all operations, with this program as the guests' first process.
pub fn files(prefix: &Path) -> Result<Vec<Operation>> {
    let program = std::env::current_exe().context("finding this program")?;
    let peer = match peer() {
        Some(script) => beside(&script, &program).context("measuring QEMU")?,
        None => BTreeMap::new(),
    };
    let mut guest = FileGuest::boot(prefix, &program)?;
    let mut operations = Vec::new();
    for name in OPERATIONS {
        let count = if name.contains("MiB") { MIB } else { COUNT };
        let Cost {
            waits,
            releases,
            exits,
            took,
        } = guest.measure(name, count)?;
        operations.push(Operation {
            name,
            waits,
            releases,
            exits,
            thaw_us: microseconds(took),
            peer_us: peer.get(*name).copied().map(microseconds),
        });
    }
    Ok(operations)
}

fn microseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// The script that runs the other machine, where `make bench` has prepared it.
fn peer() -> Option<PathBuf> {
    std::env::var_os("THAW_BENCH_PEER").map(PathBuf::from)
}

/// What each operation takes there.
fn beside(script: &Path, program: &Path) -> Result<BTreeMap<String, Duration>> {
    let directory = tempfile::tempdir()?;
    let image = directory.path().join("initramfs");
    initramfs(program, &image)?;
    let export = directory.path().join("export");
    std::fs::create_dir_all(export.join("disk"))?;
    let socket = directory.path().join("socket");
    let listener = UnixListener::bind(&socket)?;
    let output = Command::new(script)
        .stdin(OwnedFd::from(listener))
        .arg("run")
        .arg(&socket)
        .arg(&export)
        .arg(&image)
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let results: BTreeMap<_, _> = text.lines().filter_map(result).collect();
    ensure!(
        results.contains_key("end"),
        "no results:\n{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(results)
}

/// `result OPERATION COUNT NANOSECONDS`
fn result(line: &str) -> Option<(String, Duration)> {
    let (rest, nanoseconds) = line.trim().strip_prefix("result ")?.rsplit_once(' ')?;
    let (name, count) = rest.rsplit_once(' ')?;
    let count: u32 = count.parse().ok()?;
    let took = Duration::from_nanos(nanoseconds.parse().ok()?);
    Some((name.to_owned(), took / count.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_result_is_read() {
        let expected = ("stat again".to_owned(), Duration::from_nanos(15));
        assert_eq!(result("result stat again 10 150\r"), Some(expected));
        assert_eq!(result("[    0.1] result of nothing"), None);
    }
}
