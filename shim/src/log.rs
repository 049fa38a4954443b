//! The shim's log: one `time= level= msg=` line an event on standard error, which in the daemon is
//! the bundle's `log` FIFO that containerd reads.
//!
//! A reader that went away, or one that does not keep up, costs log lines and nothing else: the
//! FIFO is opened without blocking and write errors are dropped, because containerd may be
//! restarted at any time and there is nowhere else to report to.

use std::fmt::{self, Write as _};
use std::time::{SystemTime, UNIX_EPOCH};

use tracing::field::{Field, Visit};
use tracing::span;
use tracing::{Event, Level, Metadata, Subscriber};

/// Log from now on what is of this level or graver. [`Level::INFO`] is what is out of the ordinary,
/// such as the progress of a template that has to be built.
pub fn install(level: Level) {
    // Refused only when one is installed already.
    let _ = tracing::subscriber::set_global_default(Log { level });
}

/// Writes events as lines; spans are not recorded.
struct Log {
    level: Level,
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = String::with_capacity(160);
        format_event(&mut line, SystemTime::now(), event);
        let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
    }
}

fn format_event(line: &mut String, now: SystemTime, event: &Event<'_>) {
    let level = match *event.metadata().level() {
        Level::ERROR => "error",
        Level::WARN => "warning",
        Level::INFO => "info",
        _ => "debug",
    };
    let mut fields = Fields::default();
    event.record(&mut fields);
    let _ = writeln!(
        line,
        "time=\"{}\" level={level} msg={:?}{}",
        rfc3339(now),
        fields.message,
        fields.others
    );
}

#[derive(Default)]
struct Fields {
    message: String,
    others: String,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        let _ = match field.name() {
            "message" => self.message.write_str(value),
            name => write!(self.others, " {name}={value:?}"),
        };
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.others, " {name}={:?}", format!("{value:?}")),
        };
    }
}

/// UTC with milliseconds. Days to a date by the proleptic Gregorian calendar, counted from
/// 0000-03-01 so that the leap day is a year's last.
fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        second / 3600,
        second / 60 % 60,
        second % 60,
        since.subsec_millis()
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn test_dates_around_leap_days() {
        let date = |seconds: u64| rfc3339(UNIX_EPOCH + Duration::from_millis(seconds * 1000 + 7));
        assert_eq!(date(0), "1970-01-01T00:00:00.007Z");
        assert_eq!(date(951_782_399), "2000-02-28T23:59:59.007Z");
        assert_eq!(date(951_782_400), "2000-02-29T00:00:00.007Z");
        assert_eq!(date(1_709_251_199), "2024-02-29T23:59:59.007Z");
        assert_eq!(date(4_107_542_400), "2100-03-01T00:00:00.007Z");
        assert_eq!(date(1_798_761_599), "2026-12-31T23:59:59.007Z");
    }
}
