//! The kill driver: a process of a sandbox, or containerd, ends suddenly, at a point that is compiled into
//! a build for these tests, or at any moment. Then the right exit status was told, the id can be used
//! again, and nothing is left.
//!
//! Each round runs a container, a program in it, ends it with a status of its own and removes it, with one
//! sudden end somewhere on the way. Ids come back every few rounds.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use thaw_tests::{
    FAULTY, Finished, IMAGE, Testbed, Version, finish, finish_within, on_containerd, thaw,
};

/// How long the removal of a container may take, whatever has happened to it.
const REMOVAL: Duration = Duration::from_secs(120);

/// How long a start may take; the first one makes a template.
const START: Duration = Duration::from_secs(300);

/// What a container exits with when it is told to end.
const OWN: u32 = 7;

/// What is told of a container that was killed.
const KILLED: u32 = 137;

/// What is told of one whose `delete` was killed too, by containerd itself.
const UNKNOWN: u32 = 255;

/// What has to come of a container in which something ends suddenly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// It does not start.
    NotStarted,
    /// It starts, if it was quick, and is told to have been killed.
    Killed,
    /// It runs, and is told to have been killed.
    RunsAndIsKilled,
    /// It ends by itself before the sudden end of the other, and its own status is told.
    EndsItself,
    /// The shim is killed while it runs, and what cleans up behind it too.
    Lost,
}

use Outcome::{EndsItself, Killed, Lost, NotStarted, RunsAndIsKilled};

/// The points, in the order of a container's life.
const POINTS: &[(&str, Outcome)] = &[
    ("start-noting", NotStarted),
    ("start-noted", NotStarted),
    ("start-bound", NotStarted),
    ("shim-forked", NotStarted),
    ("start-unanswered", NotStarted),
    ("shim-exported", NotStarted),
    ("anchor-cloned", NotStarted),
    ("shim-anchored", NotStarted),
    ("shim-cgroup-noted", NotStarted),
    ("shim-launched", NotStarted),
    ("shim-vmm-noted", NotStarted),
    ("vmm-executed", NotStarted),
    ("vmm-jailed", NotStarted),
    ("vmm-restored", NotStarted),
    ("shim-joined", NotStarted),
    ("vmm-populated", NotStarted),
    ("shim-admitted", NotStarted),
    ("shim-mounted", NotStarted),
    ("anchor-ready", Killed),
    ("vmm-run", NotStarted),
    ("vmm-connected", NotStarted),
    ("shim-configured", NotStarted),
    ("agent-creating", NotStarted),
    ("agent-created", NotStarted),
    ("shim-created", NotStarted),
    ("agent-released", NotStarted),
    ("shim-started", NotStarted),
    ("shim-start-told", NotStarted),
    ("vmm-asked", Killed),
    ("shim-exec-added", RunsAndIsKilled),
    ("agent-exec", RunsAndIsKilled),
    ("agent-exec-started", RunsAndIsKilled),
    ("shim-exec-started", RunsAndIsKilled),
    ("agent-exited", RunsAndIsKilled),
    ("shim-exit-heard", RunsAndIsKilled),
    ("shim-exit-noted", EndsItself),
    ("shim-exit-told", EndsItself),
    ("shim-vmm-ended", EndsItself),
    ("shim-anchor-ended", EndsItself),
    ("shim-unmounted", EndsItself),
    ("shim-deleted", EndsItself),
    ("shim-ending", EndsItself),
    ("shim-unbound", EndsItself),
    ("shim-unexported", EndsItself),
    ("delete-begun", EndsItself),
    ("cleanup-killed", Lost),
    ("cleanup-cgroup", Lost),
    ("cleanup-socket", Lost),
];

/// From one point to the next: a few rounds have some of each part of a life, and enough of them have
/// each point once, since it divides nothing.
const STRIDE: usize = 11;
const _: () = assert!(!POINTS.len().is_multiple_of(STRIDE));

/// Who is killed from outside, at some moment.
#[derive(Debug, Clone, Copy)]
enum Victim {
    Shim,
    Vmm,
    Anchor,
    Containerd,
}

const VICTIMS: [Victim; 4] = [
    Victim::Shim,
    Victim::Vmm,
    Victim::Anchor,
    Victim::Containerd,
];

/// What happens in one round.
#[derive(Debug, Clone, Copy)]
enum Plan {
    /// A process ends when it gets to a point.
    Point(&'static str, Outcome),
    /// Another is killed so long after the beginning of the start.
    Moment(Victim, Duration),
}

/// What containerd tells of its tasks, as `ctr events` prints it.
struct Events {
    listener: Child,
    heard: Arc<(Mutex<Vec<String>>, Condvar)>,
}

impl Events {
    /// Listen from now on.
    fn listen(bed: &Testbed) -> Self {
        let mut command = bed.containerd().ctr();
        let listener = command.arg("events").stdout(Stdio::piped()).spawn();
        let mut listener = listener.expect("ctr is there");
        let lines = BufReader::new(listener.stdout.take().expect("it is piped")).lines();
        let heard: Arc<(Mutex<Vec<String>>, Condvar)> = Arc::default();
        let shared = heard.clone();
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let (heard, changed) = &*shared;
                let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
                heard.push(line);
                changed.notify_all();
            }
        });
        let events = Self { listener, heard };
        // It says nothing by itself: something happens until it has told of it.
        let (heard, changed) = &*events.heard;
        let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
        while heard.is_empty() {
            let label = format!("test={}", bed.next_name("label"));
            let mut command = bed.containerd().ctr();
            finish(command.args(["images", "label", IMAGE, &label])).succeeded();
            let waited = changed.wait_timeout(heard, Duration::from_millis(500));
            heard = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(heard);
        events
    }

    /// The exits of the container `id` itself that were told since the first `since` events, once there is
    /// one.
    fn exits(&self, id: &str, since: usize) -> Vec<u32> {
        let begun = Instant::now();
        let (heard, changed) = &*self.heard;
        let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let lines = heard.iter().skip(since);
            let exits: Vec<u32> = lines.filter_map(|line| exit_in(line, id)).collect();
            if !exits.is_empty() {
                return exits;
            }
            assert!(
                begun.elapsed() < REMOVAL,
                "no exit of {id} was told: {:#?}",
                heard.iter().skip(since).collect::<Vec<_>>()
            );
            let waited = changed.wait_timeout(heard, Duration::from_secs(1));
            heard = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn len(&self) -> usize {
        let heard = self.heard.0.lock();
        heard.unwrap_or_else(PoisonError::into_inner).len()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let _ = self.listener.kill();
        let _ = self.listener.wait();
    }
}

/// The status in a line of `ctr events`, if it tells of the exit of container `id`.
fn exit_in(line: &str, id: &str) -> Option<u32> {
    let (_, text) = line.split_once(" /tasks/exit ")?;
    let event: serde_json::Value = serde_json::from_str(text.trim()).ok()?;
    if event["container_id"] != id || event["id"] != id {
        return None;
    }
    // A status of 0 is left out.
    Some(event["exit_status"].as_u64().unwrap_or(0) as u32)
}

/// The container of a round.
struct Round<'a> {
    bed: &'a Testbed,
    id: String,
}

impl Round<'_> {
    fn ctr(&self, words: &[&str]) -> Finished {
        finish_within(self.bed.containerd().ctr().args(words), b"", START)
    }

    fn run(&self, options: &[&str]) -> Finished {
        let line = format!("trap 'exit {OWN}' TERM; touch /tmp/up; while :; do sleep 0.1; done");
        let mut words = vec!["run", "--detach", "--runtime", FAULTY];
        words.extend(options);
        words.extend([IMAGE, &self.id, "sh", "-c", &line]);
        self.ctr(&words)
    }

    /// Runs a program in it. When that succeeds, the container can be told to end.
    fn exec(&self) -> Finished {
        let line = "until test -e /tmp/up; do sleep 0.1; done";
        let words = [
            "tasks",
            "exec",
            "--exec-id",
            "exec",
            &self.id,
            "sh",
            "-c",
            line,
        ];
        self.ctr(&words)
    }

    /// The whole life of the container but for its removal. Returns whether it has started.
    fn live(&self, options: &[&str]) -> bool {
        let started = self.run(options);
        if started.code != 0 {
            return false;
        }
        self.exec();
        self.ctr(&["tasks", "kill", "--signal", "SIGTERM", &self.id]);
        true
    }

    /// Removes task and container, and waits until containerd has neither. What stands in the way of that
    /// goes by itself: containerd cleans up behind a shim that is gone.
    fn remove(&self) {
        let begun = Instant::now();
        loop {
            let task = self.ctr(&["tasks", "delete", "--force", &self.id]);
            // The client removes a container also when the state of its task was not told in time, and then
            // nobody can remove the task.
            let gone = task.code == 0
                || task.stderr().contains("not found")
                || task.stderr().contains("no running task");
            if gone {
                self.ctr(&["containers", "delete", &self.id]);
            }
            let left = self.ctr(&["containers", "ls", "-q"]).succeeded().stdout();
            if gone && !left.lines().any(|line| line == self.id) {
                // Left where containerd was killed between the two.
                self.ctr(&["snapshots", "rm", &self.id]);
                return;
            }
            assert!(begun.elapsed() < REMOVAL, "{task}");
            thread::sleep(Duration::from_millis(200));
        }
    }
}

/// One round with a fault point. `events` has been listening since before it.
fn round_with_point(round: &Round<'_>, events: &mut Events, point: &str, outcome: Outcome) {
    let (bed, id) = (round.bed, &round.id);
    let since = events.len();
    let log = bed.containerd().log().len();
    let variable = format!("THAW_FAULT_POINT={point}");
    let started = round.run(&["--env", &variable]);
    match outcome {
        NotStarted => assert_ne!(started.code, 0, "it has started: {started}"),
        Killed => {}
        _ => assert_eq!(started.code, 0, "{started}"),
    }
    if started.code == 0 {
        if outcome == Lost {
            let _ = kill(Pid::from_raw(thaw::processes(id).shim), Signal::SIGKILL);
        } else {
            round.exec();
            round.ctr(&["tasks", "kill", "--signal", "SIGTERM", id]);
        }
        // Its exit is told before anybody asks for its removal.
        events.exits(id, since);
    }
    if point.starts_with("agent-") {
        assert_reason(bed, log, &started);
    }
    round.remove();
    if started.code == 0 {
        // All that were told: another that differs would be taken for the right one by somebody.
        let exits = events.exits(id, since);
        let right = |exit: &u32| match outcome {
            EndsItself => *exit == OWN,
            Lost => [KILLED, UNKNOWN].contains(exit),
            _ => *exit == KILLED,
        };
        assert!(exits.iter().all(right), "{exits:?} were told");
    }
    if outcome == Lost {
        // containerd has the bundle of a `delete` that failed cleaned up when it starts the next time.
        // The next `delete` is to get through: the point is armed by the spec.
        let _ = fs::remove_file(bed.containerd().bundles().join(id).join("config.json"));
        bed.containerd().kill();
        bed.containerd().restart();
        *events = Events::listen(bed);
    }
    if point == "start-noting" {
        // Nothing but the next start knows what is left of it, for a minute.
        let since = events.len();
        assert!(round.live(&[]), "{id} does not start again");
        assert_eq!(events.exits(id, since), [OWN]);
        round.remove();
    }
}

/// The end of the agent is a panic of the guest's kernel, and the error or the log say so.
fn assert_reason(bed: &Testbed, log_before: usize, started: &Finished) {
    let begun = Instant::now();
    loop {
        let log = bed.containerd().log();
        let log = log.get(log_before..).unwrap_or_default();
        let told = format!("{}{log}", started.stderr());
        if told.contains("kernel panic in the guest: Attempted to kill init!") {
            return;
        }
        assert!(begun.elapsed() < REMOVAL, "{started}\n{log}");
        // containerd copies the shim's log when it gets to it.
        thread::sleep(Duration::from_millis(100));
    }
}

/// One round in which somebody is killed at some moment.
fn round_with_moment(round: &Round<'_>, events: &mut Events, victim: Victim, moment: Duration) {
    let since = events.len();
    let started = thread::scope(|scope| {
        let living = scope.spawn(|| round.live(&[]));
        // The moment is arbitrary: nothing is waited for.
        thread::sleep(moment);
        match victim {
            Victim::Containerd => {
                round.bed.containerd().kill();
                round.bed.containerd().restart();
            }
            _ => {
                let [shim, vmm, anchor] = thaw::noted(&round.id);
                let noted = match victim {
                    Victim::Shim => shim,
                    Victim::Vmm => vmm,
                    _ => anchor,
                };
                if let Some(pid) = noted {
                    // It may have ended by itself.
                    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                }
            }
        }
        let started = living.join();
        started.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    if let Victim::Containerd = victim {
        *events = Events::listen(round.bed);
    } else if started {
        let exits = events.exits(&round.id, since);
        let right = |exit: &u32| [OWN, KILLED].contains(exit);
        assert!(exits.iter().all(right), "{exits:?} were told");
    }
    round.remove();
}

/// `count` rounds on `bed`, one after the other, of all that there are from the one with number `first` on.
fn rounds(bed: &Testbed, first: usize, count: usize) {
    // What only the first container makes, and how long a whole life takes.
    let round = |number: usize| Round {
        bed,
        id: format!("crash-{}", number % 3),
    };
    let warm = round(0);
    assert!(warm.live(&[]), "the first container does not start");
    warm.remove();
    let begun = Instant::now();
    assert!(round(0).live(&[]), "a container does not start");
    let whole = begun.elapsed();
    round(0).remove();
    let mut events = Events::listen(bed);
    for number in first..first + count {
        let plan = plan(number, whole);
        let what = format!("round {number}, {plan:?}");
        let begun = Instant::now();
        let round = round(number);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            match plan {
                Plan::Point(point, outcome) => {
                    round_with_point(&round, &mut events, point, outcome);
                }
                Plan::Moment(victim, moment) => {
                    round_with_moment(&round, &mut events, victim, moment);
                }
            }
            // What the next start of that name would remove, or any deletion; here neither has come yet.
            thaw::thaw(&["gc"]).succeeded();
            bed.assert_clean(&what);
        }));
        println!("{what}: {:.1} s", begun.elapsed().as_secs_f64());
        if let Err(panic) = result {
            eprintln!("{what} has failed");
            std::panic::resume_unwind(panic);
        }
    }
    // The last ones' ids too.
    for number in first + count..first + count + 3 {
        let last = round(number);
        let since = events.len();
        assert!(last.live(&[]), "{} does not start again", last.id);
        assert_eq!(events.exits(&last.id, since), [OWN]);
        last.remove();
    }
}

/// What happens in round `number`: three of four times a point, each in its turn, else a moment. The seed
/// of the moments is the number.
fn plan(number: usize, whole: Duration) -> Plan {
    if number % 4 != 3 {
        let turn = number / 4 * 3 + number % 4;
        let (point, outcome) = POINTS[turn * STRIDE % POINTS.len()];
        return Plan::Point(point, outcome);
    }
    let turn = number / 4;
    let hash = (turn as u32).wrapping_mul(2_654_435_761) >> 16;
    let moment = whole.mul_f64(f64::from(hash) / 65_536.0);
    Plan::Moment(VICTIMS[turn % VICTIMS.len()], moment)
}

/// An equal part of `total` rounds on each of `versions`.
fn on_each(versions: &[Version], name: &str, total: usize) {
    let _shapes = thaw::OtherShapes::allow();
    let count = total.div_ceil(versions.len());
    for (turn, version) in versions.iter().enumerate() {
        on_containerd(*version, name, |bed| rounds(bed, turn * count, count));
    }
}

/// All that is quick enough for each run of the tests.
#[test]
fn rounds_of_sudden_ends() {
    on_each(&[Version::V1_6, Version::V2_1], "crash", 40);
}

/// `$THAW_CRASH_ROUNDS` of them.
#[test]
#[ignore = "takes an hour: make soak"]
fn soak_of_sudden_ends() {
    let total = std::env::var("THAW_CRASH_ROUNDS").ok();
    let total = total.and_then(|total| total.parse().ok()).unwrap_or(500);
    let versions = [Version::V1_6, Version::V1_7, Version::V2_1];
    on_each(&versions, "crash-soak", total);
}
