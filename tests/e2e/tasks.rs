//! What containerd asks of a task beside running it.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use thaw_tests::{Testbed, finish, on_each_containerd, thaw};

/// `ctr tasks` with these words; what it prints.
fn tasks(bed: &Testbed, words: &[&str]) -> String {
    finish(bed.containerd().ctr().arg("tasks").args(words))
        .succeeded()
        .stdout()
}

/// The topics that concern container `id` in what `ctr events` has printed.
fn topics(lines: &[String], id: &str) -> Vec<String> {
    let meant = lines
        .iter()
        .filter(|line| line.contains(&format!("\"{id}\"")));
    let topic = |line: &String| {
        let mut words = line.split_whitespace();
        words.find(|word| word.starts_with('/')).map(str::to_owned)
    };
    meant.filter_map(topic).collect()
}

/// `ctr events`, which listens when this returns; and what it prints.
fn listen(bed: &Testbed) -> (Child, std::io::Lines<BufReader<std::process::ChildStdout>>) {
    let mut command = bed.containerd().ctr();
    let mut listener = command
        .arg("events")
        .stdout(Stdio::piped())
        .spawn()
        .expect("ctr is there");
    let mut lines = BufReader::new(listener.stdout.take().expect("it is piped")).lines();
    std::thread::scope(|scope| {
        // It says nothing by itself: something happens until it has told of it.
        let heard = scope.spawn(|| lines.next());
        while !heard.is_finished() {
            let name = bed.next_name("label");
            let image = thaw_tests::IMAGE;
            finish(bed.containerd().ctr().args([
                "images",
                "label",
                image,
                &format!("test={name}"),
            ]))
            .succeeded();
        }
        heard
            .join()
            .expect("it does not panic")
            .expect("it tells")
            .expect("it is text");
    });
    (listener, lines)
}

on_each_containerd! {
    /// A program that is killed for want of memory ends with 137, and containerd hears why before.
    fn out_of_memory(bed: &Testbed) {
        let _shapes = thaw::OtherShapes::allow();
        let (mut listener, lines) = listen(bed);
        let run = bed.run().options(["--memory-limit", "50331648"]).command(["tail", "/dev/zero"]);
        run.output().ended_with(137);
        let mut seen = Vec::new();
        for line in lines {
            let line = line.expect("it is text");
            let last = line.contains("/containers/delete") && line.contains(run.id());
            seen.push(line);
            if last {
                break;
            }
        }
        listener.kill().expect("it is our child");
        listener.wait().expect("it is our child");
        let topics = topics(&seen, run.id());
        let place = |topic: &str| topics.iter().position(|one| one == topic);
        assert!(place("/tasks/oom").is_some() && place("/tasks/oom") < place("/tasks/exit"), "{topics:?}");
    }

    /// A paused container does nothing until it is resumed, and can be killed.
    fn pause(bed: &Testbed) {
        let container = bed.run().shell("while :; do date +%s%N > /tmp/now; sleep 0.05; done").detach();
        let now = || container.exec(["cat", "/tmp/now"]).succeeded().stdout();
        tasks(bed, &["pause", &container.id]);
        assert_eq!(container.status().as_deref(), Some("PAUSED"));
        tasks(bed, &["resume", &container.id]);
        assert_eq!(container.status().as_deref(), Some("RUNNING"));
        let before = now();
        while now() == before {}
        tasks(bed, &["pause", &container.id]);
        container.remove();
    }

    /// The metrics are those of the container's cgroup.
    fn metrics(bed: &Testbed) {
        let container = bed.run().shell("sleep 3600 & sleep 3600 & wait").detach();
        // The two that sleep are there when the shell waits.
        container.exec_shell("until [ $(ls -d /proc/[0-9]* | wc -l) -ge 5 ]; do :; done").succeeded();
        let text = tasks(bed, &["metrics", &container.id]);
        let value = |name: &str| -> Option<u64> {
            let line = text.lines().find(|line| line.split_whitespace().next() == Some(name))?;
            line.split_whitespace().nth(1)?.parse().ok()
        };
        assert_eq!(value("pids.current"), Some(3), "{text}");
        assert!(value("memory.usage_in_bytes").or(value("memory.usage")).is_some_and(|bytes| bytes > 0), "{text}");
        container.remove();
    }

    /// The processes of a container on the host are one: the one that stands for it.
    fn processes(bed: &Testbed) {
        let container = bed.sleeper();
        let pid = container.pid().to_string();
        let text = tasks(bed, &["ps", &container.id]);
        let pids: Vec<_> = text.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(pids, [pid.as_str()], "{text}");
        container.remove();
    }
}
