//! The clocks that run beside runc: whole commands of the client, in turns.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;
use thaw_tests::{Container, Run, Testbed};

use crate::samples::Samples;

/// The runtime that thaw is measured beside.
const RUNC: &str = "io.containerd.runc.v2";
const THAW: &str = "io.containerd.thaw.v2";

/// One clock, for both runtimes.
#[derive(Debug, Default, Serialize)]
pub struct BesideRunc {
    /// With thaw.
    pub thaw: Samples,
    /// With runc, in the same run.
    pub runc: Samples,
}

impl BesideRunc {
    /// Median of thaw by that of runc.
    pub fn ratio(&self) -> f64 {
        self.thaw.summary().p50 / self.runc.summary().p50
    }
}

/// From the execution of the shim to the end of each step of a start; steps of the VMM are named
/// `vmm: …`.
pub type Phases = BTreeMap<String, Samples>;

fn run_true<'a>(bed: &'a Testbed, runtime: &'static str) -> Run<'a> {
    bed.run().runtime(runtime).command(["true"])
}

/// `ctr run --rm … true`, the whole command, and where the time of thaw's starts went.
pub fn start(bed: &Testbed, samples: usize) -> Result<(BesideRunc, Phases)> {
    let mut clock = BesideRunc::default();
    let mut phases = Phases::new();
    for _ in 0..samples {
        clock
            .runc
            .push(run_true(bed, RUNC).output().succeeded().took);
        let run = run_true(bed, THAW);
        clock.thaw.push(run.output().succeeded().took);
        add_phases(run.id(), &mut phases)?;
    }
    Ok((clock, phases))
}

/// Reads the recorded start of container `id`.
fn add_phases(id: &str, phases: &mut Phases) -> Result<()> {
    let text = thaw_tests::thaw::thaw(&["trace", "--json", id])
        .succeeded()
        .stdout();
    let traces: Value = serde_json::from_str(&text).context("reading what thaw trace prints")?;
    let trace = &traces[0];
    let origin = trace["origin_ns"]
        .as_u64()
        .context("a trace without its origin")?;
    for (field, prefix) in [("phases", ""), ("vmm", "vmm: ")] {
        for phase in trace[field]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default()
        {
            let name = phase["name"].as_str().context("a phase without a name")?;
            let at = phase["monotonic_ns"]
                .as_u64()
                .context("a phase without a time")?;
            let since = Duration::from_nanos(at.saturating_sub(origin));
            phases
                .entry(format!("{prefix}{name}"))
                .or_default()
                .push(since);
        }
    }
    Ok(())
}

/// `ctr tasks exec … true`, the whole command, in a container that runs.
pub fn exec(bed: &Testbed, samples: usize) -> BesideRunc {
    let sleeper = |runtime| {
        bed.run()
            .runtime(runtime)
            .command(["sleep", "3600"])
            .detach()
    };
    let (thaw, runc) = (sleeper(THAW), sleeper(RUNC));
    let mut clock = BesideRunc::default();
    for _ in 0..samples {
        clock.runc.push(runc.exec(["true"]).succeeded().took);
        clock.thaw.push(thaw.exec(["true"]).succeeded().took);
    }
    thaw.remove();
    runc.remove();
    clock
}

/// Bursts of one size.
#[derive(Debug, Default, Serialize)]
pub struct Burst {
    /// How many execs are started at once.
    pub execs: usize,
    /// Until the last has ended.
    pub clock: BesideRunc,
    /// Execs of thaw's that failed, in all bursts together.
    pub thaw_failed: usize,
    /// Those of runc's. Clients and containerd give up on what takes too long.
    pub runc_failed: usize,
}

/// `execs` times `ctr tasks exec … true` at once in a container that runs, through one containerd, until
/// the last has ended; `samples` times.
pub fn burst(bed: &Testbed, execs: usize, samples: usize) -> Result<Burst> {
    let mut burst = Burst {
        execs,
        ..Burst::default()
    };
    for _ in 0..samples {
        for runtime in [RUNC, THAW] {
            let container = bed.run().runtime(runtime).command(["sleep", "3600"]);
            let container = container.detach();
            let (took, failed) = one_burst(&container, execs)?;
            container.remove();
            let (times, failures) = match runtime {
                THAW => (&mut burst.clock.thaw, &mut burst.thaw_failed),
                _ => (&mut burst.clock.runc, &mut burst.runc_failed),
            };
            times.push(took);
            *failures += failed;
        }
    }
    Ok(burst)
}

/// How long it takes, and how many of its execs fail.
fn one_burst(container: &Container<'_>, count: usize) -> Result<(Duration, usize)> {
    let begun = Instant::now();
    let mut execs = Vec::with_capacity(count);
    for _ in 0..count {
        let mut command = container.exec_command(["true"]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        execs.push(command.spawn().context("executing ctr")?);
    }
    let mut failed = 0;
    for mut exec in execs {
        failed += usize::from(!exec.wait()?.success());
    }
    Ok((begun.elapsed(), failed))
}
