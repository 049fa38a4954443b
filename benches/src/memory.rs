//! The memory clock: what one idle sandbox costs the host, itemised.

use std::fs;

use anyhow::{Context, Result};
use serde::Serialize;
use thaw_tests::{Testbed, thaw};

/// Memory of one process, in KiB.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Process {
    /// Which one.
    pub name: &'static str,
    /// Pages that no other process maps, of files too.
    pub private: u64,
    /// Of these, what is not in any file: heap, stacks, guest memory that was written.
    pub anonymous: u64,
    /// The share of pages that several processes map.
    pub proportional: u64,
    /// Page tables.
    pub page_tables: u64,
}

/// What idle sandboxes cost.
#[derive(Debug, Serialize)]
pub struct Memory {
    /// How many there were.
    pub sandboxes: u64,
    /// The processes of the first one.
    pub processes: Vec<Process>,
    /// Private memory and page tables of these processes together, in KiB.
    pub sum: u64,
    /// MemAvailable that went with each of them, in KiB: kernel memory included, noise too.
    pub available_lost: i64,
}

/// Starts `sandboxes` containers that sleep, and looks.
pub fn memory(bed: &Testbed, sandboxes: u64) -> Result<Memory> {
    let before = available()?;
    let mut containers: Vec<_> = (0..sandboxes).map(|_| bed.sleeper()).collect();
    // What a start needed and what idle costs are two things: give the former time to go.
    std::thread::sleep(std::time::Duration::from_secs(5));
    let lost = before - available()?;
    let first = containers
        .first()
        .context("at least one sandbox is wanted")?;
    let pids = thaw::processes(&first.id);
    let processes = [
        ("shim", pids.shim),
        ("anchor", pids.anchor),
        ("vmm", pids.vmm),
    ];
    let processes = processes
        .map(|(name, pid)| process(name, pid))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    containers.drain(..).for_each(thaw_tests::Container::remove);
    Ok(Memory {
        sandboxes,
        sum: processes
            .iter()
            .map(|process| process.private + process.page_tables)
            .sum(),
        processes,
        available_lost: lost / i64::try_from(sandboxes)?,
    })
}

/// MemAvailable in KiB, after what is written was written back.
fn available() -> Result<i64> {
    nix::unistd::sync();
    let text = fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
    Ok(i64::try_from(field(&text, "MemAvailable:"))?)
}

fn process(name: &'static str, pid: i32) -> Result<Process> {
    let read = |file: &str| {
        let path = format!("/proc/{pid}/{file}");
        fs::read_to_string(&path).with_context(|| format!("reading {path} of the {name}"))
    };
    let (rollup, status) = (read("smaps_rollup")?, read("status")?);
    let private = field(&rollup, "Private_Clean:") + field(&rollup, "Private_Dirty:");
    Ok(Process {
        name,
        private,
        anonymous: field(&rollup, "Anonymous:"),
        proportional: field(&rollup, "Pss:"),
        page_tables: field(&status, "VmPTE:"),
    })
}

/// The number after `name` at the start of a line; zero where there is no such line.
fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::field;

    #[test]
    fn test_field_reads_the_number_of_its_line_only() {
        let text =
            "Pss:                 120 kB\nPss_Dirty:            40 kB\nVmPTE:\t      64 kB\n";
        assert_eq!(
            (
                field(text, "Pss:"),
                field(text, "VmPTE:"),
                field(text, "Rss:")
            ),
            (120, 64, 0)
        );
    }
}
