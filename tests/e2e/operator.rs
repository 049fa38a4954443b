//! What an operator sees and sets: the `thaw` command beside running containers, configuration, runtime
//! options and annotations.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use thaw_tests::thaw::{self, thaw};
use thaw_tests::{
    Alarm, Environment, LIMIT, NAMESPACE, Testbed, Version, finish_within, on_containerd,
};

/// The host's configuration.
const CONFIGURATION: &str = "/etc/thaw/config.toml";

/// What `thaw … --json` says.
fn json(words: &[&str]) -> Value {
    let text = thaw(&[words, &["--json"]].concat()).succeeded().stdout();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{words:?}: {error}: {text}"))
}

/// What `thaw ps --json` says of sandbox `id`.
fn listed(id: &str) -> Option<Value> {
    let all = json(&["ps"]);
    let all = all.as_array().expect("a list of sandboxes").clone();
    all.into_iter().find(|sandbox| sandbox["sandbox"] == id)
}

/// Writes a message to the kernel's log that goes to the console whatever its level is.
fn say(container: &thaw_tests::Container<'_>, word: &str) {
    container
        .exec_shell(&format!("echo '<1>{word}' > /dev/kmsg"))
        .succeeded();
}

/// A sleeping container that may write to its kernel's log.
fn speaker<'a>(bed: &'a Testbed, options: &[&str]) -> thaw_tests::Container<'a> {
    bed.run()
        .options(["--device", "/dev/kmsg"])
        .options(options.iter().copied())
        .command(["sleep", "3600"])
        .detach()
}

/// A `thaw` command that runs beside the test, and is ended with it.
struct Running {
    child: Child,
    alarm: Option<Alarm>,
}

impl Running {
    fn start(words: &[&str]) -> Self {
        let child = Command::new(Environment::get().prefix.join("bin/thaw"))
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the command is installed");
        let alarm = Some(Alarm::set(&child, LIMIT));
        Self { child, alarm }
    }

    fn lines(&mut self) -> impl Iterator<Item = String> + use<> {
        let output = self.child.stdout.take().expect("it is piped");
        BufReader::new(output).lines().map_while(Result::ok)
    }

    /// Its exit code, when it has ended by itself.
    fn ended(mut self) -> Option<i32> {
        let status = self.child.wait().expect("it is our child");
        let late = self.alarm.take().is_some_and(Alarm::stop);
        assert!(!late, "the command does not end");
        status.code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(alarm) = self.alarm.take() {
            alarm.stop();
        }
    }
}

/// `thaw ps` tells of a container as long as it is there, with what its memory and its start were.
#[test]
fn ps() {
    on_containerd(Version::V2_1, "ps", |bed| {
        let container = bed.sleeper();
        let sandbox = listed(&container.id).expect("it is listed");
        assert_eq!(sandbox["namespace"], NAMESPACE);
        assert_eq!(sandbox["state"], "running", "{sandbox:#}");
        assert_eq!(sandbox["containers"][0]["id"], container.id);
        assert_eq!(sandbox["containers"][0]["pid"], container.pid());
        assert_eq!(sandbox["shape"]["memory_mib"], 2048);
        for part in ["restore_ns", "configure_ns", "create_ns", "start_ns"] {
            assert!(
                sandbox["start"][part].as_u64().is_some_and(|ns| ns > 0),
                "{part}: {sandbox:#}"
            );
        }
        for item in ["vmm", "shim", "anchors", "page_tables"] {
            let bytes = sandbox["memory"][item].as_u64();
            assert!(bytes.is_some_and(|bytes| bytes > 0), "{item}: {sandbox:#}");
        }
        let table = thaw(&["ps"]).succeeded().stdout();
        let line = table.lines().find(|line| line.contains(&container.id));
        let words: Vec<_> = line.unwrap_or_default().split_whitespace().collect();
        assert_eq!(words.get(3), Some(&"running"), "{table}");

        container.signal("SIGKILL").succeeded();
        assert_eq!(container.ended(), 137);
        let id = container.id.clone();
        container.remove();
        // Its shim ends after containerd has what it asked for.
        let begun = std::time::Instant::now();
        while listed(&id).is_some() {
            assert!(begun.elapsed() < LIMIT, "{id} is still listed");
        }
    });
}

/// `thaw top` shows the processes of the guest, and nothing that they do to their names moves anything
/// on a terminal.
#[test]
fn top() {
    on_containerd(Version::V2_1, "top", |bed| {
        let name = "\u{1b}[2Jsleeper";
        let container = bed
            .run()
            .command(["sh", "-c", "while :; do sleep 3600; done", name])
            .detach();
        let processes = json(&["top", &container.id]);
        let processes = processes.as_array().expect("a list of processes");
        let own = processes
            .iter()
            .find(|process| process["container"] == container.id);
        let own = own.unwrap_or_else(|| panic!("not the container's: {processes:#?}"));
        assert!(
            own["resident_bytes"]
                .as_u64()
                .is_some_and(|bytes| bytes > 0),
            "{own:#}"
        );
        assert!(
            processes.iter().any(|process| process["pid"] == 1),
            "{processes:#?}"
        );
        let table = thaw(&["top", &container.id]).succeeded().stdout();
        assert!(
            table.contains("?[2Jsleeper") && !table.contains('\u{1b}'),
            "{table:?}"
        );
        container.remove();

        let refused = thaw(&["top", "nobody"]).ended_with(1).stderr();
        assert!(
            refused.contains("there is no sandbox or container \"nobody\""),
            "{refused}"
        );
    });
}

/// `thaw logs` shows the guest's console, follows it to the end of its sandbox, and finds it after that
/// where it is kept.
#[test]
fn logs() {
    on_containerd(Version::V2_1, "logs", |bed| {
        let container = speaker(bed, &["--annotation", "io.thaw.console=keep"]);
        say(&container, "first-word");
        let mut following = Running::start(&["logs", "-f", &container.id]);
        let mut lines = following.lines();
        assert!(
            lines.any(|line| line.contains("first-word")),
            "it ends before it says a word"
        );
        say(&container, "second-word");
        assert!(
            lines.any(|line| line.contains("second-word")),
            "it does not follow"
        );
        let shown = thaw(&["logs", &container.id]).succeeded().stdout();
        assert!(
            shown.contains("first-word") && shown.contains("second-word"),
            "{shown}"
        );
        let id = container.id.clone();
        container.remove();
        // To its end, whatever else the guest has said.
        lines.for_each(drop);
        assert_eq!(following.ended(), Some(0));

        let kept = json(&["logs", &id]).to_string();
        assert!(kept.contains("second-word"), "{kept}");

        let quiet = speaker(bed, &["--annotation", "io.thaw.console=off"]);
        say(&quiet, "third-word");
        let shown = thaw(&["logs", &quiet.id]).succeeded().stdout();
        assert_eq!(shown, "");
        let id = quiet.id.clone();
        quiet.remove();
        let refused = thaw(&["logs", &id]).ended_with(1).stderr();
        assert!(
            refused.contains("nor is the console of an ended one kept"),
            "{refused}"
        );
    });
}

/// The value of a sample in a text of metrics.
fn metric(text: &str, name: &str) -> f64 {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(&format!("{name} ")));
    let line = line.unwrap_or_else(|| panic!("no {name} in {text}"));
    line.parse()
        .unwrap_or_else(|error| panic!("{name}: {line}: {error}"))
}

/// `thaw metrics` counts starts and failures and tells of what there is, on its output and on a socket.
#[test]
fn metrics() {
    on_containerd(Version::V2_1, "metrics", |bed| {
        let read = || thaw(&["metrics"]).succeeded().stdout();
        let starts = |text: &str| metric(text, "thaw_starts_total");
        let created = "thaw_start_phase_seconds_count{phase=\"create\"}";
        let before = read();
        let container = bed.sleeper();
        // Counted beside the answer to containerd.
        let begun = std::time::Instant::now();
        let mut after = read();
        while starts(&after) < starts(&before) + 1.0 {
            assert!(begun.elapsed() < LIMIT, "the start is not counted: {after}");
            after = read();
        }
        assert!(metric(&after, created) >= 1.0);
        assert!(
            metric(&after, "thaw_sandboxes{state=\"running\"}") >= 1.0,
            "{after}"
        );
        assert!(
            metric(&after, "thaw_templates{state=\"verified\"}") >= 1.0,
            "{after}"
        );
        assert!(
            metric(&after, "thaw_memory_bytes{item=\"vmm\"}") > 0.0,
            "{after}"
        );
        container.remove();

        let refused = bed
            .run()
            .options(["--annotation", "io.thaw.vcpus=2"])
            .command(["true"]);
        assert_ne!(refused.output().code, 0);
        let failures =
            "thaw_start_failures_total{reason=\"invalid_argument\",after=\"start received\"}";
        assert!(metric(&read(), failures) >= 1.0);

        let directory = bed.directory();
        let socket = directory.path().join("metrics.sock");
        let address = format!("unix:{}", socket.display());
        let serving = Running::start(&["metrics", "--listen", &address]);
        let begun = std::time::Instant::now();
        let mut stream = loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => break stream,
                Err(error) => assert!(begun.elapsed() < LIMIT, "nobody listens: {error}"),
            }
        };
        let mut answer = String::new();
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nHost: thaw\r\n\r\n")
            .expect("it listens");
        stream.read_to_string(&mut answer).expect("it answers");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(starts(&answer) >= starts(&after), "{answer}");
        drop(serving);
    });
}

/// After everything of a sandbox was killed, and with what a crash of the host has left, `thaw gc` tells
/// what it would remove, removes it, and has nothing more to do then; what lives stays.
#[test]
fn gc() {
    on_containerd(Version::V2_1, "gc", |bed| {
        let alive = bed.sleeper();
        // As a crash would leave it, with a process that is somebody else's by now.
        let stale = Path::new("/run/thaw").join(NAMESPACE).join("stale");
        let socket = bed.directory();
        let socket = socket.path().join("stale.sock");
        fs::create_dir_all(stale.join("export")).expect("the test is root");
        fs::write(&socket, "").expect("the directory is there");
        let own = serde_json::json!({ "pid": std::process::id(), "start_time": start_time() });
        let facts = serde_json::json!({
            "format": 1, "namespace": NAMESPACE, "sandbox": "stale", "boot": "another",
            "socket": socket, "shim": own, "vmm": own,
            "containers": { "stale": { "bundle": "/none", "anchor": own } },
        });
        fs::write(stale.join("facts.json"), facts.to_string()).expect("the test is root");
        let abandoned = Path::new("/var/lib/thaw/templates/.building-1-test");
        fs::create_dir_all(abandoned).expect("the test is root");

        let dry = thaw(&["gc", "-n"]).succeeded().stdout();
        for path in [stale.as_path(), abandoned] {
            assert!(
                dry.contains(&format!("would remove {}\n", path.display())),
                "{dry}"
            );
        }
        assert!(
            !dry.contains(&alive.id) && stale.exists() && abandoned.exists(),
            "{dry}"
        );
        let done = json(&["gc"]);
        let done = done.as_array().expect("a list");
        assert!(
            done.iter().all(|one| one["outcome"] == "removed"),
            "{done:#?}"
        );
        assert!(!stale.exists() && !socket.exists() && !abandoned.exists());
        assert_eq!(
            alive.exec(["echo", "alive"]).succeeded().stdout(),
            "alive\n"
        );
        assert_eq!(json(&["gc", "-n"]).as_array().map(Vec::len), Some(0));
        alive.remove();

        let container = bed.sleeper();
        let processes = thaw::processes(&container.id);
        for pid in [processes.shim, processes.vmm, processes.anchor] {
            // The death of one may have been that of another.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        // containerd asks for a removal too: who is first does not matter.
        let begun = std::time::Instant::now();
        while listed(&container.id).is_some() {
            thaw(&["gc"]);
            assert!(begun.elapsed() < LIMIT, "{} is not removed", container.id);
        }
        container.remove();
    });
}

/// When this process has started, in ticks since the host's boot.
fn start_time() -> u64 {
    let stat = fs::read_to_string("/proc/self/stat").expect("procfs is there");
    let after = stat.rsplit_once(") ").expect("it has a name").1;
    let field = after
        .split_ascii_whitespace()
        .nth(19)
        .and_then(|field| field.parse().ok());
    field.expect("it has a start time")
}

/// What is not known is refused by its name before anything is started, wherever it stands.
#[test]
fn refused_by_name() {
    on_containerd(Version::V2_1, "refused", |bed| {
        let refused = |options: &[&str], expected: &[&str]| {
            let run = bed.run().options(options.iter().copied()).command(["true"]);
            let output = run.output();
            assert_ne!(output.code, 0, "{output}");
            let text = output.stderr();
            assert!(expected.iter().all(|part| text.contains(part)), "{text}");
            assert!(
                listed(run.id()).is_none(),
                "something was started for {options:?}"
            );
        };
        refused(
            &["--annotation", "io.thaw.vcpus=2"],
            &[
                "annotation io.thaw.vcpus: there is no field",
                "default_vcpus",
            ],
        );
        refused(
            &["--annotation", "io.thaw.console=loud"],
            &["annotation io.thaw.console: console is one of off, on, keep"],
        );
        let directory = bed.directory();
        let path = directory.path().join("options.toml");
        let path = path.to_str().expect("its name is text");
        refused(&["--runtime-config-path", path], &[path, "no such file"]);
        fs::write(path, "\nmax_vcpu = 3\n").expect("the directory is there");
        refused(
            &["--runtime-config-path", path],
            &[path, "line 2: there is no field \"max_vcpu\""],
        );

        let _configuration = Configuration::write("console = \"on\"\nlog_level = 5\n");
        refused(
            &[],
            &[
                CONFIGURATION,
                "line 2: log_level is one of error, warning, info, debug",
            ],
        );
        let doctor = thaw(&["doctor"]).stdout();
        assert!(doctor.contains("line 2: log_level is one of"), "{doctor}");
    });
}

/// The host's configuration, while a test runs.
struct Configuration;

impl Configuration {
    fn write(text: &str) -> Self {
        let path = Path::new(CONFIGURATION);
        fs::create_dir_all(path.parent().expect("it has a directory")).expect("the test is root");
        fs::write(path, text).expect("the test is root");
        Self
    }
}

impl Drop for Configuration {
    fn drop(&mut self) {
        let _ = fs::remove_file(CONFIGURATION);
    }
}

/// What is set has its effect: an annotation before runtime options, those before the configuration.
#[test]
fn settings_have_their_effect() {
    on_containerd(Version::V2_1, "settings", |bed| {
        let _shapes = thaw::OtherShapes::allow();
        let directory = bed.directory();
        let path = directory.path().join("options.toml");
        let path = path.to_str().expect("its name is text");
        // One other shape is enough: each takes a template, which is built beforehand.
        fs::write(path, "default_memory_mib = 128\n").expect("it is there");
        let _configuration = Configuration::write(
            "default_memory_mib = 1024\nmemory_overhead_mib = 32\nmax_vcpus = 1\n",
        );
        let mut build = Command::new(Environment::get().prefix.join("bin/thaw"));
        build.args(["template", "build", "--vcpus", "1", "--memory", "128"]);
        finish_within(&mut build, b"", 2 * LIMIT).succeeded();
        let memory = |options: &[&str]| {
            let container = bed
                .run()
                .options(options.iter().copied())
                .command(["sleep", "3600"])
                .detach();
            let sandbox = listed(&container.id).expect("it is listed");
            container.remove();
            sandbox["shape"]["memory_mib"].as_u64()
        };
        // 96 MiB and the overhead of the configuration are what the smallest class holds.
        assert_eq!(memory(&["--memory-limit", "100663296"]), Some(128));
        assert_eq!(memory(&["--runtime-config-path", path]), Some(128));
        fs::write(path, "default_memory_mib = 512\n").expect("it is there");
        let annotation = ["--annotation", "io.thaw.default_memory_mib=128"];
        let both = [&["--runtime-config-path", path], &annotation[..]].concat();
        assert_eq!(memory(&both), Some(128));
    });
}
