//! Limits of a container that runs, and its counters (field case 52).

use std::fs;
use std::path::Path;

use serde_json::json;
use thaw_tests::task::{Task, process, shell};
use thaw_tests::{Container, NAMESPACE, Testbed, on_each_containerd};

/// What files of the container's own cgroup say, in the container.
fn cgroup(container: &Container<'_>, files: &[&str]) -> String {
    let line = format!(
        "cd /sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup) && cat {}",
        files.join(" ")
    );
    container.exec_shell(&line).succeeded().stdout()
}

/// A container that sees its cgroup.
fn sleeper(bed: &Testbed) -> Container<'_> {
    let mount = "type=cgroup,src=cgroup,dst=/sys/fs/cgroup,options=ro:nosuid:noexec:nodev";
    bed.run()
        .options(["--mount", mount])
        .command(["sleep", "3600"])
        .detach()
}

const FILES: [&str; 5] = [
    "memory.max",
    "cpu.weight",
    "cpu.max",
    "pids.max",
    "memory.high",
];

on_each_containerd! {
    /// An update changes what it names, and nothing else.
    fn update(bed: &Testbed) {
        let container = sleeper(bed);
        let task = Task::of(bed, &container);
        let resources = json!({
            "memory": {"limit": 100 << 20}, "cpu": {"shares": 2, "quota": 50_000, "period": 100_000, "cpus": "0"},
            "pids": {"limit": 50}, "unified": {"memory.high": "83886080"},
        });
        task.update(&resources).expect("the kernel takes them");
        let said = cgroup(&container, &FILES);
        assert_eq!(said, "104857600\n1\n50000 100000\n50\n83886080\n");
        assert_eq!(cgroup(&container, &["cpuset.cpus.effective"]), "0\n");
        task.update(&json!({"pids": {"limit": -1}})).expect("the kernel takes it");
        let said = cgroup(&container, &FILES);
        assert_eq!(said, "104857600\n1\n50000 100000\nmax\n83886080\n");
        // In force: one more than there may be.
        task.update(&json!({"pids": {"limit": 10}})).expect("the kernel takes it");
        let many = "for n in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 1 & done; wait";
        let many = container.exec_shell(many);
        assert!(many.stderr().contains("can't fork"), "{many}");
    }

    /// What the kernel kills for want of memory is counted, and the count is told for as long as there is
    /// a task.
    fn kills_for_memory(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        let directory = bed.directory();
        task.update(&json!({"memory": {"limit": 30 << 20, "swap": 30 << 20}})).expect("the kernel takes it");
        let (status, _, _) = task.run(directory.path(), "one", &process(&["tail", "/dev/zero"]));
        assert_eq!(status, 137);
        let metrics = task.metrics().expect("it runs");
        assert!(metrics.memory_events.oom_kill >= 1, "{metrics}");
        assert_eq!(metrics.memory.usage_limit, 30 << 20);
        container.exec(["true"]).succeeded();
    }

    /// The counters are the container's, while it runs, and while it is frozen.
    fn counters(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        let directory = bed.directory();
        let metrics = || task.metrics().expect("it is there");
        let before = metrics();
        assert_eq!(before.pids.current, 1);
        let line = "dd if=/dev/zero of=/dev/shm/x bs=1M count=30 2>/dev/null; \
                    i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done";
        assert_eq!(task.run(directory.path(), "one", &shell(line)).0, 0);
        let after = metrics();
        assert!(after.memory.shmem >= 30 << 20 && after.memory.usage >= 30 << 20, "{after}");
        assert!(after.cpu.usage_usec > before.cpu.usage_usec, "{before}\n{after}");
        assert!(after.memory.pgfault > before.memory.pgfault, "{before}\n{after}");
        task.pause().expect("it runs");
        let frozen = metrics();
        assert!(frozen.cpu.usage_usec >= after.cpu.usage_usec, "{frozen}");
        assert_eq!(frozen.pids.current, 1);
        task.resume().expect("it is frozen");
    }
}

/// With thaw alone.
mod thaw {
    use super::*;

    on_each_containerd! {
        /// A limit that the kernel does not take is refused by name, and all are as before.
        fn update_that_is_refused(bed: &Testbed) {
            let container = sleeper(bed);
            let task = Task::of(bed, &container);
            let before = cgroup(&container, &FILES);
            let cases = [
                (json!({"cpu": {"quota": 10, "period": 100_000}}), "cpu.max"),
                (json!({"pids": {"limit": 50}, "unified": {"memory.high": "much"}}), "memory.high"),
                (json!({"cpu": {"shares": 2}, "unified": {"no.such": "1"}}), "no.such"),
                (json!({"cpu": {"shares": 2}, "unified": {"../x": "1"}}), "../x"),
                (json!({"cpu": {"shares": 2}, "memory": {"limit": "many"}}), "memory.limit"),
                (json!({"cpu": {"cpus": "500"}}), "cpuset.cpus"),
            ];
            for (resources, name) in cases {
                let refusal = task.update(&resources).expect_err("no such limit");
                assert!(refusal.message.contains(name), "{name}: {refusal:?}");
                assert_eq!(cgroup(&container, &FILES), before, "after {resources}");
            }
        }

        /// The last counters are told until the task is deleted.
        fn counters_of_an_ended_container(bed: &Testbed) {
            let container = bed.run().shell("i=0; while [ $i -lt 1000 ]; do i=$((i+1)); done; read x; exit 3").detach();
            let task = Task::of(bed, &container);
            let _ = task.kill("", 9, false);
            task.wait("").expect("it ends");
            let metrics = task.metrics().expect("it is not deleted");
            assert!(metrics.cpu.usage_usec > 0 && metrics.memory.pgfault > 0, "{metrics}");
            assert!(metrics.memory_events.is_some() && metrics.pids.is_some() && metrics.io.is_some());
            container.ended();
            container.remove();
        }

        /// Whatever part runc has in its counters, thaw has too.
        fn counters_beside_runc(bed: &Testbed) {
            let thaw = bed.sleeper();
            let runc = bed.run().runtime("io.containerd.runc.v2").command(["sleep", "3600"]).detach();
            let [of_thaw, of_runc] = [&thaw, &runc].map(|container| Task::of(bed, container).metrics().expect("it runs"));
            let parts = |metrics: &containerd_shim_protos::cgroups_v2::metrics::Metrics| {
                let (cpu, memory, io) = (&metrics.cpu, &metrics.memory, &metrics.io);
                [
                    ("pids", metrics.pids.is_some()),
                    ("cpu", cpu.is_some()),
                    ("memory", memory.is_some()),
                    ("rdma", metrics.rdma.is_some()),
                    ("io", io.is_some()),
                    ("hugetlb", !metrics.hugetlb.is_empty()),
                    ("memory_events", metrics.memory_events.is_some()),
                    ("memory.usage", memory.usage > 0),
                    ("memory.usage_limit", memory.usage_limit > 0),
                    ("memory.anon", memory.anon > 0),
                    ("memory.pgfault", memory.pgfault > 0),
                    ("cpu.usage_usec", cpu.usage_usec > 0),
                ]
            };
            for ((name, in_thaw), (_, in_runc)) in parts(&of_thaw).into_iter().zip(parts(&of_runc)) {
                assert!(in_thaw || !in_runc, "no {name}: {of_thaw}\nas runc has: {of_runc}");
            }
            thaw.remove();
            runc.remove();
            // runc leaves the cgroup of containerd's namespace behind, which is nothing of thaw's.
            let _ = fs::remove_dir(Path::new("/sys/fs/cgroup").join(NAMESPACE));
        }
    }
}
