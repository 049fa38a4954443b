//! `thaw-bench`: the restore, start, exec, burst, memory and files clocks, started by `make bench` through
//! `tests/run`.
//!
//! ```text
//! thaw-bench [--samples N] [--sandboxes N] [CLOCK...]
//! ```
//!
//! Measures the clocks that are named (`restore`, `start`, `exec`, `burst`, `memory`, `files`; all, when none
//! is), the ones that runc has too beside runc in turns. Of bursts of 50 execs there is one for every 25
//! samples, of those of 200 one for every 50. Prints tables, and writes the same to `bench.json` in
//! $THAW_RESULTS where that is set.

mod clocks;
mod files;
mod memory;
mod report;
mod restore;
mod samples;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use report::Report;
use thaw_tests::{Environment, NAMESPACE, Testbed, Version, file_guest, on_containerd};

/// What was asked for.
#[derive(Debug)]
struct Arguments {
    samples: usize,
    sandboxes: u64,
    clocks: Vec<String>,
}

const CLOCKS: [&str; 6] = ["restore", "start", "exec", "burst", "memory", "files"];

/// Sizes of bursts, and how many samples of other clocks one of them stands for.
const BURSTS: [(usize, usize); 2] = [(50, 25), (200, 50)];

impl Arguments {
    fn parse(words: impl IntoIterator<Item = String>) -> Result<Self> {
        let mut arguments = Self {
            samples: 50,
            sandboxes: 5,
            clocks: Vec::new(),
        };
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let mut number = || -> Result<u64> {
                let number = words
                    .next()
                    .with_context(|| format!("{word} needs a number"))?;
                let number = number
                    .parse()
                    .with_context(|| format!("{word} {number}: no number"))?;
                if number == 0 {
                    bail!("{word} must be at least 1")
                }
                Ok(number)
            };
            match word.as_str() {
                "--samples" => arguments.samples = number()?.try_into()?,
                "--sandboxes" => arguments.sandboxes = number()?,
                clock if CLOCKS.contains(&clock) => arguments.clocks.push(word),
                _ => bail!(
                    "{word:?} is none of --samples, --sandboxes, {}",
                    CLOCKS.join(", ")
                ),
            }
        }
        if arguments.clocks.is_empty() {
            arguments.clocks = CLOCKS.map(str::to_owned).to_vec();
        }
        Ok(arguments)
    }
}

fn main() -> Result<()> {
    if file_guest::is_guest() {
        file_guest::serve()
    }
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    let mut result = Ok(());
    on_containerd(Version::V2_1, "bench", |bed| {
        // Before what is found wrong with the host afterwards can cost the figures.
        result = measure(bed, &arguments).and_then(|report| write(&report));
        bed.remove_containers();
        // runc leaves the cgroup of containerd's namespace behind, which is nothing of thaw's.
        let _ = fs::remove_dir(Path::new("/sys/fs/cgroup").join(NAMESPACE));
    });
    result
}

/// Writes the report to where results are asked for.
fn write(report: &Report) -> Result<()> {
    if let Some(directory) =
        std::env::var_os("THAW_RESULTS").filter(|directory| !directory.is_empty())
    {
        let path = Path::new(&directory).join("bench.json");
        let text = serde_json::to_string_pretty(report)?;
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Measures each clock that is asked for, and tells of it at once: what comes later may fail or take too long.
fn measure(bed: &Testbed, arguments: &Arguments) -> Result<Report> {
    let host = host();
    println!("{host}");
    let mut report = Report {
        host,
        ..Report::default()
    };
    for clock in &arguments.clocks {
        eprintln!("measuring {clock}");
        let measured = measure_one(bed, arguments, clock)?;
        println!("{measured}");
        report.add(measured);
    }
    Ok(report)
}

fn measure_one(bed: &Testbed, arguments: &Arguments, clock: &str) -> Result<Report> {
    let prefix = &Environment::get().prefix;
    let mut report = Report::default();
    match clock {
        "restore" => report.restore = Some(restore::restore(prefix, arguments.samples)?),
        "start" => {
            let (start, phases) = clocks::start(bed, arguments.samples)?;
            (report.start, report.phases) = (Some(start), phases);
        }
        "exec" => report.exec = Some(clocks::exec(bed, arguments.samples)),
        "burst" => {
            for (execs, samples) in BURSTS {
                let samples = arguments.samples.div_ceil(samples);
                report.bursts.push(clocks::burst(bed, execs, samples)?);
            }
        }
        "files" => report.files = files::files(prefix)?,
        _ => report.memory = Some(memory::memory(bed, arguments.sandboxes)?),
    }
    Ok(report)
}

/// The machine, in a line.
fn host() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpus = read("/proc/cpuinfo");
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    let count = cpus
        .lines()
        .filter(|line| line.starts_with("processor"))
        .count();
    let place = if Environment::get().in_lab {
        "in the lab (software emulation): ratios only"
    } else {
        "on this machine"
    };
    let kernel = read("/proc/sys/kernel/osrelease");
    format!(
        "{place}; {count} × {}, Linux {}",
        model.unwrap_or("unknown CPU"),
        kernel.trim()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments> {
        Arguments::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn test_arguments_name_clocks_and_counts() {
        let arguments = parse("--samples 7 exec").unwrap();
        assert_eq!(
            (arguments.samples, arguments.clocks),
            (7, vec!["exec".to_owned()])
        );
        assert_eq!(parse("").unwrap().clocks.len(), CLOCKS.len());
    }

    #[test]
    fn test_other_arguments_are_refused() {
        for line in ["--samples", "--samples 0", "--samples x", "idle"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
