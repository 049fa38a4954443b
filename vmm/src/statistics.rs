//! What the VMM can say about the memory that its guest has dirtied.

use std::fs::File;
use std::io::{BufRead, BufReader, Seek};

/// Bytes of anonymous memory (pages that differ from any file) in `ranges` of this process' address
/// space, from its `smaps` (Documentation/filesystems/proc.rst). Zero where that cannot be read.
pub fn anonymous_bytes(smaps: &mut File, ranges: &[(u64, u64)]) -> u64 {
    if smaps.rewind().is_err() {
        return 0;
    }
    let mut counted = false;
    let mut kib = 0;
    for line in BufReader::new(smaps).lines() {
        let Ok(line) = line else { break };
        if let Some(start) = mapping_start(&line) {
            counted = ranges
                .iter()
                .any(|(from, to)| (*from..*to).contains(&start));
        } else if let Some(rest) = line.strip_prefix("Anonymous:").filter(|_| counted) {
            let number = rest.trim().trim_end_matches(" kB");
            kib += number.parse::<u64>().unwrap_or(0);
        }
    }
    kib << 10
}

/// The first address of a mapping, when `line` is the one that introduces it.
fn mapping_start(line: &str) -> Option<u64> {
    let (start, rest) = line.split_once('-')?;
    let (end, _) = rest.split_once(' ')?;
    u64::from_str_radix(end, 16).ok()?;
    u64::from_str_radix(start, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_only_lines_that_introduce_a_mapping_have_an_address() {
        let line = "7f0c1a000000-7f0c1a021000 rw-p 00000000 00:00 0 ";
        assert_eq!(mapping_start(line), Some(0x7f0c_1a00_0000));
        assert_eq!(mapping_start("Anonymous:             12 kB"), None);
        assert_eq!(mapping_start("VmFlags: rd wr mr mw me ac sd"), None);
    }
}
