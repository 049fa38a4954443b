//! What there is on the host because of containers: looked at before and after each test.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::environment::Environment;
use crate::thaw::TEMPLATES;

/// How long a runtime has to clean up after a container is gone for its client.
const GRACE: Duration = Duration::from_secs(30);

/// Lines, one for each thing that may be left over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host(BTreeSet<String>);

impl Host {
    /// As it is now. `bundles` is where the daemon under test has its bundles.
    pub fn look(bundles: &Path) -> Self {
        let mut found = BTreeSet::new();
        processes(&mut found);
        mounts(&mut found);
        sockets(&mut found);
        directories("cgroup", Path::new("/sys/fs/cgroup"), &mut found);
        for state in ["/run/thaw", "/run/containerd/s"] {
            files(Path::new(state), &mut found);
        }
        unfinished_templates(&mut found);
        names("bundle", bundles, &mut found);
        names("interface", Path::new("/sys/class/net"), &mut found);
        Self(found)
    }

    /// What has come since `before` and does not go within half a minute.
    pub fn left_since(before: &Self, bundles: &Path) -> Vec<String> {
        let begun = Instant::now();
        loop {
            let left: Vec<String> = Self::look(bundles)
                .0
                .difference(&before.0)
                .cloned()
                .collect();
            if left.is_empty() || begun.elapsed() > GRACE {
                return left;
            }
            // Nothing announces that the last trace of a container is gone.
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Processes of runtimes, and in the lab the namespaces of all processes.
fn processes(found: &mut BTreeSet<String>) {
    let Ok(entries) = fs::read_dir("/proc") else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.bytes().all(|byte| byte.is_ascii_digit()) || name == std::process::id().to_string()
        {
            continue;
        }
        let process = entry.path();
        let command = fs::read_to_string(process.join("comm")).unwrap_or_default();
        if is_runtime(&process, command.trim()) {
            found.insert(format!(
                "process {name} {} {}",
                command.trim(),
                command_line(&process)
            ));
        }
        if Environment::get().in_lab {
            namespaces(&process, command.trim(), found);
        }
    }
}

/// Whether a process belongs to a runtime: by its program, or by its name when it is a zombie.
fn is_runtime(process: &Path, command: &str) -> bool {
    let ours = |name: &str| {
        ["containerd-shim", "thaw", "runc"]
            .iter()
            .any(|ours| name.starts_with(ours))
    };
    match fs::read_link(process.join("exe")) {
        Ok(program) => program
            .file_name()
            .is_some_and(|name| ours(&name.to_string_lossy())),
        Err(_) => ours(command),
    }
}

fn command_line(process: &Path) -> String {
    let line = fs::read(process.join("cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line)
        .replace('\0', " ")
        .trim()
        .to_owned()
}

/// The namespaces that a process holds, but for those of kernel threads.
fn namespaces(process: &Path, command: &str, found: &mut BTreeSet<String>) {
    let Ok(entries) = fs::read_dir(process.join("ns")) else {
        return;
    };
    if command.starts_with("kworker") || command == "kdevtmpfs" {
        return;
    }
    for entry in entries.flatten() {
        // A process that ends meanwhile has none.
        let Ok(namespace) = fs::read_link(entry.path()) else {
            continue;
        };
        found.insert(format!("namespace {}", namespace.display()));
    }
}

fn mounts(found: &mut BTreeSet<String>) {
    for line in fs::read_to_string("/proc/self/mountinfo")
        .unwrap_or_default()
        .lines()
    {
        // The fifth field is where; the first two are numbers that differ each time.
        let fields: Vec<&str> = line.split(' ').collect();
        let after = line.split(" - ").nth(1).unwrap_or_default();
        found.insert(format!("mount {} {after}", fields.get(4).unwrap_or(&"")));
    }
}

/// UNIX sockets with a name that speaks of a runtime.
fn sockets(found: &mut BTreeSet<String>) {
    for line in fs::read_to_string("/proc/net/unix")
        .unwrap_or_default()
        .lines()
    {
        let path = line.split_whitespace().nth(7).unwrap_or_default();
        if path.contains("thaw/") && !path.contains("/containerd-")
            || path.contains("/run/containerd/s/")
        {
            found.insert(format!("socket {path}"));
        }
    }
}

fn children(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    entries.flatten().map(|entry| entry.path()).collect()
}

fn names(kind: &str, directory: &Path, found: &mut BTreeSet<String>) {
    found.extend(
        children(directory)
            .iter()
            .map(|path| format!("{kind} {}", path.display())),
    );
}

fn directories(kind: &str, root: &Path, found: &mut BTreeSet<String>) {
    for path in children(root) {
        if path.is_dir() && !path.is_symlink() {
            found.insert(format!("{kind} {}", path.display()));
            directories(kind, &path, found);
        }
    }
}

/// Templates are kept on purpose; what they are made in is hidden, and goes.
fn unfinished_templates(found: &mut BTreeSet<String>) {
    let hidden = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with('.'))
    };
    let unfinished = children(Path::new(TEMPLATES)).into_iter().filter(hidden);
    found.extend(unfinished.map(|path| format!("unfinished template {}", path.display())));
}

/// What is kept on purpose: the record of past starts, their counters, the consoles of guests where that
/// was asked for, and what is known about templates.
const KEPT: &[&str] = &[
    "/run/thaw/traces",
    "/run/thaw/.counters",
    "/run/thaw/.consoles",
    "/run/thaw/.templates",
];

/// All below `root`, but for what is [`KEPT`].
fn files(root: &Path, found: &mut BTreeSet<String>) {
    for path in children(root) {
        if KEPT.iter().any(|kept| path == Path::new(kept)) {
            continue;
        }
        found.insert(format!("file {}", path.display()));
        if path.is_dir() && !path.is_symlink() {
            files(&path, found);
        }
    }
}
