//! Signals, and the exit statuses that follow from them (field cases 10 and 12).

use thaw_tests::task::{Streams, Task, process, shell};
use thaw_tests::{Container, on_each_containerd};

const TERM: u32 = 15;
const KILL: u32 = 9;
const USR1: u32 = 10;

/// Writes a line to a file for each TERM, and ends on USR1. The `wait` matters: a shell that waits for a
/// program of its own sees two signals as one.
const COUNTER: &str = "trap 'echo TERM >> /tmp/NAME' TERM; trap 'exit 4' USR1; echo > /tmp/NAME.ready; \
                       while :; do sleep 0.1 & wait $!; done";

fn counter(name: &str) -> String {
    COUNTER.replace("NAME", name)
}

/// Waits until a test of the container's shell succeeds.
fn until(container: &Container<'_>, test: &str) {
    container
        .exec_shell(&format!("until {test}; do sleep 0.1; done"))
        .succeeded();
}

/// How many TERMs a counter has had.
fn terms(container: &Container<'_>, name: &str) -> String {
    let line = format!("touch /tmp/{name}; wc -l < /tmp/{name}");
    container
        .exec_shell(&line)
        .succeeded()
        .stdout()
        .trim()
        .to_owned()
}

on_each_containerd! {
    /// Each signal that ends a program does so, real-time ones among them, and the status has its number.
    fn each_number(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        for signal in [1, 2, 3, 4, 6, 9, 10, 13, 14, 15, 31, 34, 35, 50, 64] {
            task.exec("one", &process(&["sleep", "600"]), &Streams::default()).expect("it can be registered");
            task.start("one").expect("it can be started");
            // None of these ends anything: 0 asks whether there is somebody.
            for harmless in [0, 17, 18, 28] {
                task.kill("one", harmless, false).expect("it runs");
            }
            task.kill("one", signal, false).expect("it runs");
            assert_eq!(task.wait("one"), Ok(128 + signal));
            assert!(task.kill("one", TERM, false).is_err(), "it has ended");
            assert_eq!(task.delete("one"), Ok(128 + signal));
        }
    }

    /// What is no signal is refused, and disturbs nobody.
    fn no_signal(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        for signal in [65, 1000, u32::MAX] {
            for all in [false, true] {
                assert!(task.kill("", signal, all).is_err(), "{signal}");
            }
        }
        for all in [false, true] {
            task.kill("", 0, all).expect("it runs");
        }
        assert!(task.kill("none", TERM, false).is_err());
        assert_eq!(container.status().as_deref(), Some("RUNNING"));
    }

    /// A first process without a handler ignores what would end others, but for SIGKILL.
    fn first_process_without_a_handler(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        for signal in [TERM, 2, 34] {
            task.kill("", signal, false).expect("it runs");
        }
        container.exec(["true"]).succeeded();
        assert_eq!(container.status().as_deref(), Some("RUNNING"));
        task.kill("", KILL, false).expect("it runs");
        assert_eq!(task.wait(""), Ok(137));
    }

    /// A signal reaches those that it is for, once, and nobody else.
    fn once_each(bed: &Testbed) {
        let container = bed.run().shell(&counter("first")).detach();
        let task = Task::of(bed, &container);
        task.exec("one", &shell(&counter("exec")), &Streams::default()).expect("it can be registered");
        task.start("one").expect("it can be started");
        until(&container, "test -e /tmp/first.ready && test -e /tmp/exec.ready");
        task.kill("", TERM, false).expect("it runs");
        until(&container, "test -s /tmp/first");
        assert_eq!((terms(&container, "first"), terms(&container, "exec")), ("1".into(), "0".into()));
        task.kill("one", TERM, false).expect("it runs");
        until(&container, "test -s /tmp/exec");
        assert_eq!((terms(&container, "first"), terms(&container, "exec")), ("1".into(), "1".into()));
        task.kill("", TERM, true).expect("it runs");
        until(&container, "test $(cat /tmp/first /tmp/exec | wc -l) -ge 4");
        // What comes later would be seen before the end that this asks for.
        task.kill("one", USR1, false).expect("it runs");
        assert_eq!(task.wait("one"), Ok(4));
        assert_eq!((terms(&container, "first"), terms(&container, "exec")), ("2".into(), "2".into()));
        task.kill("", USR1, false).expect("it runs");
        assert_eq!(task.wait(""), Ok(4));
    }

    /// What a first process hands on, as the init does that clients put before a program, arrives once (field
    /// case 10).
    fn once_behind_an_init(bed: &Testbed) {
        let child = counter("child");
        let init = format!(
            "({child}) & child=$!; echo $child > /tmp/pid; trap 'kill -TERM $child' TERM; \
             while kill -0 $child 2> /dev/null; do wait $child; status=$?; done; exit $status"
        );
        let container = bed.run().shell(&init).detach();
        let task = Task::of(bed, &container);
        until(&container, "test -e /tmp/child.ready");
        for count in ["1", "2"] {
            task.kill("", TERM, false).expect("it runs");
            until(&container, &format!("test $(wc -l < /tmp/child) -ge {count}"));
            assert_eq!(terms(&container, "child"), count);
        }
        // Its end is that of the container, and so perhaps of this.
        drop(container.exec_shell("kill -USR1 $(cat /tmp/pid)"));
        assert_eq!(task.wait(""), Ok(4));
    }

    /// A program's own status is told as it is, whatever a runtime uses the numbers for, to whoever asks,
    /// before and after the end.
    fn statuses(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        for status in [0, 1, 7, 126, 127, 128, 137, 255] {
            task.exec("one", &shell(&format!("exit {status}")), &Streams::default()).expect("it can be registered");
            std::thread::scope(|scope| {
                let early = [(); 2].map(|()| scope.spawn(|| task.wait("one")));
                task.start("one").expect("it can be started");
                for waited in early {
                    assert_eq!(waited.join().expect("it returns"), Ok(status));
                }
            });
            assert_eq!(task.wait("one"), Ok(status));
            assert_eq!(task.delete("one"), Ok(status));
        }
    }
}
