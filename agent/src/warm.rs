//! What a template is made ready with: everything that a start runs has run once, so that its pages
//! are in the template, and what is free has been given back.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Value, json};

use crate::cgroup;
use crate::engine::{Engine, ProcessRequest};
use crate::protocol::NOTHING_NAME;
use crate::status::Refusal;
use crate::sys;

/// The id of the container; no client's, as clients' ids begin with a letter or a digit.
const ID: &str = "_warm-up";

/// The id of its exec.
const EXEC_ID: &str = "warm";

/// Creates, starts and deletes a container that does nothing, and an exec in it.
pub async fn warm_up(engine: &Engine) -> Result<(), Refusal> {
    let root = engine.layout().bundles.join(format!("{ID}-root"));
    let program = fs::canonicalize(&engine.layout().program);
    let result = match program.and_then(|program| fs::create_dir_all(&root).map(|()| program)) {
        Ok(program) => run(engine, &root, &program).await,
        Err(error) => Err(Refusal::failed(error.to_string())),
    };
    let _ = fs::remove_dir_all(&root);
    result.map_err(|refusal| {
        Refusal::new(
            refusal.code,
            format!("warm-up container: {}", refusal.message),
        )
    })
}

async fn run(engine: &Engine, root: &Path, program: &Path) -> Result<(), Refusal> {
    let request = |spec: &Value| ProcessRequest {
        spec: spec.to_string().into_bytes(),
        terminal: false,
        uris: Default::default(),
    };
    let spec = spec(root, program);
    engine.create(ID, String::new(), request(&spec)).await?;
    let ran = async {
        engine.exec(ID, EXEC_ID, request(&spec["process"])).await?;
        engine.start(ID, EXEC_ID).await?;
        engine.delete_stopped(ID, EXEC_ID).await?;
        engine.start(ID, "").await?;
        engine.delete_stopped(ID, "").await
    }
    .await;
    if ran.is_err() {
        let _ = engine.kill(ID, "", libc::SIGKILL.unsigned_abs(), true);
        let _ = engine.delete_stopped(ID, "").await;
    }
    ran
}

/// What clients usually ask for, around a program that ends at once.
fn spec(root: &Path, program: &Path) -> Value {
    let mut resources = json!({});
    let controllers = fs::read_to_string(Path::new(cgroup::ROOT).join("cgroup.controllers"));
    for (controller, limit) in [("memory", 1_u64 << 30), ("pids", 100)] {
        if controllers
            .as_ref()
            .is_ok_and(|list| list.split_whitespace().any(|c| c == controller))
        {
            resources[controller] = json!({"limit": limit});
        }
    }
    let nothing = format!("/{NOTHING_NAME}");
    let capabilities = json!(["CAP_CHOWN", "CAP_KILL", "CAP_NET_BIND_SERVICE"]);
    json!({
        "ociVersion": "1.1.0",
        "process": {
            "args": [nothing],
            "cwd": "/",
            "env": ["PATH=/usr/bin:/bin"],
            "user": {"uid": 0, "gid": 0},
            "noNewPrivileges": true,
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 1024, "hard": 1024}],
            "capabilities": {
                "bounding": capabilities, "effective": capabilities, "permitted": capabilities,
            },
        },
        "root": {"path": root},
        "hostname": "warm-up",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc",
             "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
             "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
             "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm",
             "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]},
            {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue",
             "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs",
             "options": ["nosuid", "noexec", "nodev", "ro"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup",
             "options": ["nosuid", "noexec", "nodev", "relatime", "ro"]},
            {"destination": nothing, "type": "bind", "source": program,
             "options": ["bind", "ro"]},
        ],
        "linux": {
            "namespaces": [
                {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"},
                {"type": "cgroup"},
            ],
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"],
            "resources": resources,
        },
    })
}

/// Writes back and drops what the kernel caches, and makes what is free contiguous, so that it is
/// left out of the template in large pieces.
pub fn give_memory_back() -> io::Result<()> {
    sys::trim_heap();
    nix::unistd::sync();
    fs::write("/proc/sys/vm/drop_caches", "3")?;
    // Kernels without compaction have no such file; then there is nothing to do.
    let compacted = fs::write("/proc/sys/vm/compact_memory", "1");
    compacted.or_else(|error| match error.kind() {
        io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    })
}
