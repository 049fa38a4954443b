//! Who a process is, what it may do, and what it starts with.

use serde_json::json;

use super::{By, Group, capabilities, set};

/// What any process can be asked for.
const PROCESS: &[(&str, &str)] = &[
    ("ids", "probe ids"),
    ("groups", "probe groups"),
    ("id", "id"),
    ("uid line", "grep ^Uid /proc/self/status"),
    ("gid line", "grep ^Gid /proc/self/status"),
    ("inheritable capabilities", "grep ^CapInh /proc/self/status"),
    ("permitted capabilities", "grep ^CapPrm /proc/self/status"),
    ("effective capabilities", "grep ^CapEff /proc/self/status"),
    ("bounding capabilities", "grep ^CapBnd /proc/self/status"),
    ("ambient capabilities", "grep ^CapAmb /proc/self/status"),
    ("new privileges", "grep ^NoNewPrivs /proc/self/status"),
    ("seccomp mode", "grep ^Seccomp: /proc/self/status"),
    ("umask", "umask"),
    (
        "umask in the kernel's words",
        "grep ^Umask /proc/self/status",
    ),
    (
        "mode of a new file",
        "cd /tmp && : > new && stat -c '%a %u %g' new; rm -f new",
    ),
    (
        "mode of a new directory",
        "mkdir /tmp/directory && stat -c '%a %u %g' /tmp/directory; rmdir /tmp/directory",
    ),
    ("set-user-id program", "probe-suid ids"),
    (
        "capabilities of a set-user-id program",
        "probe-suid call 39 > /dev/null; probe-suid personality",
    ),
    ("descriptors", "probe descriptors"),
    ("blocked signals", "grep ^SigBlk /proc/self/status"),
    ("ignored signals", "grep ^SigIgn /proc/self/status"),
    (
        "ignored signals of the first process",
        "grep ^SigIgn /proc/1/status",
    ),
    (
        "blocked signals of the first process",
        "grep ^SigBlk /proc/1/status",
    ),
    (
        "pending signals",
        "grep -E '^(SigPnd|ShdPnd)' /proc/self/status",
    ),
    (
        "end of a pipe",
        "{ yes; echo $? >&2; } | head -n 1; sleep 0",
    ),
    ("working directory", "pwd; readlink /proc/self/cwd"),
    ("root", "readlink /proc/self/root"),
    ("environment", "env | grep -v -E '^(SHLVL|PWD|OLDPWD|_)='"),
    (
        "environment of the first process",
        "tr '\\0' '\\n' < /proc/1/environ | sort",
    ),
    ("home", "echo $HOME; cd && pwd"),
    ("program of the first process", "readlink /proc/1/exe"),
    (
        "words of the first process",
        "tr '\\0' ' ' < /proc/1/cmdline",
    ),
    ("name of the first process", "cat /proc/1/comm"),
    ("its parent", "awk '{ print $4, $6 > 0 }' /proc/1/stat"),
    (
        "session and group",
        "awk '{ print $5 == $1, $6 == $1, $7 }' /proc/1/stat",
    ),
    ("open files", "ulimit -n; ulimit -Hn"),
    ("core size", "ulimit -c; ulimit -Hc"),
    ("stack", "ulimit -s; ulimit -Hs"),
    ("file size", "ulimit -f; ulimit -Hf"),
    ("data", "ulimit -d; ulimit -Hd"),
    ("address space", "ulimit -v; ulimit -Hv"),
    ("CPU time", "ulimit -t; ulimit -Ht"),
    ("nice limit", "ulimit -e; ulimit -He; ulimit -r; ulimit -Hr"),
    (
        "readiness to be killed for memory",
        "cat /proc/self/oom_score_adj",
    ),
    (
        "scheduling",
        "awk '{ print $18, $19, $40, $41 }' /proc/self/stat",
    ),
    ("I/O priority", "ionice -p $$; probe priority"),
    ("personality", "probe personality; uname -m"),
    ("dumpable", "stat -c '%u %g' /proc/self/status"),
    ("setgroups", "cat /proc/self/setgroups"),
    (
        "mapping of ids",
        "cat /proc/self/uid_map /proc/self/gid_map",
    ),
    (
        "chown",
        "touch /tmp/owned; chown 7:8 /tmp/owned; echo $?; stat -c '%u %g' /tmp/owned; rm -f /tmp/owned",
    ),
    ("chroot", "chroot / true; echo $?"),
    ("mknod", "mknod /dev/node c 1 3; echo $?; rm -f /dev/node"),
    ("mount", "mount -t tmpfs none /mnt; echo $?"),
    ("host name cannot be set", "hostname other; echo $?"),
    ("signal to the first process", "kill -0 1; echo $?"),
    ("nice", "nice -n -5 true; echo $?; nice -n 5 nice"),
    ("raising a limit", "ulimit -Hn 1000000; echo $?"),
    (
        "reading what is root's",
        "chmod 600 /etc/plain 2>&1; cat /etc/plain; echo $?",
    ),
    (
        "writing to root's",
        "echo x > /etc/new; echo $?; rm -f /etc/new",
    ),
    (
        "own standard output again",
        "echo again > /dev/stdout; echo $?",
    ),
    (
        "own standard error again",
        "echo again > /dev/stderr; echo $?",
    ),
    (
        "owner of standard output",
        "stat -L -c '%F %a %u %g' /proc/1/fd/1 | sed 's/ 1[0-9][0-9] / /'",
    ),
    ("keyring", "grep -c . /proc/keys"),
];

const WORDS: &[(&str, &str)] = &[
    ("arguments", "tr '\\0' '|' < /proc/1/cmdline"),
    ("environment", "tr '\\0' '|' < /proc/1/environ"),
    ("empty variable", "echo \"<$EMPTY>\" ${EMPTY+set}"),
    ("variable with newline", "echo \"$LINES2\""),
    ("variable of bytes", "echo \"$BYTES\" | od -c | head -n 2"),
    ("last of two", "echo $TWICE"),
    ("home that is empty", "echo \"<$HOME>\""),
    (
        "64 KiB argument",
        "x=$(head -c 65536 /dev/zero | tr '\\0' x); probe arguments $x",
    ),
    (
        "100 KiB argument",
        "x=$(head -c 102400 /dev/zero | tr '\\0' x); probe arguments $x",
    ),
    (
        "argument that is too long",
        "x=$(head -c 140000 /dev/zero | tr '\\0' x); probe arguments $x 2>/dev/null; echo $?",
    ),
    ("many arguments", "probe arguments $(seq 1 20000)"),
    ("script", "/etc/script a 'b c'"),
    ("no program", "/etc/plain; echo $?"),
    ("no such program", "/no/such; echo $?"),
];

/// All groups.
pub const GROUPS: &[Group] = &[
    Group {
        name: "as-is",
        change: |_| {},
        by: By::Init,
        cases: PROCESS,
    },
    Group {
        name: "as-is-exec",
        change: |_| {},
        by: By::Exec,
        cases: PROCESS,
    },
    Group {
        name: "user",
        change: |spec| {
            set(
                &mut spec["process"],
                json!({
                    "user": {"uid": 1000, "gid": 1000, "additionalGids": [2000, 5, 77], "umask": 0o27},
                    "rlimits": [
                        {"type": "RLIMIT_NOFILE", "soft": 42, "hard": 143},
                        {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
                        {"type": "RLIMIT_STACK", "soft": 1 << 20, "hard": 1 << 22},
                        {"type": "RLIMIT_FSIZE", "soft": 1 << 20, "hard": 1 << 21},
                        {"type": "RLIMIT_CPU", "soft": 1000, "hard": 2000},
                        {"type": "RLIMIT_NICE", "soft": 5, "hard": 7},
                    ],
                    "oomScoreAdj": 500,
                }),
            );
        },
        by: By::Init,
        cases: PROCESS,
    },
    Group {
        name: "user-exec",
        change: |spec| {
            set(
                &mut spec["process"],
                json!({
                    "user": {"uid": 264, "gid": 51020, "additionalGids": [266]},
                    "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 43, "hard": 43}, {"type": "RLIMIT_NPROC", "soft": 99, "hard": 99}],
                    "oomScoreAdj": 300,
                    "noNewPrivileges": true,
                    "cwd": "/tmp",
                }),
            );
        },
        by: By::Exec,
        cases: PROCESS,
    },
    Group {
        name: "ambient",
        change: |spec| {
            let list = json!(["CAP_CHOWN", "CAP_NET_BIND_SERVICE", "CAP_KILL"]);
            set(
                &mut spec["process"],
                json!({
                    "user": {"uid": 1000, "gid": 1000},
                    "capabilities": {"bounding": ["CAP_CHOWN", "CAP_NET_BIND_SERVICE", "CAP_KILL", "CAP_SETUID"],
                        "effective": list, "permitted": list, "inheritable": list,
                        "ambient": ["CAP_CHOWN", "CAP_NET_BIND_SERVICE"]},
                    "noNewPrivileges": true,
                    "cwd": "/home/user/none/yet",
                    "oomScoreAdj": -200,
                }),
            );
        },
        by: By::Init,
        cases: PROCESS,
    },
    Group {
        name: "none",
        change: |spec| {
            set(
                &mut spec["process"],
                json!({
                    "capabilities": null,
                    "env": ["PATH=/bin", "HOME="],
                }),
            );
        },
        by: By::Init,
        cases: PROCESS,
    },
    Group {
        name: "all-capabilities",
        change: |spec| {
            capabilities(
                spec,
                &[
                    "SYS_ADMIN",
                    "SYS_NICE",
                    "SYS_RESOURCE",
                    "DAC_READ_SEARCH",
                    "IPC_LOCK",
                    "SYS_PTRACE",
                ],
            );
            spec["process"]["capabilities"]["inheritable"] = json!(["CAP_CHOWN"]);
        },
        by: By::Init,
        cases: PROCESS,
    },
    Group {
        name: "words",
        change: |spec| {
            spec["process"]["args"] = json!([
                "/bin/sh",
                "/cases",
                "",
                "a b",
                "tab\there",
                "new\nline",
                "ä€",
                "--",
                "*"
            ]);
            spec["process"]["env"] = json!([
                "PATH=/bin",
                "EMPTY=",
                "LINES2=a\nb",
                "BYTES=ä\u{1}",
                "TWICE=1",
                "Z=1",
                "TWICE=2",
                "A=1"
            ]);
        },
        by: By::Init,
        cases: WORDS,
    },
];
