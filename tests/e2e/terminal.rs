//! Terminals of programs (field cases 1, 6 and 8).

use std::time::Duration;

use thaw_tests::task::{Output, Streams, Task, fifo, process, shell};
use thaw_tests::{Testbed, on_each_containerd};

/// An exec with a terminal, as a client makes it: FIFOs for what it reads and writes.
struct Terminal {
    task: Task,
    exec_id: &'static str,
    output: Output,
    input: std::path::PathBuf,
    _directory: tempfile::TempDir,
}

impl Terminal {
    /// Registers it.
    fn new(bed: &Testbed, task: &Task, exec_id: &'static str, program: &serde_json::Value) -> Self {
        let directory = bed.directory();
        let output = Output::new(directory.path(), "out");
        let input = fifo(directory.path(), "in");
        let streams = Streams {
            stdin: input.display().to_string(),
            stdout: output.uri(),
            terminal: true,
            ..Streams::default()
        };
        task.exec(exec_id, program, &streams)
            .expect("it can be registered");
        Self {
            task: task.clone(),
            exec_id,
            output,
            input,
            _directory: directory,
        }
    }

    /// Runs it to its end: exit status and what it has shown.
    fn run(self) -> (u32, String) {
        self.task.start(self.exec_id).expect("it can be started");
        let shown = self.output.reader().text();
        let status = self.task.wait(self.exec_id).expect("it ends");
        assert_eq!(self.task.delete(self.exec_id), Ok(status));
        (status, shown)
    }
}

on_each_containerd! {
    /// The size that was asked for before the start is there from the first moment, a later one is told
    /// to the program, and what is typed arrives.
    fn size(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        let line = "stty size; trap 'stty size; read word; echo got $word; exit 3' WINCH; echo ready; \
                    while :; do sleep 0.1; done";
        let terminal = Terminal::new(bed, &task, "one", &shell(line));
        task.resize("one", 41, 123).expect("before the start");
        task.start("one").expect("it can be started");
        let mut output = terminal.output.reader();
        let shown = output.until(|shown| shown.contains("ready"));
        assert_eq!(shown, "41 123\r\nready\r\n");
        task.resize("one", 50, 200).expect("while it runs");
        assert_eq!(output.until(|shown| shown.ends_with('\n')), "50 200\r\n");
        std::fs::write(&terminal.input, "word\n").expect("the shim reads it");
        assert_eq!(output.text(), "word\r\ngot word\r\n");
        assert_eq!(task.wait("one"), Ok(3));
        // Too late, and for what is not there: an answer, and the container goes on.
        assert!(task.resize("one", 1, 1).is_err());
        assert!(task.resize("two", 1, 1).is_err());
        // The container itself has no terminal.
        task.resize("", 10, 10).expect("nothing to do");
        assert_eq!(task.delete("one"), Ok(3));
        container.exec(["true"]).succeeded();
    }

    /// All of the output of a program that ends at once is shown, however often it is tried.
    fn short_program(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        let lines = |last: u32| -> String { (1..=last).map(|number| format!("{number}\r\n")).collect() };
        for last in std::iter::repeat_n(3000, 20).chain([100_000]) {
            let expected = lines(last);
            let terminal = Terminal::new(bed, &task, "one", &process(&["seq", "1", &last.to_string()]));
            let (status, shown) = terminal.run();
            assert_eq!(status, 0);
            assert!(shown == expected, "{} bytes of {}", shown.len(), expected.len());
        }
    }

    /// The end of a shell is the end of its exec, though a job of it holds the terminal and lives on.
    fn background_job(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        let line = "trap '' HUP; sleep 618 & echo hi; exit 5";
        let (status, shown) = Terminal::new(bed, &task, "one", &shell(line)).run();
        assert_eq!((status, shown.as_str()), (5, "hi\r\n"));
        container.exec_shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep '[s]leep 618'").succeeded();
    }

    /// A program whose output nobody reads any more can be killed, and is reported.
    fn reader_goes_away(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        let terminal = Terminal::new(bed, &task, "one", &process(&["yes"]));
        task.start("one").expect("it can be started");
        let mut output = terminal.output.reader();
        output.until(|shown| shown.len() > 10_000);
        drop(output);
        task.kill("one", 9, false).expect("it runs");
        assert_eq!(task.wait("one"), Ok(137));
        assert_eq!(task.delete("one"), Ok(137));
        container.exec(["true"]).succeeded();
    }

    /// A terminal is as alive after a long silence as before.
    #[ignore = "waits for 90 s"]
    fn silence(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        let terminal = Terminal::new(bed, &task, "one", &shell("echo ready; read word; echo got $word"));
        task.start("one").expect("it can be started");
        let mut output = terminal.output.reader();
        output.until(|shown| shown.contains("ready"));
        std::thread::sleep(Duration::from_secs(90));
        std::fs::write(&terminal.input, "ok\n").expect("the shim reads it");
        assert!(output.text().ends_with("got ok\r\n"));
        assert_eq!(task.wait("one"), Ok(0));
    }
}
