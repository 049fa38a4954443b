//! Not a byte is lost or changed on the standard streams.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;

use tempfile::TempDir;
use thaw_tests::task::{Output, Streams, Task, fifo, process, shell};
use thaw_tests::{Finished, NAMESPACE, Testbed, finish_when_ready, on_each_containerd};

/// The numbers up to `last`, one a line.
fn numbers(last: u32) -> Vec<u8> {
    (1..=last)
        .flat_map(|number| format!("{number}\n").into_bytes())
        .collect()
}

/// How often a burst is made, by containers and by programs in one: fifty times in all.
const CONTAINERS: usize = 10;
const EXECS: usize = 40;
/// How many of them at once.
const AT_ONCE: usize = 5;

/// A file of 100,000 lines, and options that have it at `/numbers`: to write them is what is tried, and
/// not to make them.
fn lines(bed: &Testbed) -> (TempDir, [String; 2]) {
    let directory = bed.directory();
    let file = directory.path().join("numbers");
    std::fs::write(&file, numbers(100_000)).expect("it can be written");
    let options = super::volumes::mount(&file, "/numbers", "ro");
    (directory, options)
}

/// Has `burst` write those lines to standard error and exit at once, `times` times.
fn bursts(times: usize, burst: impl Fn(&str) -> Finished + Sync) {
    let expected = numbers(100_000);
    let burst = || {
        let ended = burst("cat /numbers >&2; exit 3");
        let (lines, bytes) = (
            ended.err.iter().filter(|byte| **byte == b'\n').count(),
            ended.err.len(),
        );
        assert!(
            ended.err == expected,
            "{lines} lines, {bytes} bytes of {} came",
            expected.len()
        );
        ended.ended_with(3);
    };
    for _ in 0..times / AT_ONCE {
        std::thread::scope(|scope| {
            for _ in 0..AT_ONCE {
                scope.spawn(burst);
            }
        });
    }
}

on_each_containerd! {
    /// 60 MB go in and come out unchanged.
    fn sixty_megabytes_through_cat(bed: &Testbed) {
        let mut input = vec![0; 60_000_000];
        let mut random = std::fs::File::open("/dev/urandom").expect("the kernel has random bytes");
        random.read_exact(&mut input).expect("without end");
        let run = bed.run().command(["cat"]).output_with_input(&input).succeeded();
        assert!(run.out == input, "{} of {} bytes came, or others", run.out.len(), input.len());
    }

    /// The end of a great deal of output is there, though the program ends at once.
    fn burst_then_exit(bed: &Testbed) {
        let (_directory, options) = lines(bed);
        bursts(CONTAINERS, |line| bed.run().options(options.clone()).shell(line).output());
        let sleeper = bed.run().options(options).command(["sleep", "3600"]).detach();
        bursts(EXECS, |line| sleeper.exec_shell(line));
        let run = bed.run().command(["seq", "1", "100000"]).output().succeeded();
        assert!(run.out == numbers(100_000), "{run}");
    }

    /// A program sees the end of an input in which there was nothing.
    fn no_input(bed: &Testbed) {
        let line = "echo ready; cat; echo done";
        let run = bed.run().shell(line).output_with_input_when_ready(b"").succeeded();
        assert_eq!(run.stdout(), "done\n");
        let sleeper = bed.sleeper();
        let exec = finish_when_ready(&mut sleeper.exec_command(["sh", "-c", line]), b"").succeeded();
        assert_eq!(exec.stdout(), "done\n");
    }

    /// The end of the input reaches the program while its output stays open.
    fn half_close(bed: &Testbed) {
        let line = "echo ready; cat > /tmp/in; wc -c < /tmp/in";
        let run = bed.run().shell(line).output_with_input_when_ready(&[b'x'; 100_000]).succeeded();
        assert_eq!(run.stdout(), "100000\n");
    }

    /// A last line without a newline is delivered as it is.
    fn unterminated_line(bed: &Testbed) {
        let run = bed.run().command(["printf", "no newline"]).output().succeeded();
        assert_eq!(run.stdout(), "no newline");
    }

    /// A program that does not read its input ends all the same.
    fn unread_input(bed: &Testbed) {
        bed.run().command(["true"]).output_with_input(&vec![b'x'; 1_000_000]).succeeded();
    }

    /// A logger of the host has all of a detached container's output when the task is deleted.
    fn logger(bed: &Testbed) {
        let directory = bed.directory();
        let [program, log] = ["logger", "log"].map(|name| directory.path().join(name));
        // Both at once: an end of one says nothing of the other's.
        let script = "#!/bin/sh\nexec 5>&-\necho \"$CONTAINER_NAMESPACE/$CONTAINER_ID $1=$2\" > \"$2.name\"\n\
                      cat <&4 > \"$2.err\" &\ncat <&3 > \"$2.out\"\nwait\n";
        std::fs::write(&program, script).expect("the tests' directory can be written");
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
        let uri = format!("binary://{}?log={}", program.display(), log.display());
        let run = bed.run().options(["--log-uri", &uri]).shell("echo error >&2; seq 1 100000; exit 4");
        let container = run.detach();
        let id = container.id.clone();
        assert_eq!(container.ended(), 4);
        let written = |suffix: &str| {
            let path = log.with_extension(suffix);
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        let name = format!("{NAMESPACE}/{id} log={}\n", log.display());
        assert_eq!(String::from_utf8_lossy(&written("name")), name);
        assert_eq!(written("err"), b"error\n");
        let (out, expected) = (written("out"), numbers(100_000));
        assert!(out == expected, "{} bytes of {}", out.len(), expected.len());
    }

    /// A file takes both streams of a detached container, after what it had before (field case 5).
    fn file(bed: &Testbed) {
        let directory = bed.directory();
        let log = directory.path().join("deep/down/log");
        for _ in 0..2 {
            let uri = format!("file://{}", log.display());
            let line = "echo one; echo two >&2; seq 1 10000; printf three; exit 4";
            let container = bed.run().options(["--log-uri", &uri]).shell(line).detach();
            assert_eq!(container.ended(), 4);
            container.remove();
        }
        let text = std::fs::read_to_string(&log).expect("it was made");
        // Two streams: what is on the one may come between any two bytes of the other.
        let out = format!("one\n{}three", String::from_utf8_lossy(&numbers(10_000)));
        assert_eq!(text.matches("two\n").count(), 2);
        assert!(text.replace("two\n", "") == out.repeat(2), "{} bytes of {}", text.len(), 2 * (out.len() + 4));
    }

    /// A logger that is not there, or no logger at all, is an error that names it, and leaves nothing.
    fn unfit_log(bed: &Testbed) {
        for (uri, name) in [("binary:///no/such/logger", "/no/such/logger"), ("odd:///tmp/log", "odd")] {
            let run = bed.run().options(["--log-uri", uri]).command(["true"]);
            let ended = thaw_tests::finish(&mut run.to_command(&["--detach"]));
            assert!(ended.code != 0, "{ended}");
            assert!(ended.stderr().contains(name), "{ended}");
        }
        bed.remove_containers();
        bed.assert_clean("logs that cannot be");
    }

    /// What was written before the end of the input was told arrives whole before that end.
    fn input_before_its_end(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        let directory = bed.directory();
        let data = numbers(200_000);
        let output = Output::new(directory.path(), "out");
        let input = fifo(directory.path(), "in");
        let streams = Streams { stdin: input.display().to_string(), stdout: output.uri(), ..Streams::default() };
        task.exec("one", &process(&["cat"]), &streams).expect("it can be registered");
        task.start("one").expect("it can be started");
        let said = std::thread::scope(|scope| {
            let said = scope.spawn(|| output.reader().text());
            std::fs::write(&input, &data).expect("the shim reads it");
            task.close_input("one").expect("it runs");
            said.join().expect("it does not panic")
        });
        assert!(said.as_bytes() == data, "{} of {} bytes came", said.len(), data.len());
        assert_eq!(task.wait("one"), Ok(0));
    }

    /// The end of an input that there never was does not end the output (field case 3).
    fn end_of_no_input(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        let directory = bed.directory();
        let output = Output::new(directory.path(), "out");
        let streams = Streams { stdout: output.uri(), ..Streams::default() };
        let line = "cat; for n in 1 2 3; do echo $n; sleep 0.3; done";
        task.exec("one", &shell(line), &streams).expect("it can be registered");
        task.start("one").expect("it can be started");
        task.close_input("one").expect("it runs");
        assert_eq!(output.reader().text(), "1\n2\n3\n");
        assert_eq!(task.wait("one"), Ok(0));
    }
}
