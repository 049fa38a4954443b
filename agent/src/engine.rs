//! What can be done with containers.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::unistd::pipe2;
use thaw_fault_points::point;
use tokio::time::timeout;
use ttrpc::Code;

use crate::cgroup::Cgroup;
use crate::container::Container;
use crate::disks;
use crate::exits::Exits;
use crate::io::Stream;
use crate::launch::Launcher;
use crate::memory::MemoryWatch;
use crate::process::{Outcome, Phase, Process};
use crate::protocol::{Place, RECEIVED_SPEC, Reply, Request, START_SOCKET};
use crate::status::Refusal;
use crate::stdio::Pipes;
use crate::streams::{ProcessStreams, StreamTable};
use crate::volumes::Volumes;

/// Longest id of a container or an exec; with it a path of a socket still fits its address.
const ID_LENGTH: usize = 76;

/// How many helpers wait in a template: for a container, and for the first exec in it.
const READY_HELPERS: usize = 2;

/// How long a container may take to freeze.
const FREEZING: Duration = Duration::from_secs(5);

/// Longest text of a process about why it cannot exec.
const REPORT_LENGTH: usize = 4096;

/// All containers of the guest.
#[derive(Debug)]
pub struct Engine {
    layout: Layout,
    launcher: Launcher,
    exits: Arc<Exits>,
    streams: Arc<StreamTable>,
    memory: Arc<MemoryWatch>,
    volumes: Arc<Volumes>,
    containers: Mutex<HashMap<String, Arc<Container>>>,
}

/// Where things are kept in the guest.
#[derive(Debug, Clone)]
pub struct Layout {
    /// What executes containers: the agent's own program.
    pub program: PathBuf,
    /// Directory of the bundles.
    pub bundles: PathBuf,
    /// Directory of the sockets at which containers wait for their start.
    pub states: PathBuf,
    /// Parent of the containers' cgroups, with a leading slash.
    pub cgroups: String,
}

impl Layout {
    /// In `directory`, with cgroups below `cgroups`; makes both.
    pub fn prepare(program: PathBuf, directory: &Path, cgroups: &str) -> std::io::Result<Self> {
        let layout = Self {
            program,
            bundles: directory.join("bundles"),
            states: directory.join("state"),
            cgroups: cgroups.to_owned(),
        };
        std::fs::create_dir_all(&layout.bundles)?;
        std::fs::create_dir_all(&layout.states)?;
        Cgroup::prepare(cgroups)?;
        Ok(layout)
    }
}

/// What a client wants a process to be.
#[derive(Debug)]
pub struct ProcessRequest {
    /// The runtime spec, or the process's part of one, as JSON.
    pub spec: Vec<u8>,
    /// Whether it has a terminal.
    pub terminal: bool,
    /// URIs of stdin, stdout, stderr.
    pub uris: [String; 3],
}

impl Engine {
    /// No containers yet.
    pub fn new(
        layout: Layout,
        exits: Arc<Exits>,
        streams: Arc<StreamTable>,
        memory: Arc<MemoryWatch>,
    ) -> Self {
        let launcher = Launcher::new(layout.program.clone());
        Self {
            layout,
            launcher,
            exits,
            streams,
            memory,
            volumes: Arc::default(),
            containers: Mutex::default(),
        }
    }

    /// Where things are kept.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Has helpers wait for the first requests.
    pub fn prepare(&self) -> Result<(), Refusal> {
        self.launcher.prepare(READY_HELPERS)
    }

    /// One by its id.
    pub fn container(&self, id: &str) -> Result<Arc<Container>, Refusal> {
        let container = self.containers().get(id).cloned();
        container.ok_or_else(|| Refusal::missing(format!("container {id}")))
    }

    /// One that has been made.
    fn made(&self, id: &str) -> Result<Arc<Container>, Refusal> {
        let container = self.container(id)?;
        match container.init.phase() {
            Phase::Starting => Err(Refusal::state(format!("container {id} is being created"))),
            _ => Ok(container),
        }
    }

    /// Makes a container, its first process stopped before exec. Returns that process's pid.
    pub async fn create(
        &self,
        id: &str,
        client_bundle: String,
        request: ProcessRequest,
    ) -> Result<i32, Refusal> {
        check_id(id)?;
        thaw_fault_points::arm_by_spec(&request.spec);
        point("agent-creating");
        let place = Place {
            id: id.to_owned(),
            bundle: self.layout.bundles.join(id),
            states: self.layout.states.clone(),
            cgroup: format!("{}/{id}", self.layout.cgroups),
        };
        let ProcessRequest {
            spec,
            terminal,
            uris,
        } = request;
        let container = {
            let mut containers = self.containers();
            if containers.contains_key(id) {
                let message = format!("container {id} exists already");
                return Err(Refusal::new(Code::ALREADY_EXISTS, message));
            }
            let cgroup = Cgroup::create(&place.cgroup).map_err(|error| {
                Refusal::failed(format!("make cgroup {}: {error}", place.cgroup))
            })?;
            let init = Process::new(String::new(), terminal, uris, Phase::Starting);
            let volumes = self.volumes.hold(&spec);
            let container = Container::new(place, client_bundle, init, cgroup, volumes);
            let container = Arc::new(container);
            containers.insert(id.to_owned(), Arc::clone(&container));
            container
        };
        container
            .on_disk
            .store(disks::is_root_of(&spec), Ordering::Relaxed);
        let created = self.create_init(&container, &spec).await;
        point("agent-created");
        if created.is_err() {
            container.init.set_failed();
            container.clean_up().await;
            self.containers().remove(id);
        }
        created
    }

    async fn create_init(&self, container: &Arc<Container>, spec: &[u8]) -> Result<i32, Refusal> {
        let init = &container.init;
        let [stdin, stdout, stderr] = &init.uris;
        let streams = self.streams.take(stdin, stdout, stderr).await?;
        let bundle = &container.place.bundle;
        std::fs::create_dir(bundle)
            .and_then(|()| std::fs::write(bundle.join(RECEIVED_SPEC), spec))
            .map_err(|error| Refusal::failed(format!("write the bundle: {error}")))?;
        let request = Request::Create {
            place: container.place.clone(),
            terminal: init.terminal,
            window: init.window(),
            others: self.first_processes(),
        };
        let starting = self.exits.starting();
        // Of all containers: that of this one is gone when its creation has failed.
        let kills = self.memory_kills();
        let launched = self.launch(&request, init, streams).await;
        let pid = launched.map_err(|refusal| for_memory(kills, self.memory_kills(), refusal))?;
        init.set_phase(Phase::Created(pid));
        let exit = starting.claim(pid);
        self.memory.watch(container);
        let (memory, followed) = (Arc::clone(&self.memory), Arc::clone(container));
        tokio::spawn(async move {
            // Before the exit: clients take the reason for it from what came earlier.
            let exit = exit.await;
            point("agent-exited");
            memory.check(&followed);
            let (sender, receiver) = tokio::sync::oneshot::channel();
            if let Ok(exit) = exit {
                let _ = sender.send(exit);
            }
            followed.follow_init(pid, receiver).await;
        });
        Ok(pid)
    }

    /// Has a helper make a process, and connects its stdio. The process's own words about a failure
    /// come before the helper's.
    async fn launch(
        &self,
        request: &Request,
        process: &Process,
        streams: ProcessStreams,
    ) -> Result<i32, Refusal> {
        let broken = |error| Refusal::failed(format!("set up stdio: {error}"));
        let (report, theirs) =
            pipe2(OFlag::O_CLOEXEC).map_err(|error| broken(std::io::Error::from(error)))?;
        let report = Stream::new(report).map_err(broken)?;
        let mut descriptors: Vec<OwnedFd> = vec![theirs];
        let mut plumbing = if process.terminal {
            Plumbing::Terminal(streams)
        } else {
            let (pipes, ends) = Pipes::new(streams).map_err(broken)?;
            descriptors.extend(ends);
            Plumbing::Pipes(pipes)
        };
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let launched = self.launcher.call(request, &borrowed).await;
        drop(descriptors);
        let (pid, mut received) = match launched {
            Ok((Reply::Started { pid }, received)) => (pid, received),
            Ok(_) => {
                return Err(Refusal::new(
                    Code::INTERNAL,
                    "the container helper: odd answer",
                ));
            }
            Err(refusal) => {
                return Err(match said(&report) {
                    Some(message) => Refusal::failed(message),
                    None => refusal,
                });
            }
        };
        process.set_report(report);
        plumbing = match plumbing {
            Plumbing::Pipes(pipes) => {
                process.connect_pipes(pipes);
                return Ok(pid);
            }
            other => other,
        };
        if let (Plumbing::Terminal(streams), Some(master)) = (plumbing, received.pop()) {
            let connected = process.connect_terminal(master, streams);
            connected.map_err(|error| {
                let _ = crate::sys::kill(pid, libc::SIGKILL);
                broken(error)
            })?;
        }
        Ok(pid)
    }

    /// Releases a container's first process, or starts an exec. Returns its pid.
    pub async fn start(&self, id: &str, exec_id: &str) -> Result<i32, Refusal> {
        let container = self.made(id)?;
        let process = container.process(exec_id)?;
        if exec_id.is_empty() {
            self.start_init(&container).await
        } else {
            self.start_exec(&container, &process).await
        }
    }

    async fn start_init(&self, container: &Container) -> Result<i32, Refusal> {
        let init = &container.init;
        let Phase::Created(pid) = init.phase() else {
            return Err(Refusal::state(format!(
                "{} is not in created state",
                container.place.id
            )));
        };
        // Taken by the first of two that start it at the same time.
        let Some(report) = init.take_report() else {
            return Err(Refusal::state(format!(
                "{} is being started",
                container.place.id
            )));
        };
        let socket = container
            .place
            .states
            .join(&container.place.id)
            .join(START_SOCKET);
        let released =
            UnixStream::connect(&socket).and_then(|mut socket| socket.write_all(b"start"));
        released.map_err(|error| {
            Refusal::state(format!(
                "release the process of {}: {error}",
                container.place.id
            ))
        })?;
        init.advance(Phase::Created(pid), Phase::Running(pid));
        point("agent-released");
        match listen(&report).await {
            Some(message) => Err(Refusal::failed(message)),
            None => Ok(pid),
        }
    }

    async fn start_exec(
        &self,
        container: &Container,
        process: &Arc<Process>,
    ) -> Result<i32, Refusal> {
        let _joining = container.joining.read().await;
        if !container.is_alive() {
            return Err(Refusal::state(format!(
                "{} is not running",
                container.place.id
            )));
        }
        if container.is_paused() {
            return Err(Refusal::state(format!("{} is paused", container.place.id)));
        }
        let Some(first) = container.init.pid() else {
            return Err(Refusal::state(format!(
                "{} is not running",
                container.place.id
            )));
        };
        if !process.advance(Phase::Added, Phase::Starting) {
            let exec_id = &process.exec_id;
            return Err(Refusal::state(format!(
                "exec {exec_id} has been started already"
            )));
        }
        let request = Request::Exec {
            place: container.place.clone(),
            exec_id: process.exec_id.clone(),
            first,
            terminal: process.terminal,
            window: process.window(),
        };
        let starting = self.exits.starting();
        let kills = container.memory_kills();
        let launched = self.launch(&request, process, process.take_streams()).await;
        let pid = launched.map_err(|refusal| {
            process.set_failed();
            for_memory(kills, container.memory_kills(), refusal)
        })?;
        point("agent-exec-started");
        process.set_phase(Phase::Running(pid));
        let exit = starting.claim(pid);
        if !container.is_alive() {
            // It may have come in after all others were killed.
            let _ = crate::sys::kill(pid, libc::SIGKILL);
        }
        tokio::spawn(Container::follow_exec(Arc::clone(process), pid, exit));
        Ok(pid)
    }

    /// Registers a process to be started in a container.
    pub async fn exec(
        &self,
        id: &str,
        exec_id: &str,
        request: ProcessRequest,
    ) -> Result<(), Refusal> {
        check_id(exec_id)?;
        point("agent-exec");
        let container = self.made(id)?;
        if !container.is_alive() {
            return Err(Refusal::state(format!("{id} is not running")));
        }
        if container.is_paused() {
            return Err(Refusal::state(format!("{id} is paused")));
        }
        let ProcessRequest {
            spec,
            terminal,
            uris,
        } = request;
        let process = Process::new(exec_id.to_owned(), terminal, uris, Phase::Added);
        let process = container.add_exec(process)?;
        let [stdin, stdout, stderr] = &process.uris;
        let registered = match self.streams.take(stdin, stdout, stderr).await {
            Ok(streams) => {
                process.set_streams(streams);
                std::fs::write(container.exec_file(exec_id), spec)
                    .map_err(|error| Refusal::failed(format!("write the process spec: {error}")))
            }
            Err(refusal) => Err(refusal),
        };
        registered.inspect_err(|_| {
            process.set_failed();
            container.remove_exec(&process);
        })
    }

    /// Forgets a process that has ended or never ran, and with the first one its container.
    pub async fn delete(&self, id: &str, exec_id: &str) -> Result<Outcome, Refusal> {
        let container = self.made(id)?;
        let process = container.process(exec_id)?;
        match process.phase() {
            Phase::Running(_) | Phase::Starting => {
                return Err(Refusal::state("cannot delete a running process"));
            }
            Phase::Created(_) => process.kill(libc::SIGKILL)?,
            Phase::Added => process.set_failed(),
            Phase::Ended(_) | Phase::Stopped(_) => {}
        }
        let outcome = process.stopped().await;
        if exec_id.is_empty() {
            if !container.begin_delete() {
                return Err(Refusal::missing(format!("container {id}")));
            }
            container.fail_execs();
            self.memory.forget(&container);
            container.clean_up().await;
            self.containers().remove(id);
        } else {
            container.remove_exec(&process);
        }
        Ok(outcome)
    }

    /// Waits for the end of a process, and deletes it.
    pub async fn delete_stopped(&self, id: &str, exec_id: &str) -> Result<(), Refusal> {
        self.container(id)?.process(exec_id)?.stopped().await;
        self.delete(id, exec_id).await.map(drop)
    }

    /// Sends a signal to a process, or to all of a container.
    pub fn kill(&self, id: &str, exec_id: &str, signal: u32, all: bool) -> Result<(), Refusal> {
        let container = self.made(id)?;
        let number = i32::try_from(signal).ok();
        let number = number.filter(|number| (0..=libc::SIGRTMAX()).contains(number));
        let signal =
            number.ok_or_else(|| Refusal::invalid(format!("signal {signal}: no such signal")))?;
        if all && exec_id.is_empty() && container.is_alive() {
            return container.cgroup.signal(signal).map_err(|error| {
                Refusal::failed(format!("send signal {signal} to all of {id}: {error}"))
            });
        }
        container.process(exec_id)?.kill(signal)
    }

    /// Stops all of a container, what it has written being on its file system.
    pub async fn pause(&self, id: &str) -> Result<(), Refusal> {
        let container = self.made(id)?;
        let _joining = container.joining.write().await;
        if !matches!(container.init.phase(), Phase::Running(_)) || container.is_paused() {
            return Err(Refusal::state(format!("{id} is not running")));
        }
        self.launcher
            .call(
                &Request::Sync {
                    place: container.place.clone(),
                },
                &[],
            )
            .await?;
        container.set_paused(true);
        let frozen = freeze(&container, true).await;
        if frozen.is_err() {
            container.set_paused(false);
            let _ = freeze(&container, false).await;
        }
        frozen
    }

    /// Continues a paused container.
    pub async fn resume(&self, id: &str) -> Result<(), Refusal> {
        let container = self.made(id)?;
        if !container.is_paused() {
            return Err(Refusal::state(format!("{id} is not paused")));
        }
        freeze(&container, false).await?;
        container.set_paused(false);
        Ok(())
    }

    /// Changes the limits of a container.
    pub async fn update(&self, id: &str, resources: Vec<u8>) -> Result<(), Refusal> {
        let container = self.made(id)?;
        if !container.is_alive() {
            return Err(Refusal::state(format!("{id} is not running")));
        }
        let resources =
            String::from_utf8(resources).map_err(|_| Refusal::invalid("resources: not JSON"))?;
        let request = Request::Update {
            place: container.place.clone(),
            resources,
        };
        self.launcher.call(&request, &[]).await.map(drop)
    }

    /// The first processes of all containers that have one.
    fn first_processes(&self) -> BTreeMap<String, i32> {
        let containers = self.containers();
        let all = containers.iter();
        all.filter_map(|(id, container)| Some((id.clone(), container.init.pid()?)))
            .collect()
    }

    /// How often the kernel has killed in any container for want of memory.
    fn memory_kills(&self) -> u64 {
        let all = Cgroup::at(&self.layout.cgroups);
        all.value("memory.events", "oom_kill").unwrap_or(0)
    }

    fn containers(&self) -> MutexGuard<'_, HashMap<String, Arc<Container>>> {
        self.containers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// What becomes the stdio of a process once there is one.
enum Plumbing {
    Pipes(Pipes),
    Terminal(ProcessStreams),
}

async fn freeze(container: &Container, frozen: bool) -> Result<(), Refusal> {
    let what = if frozen { "freeze" } else { "thaw" };
    match timeout(FREEZING, container.cgroup.freeze(frozen)).await {
        Ok(result) => result
            .map_err(|error| Refusal::failed(format!("{what} {}: {error}", container.place.id))),
        Err(_) => {
            let message = format!("{what} {}: not done after {FREEZING:?}", container.place.id);
            Err(Refusal::new(Code::DEADLINE_EXCEEDED, message))
        }
    }
}

/// Why a process could not be made: `refusal`, unless the kernel has killed for want of memory meanwhile,
/// `before` times up to then and `after` times up to now. In the words of the established runtime.
fn for_memory(before: u64, after: u64, refusal: Refusal) -> Refusal {
    if after > before {
        Refusal::failed("container init was OOM-killed (memory limit too low?)")
    } else {
        refusal
    }
}

/// What a process has said about why it cannot exec, as far as it is there.
fn said(report: &Stream) -> Option<String> {
    let mut buffer = [0; REPORT_LENGTH];
    match report.read_now(&mut buffer) {
        Ok(length) if length > 0 => Some(String::from_utf8_lossy(&buffer[..length]).into_owned()),
        _ => None,
    }
}

/// Waits for what a process says about why it cannot exec; `None` once it has.
async fn listen(report: &Stream) -> Option<String> {
    let mut buffer = [0; REPORT_LENGTH];
    match report.read(&mut buffer).await {
        Ok(length) if length > 0 => Some(String::from_utf8_lossy(&buffer[..length]).into_owned()),
        _ => None,
    }
}

/// Ids become file names.
fn check_id(id: &str) -> Result<(), Refusal> {
    let plain =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'+' | b'-' | b'.');
    let good = !id.is_empty() && id.len() <= ID_LENGTH && id.bytes().all(plain);
    if good && id != "." && id != ".." {
        Ok(())
    } else {
        Err(Refusal::invalid(format!(
            "id {id:?}: not 1 to {ID_LENGTH} of a-z A-Z 0-9 _ + - ."
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_ids_that_are_no_file_names_are_refused() {
        for id in ["", ".", "..", "a/b", "a b", "ä", "a\0", &"a".repeat(77)] {
            assert_eq!(
                check_id(id).unwrap_err().code,
                Code::INVALID_ARGUMENT,
                "{id:?}"
            );
        }
        for id in ["a", "redis-1", "a.b_c+d", "...", &"a".repeat(76)] {
            assert_eq!(check_id(id), Ok(()), "{id:?}");
        }
    }
}
