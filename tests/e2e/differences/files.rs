//! What a container's root, `/proc` and `/sys` look like. The guest's kernel has neither `/proc/kcore`, and so
//! no `/dev/core`, nor `/proc/sysrq-trigger`.

use serde_json::json;

use super::{By, Group, capabilities, push};

/// All groups.
pub const GROUPS: &[Group] = &[
    Group {
        name: "root",
        change: |spec| {
            spec["linux"]["maskedPaths"] = json!([
                "/etc/plain",
                "/data/sub",
                "/no/such",
                "/proc/acpi",
                "/proc/keys",
                "/sys/firmware"
            ]);
            push(&mut spec["linux"]["readonlyPaths"], json!("/data"));
            push(&mut spec["linux"]["readonlyPaths"], json!("/no/such"));
        },
        by: By::Init,
        cases: &[
            (
                "masked file",
                "cat /etc/plain; stat -c '%F %t %T' /etc/plain",
            ),
            (
                "masked directory",
                "ls -A /data/sub; stat -c '%F' /data/sub; touch /data/sub/x; echo $?",
            ),
            ("masked keys", "cat /proc/keys"),
            ("masked directory of sys", "ls -A /sys/firmware"),
            (
                "mount of a masked file",
                "grep ' /etc/plain ' /proc/self/mountinfo | cut -d' ' -f4-6",
            ),
            (
                "mount of a masked directory",
                "grep ' /data/sub ' /proc/self/mountinfo | sed 's/.* - //; s/,inode64//; s/,size=[0-9a-z]*//'",
            ),
            (
                "read-only path",
                "echo x > /data/file; echo $?; cat /data/file",
            ),
            (
                "mount of a read-only path",
                "grep ' /data ' /proc/self/mountinfo | cut -d' ' -f5,6",
            ),
            (
                "read-only path of proc",
                "echo 1 > /proc/sys/kernel/panic; echo $?",
            ),
            (
                "its mount",
                "grep ' /proc/sys ' /proc/self/mountinfo | cut -d' ' -f5,6",
            ),
            (
                "proc",
                "grep ' /proc ' /proc/self/mountinfo | cut -d' ' -f5,6",
            ),
            (
                "what proc is",
                "grep ' /proc ' /proc/mounts | cut -d' ' -f1-4",
            ),
            ("sys", "grep ' /sys ' /proc/mounts | cut -d' ' -f1-4"),
            ("writing to sys", "echo x > /sys/kernel/profiling; echo $?"),
            ("the root is writable", "echo x > /new && cat /new; rm /new"),
            (
                "the root's options",
                "grep ' / ' /proc/self/mountinfo | cut -d' ' -f6",
            ),
            (
                "propagation of the root",
                "grep ' / ' /proc/self/mountinfo | grep -o -E '(shared|master):' | wc -l",
            ),
            (
                "mounts",
                "cut -d' ' -f5 /proc/self/mountinfo | grep -v sysrq-trigger | sort | uniq -c",
            ),
            (
                "what is mounted",
                "sed 's/.* - //' /proc/self/mountinfo | cut -d' ' -f1 | sort | uniq | grep -v -E '^(fuse|virtiofs|ext4|overlay|tmpfs|9p)'",
            ),
            ("the directory above the root", "ls -A /.. | grep -c bin"),
            ("symbolic link", "cat /link/file; readlink /link"),
            ("processes", "set -- /proc/[0-9]*; echo $#"),
            ("own pid", "sh -c 'test $$ -lt 100 && echo small'"),
            (
                "namespaces of the first process",
                "for n in ipc mnt net pid uts user cgroup time; do test /proc/1/ns/$n -ef /proc/self/ns/$n && echo $n; done",
            ),
            ("entries of dev", "ls -A /dev | grep -v core"),
            (
                "links of dev",
                "for l in fd stdin stdout stderr ptmx; do readlink /dev/$l; done",
            ),
            ("file descriptors by dev", "ls /dev/fd | grep -c ."),
            (
                "dev",
                "grep ' /dev ' /proc/mounts | cut -d' ' -f2-4 | sed 's/,inode64//; s/,seclabel//'",
            ),
            ("dev is writable", "touch /dev/x && rm /dev/x; echo $?"),
            (
                "mode of dev",
                "stat -c '%a %u %g' /dev /dev/pts /dev/shm /dev/mqueue /run /tmp",
            ),
            ("pts", "grep ' /dev/pts ' /proc/mounts | cut -d' ' -f2-4"),
            (
                "shm",
                "grep ' /dev/shm ' /proc/mounts | cut -d' ' -f2-4 | sed 's/,inode64//'; df -k /dev/shm | tail -n 1 | awk '{ print $2 }'",
            ),
            (
                "mqueue",
                "grep ' /dev/mqueue ' /proc/mounts | cut -d' ' -f2-4; touch /dev/mqueue/q && ls /dev/mqueue",
            ),
            (
                "run",
                "grep ' /run ' /proc/mounts | cut -d' ' -f2-4 | sed 's/,inode64//'",
            ),
            (
                "host name",
                "hostname; cat /proc/sys/kernel/hostname; uname -n",
            ),
            ("domain name", "cat /proc/sys/kernel/domainname"),
            ("System V", "ls /proc/sysvipc; grep -c . /proc/sysvipc/shm"),
            (
                "devices of the network",
                "ls /proc/self/net | grep -c ^dev$",
            ),
            ("controlling terminal", "echo x > /dev/tty; echo $?"),
            ("null", "echo x > /dev/null; cat /dev/null | wc -c"),
            ("zero", "head -c 10 /dev/zero | od -An -tx1"),
            ("full", "echo x > /dev/full; echo $?"),
            (
                "random",
                "head -c 8 /dev/urandom | wc -c; head -c 8 /dev/random | wc -c",
            ),
            (
                "hard link",
                "echo a > /tmp/a && ln /tmp/a /tmp/b && stat -c %h /tmp/a; rm /tmp/a /tmp/b",
            ),
            (
                "FIFO",
                "mkfifo /tmp/f && { echo through > /tmp/f & cat /tmp/f; }; rm /tmp/f",
            ),
            (
                "sparse file",
                "truncate -s 1G /tmp/s && stat -c '%s %b' /tmp/s; rm /tmp/s",
            ),
            (
                "sticky directory",
                "stat -c %a /tmp; mkdir -m 1777 /tmp/st && stat -c %a /tmp/st; rmdir /tmp/st",
            ),
        ],
    },
    Group {
        name: "read-only",
        change: |spec| {
            spec["root"]["readonly"] = json!(true);
            spec["hostname"] = json!("");
        },
        by: By::Init,
        cases: &[
            ("the root is read-only", "touch /new; echo $?"),
            (
                "its options",
                "grep ' / ' /proc/self/mountinfo | cut -d' ' -f6 | tr , '\\n' | grep -E '^r[ow]$'",
            ),
            ("removing", "rm /etc/plain; echo $?"),
            ("changing a mode", "chmod 777 /etc/plain; echo $?"),
            (
                "tmpfs stays writable",
                "touch /run/x /dev/shm/x /dev/x; echo $?",
            ),
            ("mounting over", "mount -o remount,rw /; echo $?"),
        ],
    },
    Group {
        name: "settings",
        change: |spec| {
            spec["linux"]["sysctl"] = json!({
                "kernel.shmmax": "1048576", "kernel.msgmax": "4096", "kernel.sem": "32000 1024000000 500 32000",
                "fs.mqueue.msg_max": "20", "net.ipv4.ip_unprivileged_port_start": "0", "net/ipv4/ping_group_range": "0 1000",
                "net.ipv4.tcp_syncookies": "0", "kernel.shm_rmid_forced": "1",
            });
            capabilities(spec, &["SYS_ADMIN", "NET_ADMIN"]);
        },
        by: By::Init,
        cases: &[
            ("shmmax", "cat /proc/sys/kernel/shmmax"),
            ("msgmax", "cat /proc/sys/kernel/msgmax"),
            ("sem", "cat /proc/sys/kernel/sem"),
            ("shm_rmid_forced", "cat /proc/sys/kernel/shm_rmid_forced"),
            ("messages", "cat /proc/sys/fs/mqueue/msg_max"),
            ("ports", "cat /proc/sys/net/ipv4/ip_unprivileged_port_start"),
            (
                "groups that may ping",
                "cat /proc/sys/net/ipv4/ping_group_range",
            ),
            ("cookies", "cat /proc/sys/net/ipv4/tcp_syncookies"),
            ("host name can be set", "hostname other; hostname"),
            (
                "mounting",
                "mount -t tmpfs -o size=1m none /mnt && df -k /mnt | tail -n 1 | awk '{ print $2 }'; umount /mnt",
            ),
            (
                "bind mount",
                "mount -o bind /data /mnt && cat /mnt/file; umount /mnt",
            ),
            (
                "new mount namespace",
                "unshare -m sh -c 'mount -t tmpfs none /mnt && grep -c \" /mnt \" /proc/self/mountinfo'; grep -c ' /mnt ' /proc/self/mountinfo",
            ),
            ("new pid namespace", "unshare -p -f sh -c 'echo $$'"),
            ("new user namespace", "unshare -U sh -c 'id -u'"),
            ("new network namespace", "unshare -n ip link | grep -c lo:"),
            (
                "proc cannot be mounted anew over masks",
                "unshare -U -r -m -p -f mount -t proc none /mnt; echo $?",
            ),
        ],
    },
];
