//! A program that a shim executes to publish an event, in containerd's place: `PROGRAM --address …
//! publish --topic … --namespace …`, with the event on its standard input.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::{Event, Player};
use crate::testbed::LIMIT;

/// The program, and what it was given.
#[derive(Debug)]
pub struct Publish {
    directory: tempfile::TempDir,
    program: PathBuf,
    events: Mutex<Receiver<Event>>,
    _hold: File,
}

impl Publish {
    /// A new program in a directory of its own.
    pub fn new(player: &Player) -> Self {
        let directory = player.directory();
        let path = |name: &str| directory.path().join(name);
        let unwritable = "the tests' directory can be written";
        mkfifo(&path("events"), Mode::S_IRUSR | Mode::S_IWUSR).expect(unwritable);
        // One write of a line, which no other can come between.
        let script = format!(
            "#!/bin/sh\n[ ! -e {0}/away ] || exit 1\n\
             event=$(od -An -v -tx1 | tr -d ' \\n')\nprintf '%s|%s\\n' \"$*\" \"$event\" > {0}/events\n",
            directory.path().display()
        );
        fs::write(path("publish"), script).expect(unwritable);
        fs::set_permissions(path("publish"), Permissions::from_mode(0o755)).expect(unwritable);
        let both = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path("events"));
        let hold = both.expect(unwritable);
        let lines = BufReader::new(File::open(path("events")).expect(unwritable)).lines();
        let (sender, events) = channel();
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if sender.send(parse(&line)).is_err() {
                    return;
                }
            }
        });
        Self {
            program: path("publish"),
            directory,
            events: Mutex::new(events),
            _hold: hold,
        }
    }

    /// Its path.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Whether it fails from now on, as while containerd is away.
    pub fn set_away(&self, away: bool) {
        let mark = self.directory.path().join("away");
        let done = if away {
            fs::write(mark, "")
        } else {
            fs::remove_file(mark)
        };
        done.expect("the tests' directory can be written");
    }

    /// All events up to the first whose line is `last`, as lines.
    ///
    /// # Panics
    ///
    /// When that does not come.
    #[track_caller]
    pub fn until(&self, last: &str) -> Vec<String> {
        let mut lines = Vec::new();
        let events = self
            .events
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        while lines.last().is_none_or(|line| line != last) {
            match events.recv_timeout(LIMIT) {
                Ok(event) => lines.push(event.to_string()),
                Err(error) => panic!("no {last:?} after {lines:#?}: {error}"),
            }
        }
        lines
    }
}

/// `ARGUMENTS|EVENT IN HEXADECIMAL`.
fn parse(line: &str) -> Event {
    let (arguments, hexadecimal) = line.split_once('|').expect("the program writes a bar");
    let words: Vec<&str> = arguments.split(' ').collect();
    let after = |flag: &str| {
        let place = words.iter().position(|word| *word == flag);
        let value = place.and_then(|place| words.get(place + 1));
        value.map(|value| (*value).to_owned()).unwrap_or_default()
    };
    assert!(words.contains(&"publish"), "{arguments}");
    assert!(!after("--address").is_empty(), "{arguments}");
    let bytes: Vec<u8> = hexadecimal
        .as_bytes()
        .chunks(2)
        .map(|digits| {
            let digits = std::str::from_utf8(digits).expect("digits are text");
            u8::from_str_radix(digits, 16).expect("digits are digits")
        })
        .collect();
    let event = Any::parse_from_bytes(&bytes).expect("an event is an Any");
    Event {
        topic: after("--topic"),
        namespace: after("--namespace"),
        type_url: event.type_url,
        value: event.value,
    }
}
