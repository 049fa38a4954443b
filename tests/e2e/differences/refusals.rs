//! What neither runtime runs, and what thaw refuses by the name of the field.

use serde_json::json;
use thaw_tests::{Version, on_containerd};

use super::{Change, Changed, RUNC, mount, thaw};

/// Specs that no runtime takes.
const BOTH: &[(&str, Change)] = &[
    ("no such program", |spec| {
        spec["process"]["args"] = json!(["no-such-program"])
    }),
    ("no program", |spec| {
        spec["process"]["args"] = json!(["/etc/plain"])
    }),
    ("directory", |spec| {
        spec["process"]["args"] = json!(["/etc"])
    }),
    ("no arguments", |spec| spec["process"]["args"] = json!([])),
    ("working directory is a file", |spec| {
        spec["process"]["cwd"] = json!("/etc/plain")
    }),
    ("relative working directory", |spec| {
        spec["process"]["cwd"] = json!("tmp")
    }),
    ("unknown limit", |spec| {
        spec["process"]["rlimits"] = json!([{"type": "RLIMIT_NONE", "soft": 1, "hard": 1}])
    }),
    ("hard limit below the soft one", |spec| {
        spec["process"]["rlimits"] = json!([{"type": "RLIMIT_NOFILE", "soft": 9, "hard": 8}])
    }),
    ("no source", |spec| {
        mount(spec, "/mnt", "bind", "/no/such/source", &["bind"])
    }),
    ("unknown file system", |spec| {
        mount(spec, "/mnt", "nofs", "none", &[])
    }),
    ("unknown propagation", |spec| {
        spec["linux"]["rootfsPropagation"] = json!("odd")
    }),
    ("setting of no namespace", |spec| {
        spec["linux"]["sysctl"] = json!({"vm.swappiness": "1"})
    }),
    ("no such setting", |spec| {
        spec["linux"]["sysctl"] = json!({"kernel.shmnone": "1"})
    }),
    ("unknown seccomp action", |spec| {
        spec["linux"]["seccomp"] = json!({"defaultAction": "SCMP_ACT_NONE"})
    }),
    ("unknown namespace", |spec| super::namespace(spec, "odd")),
    ("mapping without a user namespace", |spec| {
        spec["linux"]["uidMappings"] = json!([{"containerID": 0, "hostID": 1000, "size": 1}]);
    }),
    ("proc over a link", |spec| {
        mount(spec, "/bin/sh", "proc", "proc", &[])
    }),
    ("memory limit below what is needed", |spec| {
        spec["linux"]["resources"]["memory"] = json!({"limit": 4096})
    }),
    ("unknown file of the cgroup", |spec| {
        spec["linux"]["resources"]["unified"] = json!({"memory.none": "1"})
    }),
    ("processors that are not there", |spec| {
        spec["linux"]["resources"]["cpu"] = json!({"cpus": "900"})
    }),
];

#[test]
fn refused_by_both() {
    on_containerd(Version::V2_1, "refused_by_both", |bed| {
        let mut odd = Vec::new();
        for (name, change) in BOTH {
            let changed = Changed::new(bed, "refused", *change);
            for runtime in [RUNC, thaw()] {
                let output = changed.run(runtime);
                if output.code == 0 {
                    odd.push(format!("{name} with {runtime}: {output}"));
                }
            }
        }
        assert!(odd.is_empty(), "taken: {odd:#?}");
    });
}
