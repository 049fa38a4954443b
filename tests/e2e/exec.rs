//! Programs are run in containers that run already.

use thaw_tests::on_each_containerd;

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
}
