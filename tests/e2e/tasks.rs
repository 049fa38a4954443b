//! What containerd asks of a task beside running it.

use thaw_tests::{Testbed, finish, on_each_containerd};

/// `ctr tasks` with these words; what it prints.
fn tasks(bed: &Testbed, words: &[&str]) -> String {
    finish(bed.containerd().ctr().arg("tasks").args(words))
        .succeeded()
        .stdout()
}

on_each_containerd! {
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
