//! What was measured, for people and for programs.

use std::fmt::{Display, Formatter, Result};

use serde::Serialize;

use crate::clocks::{BesideRunc, Burst, Phases};
use crate::files::Operation;
use crate::memory::Memory;
use crate::restore::Restore;
use crate::samples::Summary;

/// Everything of one run.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Where it was measured.
    pub host: String,
    /// `thaw-vmm` alone.
    pub restore: Option<Restore>,
    /// `ctr run --rm … true`.
    pub start: Option<BesideRunc>,
    /// Where the time of these starts went.
    pub phases: Phases,
    /// `ctr tasks exec … true`.
    pub exec: Option<BesideRunc>,
    /// Many of them at once.
    pub bursts: Vec<Burst>,
    /// Idle sandboxes.
    pub memory: Option<Memory>,
    /// Operations with files.
    pub files: Vec<Operation>,
}

impl Report {
    /// Adds what another one has, of clocks that this one has not.
    pub fn add(&mut self, other: Self) {
        self.restore = self.restore.take().or(other.restore);
        self.start = self.start.take().or(other.start);
        self.phases.extend(other.phases);
        self.exec = self.exec.take().or(other.exec);
        self.bursts.extend(other.bursts);
        self.memory = self.memory.take().or(other.memory);
        self.files.extend(other.files);
    }
}

fn row(f: &mut Formatter<'_>, name: &str, summary: Summary) -> Result {
    let Summary {
        count,
        p50,
        p95,
        p99,
        min,
        ..
    } = summary;
    writeln!(
        f,
        "  {name:<28} {p50:>9.1} {p95:>9.1} {p99:>9.1} {min:>9.1} {count:>6}"
    )
}

fn head(f: &mut Formatter<'_>, title: &str) -> Result {
    writeln!(
        f,
        "\n{title}\n  {:<28} {:>9} {:>9} {:>9} {:>9} {:>6}",
        "milliseconds", "p50", "p95", "p99", "min", "n"
    )
}

fn beside(f: &mut Formatter<'_>, title: &str, clock: &BesideRunc) -> Result {
    head(f, title)?;
    row(f, "thaw", clock.thaw.summary())?;
    row(f, "runc", clock.runc.summary())?;
    writeln!(f, "  thaw / runc, p50: {:.2}", clock.ratio())
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        if let Some(restore) = &self.restore {
            head(f, &format!("restore: thaw-vmm alone, {}", restore.shape))?;
            row(f, "run is answered", restore.run_answered.summary())?;
            row(f, "first vCPU runs", restore.vcpus_run.summary())?;
            row(f, "agent has answered", restore.agent_answers.summary())?;
            let (pages, written) = restore.working_set_pages;
            writeln!(
                f,
                "  made ready before: {pages} pages, {written} of them for writing"
            )?;
            writeln!(
                f,
                "  guest memory dirtied by then: {} KiB at most",
                restore.dirtied_bytes >> 10
            )?;
            if let Some(exits) = restore.exits {
                writeln!(f, "  exits by then: {exits} at most")?;
            }
        }
        if let Some(start) = &self.start {
            beside(f, "start: ctr run --rm … true", start)?;
        }
        if !self.phases.is_empty() {
            head(
                f,
                "steps of thaw's starts, from the execution of the shim to the end of the step",
            )?;
            let mut phases: Vec<_> = self
                .phases
                .iter()
                .map(|(name, samples)| (name, samples.summary()))
                .collect();
            phases.sort_by(|(_, one), (_, other)| one.p50.total_cmp(&other.p50));
            phases
                .into_iter()
                .try_for_each(|(name, summary)| row(f, name, summary))?;
        }
        if let Some(exec) = &self.exec {
            beside(f, "exec: ctr tasks exec … true", exec)?;
        }
        for burst in &self.bursts {
            let execs = burst.execs;
            let title = format!("burst: {execs} times ctr tasks exec … true at once, to the last");
            beside(f, &title, &burst.clock)?;
            let Burst {
                thaw_failed,
                runc_failed,
                ..
            } = burst;
            writeln!(
                f,
                "  execs that failed: thaw {thaw_failed}, runc {runc_failed}"
            )?;
        }
        if let Some(memory) = &self.memory {
            itemise(f, memory)?;
        }
        if !self.files.is_empty() {
            operations(f, &self.files)?;
        }
        Ok(())
    }
}

fn operations(f: &mut Formatter<'_>, operations: &[Operation]) -> Result {
    let columns = ["waits", "releases", "exits", "thaw us", "QEMU us", "ratio"];
    let [waits, releases, exits, thaw, peer, ratio] = columns;
    writeln!(
        f,
        "\nfiles: one operation over virtio-fs, or one MiB, beside QEMU with virtiofsd"
    )?;
    writeln!(
        f,
        "  {:<20} {waits:>8} {releases:>8} {exits:>8} {thaw:>10} {peer:>10} {ratio:>8}",
        "operation"
    )?;
    let optional = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
    for operation in operations {
        let (exits, peer) = (optional(operation.exits), optional(operation.peer_us));
        let ratio = optional(operation.ratio());
        let Operation {
            name,
            waits,
            releases,
            thaw_us,
            ..
        } = operation;
        writeln!(
            f,
            "  {name:<20} {waits:>8.2} {releases:>8.2} {exits:>8} {thaw_us:>10.1} {peer:>10} {ratio:>8}"
        )?;
    }
    Ok(())
}

fn itemise(f: &mut Formatter<'_>, memory: &Memory) -> Result {
    let columns = ["KiB", "private", "anonymous", "shared¹", "page tables"];
    let [name, private, anonymous, shared, tables] = columns;
    writeln!(f, "\nmemory: one idle sandbox")?;
    writeln!(
        f,
        "  {name:<10} {private:>10} {anonymous:>10} {shared:>10} {tables:>12}"
    )?;
    for process in &memory.processes {
        let shared = process.proportional.saturating_sub(process.private);
        let crate::memory::Process {
            name,
            private,
            anonymous,
            page_tables,
            ..
        } = process;
        writeln!(
            f,
            "  {name:<10} {private:>10} {anonymous:>10} {shared:>10} {page_tables:>12}"
        )?;
    }
    writeln!(
        f,
        "  private memory and page tables together: {} KiB",
        memory.sum
    )?;
    let Memory {
        sandboxes,
        available_lost,
        ..
    } = memory;
    writeln!(
        f,
        "  MemAvailable lost for each of {sandboxes}: {available_lost} KiB"
    )?;
    writeln!(f, "  ¹ its part of pages that other processes map too")
}
