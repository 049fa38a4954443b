//! Streams: FIFOs whose other ends come late, go away, come back, and are slow.

use std::fs;
use std::io::{Read, Write};

use thaw_tests::player::{Fifos, Player, Program};

use super::on_shim;

/// More than all pipes on the way hold.
const MUCH: usize = 2 << 20;

/// A line that prints that many bytes, of which each tells its place.
fn numbers() -> Program {
    Program::shell("seq -w 0 262143")
}

/// What it prints.
fn expected_numbers() -> Vec<u8> {
    let text: String = (0..262_144)
        .map(|number| format!("{number:06}\n"))
        .collect();
    text.into_bytes()
}

on_shim! {
    /// A reader that opens late finds everything, and the end.
    fn late_reader(player: &Player) {
        let fifos = Fifos::output(player);
        let container = player.bundle(Program::shell("echo out; echo err >&2; exit 3")).start().create(&fifos);
        container.start();
        let waiter = {
            let (task, id) = (container.task.clone(), container.id().to_owned());
            std::thread::spawn(move || task.wait(&id, "").unwrap().exit_status)
        };
        // Other calls are answered meanwhile.
        container.task.state(container.id(), "").unwrap();
        let (output, error) = (fifos.read(), fifos.error.as_ref().unwrap().read());
        assert_eq!((output.text(), error.text()), ("out\n".to_owned(), "err\n".to_owned()));
        assert_eq!(waiter.join().unwrap(), 3);
        container.remove();
    }

    /// A reader that is slow gets everything, and everything else goes on meanwhile.
    fn slow_reader(player: &Player) {
        let expected = expected_numbers();
        assert!(expected.len() > MUCH / 2);
        let fifos = Fifos::output(player);
        let container = player.bundle(numbers()).start().create(&fifos);
        container.start();
        let mut output = fifos.output.as_ref().unwrap().open();
        let mut first = vec![0; 7];
        output.read_exact(&mut first).unwrap();
        // The container waits for its reader, and whoever asks does not.
        assert_eq!(container.task.state(container.id(), "").unwrap().pid, container.pid);
        assert_eq!(container.task.pids(container.id()).unwrap().processes.len(), 1);
        container.task.connect(container.id()).unwrap();
        let mut rest = Vec::new();
        output.read_to_end(&mut rest).unwrap();
        assert!([first, rest].concat() == expected, "not what was written");
        assert_eq!(container.wait().exit_status, 0);
        container.remove();
    }

    /// A reader goes away and another one comes: the container has noticed nothing and nothing is lost,
    /// as over a restart of containerd.
    fn reader_comes_back(player: &Player) {
        let fifos = Fifos::output(player);
        let container = player.bundle(numbers()).start().create(&fifos);
        container.start();
        let mut all = Vec::new();
        for part in [70, 7000, 70_000] {
            let mut output = fifos.output.as_ref().unwrap().open();
            let mut bytes = vec![0; part];
            output.read_exact(&mut bytes).unwrap();
            all.extend(bytes);
        }
        // Whoever writes fails when nobody could read it: it has not.
        assert_eq!(container.run("e", &["true"]), 0);
        all.extend(fifos.read().all());
        assert!(all == expected_numbers(), "{} bytes of {}", all.len(), expected_numbers().len());
        assert_eq!(container.wait().exit_status, 0);
        container.remove();
    }

    /// The end of an output comes with the end of the process and not before, and is there when the exit
    /// is told.
    fn end_of_output(player: &Player) {
        let fifos = Fifos::new(player);
        let container = player.bundle(Program::shell("echo ready; read line; echo done")).start().create(&fifos);
        container.start();
        let mut output = fifos.read();
        output.wait_for("ready\n");
        container.task.state(container.id(), "").unwrap();
        assert!(output.goes_on());
        fifos.write().write_all(b"go\n").unwrap();
        assert_eq!(output.text(), "ready\ndone\n");
        assert_eq!(container.wait().exit_status, 0);
        let id = container.id().to_owned();
        player.events().until(&format!("exit {id} {id} 0"));
        container.remove();
    }

    /// Standard input ends when containerd says so, not when a client closes it; what was written before
    /// that arrives, also when the end is told before the start.
    fn end_of_input(player: &Player) {
        let fifos = Fifos::new(player);
        let container = player.bundle(Program::new(["cat"])).start().create(&fifos);
        container.start();
        let mut output = fifos.read();
        for line in ["one\n", "two\n"] {
            // Opened and closed each time.
            fifos.write().write_all(line.as_bytes()).unwrap();
            output.wait_for(line);
        }
        assert!(output.goes_on());
        fifos.write().write_all(b"three\n").unwrap();
        container.task.close_stdin(container.id(), "").unwrap();
        assert_eq!(output.text(), "one\ntwo\nthree\n");
        assert_eq!(container.wait().exit_status, 0);
        container.remove();

        let fifos = Fifos::new(player);
        let container = player.bundle(Program::new(["cat"])).start().create(&fifos);
        fifos.write().write_all(b"early\n").unwrap();
        container.task.close_stdin(container.id(), "").unwrap();
        let output = fifos.read();
        container.start();
        assert_eq!(output.text(), "early\n");
        assert_eq!(container.wait().exit_status, 0);
        container.remove();
    }

    /// The streams of execs: with input and without, ended by CloseIO before the start and after it.
    fn execs(player: &Player) {
        let container = player.sleeper();
        let id = container.id();
        for (index, early) in [false, true].into_iter().enumerate() {
            let (name, fifos) = (format!("e{index}"), Fifos::new(player));
            container.exec(&name, &["sh", "-c", "cat; echo err >&2; exit 6"], &fifos).unwrap();
            let (output, error) = (fifos.read(), fifos.error.as_ref().unwrap().read());
            if early {
                // Both ends: the shim has its own only from the start on, and what nobody has open is lost.
                let mut input = fifos.read_and_write();
                input.write_all(b"text\n").unwrap();
                container.task.close_stdin(id, &name).unwrap();
                container.task.start(id, &name).unwrap();
                drop(input);
            } else {
                container.task.start(id, &name).unwrap();
                let mut input = fifos.write();
                input.write_all(b"text\n").unwrap();
                drop(input);
                container.task.close_stdin(id, &name).unwrap();
            }
            assert_eq!((output.text(), error.text()), ("text\n".to_owned(), "err\n".to_owned()));
            assert_eq!(container.task.wait(id, &name).unwrap().exit_status, 6);
            container.task.delete(id, &name).unwrap();
        }
        container.remove();
    }

    /// A terminal: input and output are one, its size is set before the start and while it runs.
    fn terminal(player: &Player) {
        let fifos = Fifos::terminal(player);
        let program = Program::shell("trap 'stty size' WINCH; stty size; while :; do read line && break; done; tty");
        let shim = player.bundle(program.on_terminal()).start();
        let container = shim.create(&fifos);
        let id = container.id();
        container.task.resize(id, "", (91, 31)).unwrap();
        let mut output = fifos.read();
        container.start();
        output.wait_for("31 91");
        container.task.resize(id, "", (92, 32)).unwrap();
        output.wait_for("32 92");
        fifos.write().write_all(b"go\n").unwrap();
        output.wait_for("/dev/pts/0");
        assert_eq!(container.wait().exit_status, 0);
        container.remove();
    }

    /// Files are appended to, by one stream or by both.
    fn files(player: &Player) {
        let directory = player.directory();
        let path = directory.path().join("log");
        fs::write(&path, "before\n").unwrap();
        let shim = player.bundle(Program::shell("echo out; echo err >&2")).start();
        let mut request = shim.create_request(&Fifos::none());
        request.stdout = format!("file://{}", path.display());
        request.stderr.clone_from(&request.stdout);
        shim.task.create(&request).unwrap();
        let id = shim.bundle.id.clone();
        shim.task.start(&id, "").unwrap();
        shim.task.wait(&id, "").unwrap();
        let mut lines: Vec<String> = fs::read_to_string(&path).unwrap().lines().map(str::to_owned).collect();
        assert_eq!(lines.remove(0), "before");
        lines.sort();
        assert_eq!(lines, ["err", "out"]);
        shim.task.delete(&id, "").unwrap();
        shim.shut_down();
    }
}
