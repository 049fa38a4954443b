//! Resources, as their files in the container's cgroup say.

use serde_json::{Value, json};

use super::{By, Group, mount, namespace, set};

/// The files of controllers, as far as they show limits.
const CASES: &[(&str, &str)] = &[
    ("own cgroup", "cat /proc/self/cgroup"),
    ("memory.max", "cat /sys/fs/cgroup/memory.max"),
    ("memory.low", "cat /sys/fs/cgroup/memory.low"),
    ("memory.high", "cat /sys/fs/cgroup/memory.high"),
    ("memory.min", "cat /sys/fs/cgroup/memory.min"),
    ("memory.oom.group", "cat /sys/fs/cgroup/memory.oom.group"),
    ("memory.swap.max", "cat /sys/fs/cgroup/memory.swap.max"),
    ("pids.max", "cat /sys/fs/cgroup/pids.max"),
    ("cpu.max", "cat /sys/fs/cgroup/cpu.max"),
    ("cpu.max.burst", "cat /sys/fs/cgroup/cpu.max.burst"),
    ("cpu.weight", "cat /sys/fs/cgroup/cpu.weight"),
    ("cpu.idle", "cat /sys/fs/cgroup/cpu.idle"),
    ("cpuset.cpus", "cat /sys/fs/cgroup/cpuset.cpus"),
    ("cpuset.mems", "cat /sys/fs/cgroup/cpuset.mems"),
    ("cgroup.type", "cat /sys/fs/cgroup/cgroup.type"),
    ("cgroup.freeze", "cat /sys/fs/cgroup/cgroup.freeze"),
    ("cgroup.max.depth", "cat /sys/fs/cgroup/cgroup.max.depth"),
    (
        "controllers",
        "tr ' ' '\\n' < /sys/fs/cgroup/cgroup.controllers | grep -E '^(cpuset|cpu|io|memory|pids)$' | sort",
    ),
    ("processes", "grep -c . /sys/fs/cgroup/cgroup.procs"),
    ("first process", "grep -c '^1$' /sys/fs/cgroup/cgroup.procs"),
    (
        "mount",
        "grep ' /sys/fs/cgroup ' /proc/self/mountinfo | cut -d' ' -f4-6",
    ),
    (
        "below",
        "mkdir /sys/fs/cgroup/below 2>&1; echo $?; rmdir /sys/fs/cgroup/below 2>/dev/null",
    ),
    ("writing", "echo 100 > /sys/fs/cgroup/pids.max; echo $?"),
];

fn cgroup(spec: &mut Value, options: &[&str], resources: Value) {
    namespace(spec, "cgroup");
    mount(spec, "/sys/fs/cgroup", "cgroup", "cgroup", options);
    set(&mut spec["linux"]["resources"], resources);
}

/// All groups. Shares are compared where old and new ways of turning them into weights agree.
pub const GROUPS: &[Group] = &[
    Group {
        name: "no-limits",
        change: |spec| cgroup(spec, &["nosuid", "noexec", "nodev", "ro"], json!({})),
        by: By::Init,
        cases: CASES,
    },
    Group {
        name: "limits",
        change: |spec| {
            cgroup(
                spec,
                &["nosuid", "noexec", "nodev", "rw"],
                json!({
                    "memory": {"limit": 100 << 20, "reservation": 50 << 20, "swap": 150 << 20},
                    "cpu": {"quota": 50_000, "period": 100_000, "cpus": "0", "mems": "0"},
                    "pids": {"limit": 77},
                }),
            );
        },
        by: By::Init,
        cases: CASES,
    },
    Group {
        name: "no-limit-in-numbers",
        change: |spec| {
            cgroup(
                spec,
                &["rw"],
                json!({
                    "memory": {"limit": -1, "swap": -1},
                    "cpu": {"shares": 262_144, "quota": -1, "period": 50_000},
                    "pids": {"limit": -1},
                }),
            );
        },
        by: By::Init,
        cases: CASES,
    },
    Group {
        name: "unified",
        change: |spec| {
            cgroup(
                spec,
                &["ro"],
                json!({
                    "memory": {"limit": 200 << 20, "swap": 200 << 20},
                    "cpu": {"shares": 2},
                    "unified": {"memory.high": "104857600", "memory.min": "1048576", "pids.max": "55",
                                "cpu.max": "30000 60000", "memory.oom.group": "1"},
                }),
            );
        },
        by: By::Exec,
        cases: CASES,
    },
];
