//! Device nodes, and the rules by which they can be used.

use serde_json::json;

use super::{By, Group, capabilities, push};

/// All groups.
pub const GROUPS: &[Group] = &[
    Group {
        name: "nodes",
        change: |spec| {
            spec["linux"]["devices"] = json!([
                {"path": "/dev/mine", "type": "c", "major": 1, "minor": 3, "fileMode": 0o640, "uid": 7, "gid": 8},
                {"path": "/dev/sub/dir/zero", "type": "c", "major": 1, "minor": 5},
                {"path": "/dev/unbuffered", "type": "u", "major": 1, "minor": 5, "fileMode": 0o600},
                {"path": "/dev/pipe", "type": "p", "fileMode": 0o622},
                {"path": "/elsewhere/null", "type": "c", "major": 1, "minor": 3, "fileMode": 0o666},
                {"path": "/dev/kmsg", "type": "c", "major": 1, "minor": 11, "fileMode": 0o644},
            ]);
            push(
                &mut spec["linux"]["resources"]["devices"],
                json!({"allow": true, "type": "c", "major": 1, "minor": 11, "access": "r"}),
            );
        },
        by: By::Init,
        cases: &[
            ("mode and owner", "stat -c '%F %a %u %g %t %T' /dev/mine"),
            (
                "default mode",
                "stat -c '%F %a %u %g %t %T' /dev/sub/dir/zero; stat -c %a /dev/sub /dev/sub/dir",
            ),
            ("unbuffered", "stat -c '%F %a %t %T' /dev/unbuffered"),
            ("pipe", "stat -c '%F %a' /dev/pipe"),
            (
                "one of the defaults",
                "stat -c '%F %a %u %g %t %T' /dev/null",
            ),
            (
                "the other defaults",
                "for d in zero full random urandom tty; do stat -c '%n %F %a %u %g %t %T' /dev/$d; done",
            ),
            (
                "use of a character device",
                "echo x > /dev/mine; head -c 4 /dev/sub/dir/zero | od -An -tx1",
            ),
            (
                "a device with a rule",
                "dd if=/dev/kmsg bs=8k count=1 of=/dev/null 2>/dev/null; echo $?",
            ),
            ("against its rule", "echo x > /dev/kmsg; echo $?"),
            (
                "making a node",
                "mknod /dev/mem2 c 1 1; echo $?; stat -c '%F %t %T' /dev/mem2",
            ),
            ("using it", "head -c 1 /dev/mem2; echo $?"),
            (
                "making a block node",
                "mknod /dev/loop200 b 7 0; head -c 1 /dev/loop200; echo $?",
            ),
            (
                "port",
                "mknod /dev/port2 c 1 4; head -c 1 /dev/port2; echo $?",
            ),
            (
                "kernel messages by another name",
                "mknod /dev/kmsg2 c 1 11; dd if=/dev/kmsg2 bs=8k count=1 of=/dev/null 2>/dev/null; echo $?",
            ),
            (
                "a console",
                "mknod /dev/console2 c 5 1; echo > /dev/console2; echo $?",
            ),
            (
                "a terminal's multiplexer",
                "ls /dev/ptmx /dev/pts; : < /dev/ptmx; echo $?",
            ),
        ],
    },
    Group {
        name: "rules",
        change: |spec| {
            spec["linux"]["resources"]["devices"] = json!([
                {"allow": false, "access": "rwm"},
                {"allow": true, "type": "c", "major": 1, "minor": 11, "access": "rw"},
                {"allow": true, "type": "c", "major": 10, "access": "r"},
                {"allow": false, "type": "c", "major": 1, "minor": 11, "access": "w"},
            ]);
        },
        by: By::Init,
        cases: &[
            (
                "allowed and not denied since",
                "mknod /dev/k c 1 11; dd if=/dev/k bs=8k count=1 of=/dev/null 2>/dev/null; echo $?",
            ),
            ("denied since", "echo x > /dev/k; echo $?"),
            (
                "one of a major number",
                "mknod /dev/m c 10 237; : < /dev/m 2>&1 | grep -c 'not permitted'",
            ),
            (
                "for writing",
                "mknod /dev/m2 c 10 237; : > /dev/m2; echo $?",
            ),
            ("another", "mknod /dev/o c 1 1; : < /dev/o; echo $?"),
            (
                "defaults are allowed whatever the rules say",
                "echo x > /dev/null; head -c 1 /dev/zero | wc -c",
            ),
        ],
    },
    Group {
        name: "all-devices",
        change: |spec| {
            spec["linux"]["resources"]["devices"] = json!([{"allow": true, "access": "rwm"}]);
            capabilities(spec, &["SYSLOG", "SYS_ADMIN", "SYS_RAWIO"]);
        },
        by: By::Init,
        cases: &[
            (
                "reading the kernel's messages",
                "mknod /dev/k c 1 11; dd if=/dev/k bs=8k count=1 of=/dev/null 2>/dev/null; echo $?",
            ),
            ("writing them", "mknod /dev/k2 c 1 11; : > /dev/k2; echo $?"),
            ("tun", "mknod /dev/t c 10 200; : < /dev/t; echo $?"),
            ("fuse", "mknod /dev/f c 10 229; : < /dev/f; echo $?"),
        ],
    },
];
