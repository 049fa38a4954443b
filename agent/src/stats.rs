//! A container's metrics, in containerd's form for cgroup v2.

use containerd_shim_protos::cgroups_v2::metrics::{
    CPUStat, HugeTlbStat, IOEntry, IOStat, MemoryEvents, MemoryStat, Metrics, PSIData, PSIStats,
    PidsStat, RdmaStat,
};
use protobuf::{Message, MessageField};

use crate::cgroup::{Cgroup, find};

/// The type URL of the metrics.
pub const TYPE_URL: &str = "io.containerd.cgroups.v2.Metrics";

/// Reads the metrics, encoded. What a controller does not have is zero; a limit that is not set is
/// the largest number.
pub fn read(cgroup: &Cgroup) -> Vec<u8> {
    let metrics = Metrics {
        pids: MessageField::some(PidsStat {
            current: number(cgroup, "pids.current"),
            limit: number(cgroup, "pids.max"),
            ..Default::default()
        }),
        cpu: MessageField::some(cpu(cgroup)),
        memory: MessageField::some(memory(cgroup)),
        io: MessageField::some(IOStat {
            usage: io(&cgroup.read("io.stat").unwrap_or_default()),
            psi: pressure(cgroup, "io.pressure"),
            ..Default::default()
        }),
        memory_events: MessageField::some(memory_events(cgroup)),
        // There, and empty: the guest has no such device.
        rdma: MessageField::some(RdmaStat::new()),
        hugetlb: huge_pages(cgroup),
        ..Default::default()
    };
    // Encoding into memory fails only for messages over 2 GiB.
    metrics.write_to_bytes().unwrap_or_default()
}

fn cpu(cgroup: &Cgroup) -> CPUStat {
    let text = cgroup.read("cpu.stat").unwrap_or_default();
    let get = |key| find(&text, key).unwrap_or(0);
    CPUStat {
        usage_usec: get("usage_usec"),
        user_usec: get("user_usec"),
        system_usec: get("system_usec"),
        nr_periods: get("nr_periods"),
        nr_throttled: get("nr_throttled"),
        throttled_usec: get("throttled_usec"),
        nr_bursts: get("nr_bursts"),
        burst_usec: get("burst_usec"),
        psi: pressure(cgroup, "cpu.pressure"),
        ..Default::default()
    }
}

fn memory(cgroup: &Cgroup) -> MemoryStat {
    let text = cgroup.read("memory.stat").unwrap_or_default();
    let get = |key| find(&text, key).unwrap_or(0);
    MemoryStat {
        anon: get("anon"),
        file: get("file"),
        kernel_stack: get("kernel_stack"),
        slab: get("slab"),
        sock: get("sock"),
        shmem: get("shmem"),
        file_mapped: get("file_mapped"),
        file_dirty: get("file_dirty"),
        file_writeback: get("file_writeback"),
        anon_thp: get("anon_thp"),
        inactive_anon: get("inactive_anon"),
        active_anon: get("active_anon"),
        inactive_file: get("inactive_file"),
        active_file: get("active_file"),
        unevictable: get("unevictable"),
        slab_reclaimable: get("slab_reclaimable"),
        slab_unreclaimable: get("slab_unreclaimable"),
        pgfault: get("pgfault"),
        pgmajfault: get("pgmajfault"),
        workingset_refault: get("workingset_refault_file"),
        workingset_activate: get("workingset_activate_file"),
        workingset_nodereclaim: get("workingset_nodereclaim"),
        pgrefill: get("pgrefill"),
        pgscan: get("pgscan"),
        pgsteal: get("pgsteal"),
        pgactivate: get("pgactivate"),
        pgdeactivate: get("pgdeactivate"),
        pglazyfree: get("pglazyfree"),
        pglazyfreed: get("pglazyfreed"),
        thp_fault_alloc: get("thp_fault_alloc"),
        thp_collapse_alloc: get("thp_collapse_alloc"),
        usage: number(cgroup, "memory.current"),
        usage_limit: number(cgroup, "memory.max"),
        max_usage: number(cgroup, "memory.peak"),
        swap_usage: number(cgroup, "memory.swap.current"),
        swap_limit: number(cgroup, "memory.swap.max"),
        swap_max_usage: number(cgroup, "memory.swap.peak"),
        psi: pressure(cgroup, "memory.pressure"),
        ..Default::default()
    }
}

fn memory_events(cgroup: &Cgroup) -> MemoryEvents {
    let text = cgroup.read("memory.events").unwrap_or_default();
    let get = |key| find(&text, key).unwrap_or(0);
    MemoryEvents {
        low: get("low"),
        high: get("high"),
        max: get("max"),
        oom: get("oom"),
        oom_kill: get("oom_kill"),
        oom_group_kill: get("oom_group_kill"),
        ..Default::default()
    }
}

/// One entry for each size of huge pages that the kernel has.
fn huge_pages(cgroup: &Cgroup) -> Vec<HugeTlbStat> {
    let sizes = cgroup.names().into_iter().filter_map(|name| {
        let size = name.strip_prefix("hugetlb.")?.strip_suffix(".current")?;
        // Next to it are the files of reservations, `hugetlb.SIZE.rsvd.current`.
        (!size.contains('.')).then(|| size.to_owned())
    });
    let mut sizes: Vec<String> = sizes.collect();
    sizes.sort();
    let entry = |size: String| HugeTlbStat {
        current: number(cgroup, &format!("hugetlb.{size}.current")),
        max: number(cgroup, &format!("hugetlb.{size}.max")),
        failcnt: cgroup
            .value(&format!("hugetlb.{size}.events"), "max")
            .unwrap_or(0),
        pagesize: size,
        ..Default::default()
    };
    sizes.into_iter().map(entry).collect()
}

/// Lines of `io.stat`: `8:0 rbytes=1 wbytes=2 rios=3 wios=4 …`.
fn io(text: &str) -> Vec<IOEntry> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (major, minor) = words.next()?.split_once(':')?;
            let mut entry = IOEntry {
                major: major.parse().ok()?,
                minor: minor.parse().ok()?,
                ..Default::default()
            };
            for (key, value) in words.filter_map(|word| word.split_once('=')) {
                let value = value.parse().unwrap_or(0);
                match key {
                    "rbytes" => entry.rbytes = value,
                    "wbytes" => entry.wbytes = value,
                    "rios" => entry.rios = value,
                    "wios" => entry.wios = value,
                    _ => {}
                }
            }
            Some(entry)
        })
        .collect()
}

/// Pressure stall information (`Documentation/accounting/psi.rst`), where the kernel keeps it.
fn pressure(cgroup: &Cgroup, file: &str) -> MessageField<PSIStats> {
    let Ok(text) = cgroup.read(file) else {
        return MessageField::none();
    };
    let line = |kind: &str| {
        let values = text.lines().find_map(|line| line.strip_prefix(kind))?;
        let get = |key: &str| {
            let mut words = values.split_whitespace();
            words.find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
        };
        let average = |key| get(key).and_then(|value| value.parse().ok()).unwrap_or(0.0);
        Some(PSIData {
            avg10: average("avg10"),
            avg60: average("avg60"),
            avg300: average("avg300"),
            total: get("total")
                .and_then(|value| value.parse().ok())
                .unwrap_or(0),
            ..Default::default()
        })
    };
    MessageField::some(PSIStats {
        some: line("some").into(),
        full: line("full").into(),
        ..Default::default()
    })
}

/// The number in a file of one value; `max` is the largest.
fn number(cgroup: &Cgroup, file: &str) -> u64 {
    match cgroup.read(file).as_deref().map(str::trim) {
        Ok("max") => u64::MAX,
        Ok(text) => text.parse().unwrap_or(0),
        Err(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_io_lines() {
        let text = "8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6\n253:16 \nodd\n";
        let entries = io(text);
        assert_eq!(entries.len(), 2);
        let first = &entries[0];
        assert_eq!(
            (
                first.major,
                first.rbytes,
                first.wbytes,
                first.rios,
                first.wios
            ),
            (8, 1, 2, 3, 4)
        );
        assert_eq!(
            (entries[1].major, entries[1].minor, entries[1].rbytes),
            (253, 16, 0)
        );
    }
}
