use serde_json::{Value, json};
use ttrpc::Code;

use super::*;

fn spec() -> Value {
    json!({
        "ociVersion": "1.0.2",
        "process": {"args": ["sh"], "cwd": "/", "user": {"uid": 1, "gid": 2}},
        "root": {"path": "/rootfs"},
        "linux": {"namespaces": [
            {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"}
        ]},
    })
}

fn set(spec: &mut Value, pointer: &str, value: Value) {
    let mut place = spec;
    for part in pointer.trim_start_matches('/').split('/') {
        place = &mut place[part];
    }
    *place = value;
}

fn adapted(spec: Value) -> Result<Adapted, Refusal> {
    let others = [("pause".to_owned(), 7)].into();
    adapt(spec, "/thaw/c", false, &others)
}

#[test]
fn test_each_refused_field_is_refused_by_name_unless_empty() {
    for pointer in REFUSED {
        let mut full = spec();
        set(&mut full, pointer, json!(["x"]));
        let refusal = adapted(full).unwrap_err();
        assert_eq!(refusal.code, Code::INVALID_ARGUMENT, "{pointer}");
        let name = pointer[1..].replace('/', ".");
        assert_eq!(refusal.message, format!("{name}: not supported"));
        for empty in [
            json!([]),
            json!({}),
            json!(null),
            json!(""),
            json!({"a": []}),
        ] {
            let mut spec = spec();
            set(&mut spec, pointer, empty.clone());
            assert!(adapted(spec).is_ok(), "{pointer} {empty}");
        }
    }
}

#[test]
fn test_each_dropped_field_is_gone_afterwards() {
    for pointer in DROPPED {
        let mut spec = spec();
        set(&mut spec, pointer, json!("profile"));
        assert_eq!(
            adapted(spec).unwrap().spec.pointer(pointer),
            None,
            "{pointer}"
        );
    }
}

#[test]
fn test_namespaces_network_goes_and_the_others_stay() {
    let adapted = adapted(spec()).unwrap();
    let kinds: Vec<_> = adapted.spec["linux"]["namespaces"]
        .as_array()
        .unwrap()
        .iter()
        .map(|namespace| namespace["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["pid", "ipc", "uts", "mount"]);
}

#[test]
fn test_namespaces_that_cannot_be_had_are_refused() {
    let cases = [
        (
            json!([{"type": "mount"}, {"type": "pid", "path": "/proc/1/ns/pid"}]),
            "linux.namespaces[1].path (pid)",
        ),
        (
            json!([{"type": "mount", "path": "container:pause"}]),
            "linux.namespaces[0].path (mount)",
        ),
        (
            json!([{"type": "mount"}, {"type": "odd"}]),
            "linux.namespaces[1].type: \"odd\"",
        ),
        (
            json!([{"type": "pid"}]),
            "linux.namespaces: without a mount namespace",
        ),
        (json!([]), "linux.namespaces: without a mount namespace"),
    ];
    for (namespaces, name) in cases {
        let mut spec = spec();
        spec["linux"]["namespaces"] = namespaces;
        assert_eq!(
            adapted(spec).unwrap_err().message,
            format!("{name}: not supported")
        );
    }
}

#[test]
fn test_namespaces_of_other_containers_are_joined_while_those_run() {
    let with = |path: &str| {
        let mut spec = spec();
        spec["linux"]["namespaces"] = json!([{"type": "mount"}, {"type": "ipc", "path": path}]);
        adapted(spec)
    };
    let adapted = with("container:pause").unwrap();
    assert_eq!(
        adapted.spec["linux"]["namespaces"][1],
        json!({"type": "ipc", "path": "/proc/7/ns/ipc"})
    );
    let refusal = with("container:other").unwrap_err();
    assert_eq!(refusal.code, Code::FAILED_PRECONDITION);
    assert_eq!(
        refusal.message,
        "linux.namespaces[1].path (ipc): container other does not run"
    );
}

#[test]
fn test_what_needs_a_namespace_is_refused_without() {
    let mapping = json!([{"containerID": 0, "hostID": 1000, "size": 1}]);
    let cases = [
        (
            "/domainname",
            json!("x"),
            "domainname: without a uts namespace",
        ),
        (
            "/linux/uidMappings",
            mapping,
            "linux.uidMappings: without a user namespace",
        ),
        (
            "/linux/timeOffsets",
            json!({"boottime": {"secs": 1}}),
            "linux.timeOffsets: without a time namespace",
        ),
        (
            "/linux/sysctl",
            json!({"user.max_user_namespaces": "1"}),
            "linux.sysctl.user.max_user_namespaces: without a user namespace",
        ),
        (
            "/linux/sysctl",
            json!({"vm.swappiness": "1"}),
            "linux.sysctl.vm.swappiness: not of a namespace of the container's",
        ),
        (
            "/linux/sysctl",
            json!({"kernel.hostname": "x"}),
            "linux.sysctl.kernel.hostname: hostname is for that",
        ),
    ];
    for (pointer, value, message) in cases {
        let mut spec = spec();
        spec["linux"]["namespaces"] = json!([{"type": "mount"}]);
        set(&mut spec, pointer, value);
        assert_eq!(adapted(spec).unwrap_err().message, message);
    }
    let mut spec = spec();
    spec["linux"]["namespaces"] = json!([{"type": "mount"}, {"type": "user"}]);
    let refusal = adapted(spec).unwrap_err();
    assert_eq!(
        refusal.message,
        "linux.uidMappings: a user namespace needs it"
    );
}

#[test]
fn test_filters_that_ask_a_program_are_refused() {
    for filter in [
        json!({"defaultAction": "SCMP_ACT_NOTIFY"}),
        json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["a"], "action": "SCMP_ACT_NOTIFY"}]}),
    ] {
        let mut spec = spec();
        spec["linux"]["seccomp"] = filter;
        assert_eq!(
            adapted(spec).unwrap_err().message,
            "linux.seccomp: SCMP_ACT_NOTIFY: not supported"
        );
    }
}

#[test]
fn test_what_must_be_there_is_named_when_it_is_not() {
    let cases = [
        ("/process", json!(null), "process: missing in the spec"),
        (
            "/process/args",
            json!([]),
            "process.args: must not be empty",
        ),
        ("/linux", json!(null), "linux: missing in the spec"),
        (
            "/root/path",
            json!("rootfs"),
            "root.path: not an absolute path",
        ),
        (
            "/process/user/uid",
            json!(-1),
            "process.user.uid: not an id",
        ),
        (
            "/process/user/gid",
            json!(4_294_967_296_u64),
            "process.user.gid: not an id",
        ),
    ];
    for (pointer, value, message) in cases {
        let mut spec = spec();
        set(&mut spec, pointer, value);
        assert_eq!(adapted(spec).unwrap_err().message, message);
    }
    assert!(adapted(json!(7)).is_err());
}

#[test]
fn test_cgroup_and_terminal_are_the_agents_choice() {
    let mut spec = spec();
    set(&mut spec, "/linux/cgroupsPath", json!("/kubepods/x"));
    set(&mut spec, "/process/terminal", json!(false));
    let adapted = adapt(spec, "/thaw/c", true, &BTreeMap::new()).unwrap();
    assert_eq!(adapted.spec["linux"]["cgroupsPath"], "/thaw/c");
    assert_eq!(adapted.spec["process"]["terminal"], true);
}

#[test]
fn test_process_without_capabilities_gets_none() {
    let adapted = adapted(spec()).unwrap();
    for set in CAPABILITY_SETS {
        assert_eq!(
            adapted.spec["process"]["capabilities"][set],
            json!([]),
            "{set}"
        );
    }
}

#[test]
fn test_process_facts() {
    let mut spec = spec();
    set(
        &mut spec,
        "/process/consoleSize",
        json!({"height": 41, "width": 123}),
    );
    let facts = adapted(spec).unwrap().process;
    assert_eq!(
        facts,
        ProcessFacts {
            uid: 1,
            gid: 2,
            find_home: true,
            window: Some((41, 123))
        }
    );
}

#[test]
fn test_network_settings_are_taken_out_and_others_left() {
    let mut spec = spec();
    spec["linux"]["sysctl"] = json!({
        "net.ipv4.ip_unprivileged_port_start": "0",
        "net/ipv4/conf/eth0.1/forwarding": "1",
        "net.ipv4.conf.eth0/2.forwarding": "1",
        "kernel.shmmax": "5",
    });
    let adapted = adapted(spec).unwrap();
    let files: Vec<_> = adapted
        .network_settings
        .keys()
        .map(String::as_str)
        .collect();
    let expected = [
        "net/ipv4/conf/eth0.1/forwarding",
        "net/ipv4/conf/eth0.2/forwarding",
        "net/ipv4/ip_unprivileged_port_start",
    ];
    assert_eq!(files, expected);
    assert_eq!(
        adapted.spec["linux"]["sysctl"],
        json!({"kernel.shmmax": "5"})
    );
}

#[test]
fn test_network_settings_that_leave_their_tree_are_refused() {
    for key in ["net/../kernel/core_pattern", "net..ipv4", "net/./x"] {
        let mut spec = spec();
        spec["linux"]["sysctl"] = json!({key: "1"});
        assert!(adapted(spec).is_err(), "{key}");
    }
}

#[test]
fn test_exec_inherits_capabilities_and_limits_only_where_it_has_none() {
    let container =
        json!({"process": {"capabilities": {"bounding": ["CAP_KILL"]}, "rlimits": [1]}});
    let mut process = json!({"args": ["sh"], "rlimits": [2]});
    inherit(&mut process, &container);
    assert_eq!(process["capabilities"]["bounding"], json!(["CAP_KILL"]));
    assert_eq!(process["rlimits"], json!([2]));
    let mut process = json!({"args": ["sh"], "rlimits": [], "capabilities": {"bounding": []}});
    inherit(&mut process, &container);
    assert_eq!(process["capabilities"], json!({"bounding": []}));
    assert_eq!(process["rlimits"], json!([1]));
}

#[test]
fn test_home_is_looked_up_only_where_the_spec_has_none() {
    for (env, kept) in [
        (json!(["HOME=/x"]), json!(["HOME=/x"])),
        (json!(["HOME=", "A=1"]), json!(["A=1", "HOME=/"])),
        (json!(null), json!(["HOME=/"])),
    ] {
        let mut spec = spec();
        spec["process"]["env"] = env;
        let adapted = adapted(spec).unwrap();
        assert_eq!(adapted.process.find_home, kept != json!(["HOME=/x"]));
        assert_eq!(adapted.spec["process"]["env"], kept);
    }
}
