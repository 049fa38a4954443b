//! Mounts and their options.

use serde_json::json;

use super::{By, Group, mount};

const TMPFS: &[(&str, &str)] = &[
    (
        "size",
        "df -k /t/size | tail -n 1 | awk '{ print $2 }'; dd if=/dev/zero of=/t/size/x bs=64k count=20 2>&1 | tail -n 1 | cut -d' ' -f1; rm /t/size/x",
    ),
    ("mode and owner", "stat -c '%a %u %g' /t/mode"),
    ("mode that is not said", "stat -c '%a %u %g' /t/plain"),
    ("mode of what was there", "stat -c '%a %u %g' /data/sub"),
    ("read-only", "touch /t/ro/x; echo $?; stat -c %a /t/ro"),
    (
        "options",
        "for m in size mode plain ro noexec strict noatime nodiratime sync inodes; do grep \" /t/$m \" /proc/mounts | cut -d' ' -f1-4 | sed 's/,inode64//'; done",
    ),
    (
        "per mount",
        "for m in size mode plain ro noexec strict noatime nodiratime sync; do grep \" /t/$m \" /proc/self/mountinfo | cut -d' ' -f5,6; done",
    ),
    (
        "noexec",
        "cp /bin/busybox /t/noexec/ && /t/noexec/busybox true; echo $?",
    ),
    (
        "nosuid",
        "cp /bin/probe-suid /t/noexec/; cp /bin/probe-suid /t/plain/; chmod 4755 /t/plain/probe-suid; /t/plain/probe-suid ids",
    ),
    (
        "nodev",
        "mknod /t/noexec/null c 1 3; cat /t/noexec/null; echo $?; mknod /t/plain/null c 1 3; cat /t/plain/null; echo $?",
    ),
    (
        "inodes",
        "touch /t/inodes/a /t/inodes/b /t/inodes/c /t/inodes/d /t/inodes/e /t/inodes/f /t/inodes/g /t/inodes/h /t/inodes/i /t/inodes/j; echo $?",
    ),
    (
        "shared",
        "grep ' /t/shared ' /proc/self/mountinfo | grep -c shared:",
    ),
    (
        "private",
        "grep ' /t/private ' /proc/self/mountinfo | grep -c -E 'shared:|master:'",
    ),
    (
        "unbindable",
        "grep ' /t/unbindable ' /proc/self/mountinfo | grep -c unbindable",
    ),
    (
        "slave",
        "grep ' /t/slave ' /proc/self/mountinfo | grep -c -E 'shared:|master:'",
    ),
    (
        "copied up",
        "ls /t/up; cat /etc/copied/file 2>&1; ls /data2",
    ),
    ("mount at a symbolic link", "touch /link2/x; ls /home/user"),
    ("mount point that was made", "ls -d /made/by/mount"),
    (
        "mount below a mount",
        "touch /t/plain/below/x && grep -c ' /t/plain/below ' /proc/self/mountinfo",
    ),
    ("order", "grep -o ' /t/[a-z]* ' /proc/self/mountinfo"),
    ("name with a space", "touch '/t/a b/x' && ls '/t/a b'"),
];

const BINDS: &[(&str, &str)] = &[
    (
        "read-write",
        "echo new > /b/rw/new && cat /data/new; rm /data/new",
    ),
    ("read-only", "touch /b/ro/x; echo $?; cat /b/ro/file"),
    (
        "a file",
        "cat /b/file; echo more >> /b/file; cat /data/file",
    ),
    (
        "a file read-only",
        "cat /b/rofile; echo more >> /b/rofile; echo $?",
    ),
    (
        "options",
        "for m in rw ro noexec nosuid nodev noatime nodiratime strict rel all rro; do grep \" /b/$m \" /proc/self/mountinfo | cut -d' ' -f5,6; done",
    ),
    ("noexec", "/b/noexec/probe ids; echo $?"),
    ("nosuid", "/b/nosuid/probe-suid ids; echo $?"),
    ("mode of a mount point", "stat -c '%a %u %g' /b"),
    ("a directory's mode", "stat -c %a /b/rw/sub"),
    ("onto a symbolic link", "cat /mnt/target/file"),
    ("onto a file that is there", "cat /etc/group"),
    ("link in the source", "cat /b/link/file"),
    ("recursive read-only", "touch /b/rro/x; echo $?"),
    (
        "propagation",
        "for m in rw shared slave private rslave; do grep \" /b/$m \" /proc/self/mountinfo | grep -c -E 'shared:'; done",
    ),
    ("remounting", "mount -o remount,rw,bind /b/ro; echo $?"),
    ("unmounting", "umount /b/rw; echo $?"),
    (
        "moving",
        "mv /b/rw/file /b/rw/moved && mv /b/rw/moved /b/rw/file; echo $?",
    ),
    (
        "across mounts",
        "mv /b/rw/file /tmp/file && mv /tmp/file /b/rw/file; echo $?",
    ),
];

/// All groups.
pub const GROUPS: &[Group] = &[
    Group {
        name: "tmpfs",
        change: |spec| {
            let tmpfs: &[(&str, &[&str])] = &[
                ("/t", &[]),
                ("/t/size", &["size=1m", "nosuid"]),
                ("/t/mode", &["mode=1750", "uid=7", "gid=8"]),
                ("/t/plain", &[]),
                ("/data/sub", &[]),
                ("/t/ro", &["ro", "mode=700"]),
                ("/t/noexec", &["noexec", "nosuid", "nodev"]),
                ("/t/strict", &["strictatime"]),
                ("/t/noatime", &["noatime"]),
                ("/t/nodiratime", &["nodiratime"]),
                ("/t/sync", &["sync", "dirsync"]),
                ("/t/inodes", &["nr_inodes=10"]),
                ("/t/shared", &["shared"]),
                ("/t/private", &["private"]),
                ("/t/unbindable", &["unbindable"]),
                ("/t/slave", &["rslave"]),
                ("/t/plain/below", &[]),
                ("/made/by/mount", &["mode=755"]),
                ("/t/a b", &[]),
            ];
            for (destination, options) in tmpfs {
                mount(spec, destination, "tmpfs", "tmpfs", options);
            }
        },
        by: By::Init,
        cases: TMPFS,
    },
    Group {
        name: "bind",
        change: |spec| {
            let binds: &[(&str, &str, &[&str])] = &[
                ("/b/rw", "/data", &["rbind", "rw"]),
                ("/b/ro", "/data", &["rbind", "ro"]),
                ("/b/file", "/data/file", &["bind"]),
                ("/b/rofile", "/data/file", &["bind", "ro"]),
                ("/b/noexec", "/bin", &["bind", "noexec"]),
                ("/b/nosuid", "/bin", &["bind", "nosuid"]),
                ("/b/nodev", "/data", &["bind", "nodev"]),
                ("/b/noatime", "/data", &["bind", "noatime"]),
                ("/b/nodiratime", "/data", &["bind", "nodiratime"]),
                ("/b/strict", "/data", &["bind", "strictatime"]),
                ("/b/rel", "/data", &["bind", "relatime"]),
                (
                    "/b/all",
                    "/data",
                    &["bind", "ro", "nosuid", "nodev", "noexec"],
                ),
                ("/b/rro", "/data", &["rbind", "rro"]),
                ("/b/shared", "/data", &["rbind", "shared"]),
                ("/b/slave", "/data", &["rbind", "slave"]),
                ("/b/private", "/data", &["rbind", "private"]),
                ("/b/rslave", "/data", &["rbind", "rslave"]),
                ("/mnt/target", "/data", &["bind"]),
                ("/etc/group", "/etc/plain", &["bind", "ro"]),
                ("/b/link", "/data", &["bind"]),
            ];
            for (destination, source, options) in binds {
                mount(
                    spec,
                    destination,
                    "bind",
                    &format!("@ROOT{source}"),
                    options,
                );
            }
        },
        by: By::Init,
        cases: BINDS,
    },
    Group {
        name: "private-root",
        change: |spec| spec["linux"]["rootfsPropagation"] = json!("private"),
        by: By::Init,
        cases: &[
            (
                "propagation of the root",
                "grep ' / ' /proc/self/mountinfo | grep -o -E '(shared|master):' | sort",
            ),
            (
                "of others",
                "grep -v ' / ' /proc/self/mountinfo | grep -c -E 'shared:|master:'",
            ),
        ],
    },
    Group {
        name: "system",
        change: |spec| {
            super::namespace(spec, "cgroup");
            mount(
                spec,
                "/sys/fs/cgroup",
                "cgroup",
                "cgroup",
                &["nosuid", "noexec", "nodev", "relatime", "rw"],
            );
            mount(
                spec,
                "/proc2",
                "proc",
                "proc",
                &["nosuid", "noexec", "nodev", "ro"],
            );
            mount(spec, "/sys2", "sysfs", "sysfs", &["rw"]);
            mount(spec, "/mq2", "mqueue", "mqueue", &[]);
        },
        by: By::Init,
        cases: &[
            (
                "second proc",
                "grep ' /proc2 ' /proc/mounts | cut -d' ' -f1-4; cat /proc2/1/comm",
            ),
            (
                "second sys",
                "grep ' /sys2 ' /proc/self/mountinfo | cut -d' ' -f4,5",
            ),
            (
                "second mqueue",
                "touch /mq2/a; ls /dev/mqueue; grep ' /mq2 ' /proc/mounts | cut -d' ' -f2-4",
            ),
            (
                "cgroup",
                "grep ' /sys/fs/cgroup ' /proc/self/mountinfo | cut -d' ' -f4-6; cat /proc/self/cgroup",
            ),
            (
                "cgroup can be written",
                "mkdir /sys/fs/cgroup/below && rmdir /sys/fs/cgroup/below; echo $?",
            ),
        ],
    },
];
