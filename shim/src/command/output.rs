//! How numbers and tables look.

use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// Write rows in columns as wide as their widest cell. The last column is not padded.
pub(super) fn table(output: &mut dyn Write, rows: &[Vec<String>]) -> io::Result<()> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
    };
    let widths: Vec<usize> = (0..columns)
        .map(|column| width(column).unwrap_or(0))
        .collect();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', width - cell.chars().count() + 2));
        }
        writeln!(output, "{}", line.trim_end())?;
    }
    Ok(())
}

/// Write `value` as JSON for people and programs, with a line's end.
pub(super) fn json<T: Serialize + ?Sized>(output: &mut dyn Write, value: &T) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *output, value)?;
    writeln!(output)
}

/// Bytes in binary units.
pub(super) fn bytes(bytes: u64) -> String {
    match bytes {
        0..0x10_0000 => format!("{} KiB", bytes.div_ceil(1 << 10)),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

/// How long ago a time was, given in seconds since 1970.
pub(super) fn ago(seconds: u64) -> String {
    format!("{} ago", age(seconds))
}

/// How long it has been since a time, given in seconds since 1970.
pub(super) fn age(seconds: u64) -> String {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    elapsed(now.saturating_sub(seconds))
}

fn elapsed(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// Nanoseconds as milliseconds.
pub(super) fn milliseconds(ns: u64) -> String {
    format!("{}.{:02}", ns / 1_000_000, ns / 10_000 % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_table_is_aligned_without_trailing_blanks() {
        let row = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_owned()).collect();
        let mut output = Vec::new();
        let rows = [
            row(&["KEY", "SHAPE"]),
            row(&["abcdef", "1"]),
            row(&["é", "", "more"]),
        ];
        table(&mut output, &rows).unwrap();
        assert_eq!(
            String::from_utf8(output).unwrap(),
            "KEY     SHAPE\nabcdef  1\né              more\n"
        );
    }

    #[test]
    fn test_numbers() {
        assert_eq!(bytes(1), "1 KiB");
        assert_eq!(bytes(100 << 20), "100 MiB");
        assert_eq!(bytes(3 << 29), "1.5 GiB");
        assert_eq!(elapsed(119), "119 s");
        assert_eq!(elapsed(3600), "60 min");
        assert_eq!(elapsed(86_400 * 3), "3 days");
        assert_eq!(milliseconds(1_239_999_999), "1239.99");
        assert_eq!(milliseconds(50_000), "0.05");
    }
}
