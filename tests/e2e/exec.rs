//! Programs are run in containers that run already.

use serde_json::json;
use thaw_tests::task::{Output, Streams, Task, fifo, process, shell};
use thaw_tests::{Testbed, Version, on_containerd, on_each_containerd};

/// How many execs a burst has.
const MANY: usize = 200;

on_each_containerd! {
    /// Output and status are the program's, and the container goes on.
    fn output_and_status(bed: &Testbed) {
        let container = bed.sleeper();
        let exec = container.exec_shell("echo out; echo err >&2").succeeded();
        assert_eq!((exec.stdout(), exec.stderr()), ("out\n".into(), "err\n".into()));
        for code in [1, 7, 137] {
            container.exec_shell(&format!("exit {code}")).ended_with(code);
        }
        container.exec_shell("kill -9 $$").ended_with(137);
        assert_eq!(container.status().as_deref(), Some("RUNNING"));
    }

    /// It is in the container: same processes, same files, same host name.
    fn same_container(bed: &Testbed) {
        let container = bed.run().shell("echo made > /tmp/made; hostname > /tmp/name; exec sleep 3600").detach();
        let exec = container.exec_shell("tr '\\0' ' ' < /proc/1/cmdline; cat /tmp/made; hostname | cmp - /tmp/name");
        assert_eq!(exec.succeeded().stdout(), "sleep 3600 made\n");
    }

    /// It has the container's user and environment.
    fn same_user(bed: &Testbed) {
        let container = bed.run().as_user().options(["--env", "GREETING=hello"]).command(["sleep", "3600"]).detach();
        let exec = container.exec_shell("id -u; id -g; echo $GREETING").succeeded();
        assert_eq!(exec.stdout(), "1000\n1000\nhello\n");
    }

    /// Several at once do not disturb each other.
    fn side_by_side(bed: &Testbed) {
        let container = bed.sleeper();
        std::thread::scope(|scope| {
            let runs: Vec<_> = (0..4)
                .map(|n| {
                    let mut command = container.exec_command(["sh", "-c", &format!("seq {n} 5000; exit {n}")]);
                    scope.spawn(move || thaw_tests::finish(&mut command))
                })
                .collect();
            for (n, run) in runs.into_iter().enumerate() {
                let run = run.join().expect("the command ends").ended_with(n as i32);
                let expected: Vec<String> = (n..=5000).map(|line| format!("{line}\n")).collect();
                assert!(run.stdout() == expected.concat(), "{run}");
            }
        });
    }

    /// A program that is not there is an error that names it, and the container goes on.
    fn missing_program(bed: &Testbed) {
        let container = bed.sleeper();
        let exec = container.exec(["/no/such/program"]);
        assert_ne!(exec.code, 0);
        assert!(exec.stderr().contains("/no/such/program"), "{exec}");
        container.exec(["true"]).succeeded();
    }

    /// The shell's end is the exec's end, though a child of it keeps running.
    fn background_child(bed: &Testbed) {
        let container = bed.sleeper();
        let exec = container.exec_shell("sleep 600 > /dev/null 2>&1 < /dev/null & echo hi; exit 5").ended_with(5);
        assert_eq!(exec.stdout(), "hi\n");
        container.exec_shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep '[s]leep 600'").succeeded();
    }

    /// User, directory, environment, limits and capabilities of an exec are its own (field case 23).
    fn its_own_identity(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        let directory = bed.directory();
        let mut own = shell("id; umask; ulimit -n; ulimit -Hn; pwd; echo $HOME $GREETING; grep CapEff /proc/self/status");
        own["user"] = json!({"uid": 264, "gid": 51020, "additionalGids": [266], "umask": 0o027});
        own["cwd"] = json!("/home/user");
        own["env"] = json!(["PATH=/bin:/usr/bin", "GREETING=hello"]);
        own["rlimits"] = json!([{"type": "RLIMIT_NOFILE", "soft": 42, "hard": 43}]);
        let capabilities = json!(["CAP_KILL"]);
        own["capabilities"] = json!({"bounding": capabilities, "effective": capabilities, "permitted": capabilities,
                                     "inheritable": capabilities, "ambient": capabilities});
        let (status, out, err) = task.run(directory.path(), "one", &own);
        let expected = "uid=264 gid=51020 groups=266,51020\n0027\n42\n43\n/home/user\n/ hello\nCapEff:\t0000000000000020\n";
        // Not every runtime counts the first group among the others.
        assert_eq!((status, out.replace("groups=266\n", "groups=266,51020\n").as_str()), (0, expected), "{err}");
        // The container's user has a home, and it is what the next one has.
        let (_, out, _) = task.run(directory.path(), "one", &shell("id -u; echo $HOME"));
        assert_eq!(out, "0\n/root\n");
    }

    /// One that is deleted before it was started is gone, and its id is free again.
    fn deleted_before_the_start(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        let directory = bed.directory();
        let output = Output::new(directory.path(), "out");
        let streams = Streams { stdout: output.uri(), ..Streams::default() };
        for _ in 0..2 {
            task.exec("one", &process(&["true"]), &streams).expect("the id is free");
            let again = task.exec("one", &process(&["true"]), &streams).expect_err("the id is taken");
            assert_eq!(again.code, ttrpc::Code::ALREADY_EXISTS, "{again:?}");
            task.delete("one").expect("it does not run");
            assert_eq!(task.status("one").expect_err("it is gone").code, ttrpc::Code::NOT_FOUND);
        }
        assert_eq!(task.run(directory.path(), "one", &shell("exit 3")).0, 3);
    }

    /// A frozen container takes no exec; those that run go on when it does.
    fn in_a_frozen_container(bed: &Testbed) {
        let container = bed.sleeper();
        let task = Task::of(bed, &container);
        let directory = bed.directory();
        let output = Output::new(directory.path(), "out");
        let streams = Streams { stdout: output.uri(), ..Streams::default() };
        let line = "trap 'exit 3' TERM; echo ready; while :; do sleep 0.1; done";
        task.exec("runs", &shell(line), &streams).expect("it is not frozen");
        task.start("runs").expect("it is not frozen");
        output.reader().until(|said| said == "ready\n");
        task.pause().expect("it runs");
        assert!(container.exec(["true"]).code != 0, "it is frozen");
        // Heard when it goes on.
        task.kill("runs", 15, false).expect("it is there");
        task.resume().expect("it is frozen");
        assert_eq!(task.wait("runs"), Ok(3));
        container.exec(["true"]).succeeded();
    }

    /// What cannot be run is said in the words by which clients choose 126 and 127, and the id is free
    /// again (field case 7).
    fn programs_that_cannot_be_run(bed: &Testbed) {
        let container = bed.run().shell("echo garbage > /tmp/bad; chmod +x /tmp/bad; echo > /tmp/ready; exec sleep 3600").detach();
        container.exec_shell("until test -e /tmp/ready; do sleep 0.1; done").succeeded();
        let task = Task::of(bed, &container);
        let directory = bed.directory();
        let cases = [
            ("/no/such", "no such file or directory"),
            ("noexist", "executable file not found in $PATH"),
            ("/etc/passwd", "permission denied"),
            ("/etc", "is a directory"),
            ("/tmp/bad", "exec format error"),
        ];
        for (program, words) in cases {
            for terminal in [false, true] {
                let streams = Streams { terminal, ..Streams::default() };
                task.exec("one", &process(&[program]), &streams).expect("nobody has looked yet");
                let refusal = task.start("one").expect_err(program);
                assert!(refusal.message.contains(program), "{refusal:?}");
                assert!(refusal.message.contains(words), "{refusal:?}");
                task.delete("one").expect("it does not run");
            }
        }
        assert_eq!(task.run(directory.path(), "one", &shell("exit 3")).0, 3);
        assert_eq!(container.status().as_deref(), Some("RUNNING"));
    }
}

/// Two hundred at once, with all their streams, are all run, and each is told of with what is its own.
///
/// On one containerd alone, which has little to do with it.
#[test]
fn two_hundred_at_once() {
    on_containerd(Version::V2_1, "two_hundred_at_once", burst);
}

fn burst(bed: &Testbed) {
    let container = bed.sleeper();
    let task = Task::of(bed, &container);
    let directory = bed.directory();
    std::thread::scope(|scope| {
        let execs: Vec<_> = (0..MANY)
            .map(|number| {
                let (task, directory) = (&task, directory.path());
                scope.spawn(move || {
                    let id = format!("exec-{number}");
                    let output = Output::new(directory, &format!("{id}.out"));
                    let unused = |name: &str| {
                        fifo(directory, &format!("{id}.{name}"))
                            .display()
                            .to_string()
                    };
                    let streams = Streams {
                        stdin: unused("in"),
                        stdout: output.uri(),
                        stderr: unused("err"),
                        terminal: false,
                    };
                    let status = u32::try_from(number % 256).expect("it is small");
                    let line = format!("echo {number}; exit {status}");
                    task.exec(&id, &shell(&line), &streams)?;
                    task.start(&id)?;
                    let ended = task.wait(&id)?;
                    let said = output.reader().text();
                    task.delete(&id)?;
                    assert_eq!((ended, said), (status, format!("{number}\n")));
                    Ok::<_, thaw_tests::task::Refusal>(())
                })
            })
            .collect();
        for exec in execs {
            exec.join().expect("it does not panic").expect("it is run");
        }
    });
    assert_eq!(container.status().as_deref(), Some("RUNNING"));
    container.exec(["true"]).succeeded();
}
