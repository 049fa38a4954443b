//! The working set: the pages of guest memory that a restored guest is known to touch.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Bytes of a page.
pub const PAGE_SIZE: u64 = 4096;

/// Pages of a memory file, one after the other, that a guest uses alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TouchedPages {
    /// Number of the first page.
    pub first: u32,
    /// How many pages; not zero.
    pub count: u32,
    /// Whether they are written, and not only read.
    pub written: bool,
}

impl TouchedPages {
    /// Number of the page after the last.
    fn end(&self) -> u64 {
        u64::from(self.first) + u64::from(self.count)
    }
}

/// The pages that a start touches: ranges in rising order that do not overlap, few enough for a
/// message and for a start. Always so: made by [`WorkingSet::new`] and [`WorkingSet::bounded`] only.
/// Whether they lie in a certain machine's memory is [`WorkingSet::check_within`]'s to say.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<TouchedPages>", into = "Vec<TouchedPages>")]
pub struct WorkingSet(Vec<TouchedPages>);

/// Why ranges of pages are no working set.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum InvalidWorkingSet {
    /// More ranges than fit.
    #[error("a working set of {0} ranges: at most {max} are kept", max = WorkingSet::MAX_RANGES)]
    Ranges(usize),
    /// More pages than a start may be made to touch.
    #[error("a working set of {0} pages: at most {max} are kept", max = WorkingSet::MAX_PAGES)]
    Pages(u64),
    /// A range without pages.
    #[error("range {0} of the working set is empty")]
    Empty(usize),
    /// A range that does not begin after the one before it.
    #[error("range {0} of the working set is out of order")]
    Order(usize),
    /// A range past the end of the memory.
    #[error("the working set ends at page {end}, outside of a memory of {size} bytes")]
    Outside {
        /// The page after the last.
        end: u64,
        /// Bytes of the memory.
        size: u64,
    },
}

impl WorkingSet {
    /// Ranges in a working set: with the largest numbers, these take 22 KiB of a message.
    pub const MAX_RANGES: usize = 2048;

    /// Pages in a working set (32 MiB): a start that touches more is not made faster by having all
    /// of them ready before it begins.
    pub const MAX_PAGES: u64 = 8192;

    /// The working set of `ranges`, if they can be one.
    pub fn new(ranges: Vec<TouchedPages>) -> Result<Self, InvalidWorkingSet> {
        if ranges.len() > Self::MAX_RANGES {
            return Err(InvalidWorkingSet::Ranges(ranges.len()));
        }
        let mut end = 0;
        let mut pages = 0;
        for (index, range) in ranges.iter().enumerate() {
            if range.count == 0 {
                return Err(InvalidWorkingSet::Empty(index));
            }
            if u64::from(range.first) < end {
                return Err(InvalidWorkingSet::Order(index));
            }
            end = range.end();
            pages += u64::from(range.count);
        }
        if pages > Self::MAX_PAGES {
            return Err(InvalidWorkingSet::Pages(pages));
        }
        Ok(Self(ranges))
    }

    /// What fits into a working set of `ranges`, which are in order and not empty. Where they are
    /// too many, those that are only read are joined over the smallest gaps that help; the pages of
    /// a gap are mapped in vain then, but copied by nobody. Whatever is still too much is left out
    /// at the end.
    pub fn bounded(ranges: &[TouchedPages]) -> Result<Self, InvalidWorkingSet> {
        let mut joined = join(ranges, 0);
        let mut gap = 1;
        while joined.len() > Self::MAX_RANGES && gap < Self::MAX_PAGES {
            joined = join(ranges, gap);
            gap *= 2;
        }
        joined.truncate(Self::MAX_RANGES);
        let mut left = Self::MAX_PAGES;
        for range in &mut joined {
            range.count = u64::from(range.count).min(left) as u32;
            left -= u64::from(range.count);
        }
        joined.retain(|range| range.count > 0);
        Self::new(joined)
    }

    /// Refuse a working set that goes past the end of a memory of `size` bytes.
    pub fn check_within(&self, size: u64) -> Result<(), InvalidWorkingSet> {
        let end = self.0.last().map_or(0, TouchedPages::end);
        if end > size / PAGE_SIZE {
            return Err(InvalidWorkingSet::Outside { end, size });
        }
        Ok(())
    }

    /// The ranges.
    pub fn ranges(&self) -> &[TouchedPages] {
        &self.0
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many pages, and how many of them are written.
    pub fn pages(&self) -> (u64, u64) {
        self.0.iter().fold((0, 0), |(all, written), range| {
            let count = u64::from(range.count);
            (all + count, written + count * u64::from(range.written))
        })
    }
}

impl TryFrom<Vec<TouchedPages>> for WorkingSet {
    type Error = InvalidWorkingSet;

    fn try_from(ranges: Vec<TouchedPages>) -> Result<Self, InvalidWorkingSet> {
        Self::new(ranges)
    }
}

impl From<WorkingSet> for Vec<TouchedPages> {
    fn from(set: WorkingSet) -> Self {
        set.0
    }
}

/// Join neighbours of the same kind, and those that are only read also over up to `gap` pages.
fn join(ranges: &[TouchedPages], gap: u64) -> Vec<TouchedPages> {
    let mut joined: Vec<TouchedPages> = Vec::new();
    for range in ranges {
        if let Some(last) = joined.last_mut()
            && last.written == range.written
            && let Some(between) = u64::from(range.first).checked_sub(last.end())
            && between <= if range.written { 0 } else { gap }
            && let Ok(count) = u32::try_from(range.end() - u64::from(last.first))
        {
            last.count = count;
        } else {
            joined.push(*range);
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Channel, Request};

    fn read(first: u32, count: u32) -> TouchedPages {
        TouchedPages {
            first,
            count,
            written: false,
        }
    }

    fn written(first: u32, count: u32) -> TouchedPages {
        TouchedPages {
            written: true,
            ..read(first, count)
        }
    }

    #[test]
    fn test_ranges_that_are_no_working_set_are_refused() {
        let many = (0..=WorkingSet::MAX_RANGES as u32)
            .map(|n| read(2 * n, 1))
            .collect();
        let cases = [
            (vec![read(5, 0)], InvalidWorkingSet::Empty(0)),
            (vec![read(5, 2), read(6, 1)], InvalidWorkingSet::Order(1)),
            (vec![read(5, 2), written(1, 1)], InvalidWorkingSet::Order(1)),
            (vec![read(0, 8193)], InvalidWorkingSet::Pages(8193)),
            (
                vec![read(u32::MAX, u32::MAX)],
                InvalidWorkingSet::Pages(u32::MAX.into()),
            ),
            (many, InvalidWorkingSet::Ranges(2049)),
        ];
        for (ranges, expected) in cases {
            let bytes = postcard::to_stdvec(&ranges).unwrap();
            assert!(postcard::from_bytes::<WorkingSet>(&bytes).is_err());
            assert_eq!(WorkingSet::new(ranges), Err(expected));
        }
        let good = WorkingSet::new(vec![read(0, 1), written(1, 3), read(9, 2)]).unwrap();
        assert_eq!(good.pages(), (6, 3));
        assert!(WorkingSet::default().is_empty());
    }

    #[test]
    fn test_a_working_set_must_end_within_the_memory() {
        let set = WorkingSet::new(vec![read(0, 1), written(9, 1)]).unwrap();
        assert_eq!(set.check_within(10 * PAGE_SIZE), Ok(()));
        assert!(set.check_within(10 * PAGE_SIZE - 1).is_err());
        let last = WorkingSet::new(vec![read(u32::MAX, 8192)]).unwrap();
        assert!(last.check_within(1 << 40).is_err());
        assert_eq!(WorkingSet::default().check_within(0), Ok(()));
    }

    #[test]
    fn test_neighbours_of_a_kind_are_one_range() {
        let ranges = [
            read(0, 1),
            read(1, 2),
            written(3, 1),
            written(4, 1),
            written(6, 1),
        ];
        let set = WorkingSet::bounded(&ranges).unwrap();
        assert_eq!(set.ranges(), [read(0, 3), written(3, 2), written(6, 1)]);
    }

    #[test]
    fn test_only_read_ranges_are_joined_over_gaps_and_only_when_they_are_too_many() {
        let few: Vec<_> = (0..100).map(|n| read(2 * n, 1)).collect();
        assert_eq!(WorkingSet::bounded(&few).unwrap().ranges(), few);
        let many: Vec<_> = (0..3000).map(|n| read(2 * n, 1)).collect();
        let set = WorkingSet::bounded(&many).unwrap();
        assert_eq!(set.ranges(), [read(0, 5999)]);
        let many: Vec<_> = (0..3000).map(|n| written(2 * n, 1)).collect();
        let set = WorkingSet::bounded(&many).unwrap();
        assert_eq!(set.ranges(), &many[..WorkingSet::MAX_RANGES]);
    }

    #[test]
    fn test_pages_beyond_the_bound_are_left_out() {
        let set = WorkingSet::bounded(&[read(0, 8000), written(9000, 500), read(10_000, 1)]);
        assert_eq!(set.unwrap().ranges(), [read(0, 8000), written(9000, 192)]);
    }

    #[test]
    fn test_the_largest_working_set_fits_into_a_message() {
        let first = u32::MAX - 3 * WorkingSet::MAX_RANGES as u32;
        let ranges = (0..WorkingSet::MAX_RANGES as u32).map(|n| written(first + 3 * n, 1));
        let working_set = WorkingSet::new(ranges.collect()).unwrap();
        let (a, b) = Channel::pair().unwrap();
        let request = Request::Restore { working_set };
        a.send(&request, &[]).unwrap();
        assert_eq!(b.receive::<Request>().unwrap().unwrap().0, request);
    }
}
