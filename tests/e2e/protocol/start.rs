//! How containerd starts a shim, and what it asks the program itself.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::types::introspection::RuntimeInfo;
use thaw_tests::player::{Api, Player, Program, Protocol};
use thaw_tests::{Environment, finish};

use super::on_shim;

fn sleeper() -> Program {
    Program::new(["sleep", "3600"])
}

fn shim() -> Command {
    let mut command = Command::new(
        Environment::get()
            .prefix
            .join("bin/containerd-shim-thaw-v2"),
    );
    command.env_clear();
    command
}

on_shim! {
    /// Every containerd gets the answer that it understands, and finds the shim there, with either
    /// version of the task service.
    fn every_protocol(player: &Player) {
        for protocol in Protocol::ALL {
            let shim = player.bundle(sleeper()).by(protocol).start();
            let answer = &shim.answer;
            let version = if protocol.is_modern() { 3 } else { 2 };
            assert_eq!((answer.version, answer.protocol.as_str()), (version, "ttrpc"), "{protocol:?}");
            // What is not claimed here containerd does itself: mounts, above all.
            assert_eq!(answer.capabilities, [0; 0], "{protocol:?}");
            assert_eq!(answer.socket.parent(), Some(Path::new("/run/containerd/s")));
            let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode(&answer.socket), 0o600);
            // Where containerds before 2.0 look for it after a restart.
            let address = fs::read_to_string(shim.bundle.path.join("address")).unwrap();
            assert_eq!(address, format!("unix://{}", answer.socket.display()));
            let pid = shim.pid();
            for api in [Api::V2, Api::V3] {
                let connected = shim.connect(api).connect(&shim.bundle.id).unwrap();
                assert_eq!((connected.shim_pid.cast_signed(), connected.task_pid), (pid, 0), "{api:?}");
            }
            shim.shut_down();
            assert!(!answer.socket.exists());
        }
    }

    /// Runtime options on standard input are not taken for parameters, nor parameters for options.
    fn options_beside_parameters(player: &Player) {
        let options = [
            ("containerd.runc.v1.Options", &b"\x48\x01"[..]),
            ("runtimeoptions.v1.Options", &b""[..]),
        ];
        for (url, value) in options {
            for protocol in [Protocol::V1_6, Protocol::V2_0, Protocol::V2_3] {
                let mut bundle = player.bundle(sleeper()).by(protocol);
                bundle.options = Some((url.to_owned(), value.to_vec()));
                let shim = bundle.start();
                assert_eq!(shim.answer.version == 3, protocol.is_modern(), "{url} {protocol:?}");
                shim.shut_down();
            }
        }
    }

    /// Options of a type that is not known are refused by name, where they are known to be options.
    fn unknown_options(player: &Player) {
        for protocol in [Protocol::V1_6, Protocol::V2_0] {
            let mut bundle = player.bundle(sleeper()).by(protocol);
            bundle.options = Some(("example.v1.Unheard".to_owned(), b"\x08\x01".to_vec()));
            let started = bundle.try_start();
            assert!(started.code != 0 && started.out.is_empty(), "{started}");
            assert!(started.stderr().contains("example.v1.Unheard"), "{started}");
        }
    }

    /// The socket goes where containerd 2.3 and later say.
    fn socket_directory(player: &Player) {
        let directory = player.directory();
        let path = directory.path().join("s");
        let mut bundle = player.bundle(sleeper()).by(Protocol::V2_3);
        bundle.socket_directory = path.to_str().map(str::to_owned);
        let shim = bundle.start();
        assert_eq!(shim.answer.socket.parent(), Some(path.as_path()));
        let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o700);
        shim.shut_down();
    }

    /// A socket that cannot be made is refused with its path, and nothing is left of the start.
    fn no_place_for_the_socket(player: &Player) {
        let directory = player.directory();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let long = directory.path().join("d".repeat(100));
        for path in [&file, &file.join("below"), &long] {
            let mut bundle = player.bundle(sleeper()).by(Protocol::V2_3);
            bundle.socket_directory = path.to_str().map(str::to_owned);
            let started = bundle.try_start();
            assert!(started.code != 0 && started.out.is_empty(), "{started}");
            assert!(started.stderr().contains(path.to_str().unwrap()), "{started}");
            assert!(!Path::new("/run/thaw/thaw-test").join(&bundle.id).exists());
        }
    }

    /// A bundle that is none is refused by name, and nothing is left of the start.
    fn no_bundle(player: &Player) {
        let missing = player.bundle(sleeper());
        fs::remove_file(missing.path.join("config.json")).unwrap();
        let malformed = player.bundle(sleeper());
        fs::write(malformed.path.join("config.json"), "{\"process\": ").unwrap();
        let other = player.bundle(sleeper());
        fs::write(other.path.join("config.json"), "[]").unwrap();
        for mut bundle in [missing, malformed, other] {
            for protocol in [Protocol::V1_6, Protocol::V2_3] {
                bundle.protocol = protocol;
                let started = bundle.try_start();
                assert!(started.code != 0 && started.out.is_empty(), "{started}");
                assert!(started.stderr().contains("config.json"), "{started}");
                assert_eq!(started.stderr().lines().count(), 1, "{started}");
            }
        }
    }

    /// Two starts of one bundle at the same time are one shim.
    fn two_starts_at_once(player: &Player) {
        let bundle = player.bundle(sleeper());
        let outputs = std::thread::scope(|scope| {
            let starts = [(); 2].map(|()| scope.spawn(|| bundle.try_start().succeeded().stdout()));
            starts.map(|start| start.join().unwrap())
        });
        assert_eq!(outputs[0], outputs[1]);
        let shim = bundle.start();
        assert_eq!(format!("unix://{}", shim.answer.socket.display()), outputs[0]);
        shim.shut_down();
    }

    /// What containerd asks before it has anything to run: no environment, nothing to read, or runtime
    /// options to read.
    fn information(player: &Player) {
        let asked = finish(shim().arg("-info")).succeeded();
        assert_eq!(asked.stderr(), "");
        let info = RuntimeInfo::parse_from_bytes(&asked.out).unwrap();
        assert_eq!(info.name, "io.containerd.thaw.v2");
        assert!(!info.version.version.is_empty());
        // Without them containerd cannot tell what a pod may ask for.
        let features = info.features.as_ref().expect("there are features");
        assert_eq!(
            features.type_url,
            "types.containerd.io/opencontainers/runtime-spec/1/features/Features"
        );
        let features: serde_json::Value = serde_json::from_slice(&features.value).unwrap();
        assert_eq!(features["linux"]["mountExtensions"]["idmap"]["enabled"], false);

        let options = Any {
            type_url: "runtimeoptions.v1.Options".to_owned(),
            ..Any::default()
        };
        let input = options.write_to_bytes().unwrap();
        let asked = thaw_tests::finish_within(shim().arg("-info"), &input, thaw_tests::LIMIT).succeeded();
        let info = RuntimeInfo::parse_from_bytes(&asked.out).unwrap();
        assert_eq!(info.options.type_url, options.type_url);
        drop(player.directory());
    }

    /// The program's own flags, and those that it does not have.
    fn flags(player: &Player) {
        for flag in ["-v", "-version", "--version"] {
            let asked = finish(shim().arg(flag)).succeeded();
            assert!(asked.stdout().contains("Version"), "{asked}");
        }
        for words in [&["-frobnicate"][..], &["-id"], &["-id", "x", "restart"], &[]] {
            let asked = finish(shim().args(words));
            assert!(asked.code != 0 && asked.out.is_empty(), "{asked}");
            assert_eq!(asked.stderr().lines().count(), 1, "{asked}");
        }
        // Ids that lead elsewhere.
        for id in ["../escape", "", ".", "a/b"] {
            let mut bundle = player.bundle(sleeper());
            let own = std::mem::replace(&mut bundle.id, id.to_owned());
            let started = bundle.try_start();
            assert!(started.code != 0 && started.out.is_empty(), "{id:?}: {started}");
            bundle.id = own;
        }
    }
}
