//! The `thaw` command: looks after a host and its templates. Sandboxes are containerd's to start.

mod arguments;
mod doctor;
mod gc;
mod logs;
mod metrics;
mod output;
mod ps;
mod sandboxes;
mod template;
mod top;
mod trace;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use arguments::{Arguments, Command};
use tracing::Level;

const USAGE: &str = "\
Usage: thaw [-v] COMMAND

Sandboxes:
  ps [--json]               show the sandboxes of this host: what they do, how long their start
                            took, what they take of the host's memory
  top ID [--json]           show the processes in the guest of a sandbox
  logs ID [-f | --json]     show what the guest's kernel has printed; -f: until the sandbox ends
  trace [ID] [--json]       show where the time of recent starts went
  gc [-n] [--json]          remove what killed processes have left behind; -n: only say what

The host:
  doctor [--json]           say whether this host can run thaw, and what to do where it cannot
  metrics [--listen unix:PATH]
                            print counters and sizes for Prometheus, or serve them on a socket
  template build [--vcpus N] [--memory MIB]
                            build a template now rather than at the first start that needs it
  template list [--json]    show the templates of this host
  template verify [KEY]     compare a template's digests, or every template's
  template remove KEY | --all
                            remove templates; running sandboxes are not affected
  help, version

An ID is that of a sandbox or of a container; --namespace NAMESPACE says in which of containerd's
namespaces it is, where several have one. A KEY may be shortened. -v shows on standard error what is
being done.
";

/// Run the command with `arguments` (without the program's name). Writes results to standard
/// output and errors, one line each, to standard error.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let Arguments { command, verbose } = match arguments::parse(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("thaw: {error}; `thaw help` shows what can be given");
            return ExitCode::from(2);
        }
    };
    let level = match command {
        _ if verbose => Level::DEBUG,
        // Takes seconds: its progress is of interest.
        Command::TemplateBuild { .. } => Level::INFO,
        _ => Level::WARN,
    };
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_max_level(level)
        .with_target(false)
        .init();

    let mut output = io::BufWriter::new(io::stdout().lock());
    let result = run(command, &mut output).and_then(|success| {
        output.flush()?;
        Ok(success)
    });
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // `thaw … | head` is no failure.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("thaw: {}", in_one_line(&error));
            ExitCode::FAILURE
        }
    }
}

/// Run one command; whether what it found was as it should be.
fn run(command: Command, output: &mut dyn Write) -> Result<bool> {
    match command {
        Command::Help => {
            output.write_all(USAGE.as_bytes())?;
            Ok(true)
        }
        Command::Version => {
            writeln!(output, "thaw {}", env!("CARGO_PKG_VERSION"))?;
            Ok(true)
        }
        Command::Doctor { json } => doctor::run(json, output),
        Command::TemplateBuild { vcpus, memory_mib } => template::build(vcpus, memory_mib, output),
        Command::TemplateList { json } => template::list(json, output),
        Command::TemplateVerify { key } => template::verify(key.as_deref(), output),
        Command::TemplateRemove { key } => template::remove(key.as_deref(), output),
        Command::Trace { id, json } => trace::run(id.as_deref(), json, output),
        Command::Ps { json } => ps::run(json, output),
        Command::Top { sandbox, json } => {
            top::run(&sandbox.id, sandbox.namespace.as_deref(), json, output)
        }
        Command::Logs {
            sandbox,
            follow,
            json,
        } => logs::run(
            &sandbox.id,
            sandbox.namespace.as_deref(),
            follow,
            json,
            output,
        ),
        Command::Gc { dry, json } => gc::run(dry, json, output),
        Command::Metrics { address } => metrics::run(address.as_deref(), output),
    }
}

/// An error and its causes, without those that the text before them has told already.
fn in_one_line(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text.replace('\n', " ")
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<io::Error>();
    io.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_error_tells_each_cause_once() {
        let io = || io::Error::other("disk on fire");
        let error = anyhow::Error::from(io())
            .context("reading a")
            .context("listing b");
        assert_eq!(in_one_line(&error), "listing b: reading a: disk on fire");
        let doing = "reading a".to_owned();
        let told = crate::template::TemplateError::System {
            doing,
            source: io(),
        };
        assert_eq!(in_one_line(&told.into()), "reading a: disk on fire");
    }
}
