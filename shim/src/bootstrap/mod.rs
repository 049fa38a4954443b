//! How containerd runs the shim: `start`, `delete`, `-info`, `-v`.
//!
//! | containerd | standard input of `start` | the answer it gets |
//! |---|---|---|
//! | 1.6, 1.7, 2.0 to 2.2 | nothing, or runtime options | the bare address: task API version 2 |
//! | 2.3 and later | `BootstrapParams` | `BootstrapResult`: task API version 3 |
//!
//! containerd reads output and errors of a successful `start` as one text, so nothing may be written
//! to standard error there. What fails is written there, and users see it.

mod fork;
mod info;
mod input;
mod reply;
mod socket;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use containerd_shim_protos::api::DeleteResponse;
use containerd_shim_protos::protobuf::Message;

use thaw_fault_points::point;

use crate::cleanup;
use crate::counters;
use crate::daemon::Start;
use crate::facts::{self, ContainerFacts, Exit, Facts, FactsFile};
use crate::flags::{Action, Flags};
use crate::network;
use crate::process::timestamp;
use crate::process_identity::{ProcessIdentity, boot_id};
use crate::settings::{ConsoleLog, Settings, SettingsError};
use crate::spec::{BundleSpec, SpecError};
use crate::trace::{Recorder, monotonic_ns};
use tracing::Level;

pub use fork::Confirmation;
use fork::Role;
use input::Bootstrap;
use reply::Reply;
use socket::Bound;

/// The program `containerd-shim-thaw-v2`.
pub fn main(arguments: impl IntoIterator<Item = String>) -> ExitCode {
    let origin_ns = monotonic_ns();
    let done = Flags::parse(arguments).map_err(io::Error::other).and_then(|flags| {
        match flags.action {
            Action::Start => start(&flags, origin_ns).inspect_err(count),
            Action::Delete => delete(&flags).map(|()| ExitCode::SUCCESS),
            Action::Info => info::answer()
                .and_then(|info| write_message(&info))
                .map(|()| ExitCode::SUCCESS),
            Action::Version => version().map(|()| ExitCode::SUCCESS),
            Action::None => Err(io::Error::other(
                "this program is started by containerd: `ctr run --runtime io.containerd.thaw.v2 …`; \
                 see `thaw --help` for commands",
            )),
        }
    });
    done.unwrap_or_else(|error| {
        // Where this cannot be written nobody could be told.
        let _ = writeln!(io::stderr(), "thaw: {error}");
        ExitCode::FAILURE
    })
}

/// Count a start that has failed before there was a shim.
fn count(error: &io::Error) {
    let cause = error.get_ref();
    let refused = cause.is_some_and(|cause| cause.is::<SpecError>() || cause.is::<SettingsError>());
    let reason = if refused {
        "invalid_argument"
    } else {
        "failed"
    };
    // The error itself is told; standard error has place for no other.
    let _ = counters::count_failure(&counters::directory(), reason, "start received");
}

/// Start a shim for the container whose bundle is the working directory, unless its sandbox has one,
/// and tell containerd where it listens.
fn start(flags: &Flags, origin_ns: u64) -> io::Result<ExitCode> {
    let bootstrap = Bootstrap::read(&flags.id, &flags.namespace)?;
    let bundle = std::env::current_dir()?;
    let spec = BundleSpec::read(&bundle).map_err(io::Error::other)?;
    let options = bootstrap.options().map_err(io::Error::other)?;
    let settings =
        Settings::resolve(options.as_ref(), &spec.view.annotations).map_err(io::Error::other)?;
    let sandbox = spec.view.group().unwrap_or(&flags.id).to_owned();
    let running = running_sandbox(&flags.namespace, &sandbox)?;
    let siblings = running.as_ref().map(Facts::siblings).unwrap_or_default();
    spec.view.check(&siblings).map_err(io::Error::other)?;
    let trace = Recorder::new(&flags.namespace, &flags.id, origin_ns);
    trace.mark("spec read");

    let address = bootstrap.grpc_address(&flags.address);
    let socket = socket::path(
        bootstrap.socket_directory(),
        address,
        &flags.namespace,
        &sandbox,
    );
    let reply = Reply::new(&socket, bootstrap.is_modern());
    // Until the socket is bound, so that of two starts for one sandbox the second finds it.
    let claiming = cleanup::lock_starts(facts::root())?;
    // Again: of two starts for one sandbox the second has waited for the first.
    let running = running_sandbox(&flags.namespace, &sandbox)?;
    if running.is_some() && socket::is_served(&socket) {
        // The sandbox of a pod: its shim serves this container too.
        reply.give(&bundle)?;
        return Ok(ExitCode::SUCCESS);
    }

    socket::prepare_directory(&socket)?;
    if spec.view.is_pod_member() && sandbox != flags.id {
        return Err(io::Error::other(format!(
            "container {}: its pod's sandbox {sandbox} does not run: start the pod anew",
            flags.id
        )));
    }
    let facts = claim(
        flags,
        &sandbox,
        &bundle,
        &socket,
        spec.view.group().is_some(),
        &settings,
    )?;
    point("start-noted");
    let listener = match socket::bind(&socket) {
        Ok(Bound::New(listener)) => listener,
        // Somebody else was quicker; their facts are in place.
        Ok(Bound::Served) => {
            reply.give(&bundle)?;
            return Ok(ExitCode::SUCCESS);
        }
        Err(error) => {
            // containerd asks for no deletion of what was not started.
            let _ = cleanup::remove(facts.directory(), &facts.get());
            return Err(error);
        }
    };
    point("start-bound");
    // Without it each VMM gets an empty namespace of its own.
    let vmm_network = network::pinned(&facts::root().join(".network")).ok();
    let start = Start {
        namespace: flags.namespace.clone(),
        id: flags.id.clone(),
        bundle: bundle.clone(),
        spec,
        facts,
        listener,
        vmm_network,
        events_address: bootstrap.events_address(),
        settings,
        options,
        log_level: if flags.debug || bootstrap.wants_debug() {
            Level::DEBUG
        } else {
            Level::INFO
        },
        publish_program: bootstrap
            .publish_program(&flags.publish_binary)
            .map(|program| (program, address.to_owned())),
        trace,
    };
    drop(claiming);
    let role = fork::fork(&start.descriptors()).inspect_err(|_| {
        let _ = cleanup::remove(start.facts.directory(), &start.facts.get());
    })?;
    match role {
        Role::Child(parent) => {
            let taken = start.take_over();
            point("shim-forked");
            let confirmation = parent.report(taken.as_ref().err());
            Ok(if taken.is_ok() {
                start.serve(confirmation)
            } else {
                ExitCode::FAILURE
            })
        }
        Role::Parent(mut child) => {
            if let Err(error) = child.wait_for_report() {
                let _ = cleanup::remove(start.facts.directory(), &start.facts.get());
                return Err(error);
            }
            point("start-unanswered");
            reply.give(&bundle)?;
            child.confirm();
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The facts of `sandbox` if it runs and is not about to end.
fn running_sandbox(namespace: &str, sandbox: &str) -> io::Result<Option<Facts>> {
    let directory = facts::sandbox_directory(facts::root(), namespace, sandbox)?;
    // Damaged ones are no running sandbox's.
    let facts = FactsFile::read(&directory).ok().flatten();
    Ok(facts.filter(|facts| facts.is_alive() && !facts.ending))
}

/// Remove what an earlier sandbox of this name has left, and write down what is going to be made.
fn claim(
    flags: &Flags,
    sandbox: &str,
    bundle: &Path,
    socket: &Path,
    group: bool,
    settings: &Settings,
) -> io::Result<FactsFile> {
    let directory = facts::sandbox_directory(facts::root(), &flags.namespace, sandbox)?;
    if directory.exists() {
        match FactsFile::read(&directory) {
            Ok(Some(facts)) if facts.are_of_another(sandbox, bundle) => {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    format!(
                        "id {sandbox:?} is that of a running container of another containerd \
                         (bundle {}): use another id or namespace",
                        facts.bundle.display()
                    ),
                ));
            }
            Ok(Some(facts)) => cleanup::remove(&directory, &facts)?,
            Ok(None) | Err(_) => facts::remove_directory(&directory)?,
        }
    }
    // Before it is created: whoever asks for its deletion is not asked for another's.
    let container = ContainerFacts {
        bundle: bundle.to_owned(),
        ..ContainerFacts::default()
    };
    let facts = Facts {
        namespace: flags.namespace.clone(),
        sandbox: sandbox.to_owned(),
        group,
        containers: [(flags.id.clone(), container)].into(),
        bundle: bundle.to_owned(),
        socket: socket.to_owned(),
        shim: Some(ProcessIdentity::current()?),
        boot: boot_id()?,
        started_ns: Exit::now(0).at_ns,
        keep_console: settings.console == ConsoleLog::Keep,
        ..Facts::default()
    };
    FactsFile::create(facts::root(), facts)
}

/// Remove what is left of a container, and tell containerd how it ended.
fn delete(flags: &Flags) -> io::Result<()> {
    // containerd takes what is said on standard error into its log.
    crate::log::install(Level::WARN);
    let bundle = if flags.bundle.as_os_str().is_empty() {
        PathBuf::from(".")
    } else {
        flags.bundle.clone()
    };
    // The bundle may be gone already, or never have been complete.
    let group = BundleSpec::read(&bundle).ok();
    let group = group.as_ref().and_then(|spec| spec.view.group());
    let sandbox = group.unwrap_or(&flags.id);
    let directory = facts::sandbox_directory(facts::root(), &flags.namespace, sandbox)?;
    let deleted = cleanup::delete(&directory, &flags.id, &bundle)?;
    let response = DeleteResponse {
        pid: deleted.pid,
        exit_status: deleted.exit.status,
        exited_at: Some(timestamp(deleted.exit.at_ns)).into(),
        ..DeleteResponse::default()
    };
    write_message(&response)?;
    // Others that nobody will ask to delete any more. What comes of it is theirs.
    cleanup::sweep(facts::root());
    Ok(())
}

fn version() -> io::Result<()> {
    writeln!(
        io::stdout(),
        "containerd-shim-thaw-v2:\n  Version: {}",
        env!("CARGO_PKG_VERSION")
    )
}

fn write_message(message: &impl Message) -> io::Result<()> {
    let bytes = message.write_to_bytes().map_err(io::Error::other)?;
    let mut output = io::stdout();
    output.write_all(&bytes)?;
    output.flush()
}
