//! The guest's processes, as procfs has them.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::{SysconfVar, sysconf};
use thaw_agent_api::MOST_COMMAND_BYTES;
use thaw_agent_api::agent::GuestProcess;

/// `PF_KTHREAD` of `include/linux/sched.h`, in field 9 of `proc_pid_stat(5)`.
const KERNEL_THREAD: u64 = 0x0020_0000;

/// All processes that are no kernel threads, by their ids, but no more than `most`; and whether there
/// are more. Containers are those whose cgroups are below `cgroups`.
pub fn list(cgroups: &str, most: usize) -> io::Result<(Vec<GuestProcess>, bool)> {
    let mut pids: Vec<u32> = fs::read_dir("/proc")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    pids.sort_unstable();
    let mut processes = Vec::new();
    for pid in pids {
        // One that ends meanwhile is none.
        let Some(process) = describe(&Path::new("/proc").join(pid.to_string()), pid, cgroups)
        else {
            continue;
        };
        if processes.len() == most {
            return Ok((processes, true));
        }
        processes.push(process);
    }
    Ok((processes, false))
}

/// The process whose directory in procfs is `directory`.
fn describe(directory: &Path, pid: u32, cgroups: &str) -> Option<GuestProcess> {
    let stat = Stat::parse(&fs::read_to_string(directory.join("stat")).ok()?)?;
    if stat.flags & KERNEL_THREAD != 0 {
        return None;
    }
    let user = fs::metadata(directory).ok()?.uid();
    let cgroup = fs::read_to_string(directory.join("cgroup")).unwrap_or_default();
    let command = command_line(directory).unwrap_or(stat.name);
    Some(GuestProcess {
        pid,
        parent: stat.parent,
        user,
        state: stat.state.to_string(),
        cpu_ns: stat
            .ticks
            .saturating_mul(1_000_000_000 / constant(SysconfVar::CLK_TCK, 100)),
        resident_bytes: stat
            .pages
            .saturating_mul(constant(SysconfVar::PAGE_SIZE, 4096)),
        threads: stat.threads,
        container_id: container_of(&cgroup, cgroups).unwrap_or_default(),
        command,
        ..GuestProcess::default()
    })
}

/// A constant of the system, never zero.
fn constant(name: SysconfVar, default: u64) -> u64 {
    let value = sysconf(name).ok().flatten();
    value
        .and_then(|value| u64::try_from(value).ok())
        .filter(|value| *value > 0)
        .unwrap_or(default)
}

/// The words of a command line, no longer than [`MOST_COMMAND_BYTES`]; `None` where it is empty.
fn command_line(directory: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(directory.join("cmdline"))
        .ok()?
        .take(MOST_COMMAND_BYTES as u64)
        .read_to_end(&mut bytes)
        .ok()?;
    let words = bytes.split(|byte| *byte == 0);
    let words: Vec<_> = words.map(String::from_utf8_lossy).collect();
    let line = words.join(" ");
    let line = line.trim();
    (!line.is_empty()).then(|| line.to_owned())
}

/// The container that a process with this `/proc/PID/cgroup` belongs to.
fn container_of(cgroup: &str, cgroups: &str) -> Option<String> {
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::"))?;
    let below = path.strip_prefix(cgroups)?.strip_prefix('/')?;
    // Its own cgroup, or one that it has made below.
    let id = below.split('/').next()?;
    (!id.is_empty()).then(|| id.to_owned())
}

/// What is used of `proc_pid_stat(5)`.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    name: String,
    state: char,
    parent: u32,
    flags: u64,
    ticks: u64,
    threads: u32,
    pages: u64,
}

impl Stat {
    fn parse(text: &str) -> Option<Self> {
        // The name may hold parentheses and blanks.
        let (before, after) = text.rsplit_once(") ")?;
        let (_, name) = before.split_once(" (")?;
        let fields: Vec<&str> = after.split_ascii_whitespace().collect();
        // Counted from 3, as in the manual page.
        let number = |field: usize| -> Option<u64> { fields.get(field - 3)?.parse().ok() };
        Some(Self {
            name: name.to_owned(),
            state: fields.first()?.chars().next()?,
            parent: number(4)?.try_into().ok()?,
            flags: number(9)?,
            ticks: number(14)?.saturating_add(number(15)?),
            threads: number(20)?.try_into().ok()?,
            pages: number(24)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_stat_with_any_name() {
        let text = "7 (a) (b) R 1 7 7 0 -1 4194560 1 2 3 4 50 6 7 8 20 0 3 0 99 1000 25 18\n";
        let stat = Stat::parse(text).unwrap();
        let expected = Stat {
            name: "a) (b".into(),
            state: 'R',
            parent: 1,
            flags: 4_194_560,
            ticks: 56,
            threads: 3,
            pages: 25,
        };
        assert_eq!(stat, expected);
        assert_eq!(Stat::parse("7 (a) R 1"), None);
        assert_eq!(Stat::parse(""), None);
    }

    #[test]
    fn test_container_is_that_of_the_cgroup() {
        let container = |cgroup| container_of(cgroup, "/thaw");
        assert_eq!(container("0::/thaw/web\n").as_deref(), Some("web"));
        assert_eq!(
            container("1:x:/\n0::/thaw/web/inner\n").as_deref(),
            Some("web")
        );
        for other in [
            "0::/\n",
            "0::/thaw\n",
            "0::/thaw/\n",
            "0::/thawed/web\n",
            "",
        ] {
            assert_eq!(container(other), None, "{other}");
        }
    }

    #[test]
    fn test_this_process_is_among_them_and_no_kernel_thread() {
        let (processes, truncated) = list("/thaw", usize::MAX).unwrap();
        assert!(!truncated);
        let own = processes
            .iter()
            .find(|process| process.pid == std::process::id());
        let own = own.unwrap();
        assert!(own.resident_bytes > 0 && own.threads > 0 && !own.command.is_empty());
        assert!(
            processes
                .iter()
                .all(|process| process.command != "kthreadd")
        );
        assert!(
            processes
                .iter()
                .all(|process| process.command.len() <= 3 * MOST_COMMAND_BYTES)
        );
        let (some, truncated) = list("/thaw", 1).unwrap();
        assert!(truncated || processes.len() == 1);
        assert_eq!(some.len(), 1);
    }
}
