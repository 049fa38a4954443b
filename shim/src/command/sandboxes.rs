//! The sandboxes of this host, as `ps`, `top`, `logs` and `metrics` find them: by their facts, and by
//! what their shims say.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use containerd_shim_protos::api::{StateRequest, Status};
use containerd_shim_protos::shim_async::TaskClient;
use serde::Serialize;
use thaw_vmm_control::Shape;
use tokio::net::UnixStream;
use ttrpc::asynchronous::{Client, transport::Socket};
use ttrpc::context;

use crate::cleanup;
use crate::facts::{Facts, FactsFile};
use crate::process_identity::ProcessIdentity;
use crate::trace::{self, StartTrace, Summary};

/// How long a shim may take to say what a container is doing.
const STATE_LIMIT: Duration = Duration::from_secs(2);

/// A sandbox that has facts.
#[derive(Debug, Serialize)]
pub(super) struct Found {
    /// containerd's namespace.
    pub namespace: String,
    /// Its name: the id of the container that it was started for, or of the pod.
    pub sandbox: String,
    /// Its directory.
    pub directory: PathBuf,
    /// What it is doing.
    pub state: State,
    /// vCPUs and memory of its VM; `None` until they are chosen.
    pub shape: Option<Shape>,
    /// When it was started, in nanoseconds since 1970; zero where that was not noted.
    pub started_ns: u64,
    /// Its containers.
    pub containers: Vec<Container>,
    /// How long the parts of its first container's start took; `None` when its trace is gone.
    pub start: Option<Summary>,
    /// What it takes of the host's memory.
    pub memory: Memory,
}

/// A container of a sandbox.
#[derive(Debug, Serialize)]
pub(super) struct Container {
    /// Its id.
    pub id: String,
    /// What it is doing.
    pub state: State,
    /// Its pid on the host, its anchor's.
    pub pid: Option<u32>,
    /// Its exit status, when it has ended.
    pub exit_status: Option<u32>,
}

/// What a sandbox or a container is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// Not created yet.
    Starting,
    /// Created, and not started.
    Created,
    /// Its program runs.
    Running,
    /// Frozen.
    Paused,
    /// Its program has ended.
    Stopped,
    /// Its shim does not answer.
    Unknown,
    /// Its shim is gone: `thaw gc` removes what is left.
    Dead,
}

impl State {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Starting,
        Self::Created,
        Self::Running,
        Self::Paused,
        Self::Stopped,
        Self::Unknown,
        Self::Dead,
    ];

    /// As people and metrics read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
            Self::Unknown => "unknown",
            Self::Dead => "dead",
        }
    }
}

/// Memory of a sandbox on the host, in bytes: pages that no other process has, of files too, and page
/// tables.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(super) struct Memory {
    /// The VMM's, with all that the guest has written.
    pub vmm: u64,
    /// The shim's.
    pub shim: u64,
    /// The anchors'.
    pub anchors: u64,
    /// Page tables of all of them.
    pub page_tables: u64,
}

impl Memory {
    /// All items, by name.
    pub fn items(&self) -> [(&'static str, u64); 4] {
        [
            ("vmm", self.vmm),
            ("shim", self.shim),
            ("anchor", self.anchors),
            ("page_tables", self.page_tables),
        ]
    }

    /// All together.
    pub fn sum(&self) -> u64 {
        self.items().iter().map(|(_, bytes)| bytes).sum()
    }

    fn of(facts: &Facts) -> Self {
        let mut memory = Self::default();
        let mut add = |process: Option<ProcessIdentity>, item: fn(&mut Self) -> &mut u64| {
            // One that has ended has none.
            let Some((private, page_tables)) = process
                .filter(|process| process.is_alive())
                .and_then(|process| process_memory(process.pid).ok())
            else {
                return;
            };
            *item(&mut memory) += private;
            memory.page_tables += page_tables;
        };
        add(facts.vmm, |memory| &mut memory.vmm);
        add(facts.shim, |memory| &mut memory.shim);
        for container in facts.containers.values() {
            add(container.anchor, |memory| &mut memory.anchors);
        }
        memory
    }
}

/// Private bytes and bytes of page tables of a process.
fn process_memory(pid: u32) -> io::Result<(u64, u64)> {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}"));
    let (rollup, status) = (read("smaps_rollup")?, read("status")?);
    let private = field(&rollup, "Private_Clean:") + field(&rollup, "Private_Dirty:");
    Ok((private << 10, field(&status, "VmPTE:") << 10))
}

/// The number after `name` at the start of a line; zero where there is no such line.
fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

/// A runtime for talking to shims.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build();
    runtime.context("starting to talk to shims")
}

/// A connection to the shim whose facts these are.
pub(super) fn connect(facts: &Facts) -> Result<Client> {
    let socket = &facts.socket;
    let connect = || {
        let stream = StdUnixStream::connect(socket)?;
        stream.set_nonblocking(true)?;
        UnixStream::from_std(stream)
    };
    let stream = connect().with_context(|| format!("connecting to {}", socket.display()))?;
    Ok(Client::new(Socket::new(stream)))
}

/// All sandboxes below `root`, by namespace and name, with what their shims say and `traces` has.
pub(super) fn all(root: &Path, traces: &Path) -> Result<Vec<Found>> {
    let traces = match trace::read_all(traces) {
        Ok(traces) => traces,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            return Err(error).with_context(|| format!("reading {}", traces.display()));
        }
    };
    let mut found = known(root)?;
    runtime()?.block_on(async {
        let mut asking = tokio::task::JoinSet::new();
        for (number, (_, facts)) in found.iter().enumerate() {
            let facts = facts.clone();
            asking.spawn(async move { (number, states(&facts).await) });
        }
        let mut states = BTreeMap::new();
        while let Some(answer) = asking.join_next().await {
            let (number, answer) = answer.context("asking a shim")?;
            states.insert(number, answer);
        }
        let sandboxes = found
            .drain(..)
            .enumerate()
            .map(|(number, (directory, facts))| {
                let states = states.remove(&number).unwrap_or_default();
                Found::new(directory, facts, &states, &traces)
            });
        Ok(sandboxes.collect())
    })
}

/// The sandboxes below `root` with their directories, by namespace and name. Those that are being made
/// or are damaged are left out.
pub(super) fn known(root: &Path) -> Result<Vec<(PathBuf, Facts)>> {
    let directories = cleanup::sandboxes(root)
        .with_context(|| format!("looking for sandboxes in {}", root.display()))?;
    let facts = directories.into_iter().filter_map(|directory| {
        let facts = FactsFile::read(&directory).ok()??;
        Some((directory, facts))
    });
    let mut found: Vec<_> = facts.collect();
    found.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(found)
}

/// The one sandbox below `root` that is called `id` or has a container `id`, in `namespace` if one is
/// given; its facts.
pub(super) fn one(root: &Path, namespace: Option<&str>, id: &str) -> Result<(PathBuf, Facts)> {
    let meant = |facts: &Facts| {
        (facts.sandbox == id || facts.containers.contains_key(id))
            && namespace.is_none_or(|namespace| facts.namespace == namespace)
    };
    let found = known(root)?.into_iter();
    let mut found = found.filter(|(_, facts)| meant(facts));
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one),
        (Some((_, one)), Some((_, other))) => bail!(
            "there is a {id:?} in namespace {} and in {}: say --namespace NAMESPACE",
            one.namespace,
            other.namespace
        ),
        (None, _) => Err(no_sandbox(id, namespace)),
    }
}

/// That there is no sandbox `id`.
pub(super) fn no_sandbox(id: &str, namespace: Option<&str>) -> anyhow::Error {
    let place = namespace.map_or_else(String::new, |namespace| {
        format!(" in namespace {namespace:?}")
    });
    anyhow!("there is no sandbox or container {id:?}{place}; `thaw ps` shows those there are")
}

/// What the shim says about each container; what it does not say is missing.
async fn states(facts: &Facts) -> BTreeMap<String, State> {
    let mut states = BTreeMap::new();
    let Some(client) = facts.is_alive().then(|| connect(facts).ok()).flatten() else {
        return states;
    };
    let client = TaskClient::new(client);
    for id in facts.containers.keys() {
        let request = StateRequest {
            id: id.clone(),
            ..StateRequest::default()
        };
        let context = context::with_duration(STATE_LIMIT);
        let Ok(answer) = client.state(context, &request).await else {
            continue;
        };
        let state = match answer.status.enum_value_or_default() {
            Status::CREATED => State::Created,
            Status::RUNNING => State::Running,
            Status::PAUSED | Status::PAUSING => State::Paused,
            Status::STOPPED => State::Stopped,
            Status::UNKNOWN => State::Unknown,
        };
        states.insert(id.clone(), state);
    }
    states
}

impl Found {
    fn new(
        directory: PathBuf,
        facts: Facts,
        states: &BTreeMap<String, State>,
        traces: &[StartTrace],
    ) -> Self {
        let alive = facts.is_alive();
        let containers: Vec<_> = facts
            .containers
            .iter()
            .map(|(id, container)| Container {
                id: id.clone(),
                state: match (alive, states.get(id)) {
                    (false, _) => State::Dead,
                    (true, Some(state)) => *state,
                    (true, None) => State::Unknown,
                },
                pid: container.anchor.map(|anchor| anchor.pid),
                exit_status: container.exit.map(|exit| exit.status),
            })
            .collect();
        let state = match (
            alive,
            containers.iter().map(|container| container.state).min(),
        ) {
            (false, _) => State::Dead,
            (true, None) => State::Starting,
            // What runs says more about a sandbox than what has ended in it.
            (true, Some(_)) if containers.iter().any(|one| one.state == State::Running) => {
                State::Running
            }
            (true, Some(first)) => first,
        };
        let start = traces
            .iter()
            .rev()
            .find(|trace| trace.namespace == facts.namespace && trace.id == facts.sandbox)
            .filter(|trace| trace.wall_time_ns.abs_diff(facts.started_ns) < SAME_START_NS)
            .map(StartTrace::summary);
        Self {
            namespace: facts.namespace.clone(),
            sandbox: facts.sandbox.clone(),
            directory,
            state,
            shape: facts.shape,
            started_ns: facts.started_ns,
            containers,
            start,
            memory: Memory::of(&facts),
        }
    }
}

/// A trace belongs to a sandbox of its name when both say that they began at about the same time: within
/// this, in nanoseconds. A start may wait for others between one and the other.
const SAME_START_NS: u64 = 60_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{ContainerFacts, Exit};

    fn facts(namespace: &str, sandbox: &str, containers: &[&str]) -> Facts {
        let container = |id: &&str| ((*id).to_owned(), ContainerFacts::default());
        Facts {
            namespace: namespace.into(),
            sandbox: sandbox.into(),
            started_ns: Exit::now(0).at_ns,
            containers: containers.iter().map(container).collect(),
            ..Facts::default()
        }
    }

    #[test]
    fn test_a_sandbox_is_found_by_its_own_and_its_containers_names() {
        let root = tempfile::tempdir().unwrap();
        for (namespace, sandbox, containers) in [
            ("a", "pod", &["pod", "web"][..]),
            ("b", "web", &[]),
            ("b", "db", &["db"]),
        ] {
            FactsFile::create(root.path(), facts(namespace, sandbox, containers)).unwrap();
        }
        let found = |namespace, id| {
            one(root.path(), namespace, id)
                .map(|(_, facts)| facts.sandbox)
                .map_err(|error| error.to_string())
        };
        assert_eq!(found(None, "db").as_deref(), Ok("db"));
        assert_eq!(found(None, "pod").as_deref(), Ok("pod"));
        assert_eq!(found(Some("a"), "web").as_deref(), Ok("pod"));
        assert_eq!(found(Some("b"), "web").as_deref(), Ok("web"));
        let error = found(None, "web").unwrap_err();
        assert!(
            error.contains("namespace a and in b: say --namespace"),
            "{error}"
        );
        let error = found(Some("a"), "db").unwrap_err();
        assert!(error.contains("\"db\" in namespace \"a\""), "{error}");
    }

    #[test]
    fn test_a_sandbox_without_a_shim_is_dead_and_takes_no_memory() {
        let root = tempfile::tempdir().unwrap();
        FactsFile::create(root.path(), facts("a", "web", &["web"])).unwrap();
        let all = all(root.path(), &root.path().join("traces")).unwrap();
        let [found] = &all[..] else { panic!("{all:?}") };
        assert_eq!(
            (found.state, found.containers[0].state),
            (State::Dead, State::Dead)
        );
        assert_eq!(found.memory.sum(), 0);
        assert_eq!(found.start, None);
    }

    #[test]
    fn test_states_of_containers_and_what_follows_for_the_sandbox() {
        let state = |said: &[(&str, State)]| {
            let mut facts = facts("a", "pod", &["pod", "web"]);
            facts.alive = true;
            let said = said
                .iter()
                .map(|(id, state)| ((*id).to_owned(), *state))
                .collect();
            Found::new(PathBuf::new(), facts, &said, &[]).state
        };
        assert_eq!(
            state(&[("pod", State::Running), ("web", State::Created)]),
            State::Running
        );
        assert_eq!(
            state(&[("pod", State::Stopped), ("web", State::Paused)]),
            State::Paused
        );
        assert_eq!(state(&[("pod", State::Stopped)]), State::Stopped);
        assert_eq!(state(&[]), State::Unknown);
        let mut none = facts("a", "pod", &[]);
        none.alive = true;
        let found = Found::new(PathBuf::new(), none, &BTreeMap::new(), &[]);
        assert_eq!(found.state, State::Starting);
    }

    #[test]
    fn test_a_start_of_the_same_name_long_ago_is_another_s() {
        let facts = facts("a", "web", &[]);
        let trace = |wall_time_ns| StartTrace {
            namespace: "a".into(),
            id: "web".into(),
            wall_time_ns,
            ..StartTrace::default()
        };
        let start = |wall_time_ns| {
            let traces = [trace(wall_time_ns)];
            Found::new(PathBuf::new(), facts.clone(), &BTreeMap::new(), &traces).start
        };
        assert!(start(facts.started_ns).is_some());
        assert!(start(facts.started_ns - 2 * SAME_START_NS).is_none());
    }

    #[test]
    fn test_memory_of_this_process() {
        let (private, page_tables) = process_memory(std::process::id()).unwrap();
        assert!(private > 0 && page_tables > 0);
        let own = ProcessIdentity::current().unwrap();
        let facts = Facts {
            shim: Some(own),
            ..Facts::default()
        };
        let memory = Memory::of(&facts);
        assert!(memory.shim > 0 && memory.page_tables > 0 && memory.vmm == 0);
    }
}
