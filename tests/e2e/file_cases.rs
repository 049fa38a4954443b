//! What programs do with files comes to the same as under runc: a table of cases.
//!
//! `src/bin/file-cases` holds the cases. It runs under runc and under thaw, on the root file system and on a
//! volume, and prints a line for each. Lines that differ are listed here, each with its reason.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use thaw_tests::{NAMESPACE, Testbed, Version, on_containerd};

/// Cases whose outcome differs from runc's, and why. A case that does not differ any more fails the test too.
const EXPLAINED: &[(&str, &str)] = &[
    (
        "device by mknod",
        "the host's kernel wants CAP_MKNOD in the initial user namespace, which the file server has not",
    ),
    (
        "setuid after a write by root",
        "the host's kernel keeps the bits only for CAP_FSETID in the initial user namespace",
    ),
    (
        "time of birth",
        "the file server's library does not know FUSE_STATX",
    ),
    (
        "without a name",
        "the file server's library does not know FUSE_TMPFILE",
    ),
    (
        "without a name, exclusively",
        "the file server's library does not know FUSE_TMPFILE",
    ),
    (
        "without a name, then linked",
        "the file server's library does not know FUSE_TMPFILE",
    ),
];

const RUNC: &str = "io.containerd.runc.v2";
const PROGRAM: &str = env!("CARGO_BIN_EXE_file-cases");

/// The program in a directory of its own, and options that put it at `/file-cases` and a volume at `/volume`.
fn program(bed: &Testbed) -> (tempfile::TempDir, Vec<String>) {
    let directory = bed.directory();
    let program = directory.path().join("file-cases");
    fs::copy(PROGRAM, &program).expect("the program is built beside this one");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("it can be changed");
    let volume = directory.path().join("volume");
    fs::create_dir(&volume).expect("it can be made");
    let mut options = Vec::new();
    for (source, target, how) in [(&program, "/file-cases", "ro"), (&volume, "/volume", "rw")] {
        let source = source.display();
        options.push("--mount".to_owned());
        options.push(format!(
            "type=bind,src={source},dst={target},options=rbind:{how}"
        ));
    }
    (directory, options)
}

/// Outcomes by place and case.
type Outcomes = BTreeMap<String, String>;

/// The table under `runtime`, on the root and on a volume of its own.
fn outcomes(bed: &Testbed, runtime: &'static str) -> Outcomes {
    let (_directory, options) = program(bed);
    let run = bed.run().runtime(runtime).options(options).command([
        "/file-cases",
        "/home/user",
        "/volume",
    ]);
    let output = run.output().succeeded().stdout();
    let mut outcomes = Outcomes::new();
    for line in output.lines() {
        let (case, outcome) = line.split_once(": ").unwrap_or((line, ""));
        outcomes.insert(case.to_owned(), outcome.to_owned());
    }
    outcomes
}

/// Each case of the table, under both.
#[test]
fn outcomes_are_those_of_runc() {
    on_containerd(Version::V2_1, "outcomes_are_those_of_runc", |bed| {
        let (thaw, runc) = (outcomes(bed, "io.containerd.thaw.v2"), outcomes(bed, RUNC));
        // runc leaves the cgroup of containerd's namespace behind, which is nothing of thaw's.
        let _ = fs::remove_dir(Path::new("/sys/fs/cgroup").join(NAMESPACE));
        assert!(runc.len() >= 250, "only {} cases", runc.len());
        let names = |outcomes: &Outcomes| outcomes.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&thaw), names(&runc), "a case is missing");
        let explained = |case: &str| {
            let name = case.split_once(' ').map_or(case, |(_, name)| name);
            EXPLAINED.iter().any(|(other, _)| *other == name)
        };
        let mut wrong = Vec::new();
        let mut differing = Vec::new();
        for (case, expected) in &runc {
            let outcome = &thaw[case];
            if outcome != expected {
                differing.push(case.as_str());
                if !explained(case) {
                    wrong.push(format!("{case}: {outcome:?}, and {expected:?} under runc"));
                }
            }
        }
        assert!(
            wrong.is_empty(),
            "different, and not explained:\n{}",
            wrong.join("\n")
        );
        for (name, reason) in EXPLAINED {
            let differs = differing
                .iter()
                .any(|case| case.split_once(' ').is_some_and(|(_, case)| case == *name));
            assert!(
                differs,
                "{name:?} is as under runc: {reason:?} explains nothing"
            );
        }
    });
}

/// Random operations, on the root and on a volume, come to what memory says; the seed is the test's.
fn exercised(bed: &Testbed, seed: u64, steps: u32) {
    let (_directory, options) = program(bed);
    let container = bed
        .run()
        .options(options)
        .command(["sleep", "3600"])
        .detach();
    for (place, seed) in [("/home/user/x", seed), ("/volume/x", seed + 1)] {
        let (seed, steps) = (seed.to_string(), steps.to_string());
        container
            .exec(["/file-cases", "exercise", place, &seed, &steps])
            .succeeded();
    }
}

#[test]
fn exercise() {
    on_containerd(Version::V2_1, "exercise", |bed| {
        exercised(bed, 20_261_201, 200)
    });
}

#[test]
#[ignore = "takes minutes"]
fn exercise_long() {
    on_containerd(Version::V2_1, "exercise_long", |bed| {
        for seed in 1..=10 {
            exercised(bed, seed * 1000, 1500);
        }
    });
}
