//! Features that the lab's runc is too old for, or leaves out: what they are to do comes from the runtime
//! spec. That runc has no effect of `rootfsPropagation` on the container's own mounts, and an exec without the
//! container's umask.

use serde_json::json;
use thaw_tests::{Environment, Version, on_containerd};

use super::{By, Change, Changed, Group, capabilities, mount, namespace, thaw};

/// A group, and what its cases print.
const GROUPS: &[(Group, &[&str])] = &[
    (
        Group {
            name: "scheduling",
            change: |spec| {
                spec["process"]["scheduler"] = json!({"policy": "SCHED_BATCH", "nice": 7});
                spec["process"]["ioPriority"] = json!({"class": "IOPRIO_CLASS_BE", "priority": 6});
                spec["linux"]["personality"] = json!({"domain": "LINUX32"});
                spec["domainname"] = json!("domain-name");
            },
            by: By::Init,
            cases: &[
                (
                    "nice and policy",
                    "awk '{ print $19, $41 }' /proc/self/stat",
                ),
                ("I/O priority", "probe priority"),
                ("personality", "probe personality; uname -m"),
                ("domain name", "cat /proc/sys/kernel/domainname"),
            ],
        },
        &["7 3", "16390", "0x8\ni686", "domain-name"],
    ),
    (
        Group {
            name: "scheduling-exec",
            change: |spec| {
                spec["process"]["scheduler"] = json!({"policy": "SCHED_FIFO", "priority": 5});
                spec["process"]["ioPriority"] =
                    json!({"class": "IOPRIO_CLASS_IDLE", "priority": 0});
                spec["linux"]["personality"] = json!({"domain": "LINUX32"});
            },
            by: By::Exec,
            cases: &[
                (
                    "priority and policy",
                    "awk '{ print $40, $41 }' /proc/self/stat",
                ),
                ("I/O priority", "probe priority"),
                ("personality", "probe personality; uname -m"),
            ],
        },
        &["5 1", "24576", "0x8\ni686"],
    ),
    (
        Group {
            name: "clocks",
            change: |spec| {
                namespace(spec, "time");
                spec["linux"]["timeOffsets"] = json!({"boottime": {"secs": 1_000_000}, "monotonic": {"secs": 500_000, "nanosecs": 7}});
            },
            by: By::Init,
            cases: &[
                (
                    "offsets",
                    "awk '{ print $1, $2, $3 }' /proc/self/timens_offsets",
                ),
                (
                    "uptime",
                    "test $(cut -d. -f1 /proc/uptime) -ge 1000000 && echo long",
                ),
            ],
        },
        &["monotonic 500000 7\nboottime 1000000 0", "long"],
    ),
    (
        Group {
            name: "umask-exec",
            change: |spec| spec["process"]["user"]["umask"] = json!(0o27),
            by: By::Exec,
            cases: &[("umask", "umask")],
        },
        &["0027"],
    ),
    (
        Group {
            name: "shared-root",
            change: |spec| spec["linux"]["rootfsPropagation"] = json!("shared"),
            by: By::Init,
            cases: &[(
                "propagation of the root",
                "awk '$5 == \"/\"' /proc/self/mountinfo | grep -o -E '(shared|master):'",
            )],
        },
        &["shared:"],
    ),
    (
        Group {
            name: "unbindable-root",
            change: |spec| {
                spec["linux"]["rootfsPropagation"] = json!("unbindable");
                capabilities(spec, &["SYS_ADMIN"]);
            },
            by: By::Init,
            cases: &[
                (
                    "propagation of the root",
                    "awk '$5 == \"/\"' /proc/self/mountinfo | grep -o unbindable",
                ),
                ("binding it", "mount -o bind / /mnt 2>/dev/null; echo $?"),
            ],
        },
        &["unbindable", "255"],
    ),
    (
        Group {
            name: "copy-up",
            change: |spec| {
                mount(spec, "/data", "tmpfs", "tmpfs", &["tmpcopyup", "size=1m"]);
                mount(
                    spec,
                    "/home/r",
                    "bind",
                    "@ROOT/data",
                    &["rbind", "rro", "rnosuid"],
                );
                capabilities(spec, &["SYS_ADMIN"]);
            },
            by: By::Init,
            cases: &[
                ("files", "cat /data/file /data/sub/file"),
                ("modes", "stat -c %a /data /data/sub"),
                (
                    "a file system of its own",
                    "echo x > /data/new; grep -c ' /data tmpfs ' /proc/mounts",
                ),
                (
                    "recursive attributes",
                    "grep ' /home/r ' /proc/self/mountinfo | cut -d' ' -f6 | tr , '\\n' | grep -E '^(ro|nosuid)$'",
                ),
            ],
        },
        &["data\nsub", "755\n750", "1", "ro\nnosuid"],
    ),
    (
        Group {
            name: "hooks",
            change: |spec| {
                let hook = |stage: &str| {
                    json!([{"path": "/bin/sh", "args": ["sh", "-c",
                    format!("cat > /run/{stage}; echo >> /run/{stage}; echo $NAME >> /run/{stage}")], "env": ["PATH=/bin", "NAME=hook"]}])
                };
                spec["hooks"] =
                    json!({"createContainer": hook("created"), "startContainer": hook("started")});
                spec["annotations"] = json!({"key": "value"});
            },
            by: By::Init,
            cases: &[
                (
                    "created",
                    "grep -o '\"status\":\"[a-z]*\"' /run/created; grep -c '\"key\":\"value\"' /run/created; tail -n 1 /run/created",
                ),
                (
                    "started",
                    "grep -o '\"status\":\"[a-z]*\"' /run/started; tail -n 1 /run/started",
                ),
            ],
        },
        &[
            "\"status\":\"creating\"\n1\nhook",
            "\"status\":\"created\"\nhook",
        ],
    ),
];

/// Specs that a guest cannot carry out, and what the refusal names.
const REFUSED: &[(Change, &str)] = &[
    (
        |spec| spec["hooks"] = json!({"createContainer": [{"path": "/no/such/hook"}]}),
        "hooks.createContainer[0].path",
    ),
    (
        |spec| spec["linux"]["seccomp"] = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mkdir"], "action": "SCMP_ACT_NOTIFY"}]}),
        "linux.seccomp: SCMP_ACT_NOTIFY",
    ),
    (
        |spec| spec["linux"]["timeOffsets"] = json!({"boottime": {"secs": 1}}),
        "linux.timeOffsets",
    ),
];

#[test]
fn newer_than_runc() {
    if !Environment::get().is_thaw() {
        return;
    }
    on_containerd(Version::V2_1, "newer_than_runc", |bed| {
        let mut odd = Vec::new();
        for (group, expected) in GROUPS {
            let results = match group.run(bed, thaw()) {
                Ok(results) => results,
                Err(text) => {
                    odd.push(text);
                    continue;
                }
            };
            for ((name, line), expected) in group.cases.iter().zip(*expected) {
                let expected = format!("{expected}\n@= 0\n");
                if results[*name] != expected {
                    odd.push(format!(
                        "{}: {name}: {line}: {} instead of {expected}",
                        group.name, results[*name]
                    ));
                }
            }
        }
        for (change, field) in REFUSED {
            let output = Changed::new(bed, "refused", *change).run(thaw());
            if output.code == 0 || !output.stderr().contains(field) {
                odd.push(format!("no refusal that names {field}: {output}"));
            }
        }
        assert!(odd.is_empty(), "{odd:#?}");
    });
}
