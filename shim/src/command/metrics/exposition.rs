//! The text format of Prometheus, version 0.0.4: written here rather than by a client library, which
//! would bring registries and locks for what is one pass over known values.

use std::fmt::{Display, Write};

/// A text in the making.
#[derive(Debug, Default)]
pub(super) struct Exposition(String);

impl Exposition {
    /// Begin the metrics of one name; `kind` is `counter`, `gauge` or `histogram`.
    pub fn family(&mut self, name: &str, kind: &str, help: &str) {
        let help = help.replace('\\', "\\\\").replace('\n', "\\n");
        // Writing to a text does not fail.
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    /// One value.
    pub fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.0.push_str(name);
        let labels = labels.iter().map(|(name, value)| {
            let value = value
                .replace('\\', "\\\\")
                .replace('"', "\\\"")
                .replace('\n', "\\n");
            format!("{name}=\"{value}\"")
        });
        let labels: Vec<_> = labels.collect();
        if !labels.is_empty() {
            let _ = write!(self.0, "{{{}}}", labels.join(","));
        }
        let _ = writeln!(self.0, " {value}");
    }

    /// The text.
    pub fn finish(self) -> String {
        self.0
    }
}
