//! `thaw doctor`: whether this host can run sandboxes, and what to do about each thing it lacks.

mod checks;
mod containerd;

use std::io::{self, IsTerminal, Write};

use anyhow::Result;
use serde::Serialize;

/// Look at the host and say what was found. `false` when something is missing without which no
/// sandbox starts.
pub(super) fn run(json: bool, output: &mut dyn Write) -> Result<bool> {
    let checks = checks::all();
    let report = Report {
        ok: checks.iter().all(|check| check.status != Status::Failed),
        checks,
    };
    if json {
        serde_json::to_writer_pretty(&mut *output, &report)?;
        writeln!(output)?;
    } else {
        report.print(io::stdout().is_terminal(), output)?;
    }
    Ok(report.ok)
}

/// All that was found.
#[derive(Debug, Serialize)]
struct Report {
    ok: bool,
    checks: Vec<Check>,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Check {
    name: &'static str,
    status: Status,
    /// What there is.
    found: String,
    /// What to do, where there is something to be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

/// Whether a thing is as it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    /// Sandboxes start, but something does not work as it should.
    Warning,
    /// No sandbox starts.
    Failed,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Ok,
            found: found.into(),
            advice: None,
        }
    }

    fn warning(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        let advice = Some(advice.into());
        Self {
            name,
            status: Status::Warning,
            found: found.into(),
            advice,
        }
    }

    fn failed(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            status: Status::Failed,
            ..Self::warning(name, found, advice)
        }
    }
}

impl Report {
    fn print(&self, colour: bool, output: &mut dyn Write) -> io::Result<()> {
        let width = self
            .checks
            .iter()
            .map(|check| check.name.len())
            .max()
            .unwrap_or(0);
        for check in &self.checks {
            let (word, code) = match check.status {
                Status::Ok => ("ok", "32"),
                Status::Warning => ("warn", "33"),
                Status::Failed => ("FAIL", "31"),
            };
            let word = match colour {
                true => format!("\x1b[{code}m{word:<4}\x1b[0m"),
                false => format!("{word:<4}"),
            };
            writeln!(output, "{word}  {:<width$}  {}", check.name, check.found)?;
            if let Some(advice) = &check.advice {
                writeln!(output, "      {:<width$}  -> {advice}", "")?;
            }
        }
        let verdict = match self.ok {
            true => "This host can run sandboxes.",
            false => "This host cannot run sandboxes yet: see the lines marked FAIL.",
        };
        writeln!(output, "\n{verdict}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let checks = vec![
            Check::ok("kernel", "6.12"),
            Check::failed("kvm", "none", "modprobe kvm_amd"),
        ];
        Report { ok: false, checks }
    }

    #[test]
    fn test_table_says_what_to_do() {
        let mut output = Vec::new();
        report().print(false, &mut output).unwrap();
        assert_eq!(
            String::from_utf8(output).unwrap(),
            "ok    kernel  6.12\nFAIL  kvm     none\n              -> modprobe kvm_amd\n\n\
             This host cannot run sandboxes yet: see the lines marked FAIL.\n"
        );
    }

    #[test]
    fn test_json_has_the_same() {
        let value = serde_json::to_value(report()).unwrap();
        assert_eq!(value["ok"], false);
        assert_eq!(value["checks"][1]["status"], "failed");
        assert_eq!(value["checks"][1]["advice"], "modprobe kvm_amd");
        assert!(value["checks"][0].get("advice").is_none());
    }
}
