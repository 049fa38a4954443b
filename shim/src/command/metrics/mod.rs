//! `thaw metrics`: what there is on this host and what has been counted, in the text format that
//! Prometheus reads (version 0.0.4), on standard output or on a Unix socket.
//!
//! Nothing is collected in the background: each reading looks at the host.

mod exposition;
mod listen;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

use super::sandboxes::{self, Found, Memory, State};
use crate::counters::{self, BUCKETS_MS, Counters};
use crate::paths::TEMPLATE_DIRECTORY;
use crate::template::{TemplateStore, Trust};
use crate::{facts, trace};
use exposition::Exposition;

/// Print the metrics, or serve them at `address` (`unix:PATH`) for ever.
pub(super) fn run(address: Option<&str>, output: &mut dyn Write) -> Result<bool> {
    match address {
        Some(address) => listen::serve(address, || read().map(|metrics| metrics.text()))?,
        None => output.write_all(read()?.text().as_bytes())?,
    }
    Ok(true)
}

/// All that is told.
struct Metrics {
    sandboxes: Vec<Found>,
    counters: Counters,
    /// How many templates there are of each state, and the disk space that they take.
    templates: BTreeMap<&'static str, (u64, u64)>,
}

/// Look at this host.
fn read() -> Result<Metrics> {
    let directory = counters::directory();
    Ok(Metrics {
        sandboxes: sandboxes::all(facts::root(), &trace::directory())?,
        counters: counters::read(&directory)
            .with_context(|| format!("reading the counters in {}", directory.display()))?,
        templates: templates(Path::new(TEMPLATE_DIRECTORY))?,
    })
}

fn templates(directory: &Path) -> Result<BTreeMap<&'static str, (u64, u64)>> {
    let mut templates =
        BTreeMap::from(["verified", "unverified", "damaged"].map(|name| (name, (0, 0))));
    for template in TemplateStore::new(directory).list()? {
        let name = match template.trust {
            Trust::Verified => "verified",
            Trust::Unverified => "unverified",
            Trust::Damaged => "damaged",
        };
        let (count, bytes) = templates.entry(name).or_default();
        *count += 1;
        *bytes += template.allocated_bytes;
    }
    Ok(templates)
}

impl Metrics {
    fn text(&self) -> String {
        let mut text = Exposition::default();
        text.family(
            "thaw_build_info",
            "gauge",
            "The version of the thaw command, as a label.",
        );
        let version = env!("CARGO_PKG_VERSION");
        text.sample("thaw_build_info", &[("version", version)], 1);
        self.starts(&mut text);
        self.templates(&mut text);
        self.sandboxes(&mut text);
        text.finish()
    }

    fn starts(&self, text: &mut Exposition) {
        let name = "thaw_starts_total";
        text.family(
            name,
            "counter",
            "Containers that were started since the host has booted.",
        );
        text.sample(name, &[], self.counters.starts);
        let name = "thaw_start_failures_total";
        let help = "Starts that failed, by the kind of error and the step after which it was.";
        text.family(name, "counter", help);
        for (reason, steps) in &self.counters.failures {
            for (after, count) in steps {
                text.sample(name, &[("reason", reason), ("after", after)], *count);
            }
        }
        let name = "thaw_start_phase_seconds";
        text.family(
            name,
            "histogram",
            "How long the phases of a container's start took.",
        );
        for (phase, histogram) in &self.counters.phases {
            let bounds = BUCKETS_MS
                .iter()
                .map(|ms| (*ms as f64 / 1000.0).to_string());
            let bounds = bounds.chain(["+Inf".to_owned()]);
            let counts = histogram.cumulative();
            for (bound, count) in bounds.zip(counts) {
                let labels = [("phase", phase.as_str()), ("le", bound.as_str())];
                text.sample(&format!("{name}_bucket"), &labels, count);
            }
            let labels = [("phase", phase.as_str())];
            text.sample(
                &format!("{name}_sum"),
                &labels,
                histogram.sum_ns as f64 / 1e9,
            );
            let all = counts.last().copied().unwrap_or(0);
            text.sample(&format!("{name}_count"), &labels, all);
        }
    }

    fn templates(&self, text: &mut Exposition) {
        let families = [
            (
                "thaw_templates",
                "Templates of this host, by what is known of their files.",
            ),
            (
                "thaw_template_bytes",
                "Disk space that the templates of this host take.",
            ),
        ];
        for (name, help) in families {
            text.family(name, "gauge", help);
            for (state, (count, bytes)) in &self.templates {
                let value = if name == "thaw_templates" {
                    count
                } else {
                    bytes
                };
                text.sample(name, &[("state", state)], *value);
            }
        }
    }

    fn sandboxes(&self, text: &mut Exposition) {
        let name = "thaw_sandboxes";
        text.family(name, "gauge", "Sandboxes of this host, by state.");
        for state in State::ALL {
            let count = self
                .sandboxes
                .iter()
                .filter(|sandbox| sandbox.state == state)
                .count();
            text.sample(name, &[("state", state.name())], count);
        }
        let name = "thaw_memory_bytes";
        let help = "Private memory of all sandboxes by item; that of guests is in their VMMs'.";
        text.family(name, "gauge", help);
        let mut sum = Memory::default();
        for Found { memory, .. } in &self.sandboxes {
            sum.vmm += memory.vmm;
            sum.shim += memory.shim;
            sum.anchors += memory.anchors;
            sum.page_tables += memory.page_tables;
        }
        for (item, bytes) in sum.items() {
            text.sample(name, &[("item", item)], bytes);
        }
    }
}

#[cfg(test)]
mod tests;
