//! The log of `thaw-vmm`: one line on standard error for each warning or error. Its owner decides
//! where that goes. Smaller than a general subscriber, whose set-up alone would show in a start.

use std::fmt::{self, Write as _};
use std::io::Write as _;

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// What is logged: this level and those above it.
const LEVEL: LevelFilter = LevelFilter::WARN;

struct Log;

/// Log to standard error from now on. A second call changes nothing.
pub fn init() {
    // An error says that there is a log already.
    let _ = tracing::subscriber::set_global_default(Log);
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= LEVEL
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LEVEL)
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let mut line = Line(format!("{} {}:", metadata.level(), metadata.target()));
        event.record(&mut line);
        line.0.push('\n');
        // There is nowhere to say that the log cannot be written.
        let _ = std::io::stderr().write_all(line.0.as_bytes());
    }

    // Nothing here has spans.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// A line of the log that grows by the event's fields.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.0, " {value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_only_warnings_and_errors_are_logged() {
        tracing::subscriber::with_default(Log, || {
            assert!(tracing::enabled!(tracing::Level::ERROR));
            assert!(tracing::enabled!(tracing::Level::WARN));
            assert!(!tracing::enabled!(tracing::Level::INFO));
        });
    }
}
