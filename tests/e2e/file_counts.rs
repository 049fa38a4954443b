//! What an operation with files costs, in counts: requests that its caller waits for.

use std::path::Path;

use thaw_tests::Environment;
use thaw_tests::file_guest::FileGuest;

const PROGRAM: &str = env!("CARGO_BIN_EXE_file-guest");

/// The most requests that a program waits for, on average over 200 of an operation. What the guest may
/// believe for a second it asks for again after that, so a slow machine needs a little more than the whole
/// numbers, which are half less.
const MOST: &[(&str, f64)] = &[
    ("create", 1.5),
    ("stat", 1.5),
    ("stat again", 0.5),
    ("open", 1.5),
    ("write", 5.5),
    ("read", 3.5),
    ("read again", 1.5),
    ("rename", 4.5),
    ("remove", 2.5),
];

/// The most requests for a MiB of data.
const MOST_OF_DATA: &[(&str, f64)] = &[
    ("write MiB", 2.5),
    ("read MiB", 9.0),
    ("read MiB again", 0.5),
];

#[test]
fn round_trips() {
    let mut guest = FileGuest::boot(&Environment::get().prefix, Path::new(PROGRAM))
        .unwrap_or_else(|error| panic!("{error:#}"));
    let mut wrong = Vec::new();
    let all = MOST.iter().map(|limit| (limit, 200));
    for ((operation, most), count) in all.chain(MOST_OF_DATA.iter().map(|limit| (limit, 16))) {
        let cost = guest
            .measure(operation, count)
            .unwrap_or_else(|error| panic!("{operation}: {error:#}"));
        println!("{operation:<16} {cost:?}");
        if cost.waits > *most {
            wrong.push(format!(
                "{operation}: {:.2} requests, at most {most}",
                cost.waits
            ));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
