//! Containers are run, and end as their programs do.

use thaw_tests::{Alarm, LIMIT, finish, on_each_containerd, show};

on_each_containerd! {
    /// What the program prints comes out, each stream for itself, with its exit status.
    fn output_and_status(bed: &Testbed) {
        let run = bed.run().shell("echo out; echo err >&2").output().succeeded();
        assert_eq!((run.stdout(), run.stderr()), ("out\n".into(), "err\n".into()));
        for code in [1, 7, 137] {
            bed.run().shell(&format!("exit {code}")).output().ended_with(code);
        }
    }

    /// Environment, directory, user, groups and host name are those of the container's specification.
    fn specification(bed: &Testbed) {
        let options = ["--env", "GREETING=hello world", "--cwd", "/home/user"];
        let line = "echo $GREETING; pwd; id -u; id -g; id -G";
        let run = bed.run().as_user().options(options).shell(line).output().succeeded();
        assert_eq!(run.stdout(), "hello world\n/home/user\n1000\n1000\n1000 2000\n");
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("procfs is there");
        let run = bed.run().command(["hostname"]).output().succeeded();
        assert_eq!(run.stdout(), host);
    }

    /// The program is process 1 of a namespace of its own and sees no process of the host.
    fn process_namespace(bed: &Testbed) {
        let run = bed.run().shell("echo $$; ls -d /proc/[0-9]*").output().succeeded();
        let lines: Vec<String> = run.stdout().lines().map(str::to_owned).collect();
        assert_eq!(lines.first().map(String::as_str), Some("1"));
        // The shell and what it runs.
        assert!(lines.len() <= 3, "{lines:?}");
    }

    /// A read-only root stays as it is; what the specification mounts over it can be written.
    fn read_only_root(bed: &Testbed) {
        let run = bed.run().options(["--read-only"]).shell("echo x > /etc/x; echo y > /dev/shm/y && cat /dev/shm/y");
        let run = run.output().succeeded();
        assert_eq!(run.stdout(), "y\n");
        assert!(run.stderr().contains("Read-only file system"), "{run}");
    }

    /// A signal from outside ends the program, and the status says so.
    fn killed(bed: &Testbed) {
        let run = bed.run().command(["sleep", "3600"]);
        let id = run.id().to_owned();
        let ctr = run.spawn();
        // Returns when the task is there, as no task can be killed before.
        let kill = format!(
            "until {0} tasks ls | grep -q '^{id} .*RUNNING'; do sleep 0.2; done; {0} tasks kill -s SIGKILL {id}",
            show(&bed.containerd().ctr())
        );
        finish(std::process::Command::new("sh").args(["-c", &kill])).succeeded();
        let output = ctr.wait_with_output().expect("ctr is a child of this process");
        assert_eq!(output.status.code(), Some(137), "{output:?}");
    }

    /// A detached container runs until it is killed, and its task is then deleted with its status.
    fn detached(bed: &Testbed) {
        let container = bed.run().shell("trap 'exit 9' TERM; while :; do sleep 0.1; done").detach();
        assert_eq!(container.status().as_deref(), Some("RUNNING"));
        assert!(container.pid() > 1);
        container.signal("SIGTERM").succeeded();
        assert_eq!(container.ended(), 9);
        assert_eq!(container.status(), None);
        container.remove();
    }

    /// Two containers side by side have nothing of each other.
    fn side_by_side(bed: &Testbed) {
        let (first, second) = (bed.sleeper(), bed.sleeper());
        first.exec_shell("echo first > /tmp/mine").succeeded();
        second.exec_shell("test ! -e /tmp/mine").succeeded();
        assert_ne!(first.pid(), second.pid());
        first.signal("SIGKILL").succeeded();
        assert_eq!(first.ended(), 137);
        assert_eq!(second.exec_shell("echo still here").succeeded().stdout(), "still here\n");
    }

    /// A program that is not there is an error that names it.
    fn missing_program(bed: &Testbed) {
        let run = bed.run().command(["/no/such/program"]).output();
        assert_ne!(run.code, 0);
        assert!(run.stderr().contains("/no/such/program"), "{run}");
    }

    /// A mount whose source is missing is an error that names it.
    fn missing_mount_source(bed: &Testbed) {
        let options = ["--mount", "type=bind,src=/no/such/source,dst=/data,options=rbind:ro"];
        let run = bed.run().options(options).command(["true"]).output();
        assert_ne!(run.code, 0);
        assert!(run.stderr().contains("/no/such/source"), "{run}");
    }

    /// With a terminal, the program has one, of the size of ctr's own.
    fn terminal(bed: &Testbed) {
        let size = nix::pty::Winsize { ws_row: 41, ws_col: 123, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = nix::pty::openpty(&size, None).expect("the kernel has terminals");
        let run = bed.run().shell("test -t 0 && test -t 1 && test -t 2 && sleep 1 && stty size");
        let mut command = run.to_command(&["--rm", "--tty"]);
        let end = || pty.slave.try_clone().expect("descriptors are left");
        command.stdin(end()).stdout(end()).stderr(end());
        let mut child = command.spawn().expect("ctr is there");
        let alarm = Alarm::set(&child, LIMIT);
        // The other ends are ctr's alone, so that reading ends with it.
        drop((command, pty.slave));
        let mut shown = Vec::new();
        let mut buffer = [0; 4096];
        // A terminal that nobody has open any more is an error, not an end of file.
        while let Ok(length) = nix::unistd::read(&pty.master, &mut buffer) {
            shown.extend_from_slice(&buffer[..length]);
            if length == 0 {
                break;
            }
        }
        let status = child.wait().expect("ctr is a child of this process");
        assert!(!alarm.stop(), "not done in time; it has shown {:?}", String::from_utf8_lossy(&shown));
        let shown = String::from_utf8_lossy(&shown).into_owned();
        assert!(status.success(), "{status}: {shown}");
        assert_eq!(shown.lines().last().map(str::trim), Some("41 123"), "{shown:?}");
    }
}
