//! The same small programs under runc and under thaw, with the same result.
//!
//! A table of cases, one line of shell each. All cases of a group run in one container, whose spec is
//! the one that containerd's client makes, changed as the group says; what each prints and its exit
//! status are compared. Cases of features that the runc of the lab is too old for have their results in
//! the table.

mod cgroups;
mod devices;
mod files;
mod identity;
mod mounts;
mod newer;
mod refusals;
mod seccomp;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use thaw_tests::task::Task;
use thaw_tests::{Environment, Finished, Testbed, Version, finish, on_containerd};

const RUNC: &str = "io.containerd.runc.v2";

/// What is different in a spec.
type Change = fn(&mut Value);

/// Containers with the same spec.
struct Group {
    /// Of the group, in reports and in names.
    name: &'static str,
    /// Changes the spec that the client makes.
    change: Change,
    /// How the cases are run.
    by: By,
    /// Name and line for the shell of each.
    cases: &'static [(&'static str, &'static str)],
}

/// Who runs the cases.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// The container's first process.
    Init,
    /// An exec with nothing of its own but the program, as clients make it of the container's process.
    Exec,
}

/// What a case has printed, and its exit status.
type Results = BTreeMap<String, String>;

/// The root file system of one container.
struct Root(tempfile::TempDir);

impl Root {
    fn make(bed: &Testbed) -> Self {
        let directory = bed.directory();
        fill(directory.path()).unwrap_or_else(|error| panic!("making a root directory: {error}"));
        Self(directory)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

/// busybox, a static program of ours as itself and set-user-id, and what is looked at.
fn fill(root: &Path) -> std::io::Result<()> {
    fs::set_permissions(root, fs::Permissions::from_mode(0o755))?;
    for directory in [
        "bin",
        "sbin",
        "dev",
        "etc",
        "proc",
        "root",
        "run",
        "sys",
        "tmp",
        "var",
        "data",
        "data/sub",
        "home",
        "home/user",
        "mnt",
        "usr/bin",
    ] {
        fs::create_dir_all(root.join(directory))?;
    }
    let mode =
        |path: &str, mode| fs::set_permissions(root.join(path), fs::Permissions::from_mode(mode));
    mode("tmp", 0o1777)?;
    mode("data/sub", 0o750)?;
    let busybox = finish(Command::new("sh").args(["-c", "command -v busybox"]))
        .succeeded()
        .stdout();
    fs::copy(busybox.trim(), root.join("bin/busybox"))?;
    for name in finish(Command::new(busybox.trim()).arg("--list"))
        .succeeded()
        .stdout()
        .lines()
    {
        if name != "busybox" {
            symlink("busybox", root.join("bin").join(name))?;
        }
    }
    fs::copy(env!("CARGO_BIN_EXE_probe"), root.join("bin/probe"))?;
    fs::copy(root.join("bin/probe"), root.join("bin/probe-suid"))?;
    mode("bin/probe", 0o755)?;
    mode("bin/probe-suid", 0o4755)?;
    fs::write(
        root.join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
    )?;
    fs::write(
        root.join("etc/group"),
        "root:x:0:\ntty:x:5:\nuser:x:1000:\nextra:x:2000:user\n",
    )?;
    fs::write(root.join("etc/plain"), "plain\n")?;
    fs::write(root.join("etc/script"), "#!/bin/sh\necho script $*\n")?;
    mode("etc/script", 0o755)?;
    fs::write(root.join("data/file"), "data\n")?;
    fs::write(root.join("data/sub/file"), "sub\n")?;
    symlink("/data", root.join("link"))
}

/// The cases as a script, each in a subshell.
fn script(cases: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (name, line) in cases {
        let _ = write!(
            text,
            "echo \"@@ {name}\"\n(\n{line}\n) </dev/null 2>&1\necho \"@= $?\"\n"
        );
    }
    text
}

/// What came out of a [`script`].
fn results(text: &str) -> Results {
    let mut results = Results::new();
    let mut name = String::from("before the first case");
    for line in text.lines() {
        if let Some(next) = line.strip_prefix("@@ ") {
            next.clone_into(&mut name);
        }
        let result = results.entry(name.clone()).or_default();
        if !line.starts_with("@@ ") {
            result.push_str(line);
            result.push('\n');
        }
    }
    results
}

/// The spec that the client makes, with `root` as its root and a program for its shell.
fn spec(bed: &Testbed, root: &Path, name: &str) -> Value {
    let text = finish(bed.containerd().ctr().args(["oci", "spec"]))
        .succeeded()
        .stdout();
    let mut spec: Value = serde_json::from_str(&text).expect("the client writes JSON");
    spec["root"]["path"] = json!(root);
    spec["linux"]["cgroupsPath"] = json!(format!("/thaw-differences-{name}"));
    spec["process"]["env"] = json!(["PATH=/bin:/sbin", "NAME=value"]);
    spec["process"]["args"] = json!(["sh", "/cases"]);
    spec["process"]["noNewPrivileges"] = json!(false);
    spec["hostname"] = json!("host-name");
    // Where the spec has none it is that of the host's process which starts the container.
    spec["process"]["oomScoreAdj"] = json!(0);
    spec
}

/// A change of a spec as `ctr run --config` takes it.
struct Changed<'a> {
    bed: &'a Testbed,
    root: Root,
    spec: Value,
}

impl<'a> Changed<'a> {
    fn new(bed: &'a Testbed, name: &str, change: Change) -> Self {
        let root = Root::make(bed);
        let mut spec = spec(bed, root.path(), name);
        change(&mut spec);
        let text = spec
            .to_string()
            .replace("@ROOT", &root.path().display().to_string());
        let spec = serde_json::from_str(&text).expect("a path changes no syntax");
        Self { bed, root, spec }
    }

    /// Runs it to its end.
    fn run(&self, runtime: &str) -> Finished {
        let id = self.bed.next_name("c");
        finish(&mut self.command(runtime, &id, &["--rm"]))
    }

    fn command(&self, runtime: &str, id: &str, flags: &[&str]) -> Command {
        let file = self.root.path().join("../").join(format!("{id}.json"));
        fs::write(&file, self.spec.to_string()).expect("the tests' directory can be written");
        let mut command = self.bed.containerd().ctr();
        command
            .args(["run", "--runtime", runtime])
            .args(flags)
            .arg("--config")
            .arg(&file)
            .arg(id);
        command
    }
}

impl Group {
    /// Runs the group with a runtime; says why not all cases have a result.
    fn run(&self, bed: &Testbed, runtime: &'static str) -> Result<Results, String> {
        let mut changed = Changed::new(bed, self.name, self.change);
        fs::write(changed.root.path().join("cases"), script(self.cases))
            .expect("it can be written");
        let output = match self.by {
            By::Init => changed.run(runtime),
            By::Exec => {
                let process = changed.spec["process"].clone();
                changed.spec["process"]["args"] = json!(["sleep", "3600"]);
                let run = bed.run().runtime(runtime);
                let id = run.id().to_owned();
                finish(&mut changed.command(runtime, &id, &["--detach"])).succeeded();
                let container = run.detached();
                let mut process = process;
                process["args"] = json!(["sh", "/cases"]);
                let directory = bed.directory();
                let (code, out, err) =
                    Task::of(bed, &container).run(directory.path(), "cases", &process);
                container.remove();
                return self.checked(runtime, code as i32, &out, &err);
            }
        };
        self.checked(runtime, output.code, &output.stdout(), &output.stderr())
    }

    fn checked(&self, runtime: &str, code: i32, out: &str, err: &str) -> Result<Results, String> {
        let results = results(out);
        let complete = code == 0
            && results.len() == self.cases.len()
            && results.values().all(|text| text.contains("@= "));
        if complete {
            return Ok(results);
        }
        Err(format!(
            "\n{} with {runtime} ended with {code}; stderr:\n{err}\nstdout:\n{out}",
            self.name
        ))
    }

    /// Adds what differs to `report`.
    fn compare(&self, bed: &Testbed, report: &mut String) {
        let (expected, found) = match (self.run(bed, RUNC), self.run(bed, thaw())) {
            (Ok(expected), Ok(found)) => (expected, found),
            (expected, found) => {
                let failures = expected.err().into_iter().chain(found.err());
                failures.for_each(|text| report.push_str(&text));
                return;
            }
        };
        for (name, line) in self.cases {
            let (expected, found) = (&expected[*name], &found[*name]);
            if expected != found {
                let _ = write!(
                    report,
                    "\n{}: {name}: {line}\nrunc:\n{expected}thaw:\n{found}",
                    self.name
                );
            }
        }
    }
}

/// The runtime under test.
fn thaw() -> &'static str {
    &Environment::get().runtime
}

/// Runs groups with both runtimes, and fails with all that differs.
fn compare(name: &str, groups: &[Group]) {
    on_containerd(Version::V2_1, name, |bed| {
        let mut report = String::new();
        for group in groups {
            group.compare(bed, &mut report);
        }
        assert!(report.is_empty(), "differences:{report}");
    });
}

/// Puts an object's fields into another's.
fn set(place: &mut Value, fields: Value) {
    if let Value::Object(fields) = fields {
        for (name, value) in fields {
            place[name] = value;
        }
    }
}

/// Adds to a list, which may be missing.
fn push(place: &mut Value, value: Value) {
    match place.as_array_mut() {
        Some(list) => list.push(value),
        None => *place = json!([value]),
    }
}

/// Gives the process these capabilities, in all sets.
fn capabilities(spec: &mut Value, names: &[&str]) {
    for set in ["bounding", "effective", "permitted"] {
        for name in names {
            let name = json!(format!("CAP_{name}"));
            push(&mut spec["process"]["capabilities"][set], name);
        }
    }
}

/// A namespace more.
fn namespace(spec: &mut Value, kind: &str) {
    push(&mut spec["linux"]["namespaces"], json!({"type": kind}));
}

/// A mount more.
fn mount(spec: &mut Value, destination: &str, kind: &str, source: &str, options: &[&str]) {
    let mount =
        json!({"destination": destination, "type": kind, "source": source, "options": options});
    push(&mut spec["mounts"], mount);
}

#[test]
fn identity() {
    compare("differences_identity", identity::GROUPS);
}

#[test]
fn files() {
    compare("differences_files", files::GROUPS);
}

#[test]
fn mounts() {
    compare("differences_mounts", mounts::GROUPS);
}

#[test]
fn devices() {
    compare("differences_devices", devices::GROUPS);
}

#[test]
fn seccomp() {
    compare("differences_seccomp", seccomp::GROUPS);
}

#[test]
fn cgroups() {
    compare("differences_cgroups", cgroups::GROUPS);
}
