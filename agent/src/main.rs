//! PID 1 of a thaw guest: listens on vsock, runs containers, reaps.
//!
//! One program, three roles by the name it is called with: the agent, the helper that it executes
//! for each container process, and a program that ends at once (for template builds).

// The Rust runtime's own start-up aborts when descriptors 0 to 2 are closed and there is no
// /dev/null yet, which is how a kernel may start its first process.
#![cfg_attr(not(test), no_main)]
mod boot;
mod cgroup;
mod container;
mod disks;
mod engine;
mod exits;
mod growth;
mod helper;
mod identity;
mod io;
mod launch;
mod memory;
mod operator;
mod process;
mod processes;
mod protocol;
mod sandbox;
mod stats;
mod status;
mod stdio;
mod streams;
mod sys;
mod task;
mod volumes;
mod warm;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use thaw_agent_api::agent_ttrpc::{create_operator, create_sandbox};
use thaw_agent_api::{CONTROL_PORT, READY_LINE, STREAM_PORT};
use tracing::error;
use tracing_subscriber::filter::LevelFilter;

use crate::cgroup::Cgroup;
use crate::engine::{Engine, Layout};
use crate::exits::Exits;
use crate::growth::Growth;
use crate::io::Listener;
use crate::memory::MemoryWatch;
use crate::operator::OperatorService;
use crate::protocol::{HELPER_NAME, NOTHING_NAME};
use crate::sandbox::SandboxService;
use crate::streams::StreamTable;
use crate::task::TaskService;

/// Where the agent listens.
enum Place {
    /// On vsock, as the first process of a guest.
    Guest,
    /// In a directory, without any set-up: for tests.
    Directory(PathBuf),
}

/// Called by the C library's start-up code.
#[cfg(not(test))]
// SAFETY: nothing else defines this symbol, and its signature is that of C's main.
#[unsafe(no_mangle)]
extern "C" fn main(_: libc::c_int, _: *const *const libc::c_char) -> libc::c_int {
    libc::c_int::from(run() != ExitCode::SUCCESS)
}

#[cfg_attr(test, allow(dead_code))] // called by the program only
fn run() -> ExitCode {
    let arguments: Vec<String> = std::env::args_os()
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    let name = arguments
        .first()
        .map_or("", |path| path.rsplit('/').next().unwrap_or(path));
    match name {
        HELPER_NAME => helper::run(),
        NOTHING_NAME => ExitCode::SUCCESS,
        _ => be_agent(&arguments),
    }
}

fn be_agent(arguments: &[String]) -> ExitCode {
    sys::ignore_sigpipe();
    let place = match arguments {
        [_, flag, place] if flag == "--listen" && place.starts_with("unix:") => {
            Place::Directory(PathBuf::from(&place["unix:".len()..]))
        }
        _ if std::process::id() == 1 => Place::Guest,
        _ => {
            eprintln!(
                "thaw-agent is the first process of a thaw guest; for tests: --listen unix:DIR"
            );
            return ExitCode::from(2);
        }
    };
    if let Place::Guest = place
        && let Err(error) = boot::set_up()
    {
        let _ = writeln!(std::io::stderr(), "thaw-agent: {error}");
        return ExitCode::FAILURE;
    }
    log_to_stderr();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    match runtime
        .map_err(Into::into)
        .and_then(|runtime| runtime.block_on(serve(place)))
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Warnings and worse; `THAW_LOG` in the environment (the kernel passes unknown words of its
/// command line on) asks for more.
fn log_to_stderr() {
    let level = std::env::var("THAW_LOG")
        .ok()
        .and_then(|level| level.parse().ok());
    tracing_subscriber::fmt()
        .with_max_level(level.unwrap_or(LevelFilter::WARN))
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .without_time()
        .init();
}

/// Serves until the end of the guest.
async fn serve(place: Place) -> Result<(), Box<dyn std::error::Error>> {
    let children = exits::child_signal()?;
    let (layout, listener, control) = match &place {
        Place::Guest => (
            Layout::prepare(
                PathBuf::from(boot::PROGRAM),
                Path::new("/run/thaw"),
                "/thaw",
            )?,
            Listener::vsock(STREAM_PORT)?,
            format!("vsock://-1:{CONTROL_PORT}"),
        ),
        Place::Directory(directory) => (
            Layout::prepare(
                PathBuf::from("/proc/self/exe"),
                directory,
                &format!("/thaw-{}", std::process::id()),
            )?,
            Listener::unix(&directory.join("stream"))?,
            format!("unix://{}", directory.join("control").display()),
        ),
    };
    let (exits, streams) = (Arc::new(Exits::default()), Arc::new(StreamTable::default()));
    let growth = Growth::new(Cgroup::at(&layout.cgroups));
    let memory = Arc::new(MemoryWatch::new(growth));
    let engine = Engine::new(
        layout,
        Arc::clone(&exits),
        Arc::clone(&streams),
        Arc::clone(&memory),
    );
    let engine = Arc::new(engine);
    let sandbox = SandboxService::new(Arc::clone(&engine), memory, matches!(place, Place::Guest));
    let operator = OperatorService::new(&engine.layout().cgroups);
    let mut server = ttrpc::asynchronous::Server::new()
        .bind(&control)?
        .register_service(create_sandbox(Arc::new(sandbox)))
        .register_service(create_operator(Arc::new(operator)))
        .register_service(TaskService::register(engine));
    server.start().await?;
    if let Place::Guest = place {
        // On the console: a template build waits for this line. Not by eprintln, which panics
        // where there is no console.
        let _ = writeln!(std::io::stderr(), "{READY_LINE}");
    }
    tokio::join!(exits.reap(children), streams.serve(listener));
    Ok(())
}
