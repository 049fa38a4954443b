//! `thaw trace`.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::output::{ago, milliseconds, table};
use crate::trace::{self, Phase, StartTrace};

/// Starts shown when no id is given.
const RECENT: usize = 8;

/// Show where the time of recent starts went; of all recorded starts of a container with `id`.
pub(super) fn run(id: Option<&str>, json: bool, output: &mut dyn Write) -> Result<bool> {
    run_in(&trace::directory(), id, json, output)
}

fn run_in(directory: &Path, id: Option<&str>, json: bool, output: &mut dyn Write) -> Result<bool> {
    let traces = match trace::read_all(directory) {
        Ok(traces) => traces,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            return Err(error).with_context(|| format!("reading {}", directory.display()));
        }
    };
    let traces: Vec<_> = match id {
        Some(id) => traces.into_iter().filter(|trace| trace.id == id).collect(),
        None => {
            let skipped = traces.len().saturating_sub(RECENT);
            traces.into_iter().skip(skipped).collect()
        }
    };
    if let (Some(id), true) = (id, traces.is_empty()) {
        bail!(
            "no start of {id:?} is recorded in {}; the last {} starts are",
            directory.display(),
            trace::KEPT
        );
    }
    if json {
        serde_json::to_writer_pretty(&mut *output, &traces)?;
        writeln!(output)?;
        return Ok(true);
    }
    if traces.is_empty() {
        writeln!(output, "no start is recorded yet")?;
    }
    for (number, trace) in traces.iter().enumerate() {
        if number > 0 {
            writeln!(output)?;
        }
        show(trace, output)?;
    }
    Ok(true)
}

/// One start: the phases of both processes in order of time, each with the time since the one
/// before it in the same process.
fn show(trace: &StartTrace, output: &mut dyn Write) -> io::Result<()> {
    let origin = trace.origin_ns;
    let steps = timeline(trace);
    let total = steps
        .last()
        .map_or(0, |step| step.phase.monotonic_ns.saturating_sub(origin));
    let age = ago(trace.wall_time_ns / 1_000_000_000);
    let StartTrace {
        namespace,
        id,
        shape,
        ..
    } = trace;
    writeln!(
        output,
        "{namespace}/{id}  {shape}  {} ms  {age}",
        milliseconds(total)
    )?;
    let mut rows = vec![
        ["    AT ms", "TOOK ms", "BY", "DONE"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for step in &steps {
        let at = step.phase.monotonic_ns;
        rows.push(vec![
            format!("{:>9}", milliseconds(at.saturating_sub(origin))),
            format!("{:>7}", milliseconds(at.saturating_sub(step.since))),
            step.by.to_owned(),
            step.phase.name.clone(),
        ]);
    }
    table(output, &rows)?;
    if trace.file_requests > 0 {
        writeln!(output, "    file requests: {}", trace.file_requests)?;
    }
    let counters = trace.kvm.iter().filter(|(_, count)| *count > 0);
    let counters: Vec<_> = counters
        .map(|(name, count)| format!("{name} {count}"))
        .collect();
    if !counters.is_empty() {
        writeln!(output, "    kvm: {}", counters.join(", "))?;
    }
    Ok(())
}

/// A phase in the common order of time.
struct Step<'a> {
    by: &'static str,
    phase: &'a Phase,
    /// The end of the phase before it in the same process.
    since: u64,
}

fn timeline(trace: &StartTrace) -> Vec<Step<'_>> {
    let mut steps = Vec::new();
    for (by, phases) in [("shim", &trace.phases), ("vmm", &trace.vmm)] {
        // The VMM's first phase has nothing before it: it begins when the VMM does.
        let mut since = match (by, phases.first()) {
            ("vmm", Some(first)) => first.monotonic_ns,
            _ => trace.origin_ns,
        };
        for phase in phases {
            steps.push(Step { by, phase, since });
            since = phase.monotonic_ns;
        }
    }
    steps.sort_by_key(|step| step.phase.monotonic_ns);
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(name: &str, ms: u64) -> Phase {
        Phase {
            name: name.to_owned(),
            monotonic_ns: 1_000_000_000 + ms * 1_000_000,
        }
    }

    fn recorded(id: &str, origin_ms: u64) -> StartTrace {
        StartTrace {
            namespace: "default".to_owned(),
            id: id.to_owned(),
            shape: "2x2048M".to_owned(),
            origin_ns: 1_000_000_000 + origin_ms * 1_000_000,
            phases: vec![phase("spec read", 2), phase("container created", 50)],
            vmm: vec![phase("executed", 5), phase("restored", 20)],
            kvm: vec![("exits".to_owned(), 7), ("halts".to_owned(), 0)],
            ..StartTrace::default()
        }
    }

    fn output(traces: &[StartTrace], id: Option<&str>, json: bool) -> Result<String> {
        let directory = tempfile::tempdir().unwrap();
        for trace in traces {
            let path = directory.path().join(format!("{}.json", trace.id));
            std::fs::write(path, serde_json::to_vec(trace).unwrap()).unwrap();
        }
        let mut output = Vec::new();
        run_in(directory.path(), id, json, &mut output)?;
        Ok(String::from_utf8(output).unwrap())
    }

    #[test]
    fn test_phases_of_both_processes_are_in_order_with_their_durations() {
        let text = output(&[recorded("web", 0)], None, false).unwrap();
        let lines: Vec<_> = text.lines().map(|line| line.split_whitespace()).collect();
        let lines: Vec<Vec<_>> = lines.into_iter().map(Iterator::collect).collect();
        assert_eq!(lines[0][..4], ["default/web", "2x2048M", "50.00", "ms"]);
        assert_eq!(lines[2], ["2.00", "2.00", "shim", "spec", "read"]);
        assert_eq!(lines[3], ["5.00", "0.00", "vmm", "executed"]);
        assert_eq!(lines[4], ["20.00", "15.00", "vmm", "restored"]);
        assert_eq!(lines[5], ["50.00", "48.00", "shim", "container", "created"]);
        assert_eq!(lines[6], ["kvm:", "exits", "7"]);
    }

    #[test]
    fn test_an_id_selects_and_json_reads_back() {
        let traces = [recorded("web", 0), recorded("db", 1)];
        let text = output(&traces, Some("db"), true).unwrap();
        let read: Vec<StartTrace> = serde_json::from_str(&text).unwrap();
        assert_eq!(read, traces[1..]);
        let error = output(&traces, Some("other"), false)
            .unwrap_err()
            .to_string();
        assert!(error.contains("no start of \"other\""), "{error}");
    }

    #[test]
    fn test_without_an_id_the_most_recent_are_shown() {
        let traces: Vec<_> = (0..12).map(|n| recorded(&format!("c{n:02}"), n)).collect();
        let text = output(&traces, None, false).unwrap();
        assert!(!text.contains("c03"));
        assert!(text.contains("c04") && text.contains("c11"));
        assert_eq!(
            output(&[], None, false).unwrap(),
            "no start is recorded yet\n"
        );
    }
}
