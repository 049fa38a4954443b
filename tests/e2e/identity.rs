//! Clones of one template are not alike, and their time is the host's.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use thaw_tests::{Alarm, LIMIT, Run, Testbed, Version, on_containerd, on_each_containerd};

/// What a clone says of itself.
#[derive(Debug)]
struct Clone {
    random: String,
    uuid: String,
    boot: String,
    uptime: f64,
    /// The clone's clock, and the host's before it was asked and after it has answered.
    clock: f64,
    asked: f64,
    answered: f64,
    /// The whole command.
    took: Duration,
}

/// The clock is printed when it is asked for: the time of an answer is then all that is uncertain.
const INTERVIEW: &str = "echo ready; read -r _; adjtimex > /tmp/clock; awk '/time.tv_sec/ { s = $2 } /time.tv_usec/ { u = $2 } \
     END { printf \"%d.%06d\\n\", s, u }' /tmp/clock; cut -d' ' -f1 /proc/uptime; \
     head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '; cat /proc/sys/kernel/random/uuid /proc/sys/kernel/random/boot_id";

fn host_time() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

/// Starts a container and asks it.
fn interview(run: &Run<'_>) -> Clone {
    let begun = Instant::now();
    let mut command = run.to_command(&["--rm"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("ctr is there");
    let alarm = Alarm::set(&child, LIMIT);
    let mut stdin = child.stdin.take().expect("it is piped");
    let stdout = child.stdout.take().expect("it is piped");
    let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
    assert_eq!(lines.next().as_deref(), Some("ready"));
    let asked = host_time();
    stdin.write_all(b"\n").expect("it reads");
    let clock = lines.next();
    let answered = host_time();
    drop(stdin);
    let mut rest: Vec<String> = lines.collect();
    let status = child.wait().expect("ctr is a child of this process");
    assert!(!alarm.stop() && status.success(), "{status}");
    let clock = clock
        .and_then(|line| line.trim().parse().ok())
        .expect("the first line is the time");
    assert_eq!(rest.len(), 4, "{rest:?}");
    let uptime = rest
        .remove(0)
        .trim()
        .parse()
        .expect("the second line is the uptime");
    let [random, uuid, boot] = [rest.remove(0), rest.remove(0), rest.remove(0)];
    Clone {
        random,
        uuid,
        boot,
        uptime,
        clock,
        asked,
        answered,
        took: begun.elapsed(),
    }
}

on_each_containerd! {
    /// Two that start together differ in random bytes, UUID and boot id; the clocks of both are
    /// within a second of the host's, though the template is older.
    fn two_clones(bed: &Testbed) {
        let runs = [bed.run().shell(INTERVIEW), bed.run().shell(INTERVIEW)];
        let [first, second] = std::thread::scope(|scope| {
            let [first, second] = runs.each_ref().map(|run| scope.spawn(|| interview(run)));
            [first, second].map(|clone| clone.join().expect("the interview ends"))
        });
        assert_ne!(first.random, second.random);
        assert_ne!(first.uuid, second.uuid);
        assert_ne!(first.boot, second.boot);
        for clone in [&first, &second] {
            assert!((clone.asked - 1.0..clone.answered + 1.0).contains(&clone.clock), "{clone:?}");
            assert_eq!(clone.random.len(), 32);
        }
        let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("procfs is there");
        assert_ne!(first.boot, host.trim());
    }
}

/// The monotonic clock goes on from the template's: it does not jump by the template's age.
#[test]
fn monotonic_clock_continues() {
    on_containerd(Version::V2_1, "monotonic", |bed: &Testbed| {
        let first = interview(&bed.run().shell(INTERVIEW));
        // Not to wait for something, but for the template to be older.
        std::thread::sleep(first.took * 2);
        let second = interview(&bed.run().shell(INTERVIEW));
        let between = (second.uptime - first.uptime).abs();
        let most = first.took.max(second.took).as_secs_f64();
        assert!(
            between < most,
            "uptimes {} and {}",
            first.uptime,
            second.uptime
        );
    });
}
