//! containerd's events service, which listens, is slow, or is not there.

use std::fmt;
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use containerd_shim_protos::events::task::{
    TaskCreate, TaskDelete, TaskExecAdded, TaskExecStarted, TaskExit, TaskOOM, TaskPaused,
    TaskResumed, TaskStart,
};
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::shim::events::ForwardRequest;
use ttrpc::proto::MESSAGE_HEADER_LENGTH;
use ttrpc::{MessageHeader, Request, Response};

use crate::testbed::LIMIT;

/// How containerd is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mood {
    /// It takes events and says so.
    Answering,
    /// It takes events and says nothing until it is answering again.
    Silent,
    /// Its socket is gone and its connections are closed, as while it restarts.
    Absent,
}

/// One event as it arrived.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Its topic.
    pub topic: String,
    /// containerd's namespace that it is in.
    pub namespace: String,
    /// The type of its contents.
    pub type_url: String,
    /// Its contents.
    pub value: Vec<u8>,
}

impl Event {
    /// Its contents.
    ///
    /// # Panics
    ///
    /// When they are of another type.
    #[track_caller]
    pub fn decode<Contents: Message>(&self) -> Contents {
        let name = self.type_url.rsplit('.').next();
        assert_eq!(name, Some(Contents::NAME), "the type of {}", self.topic);
        Contents::parse_from_bytes(&self.value)
            .unwrap_or_else(|error| panic!("decoding an event of {}: {error}", self.topic))
    }
}

/// In one line: `create C`, `exec-added C E`, `exit C E STATUS`.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let topic = self.topic.strip_prefix("/tasks/").unwrap_or(&self.topic);
        write!(f, "{topic} ")?;
        match topic {
            "create" => f.write_str(&self.decode::<TaskCreate>().container_id),
            "start" => f.write_str(&self.decode::<TaskStart>().container_id),
            "oom" => f.write_str(&self.decode::<TaskOOM>().container_id),
            "paused" => f.write_str(&self.decode::<TaskPaused>().container_id),
            "resumed" => f.write_str(&self.decode::<TaskResumed>().container_id),
            "exec-added" => {
                let event: TaskExecAdded = self.decode();
                write!(f, "{} {}", event.container_id, event.exec_id)
            }
            "exec-started" => {
                let event: TaskExecStarted = self.decode();
                write!(f, "{} {}", event.container_id, event.exec_id)
            }
            "exit" => {
                let event: TaskExit = self.decode();
                let TaskExit {
                    container_id,
                    id,
                    exit_status,
                    ..
                } = event;
                write!(f, "{container_id} {id} {exit_status}")
            }
            "delete" => {
                let event: TaskDelete = self.decode();
                write!(f, "{} {}", event.container_id, event.exit_status)
            }
            _ => f.write_str(&self.type_url),
        }
    }
}

/// The service, as far as a shim calls it: `Forward`.
#[derive(Debug)]
pub struct Listener {
    path: PathBuf,
    shared: Arc<Shared>,
    sender: Sender<Event>,
    received: Mutex<Receiver<Event>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    mood: Mood,
    /// Counts the times that the socket was there; what belongs to an earlier one ends.
    generation: u64,
    connections: Vec<UnixStream>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener {
    /// Serves at `path`, answering.
    pub(super) fn bind(path: &Path) -> Self {
        let (sender, received) = channel();
        let listener = Self {
            path: path.to_owned(),
            shared: Arc::new(Shared {
                state: Mutex::new(State {
                    mood: Mood::Absent,
                    generation: 0,
                    connections: Vec::new(),
                }),
                changed: Condvar::new(),
            }),
            sender,
            received: Mutex::new(received),
        };
        listener.set(Mood::Answering);
        listener
    }

    /// Its socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// From now on it is so.
    pub fn set(&self, mood: Mood) {
        let mut state = self.shared.lock();
        let before = std::mem::replace(&mut state.mood, mood);
        match (before, mood) {
            (Mood::Absent, Mood::Absent) => {}
            (_, Mood::Absent) => {
                state.generation += 1;
                for connection in state.connections.drain(..) {
                    // Closed by its client already where this fails.
                    let _ = connection.shutdown(Shutdown::Both);
                }
                // Wakes who accepts, and finds that its time is over.
                let _ = UnixStream::connect(&self.path);
                let _ = fs::remove_file(&self.path);
            }
            (Mood::Absent, _) => {
                let listener = UnixListener::bind(&self.path)
                    .unwrap_or_else(|error| panic!("serving at {}: {error}", self.path.display()));
                let (shared, sender) = (self.shared.clone(), self.sender.clone());
                let generation = state.generation;
                thread::spawn(move || accept(&listener, generation, &shared, &sender));
            }
            _ => {}
        }
        self.shared.changed.notify_all();
    }

    /// The next event.
    ///
    /// # Panics
    ///
    /// When none comes.
    #[track_caller]
    pub fn next(&self) -> Event {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        received
            .recv_timeout(LIMIT)
            .unwrap_or_else(|error| panic!("no event: {error}"))
    }

    /// All events up to the first whose line is `last`, as lines.
    #[track_caller]
    pub fn until(&self, last: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
            match received.recv_timeout(LIMIT) {
                Ok(event) => lines.push(event.to_string()),
                Err(error) => panic!("no {last:?} after {lines:#?}: {error}"),
            }
            if lines.last().is_some_and(|line| line == last) {
                return lines;
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.set(Mood::Absent);
    }
}

fn accept(listener: &UnixListener, generation: u64, shared: &Arc<Shared>, sender: &Sender<Event>) {
    for stream in listener.incoming().flatten() {
        let mut state = shared.lock();
        if state.generation != generation {
            return;
        }
        state.connections.extend(stream.try_clone());
        let (shared, sender) = (shared.clone(), sender.clone());
        thread::spawn(move || serve(stream, &shared, &sender));
    }
}

/// Answers one client until it goes away.
fn serve(mut stream: UnixStream, shared: &Shared, sender: &Sender<Event>) -> Option<()> {
    loop {
        let mut header = [0; MESSAGE_HEADER_LENGTH];
        stream.read_exact(&mut header).ok()?;
        let header = MessageHeader::from(header);
        let mut body = vec![0; header.length as usize];
        stream.read_exact(&mut body).ok()?;
        let request = Request::parse_from_bytes(&body).ok()?;
        assert_eq!(
            (request.service.as_str(), request.method.as_str()),
            ("containerd.services.events.ttrpc.v1.Events", "Forward")
        );
        let forwarded = ForwardRequest::parse_from_bytes(&request.payload).ok()?;
        let envelope = forwarded.envelope.into_option()?;
        let contents = envelope.event.into_option().unwrap_or_default();
        let event = Event {
            topic: envelope.topic,
            namespace: envelope.namespace,
            type_url: contents.type_url,
            value: contents.value,
        };
        // A test that has seen enough does not listen any more.
        let _ = sender.send(event);
        let state = shared.lock();
        let silent = |state: &mut State| state.mood == Mood::Silent;
        drop(shared.changed.wait_while(state, silent));
        let answer = Response::new().write_to_bytes().ok()?;
        let header = MessageHeader::new_response(header.stream_id, answer.len() as u32);
        let message = [Vec::from(header), answer].concat();
        stream.write_all(&message).ok()?;
    }
}
