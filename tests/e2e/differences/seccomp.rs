//! Seccomp filters, for first processes and execs. Numbers of errors are those of the kernel.

use serde_json::{Value, json};

use super::{By, Group, push};

/// A call whose first argument a filter looks at: `personality`, with what is no personality.
const CASES: &[(&str, &str)] = &[
    ("mode", "grep -E '^Seccomp(_filters)?:' /proc/self/status"),
    ("error with a number", "probe call 83 0 0"),
    ("error without a number", "probe call 84 0"),
    ("error of zero", "probe call 88 0 0"),
    ("as the shell sees it", "mkdir /tmp/x; echo $?"),
    ("killed process", "probe call 90 0 0; echo $?"),
    ("killed thread", "probe call 91 0 0; echo $?"),
    ("trap", "probe call 92 0 0; echo $?"),
    ("trace without a tracer", "probe call 187 -1 0 0"),
    ("log", "probe call 94 0 0 0"),
    ("allowed", "probe call 86 0 0"),
    (
        "equal argument",
        "probe call 135 4242; probe call 135 4294967295",
    ),
    (
        "two arguments",
        "probe call 62 1000000 0; probe call 62 1000000 15; probe call 62 1000001 0",
    ),
    (
        "greater argument",
        "probe call 72 100 1; probe call 72 200 1",
    ),
    (
        "less argument",
        "probe call 33 1 2000000; probe call 33 900 900",
    ),
    (
        "masked argument",
        "probe call 95 7 | sed 's/[0-9].*/n/'; probe call 95 16 | grep -c ^-",
    ),
    ("unequal argument", "probe call 32 5000; probe call 32 6000"),
    ("unknown call", "probe call 499 0"),
    ("another process", "sh -c 'probe call 83 0 0'"),
];

fn filter(spec: &mut Value) {
    let rule = |names: &str, action: &str, number: Value| json!({"names": [names], "action": action, "errnoRet": number});
    let with = |name: &str, number: u32, arguments: Value| json!({"names": [name], "action": "SCMP_ACT_ERRNO", "errnoRet": number, "args": arguments});
    let argument = |index: u32, value: u64, two: u64, op: &str| json!({"index": index, "value": value, "valueTwo": two, "op": op});
    spec["linux"]["seccomp"] = json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": [
            rule("mkdir", "SCMP_ACT_ERRNO", json!(95)),
            rule("rmdir", "SCMP_ACT_ERRNO", json!(null)),
            rule("symlink", "SCMP_ACT_ERRNO", json!(0)),
            rule("chmod", "SCMP_ACT_KILL_PROCESS", json!(null)),
            rule("fchmod", "SCMP_ACT_KILL_THREAD", json!(null)),
            rule("chown", "SCMP_ACT_TRAP", json!(null)),
            rule("readahead", "SCMP_ACT_TRACE", json!(5)),
            rule("lchown", "SCMP_ACT_LOG", json!(null)),
            rule("no_such_call", "SCMP_ACT_KILL", json!(null)),
            with("personality", 41, json!([argument(0, 4242, 0, "SCMP_CMP_EQ")])),
            with("kill", 42, json!([argument(0, 1_000_000, 0, "SCMP_CMP_EQ"), argument(1, 15, 0, "SCMP_CMP_EQ")])),
            with("fcntl", 43, json!([argument(0, 150, 0, "SCMP_CMP_GT")])),
            with("dup2", 44, json!([argument(1, 1_000_000, 0, "SCMP_CMP_GE")])),
            with("umask", 45, json!([argument(0, 16, 16, "SCMP_CMP_MASKED_EQ")])),
            with("dup", 46, json!([argument(0, 5000, 0, "SCMP_CMP_GE"), argument(0, 5000, 0, "SCMP_CMP_LE")])),
        ],
    });
}

/// All groups.
pub const GROUPS: &[Group] = &[
    Group {
        name: "filter",
        change: filter,
        by: By::Init,
        cases: CASES,
    },
    Group {
        name: "filter-exec",
        change: filter,
        by: By::Exec,
        cases: CASES,
    },
    Group {
        name: "filter-no-new-privileges",
        change: |spec| {
            filter(spec);
            spec["process"]["noNewPrivileges"] = json!(true);
            spec["process"]["user"] = json!({"uid": 1000, "gid": 1000});
        },
        by: By::Init,
        cases: CASES,
    },
    Group {
        name: "filter-no-new-privileges-exec",
        change: |spec| {
            filter(spec);
            spec["process"]["noNewPrivileges"] = json!(true);
            spec["process"]["user"] = json!({"uid": 1000, "gid": 1000});
        },
        by: By::Exec,
        cases: CASES,
    },
    Group {
        name: "default-error",
        change: |spec| {
            filter(spec);
            let names: Vec<&str> = ALLOWED.split_whitespace().collect();
            spec["linux"]["seccomp"]["defaultAction"] = json!("SCMP_ACT_ERRNO");
            spec["linux"]["seccomp"]["defaultErrnoRet"] = json!(38);
            spec["linux"]["seccomp"]["syscalls"] = json!([]);
            push(
                &mut spec["linux"]["seccomp"]["syscalls"],
                json!({"names": names, "action": "SCMP_ACT_ALLOW"}),
            );
        },
        by: By::Init,
        cases: &[
            ("what is listed", "probe ids; echo $?"),
            (
                "what is not",
                "probe call 83 0 0; probe call 165 0 0 0 0 0; mkdir /tmp/x; echo $?",
            ),
            ("mode", "grep -E '^Seccomp:' /proc/self/status"),
        ],
    },
];

/// What busybox and runc need.
const ALLOWED: &str = "read write close stat statfs fstatfs fstat lstat newfstatat statx poll lseek mmap mprotect munmap brk rt_sigaction \
    rt_sigprocmask rt_sigreturn ioctl pread64 pwrite64 readv writev access faccessat faccessat2 pipe pipe2 select sched_yield mremap \
    madvise dup dup2 dup3 nanosleep clock_nanosleep getpid gettid socket connect sendto recvfrom clone clone3 fork vfork execve execveat \
    exit exit_group wait4 kill tgkill uname fcntl getcwd chdir fchdir readlink readlinkat umask getuid geteuid getgid getegid \
    getppid getpgrp setpgid setsid getgroups setgroups setuid setgid setresuid setresgid capget capset prctl arch_prctl gettimeofday \
    clock_gettime set_tid_address set_robust_list rseq prlimit64 getrlimit getrandom futex open openat getdents64 sigaltstack epoll_create1 \
    epoll_ctl epoll_wait epoll_pwait eventfd2 sched_getaffinity close_range rt_sigtimedwait seccomp sendfile tkill waitid getpgid getsid";
