//! `thaw ps`.

use std::io::Write;
use std::path::Path;

use anyhow::Result;

use super::output::{age, bytes, json, milliseconds, table};
use super::sandboxes::{self, Found};
use crate::{facts, trace};

const HEADING: [&str; 14] = [
    "NAMESPACE",
    "SANDBOX",
    "SHAPE",
    "STATE",
    "AGE",
    "RESTORE",
    "CONFIGURE",
    "CREATE",
    "START",
    "VMM",
    "SHIM",
    "ANCHOR",
    "TABLES",
    "TOTAL",
];

/// Show the sandboxes of this host.
pub(super) fn run(as_json: bool, output: &mut dyn Write) -> Result<bool> {
    run_in(facts::root(), &trace::directory(), as_json, output)
}

fn run_in(root: &Path, traces: &Path, as_json: bool, output: &mut dyn Write) -> Result<bool> {
    let found = sandboxes::all(root, traces)?;
    if as_json {
        json(output, &found)?;
        return Ok(true);
    }
    let heading = HEADING.map(str::to_owned).to_vec();
    let rows: Vec<_> = std::iter::once(heading)
        .chain(found.iter().map(row))
        .collect();
    table(output, &rows)?;
    Ok(true)
}

fn row(found: &Found) -> Vec<String> {
    let unknown = || "-".to_owned();
    let mut row = vec![
        found.namespace.clone(),
        found.sandbox.clone(),
        found.shape.map_or_else(unknown, |shape| shape.to_string()),
        state(found),
        if found.started_ns == 0 {
            unknown()
        } else {
            age(found.started_ns / 1_000_000_000)
        },
    ];
    let phases = found.start.unwrap_or_default().phases();
    row.extend(
        phases.map(|(_, ns)| ns.map_or_else(unknown, |ns| format!("{} ms", milliseconds(ns)))),
    );
    row.extend(found.memory.items().map(|(_, size)| bytes(size)));
    row.push(bytes(found.memory.sum()));
    row
}

/// Of a sandbox with several containers, how many there are of each state.
fn state(found: &Found) -> String {
    let states: Vec<_> = found
        .containers
        .iter()
        .map(|container| container.state)
        .collect();
    if states.len() < 2 {
        return found.state.name().to_owned();
    }
    let count = |state| states.iter().filter(|one| **one == state).count();
    let counts = sandboxes::State::ALL
        .into_iter()
        .filter_map(|state| match count(state) {
            0 => None,
            count => Some(format!("{count} {}", state.name())),
        });
    counts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{ContainerFacts, Exit, Facts, FactsFile};
    use crate::trace::{Recorder, step};

    /// One dead sandbox of two containers, with a trace.
    fn host() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let ended = ContainerFacts {
            exit: Some(Exit {
                status: 3,
                at_ns: 1,
            }),
            ..ContainerFacts::default()
        };
        let facts = Facts {
            namespace: "default".into(),
            sandbox: "pod".into(),
            started_ns: Exit::now(0).at_ns,
            shape: Some(thaw_vmm_control::Shape::new(2, 2048).unwrap()),
            containers: [
                ("pod".into(), ContainerFacts::default()),
                ("web".into(), ended),
            ]
            .into(),
            ..Facts::default()
        };
        FactsFile::create(root.path(), facts).unwrap();
        let recorder = Recorder::new("default", "pod", trace::monotonic_ns());
        recorder.mark(step::VCPUS_RUN);
        recorder.mark(step::CONFIGURED);
        recorder.write(&root.path().join("traces")).unwrap();
        root
    }

    fn output(root: &Path, as_json: bool) -> String {
        let mut output = Vec::new();
        run_in(root, &root.join("traces"), as_json, &mut output).unwrap();
        String::from_utf8(output).unwrap()
    }

    #[test]
    fn test_a_line_for_each_sandbox() {
        let host = host();
        let text = output(host.path(), false);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert_eq!(lines[0].split_whitespace().collect::<Vec<_>>(), HEADING);
        let start = ["default", "pod", "2x2048M", "2", "dead"];
        let words: Vec<_> = lines[1].split_whitespace().collect();
        assert_eq!(words[..5], start, "{text}");
        assert!(lines[1].contains(" ms  "), "{text}");
        assert!(lines[1].ends_with("0 KiB"), "{text}");
    }

    #[test]
    fn test_json_has_all_of_it() {
        let host = host();
        let value: serde_json::Value = serde_json::from_str(&output(host.path(), true)).unwrap();
        let sandbox = &value[0];
        assert_eq!(sandbox["state"], "dead");
        assert_eq!(sandbox["shape"]["memory_mib"], 2048);
        assert_eq!(sandbox["containers"][1]["id"], "web");
        assert_eq!(sandbox["containers"][1]["exit_status"], 3);
        assert!(sandbox["start"]["restore_ns"].is_u64(), "{value}");
        assert!(sandbox["start"]["start_ns"].is_null(), "{value}");
        assert_eq!(sandbox["memory"]["vmm"], 0);
    }

    #[test]
    fn test_a_host_without_sandboxes_has_none() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(output(root.path(), true).trim(), "[]");
        assert_eq!(output(root.path(), false).lines().count(), 1);
    }
}
