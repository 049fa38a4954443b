//! Large things: what the kernel takes goes through, and what is too much is refused without harm.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use serde_json::json;
use thaw_tests::player::{Api, Fifos, Player, Program};
use ttrpc::{Code, MessageHeader};

use super::on_shim;

/// `MAX_ARG_STRLEN`, the longest argument with its end.
const LONGEST: usize = 128 << 10;

on_shim! {
    /// One argument and one variable of the greatest length, and many of them.
    fn arguments_and_environment(player: &Player) {
        let container = player.sleeper();
        let fifos = Fifos::output(player);
        let many = vec!["x".repeat(1000); 700];
        let count = "echo ${#0} ${#BIG} $#".to_owned();
        let mut args = vec!["sh".to_owned(), "-c".to_owned(), count, "y".repeat(LONGEST - 1)];
        args.extend(many);
        let process = json!({
            "args": args, "cwd": "/", "user": { "uid": 0, "gid": 0 },
            "env": ["PATH=/bin", format!("BIG={}", "z".repeat(LONGEST - 5))],
        });
        container.exec_process("e", &process, &fifos).unwrap();
        let output = fifos.read();
        container.task.start(container.id(), "e").unwrap();
        assert_eq!(output.text(), format!("{} {} 700\n", LONGEST - 1, LONGEST - 5));
        container.task.wait(container.id(), "e").unwrap();
        container.task.delete(container.id(), "e").unwrap();

        // One byte more than the kernel takes.
        let process = json!({
            "args": ["echo", "y".repeat(LONGEST)], "cwd": "/", "env": ["PATH=/bin"],
            "user": { "uid": 0, "gid": 0 },
        });
        container.exec_process("f", &process, &Fifos::none()).unwrap();
        let refused = container.task.start(container.id(), "f").unwrap_err();
        assert!(refused.to_string().contains("argument list too long"), "{refused}");
        assert_eq!(container.run("g", &["true"]), 0);
        container.remove();
    }

    /// A spec of a megabyte is run, and one that is more than a message may be is refused by name.
    fn specs(player: &Player) {
        let padded = |bytes: usize| Program::new(["true"]).with(|spec| {
            spec["annotations"] = json!({ "padding": "p".repeat(bytes) });
        });
        let container = player.running(padded(1 << 20));
        assert_eq!(container.wait().exit_status, 0);
        container.remove();

        let bundle = player.bundle(padded(5 << 20));
        let started = bundle.try_start();
        assert!(started.code != 0, "{started}");
        assert!(started.stderr().contains("config.json"), "{started}");
    }

    /// A message of more than four megabytes is refused, and the connection is as good as before.
    fn messages(player: &Player) {
        let shim = player.bundle(Program::new(["true"])).start();
        let mut stream = UnixStream::connect(&shim.answer.socket).unwrap();
        let large = vec![0; (4 << 20) + 1];
        stream.write_all(&Vec::from(MessageHeader::new_request(1, large.len() as u32))).unwrap();
        stream.write_all(&large).unwrap();
        let answer = |stream: &mut UnixStream| {
            let mut header = [0; 10];
            stream.read_exact(&mut header).unwrap();
            let header = MessageHeader::from(header);
            let mut body = vec![0; header.length as usize];
            stream.read_exact(&mut body).unwrap();
            let response: ttrpc::Response =
                containerd_shim_protos::protobuf::Message::parse_from_bytes(&body).unwrap();
            (header.stream_id, response)
        };
        let (id, response) = answer(&mut stream);
        let status = response.status.unwrap();
        assert_eq!(id, 1);
        assert_ne!(status.code(), Code::OK);
        assert!(status.message.contains("exceed maximum message size"), "{}", status.message);
        // What is no message at all is refused too, and does no harm either.
        stream.write_all(&Vec::from(MessageHeader::new_request(3, 7))).unwrap();
        stream.write_all(&[0xff; 7]).unwrap();
        let (id, response) = answer(&mut stream);
        assert_eq!(id, 3);
        assert_ne!(response.status.unwrap().code(), Code::OK);
        assert_ne!(shim.connect(Api::V3).connect("x").unwrap().shim_pid, 0);
        shim.shut_down();
    }

    /// Ids as long as containerd allows.
    fn ids(player: &Player) {
        let long = |what: &str| format!("{what}{}", "n".repeat(76 - what.len()));
        let bundle = player.bundle_named(&long("container"), Program::new(["sleep", "3600"]));
        let container = bundle.start().create(&Fifos::none());
        container.start();
        assert_eq!(container.run(&long("exec"), &["true"]), 0);
        container.remove();
    }

    /// Many execs at the same time all report.
    fn many_execs(player: &Player) {
        let container = player.sleeper();
        let statuses: Vec<u32> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..24).map(|number| {
                let container = &container;
                scope.spawn(move || {
                    let line = format!("exit {number}");
                    container.run(&format!("e{number}"), &["sh", "-c", &line])
                })
            }).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert_eq!(statuses, (0..24).collect::<Vec<_>>());
        container.remove();
    }
}
