//! What one test has: a containerd of one version, and a clean host before and after.

use std::collections::BTreeMap;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::command::{finish, finish_within};
use crate::container::{Container, Run};
use crate::containerd::Containerd;
use crate::environment::{Environment, IMAGE, Version};
use crate::host::Host;

/// No single command of a test takes longer, not even in the lab beside a build.
pub const LIMIT: Duration = Duration::from_secs(240);

/// One test at a time: whatever is new on the host is that test's.
pub(crate) static TURN: Mutex<()> = Mutex::new(());

/// One containerd, and the names that one test uses on it.
#[derive(Debug)]
pub struct Testbed {
    containerd: Arc<Containerd>,
    test: String,
    next: AtomicU32,
    before: Host,
}

/// Writes one test for each version of containerd: the function's name becomes a module's, with a
/// test for each version in it.
#[macro_export]
macro_rules! on_each_containerd {
    ($($(#[doc = $doc:expr])* $(#[ignore = $reason:literal])? fn $name:ident($bed:ident: &Testbed) $body:block)+) => {
        $(
            $(#[doc = $doc])*
            mod $name {
                #[allow(unused_imports)]
                use super::*;

                fn test($bed: &$crate::Testbed) $body

                #[test]
                $(#[ignore = $reason])?
                fn containerd_1_6() {
                    $crate::on_containerd($crate::Version::V1_6, stringify!($name), test);
                }

                #[test]
                $(#[ignore = $reason])?
                fn containerd_1_7() {
                    $crate::on_containerd($crate::Version::V1_7, stringify!($name), test);
                }

                #[test]
                $(#[ignore = $reason])?
                fn containerd_2_1() {
                    $crate::on_containerd($crate::Version::V2_1, stringify!($name), test);
                }
            }
        )+
    };
}

/// Runs `test` on a containerd of `version`. Removes whatever containers it leaves, and fails when
/// anything of theirs is then still on the host.
///
/// # Panics
///
/// When the test does, or something was left over.
pub fn on_containerd(version: Version, name: &str, test: impl FnOnce(&Testbed)) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    static DAEMONS: Mutex<BTreeMap<Version, Arc<Containerd>>> = Mutex::new(BTreeMap::new());
    let mut daemons = DAEMONS.lock().unwrap_or_else(PoisonError::into_inner);
    let containerd = daemons
        .entry(version)
        .or_insert_with(|| Arc::new(prepare(version)))
        .clone();
    let bundles = containerd.bundles();
    let begun = Instant::now();
    let before = Host::look(&bundles);
    let log = containerd.log().len();
    let bed = Testbed {
        containerd,
        test: name.replace('_', "-"),
        next: AtomicU32::new(0),
        before,
    };
    let result = catch_unwind(AssertUnwindSafe(|| test(&bed)));
    // A test that has killed it may have failed before it has started it again.
    bed.containerd.restart();
    bed.remove_containers();
    let left = Host::left_since(&bed.before, &bundles);
    // Not by a macro, whose output the test harness keeps to itself: a slow test is to be seen.
    let _ = writeln!(
        std::io::stderr(),
        "  {name} on {}: {:.1} s",
        version.name(),
        begun.elapsed().as_secs_f64()
    );
    if result.is_err() || !left.is_empty() {
        let all = bed.containerd.log();
        eprintln!(
            "containerd {} during the test:\n{}",
            version.name(),
            all.get(log..).unwrap_or(&all)
        );
    }
    if let Err(panic) = result {
        eprintln!("left over (the test failed anyway): {left:#?}");
        resume_unwind(panic);
    }
    assert!(left.is_empty(), "left over on the host: {left:#?}");
}

/// Starts a daemon, imports the image, and runs the first container: what the runtime makes once (a
/// template, the parent of cgroups) is there before the first look at the host.
fn prepare(version: Version) -> Containerd {
    let containerd = Containerd::start(version);
    let image = &Environment::get().image;
    finish(containerd.ctr().args(["images", "import"]).arg(image)).succeeded();
    let runtime = &Environment::get().runtime;
    let mut first = containerd.ctr();
    first.args(["run", "--rm", "--runtime", runtime, IMAGE, "first", "true"]);
    let first = finish_within(&mut first, b"", Duration::from_secs(240));
    assert!(
        first.code == 0,
        "the first container does not run: {first}\n{}",
        containerd.log()
    );
    containerd
}

impl Testbed {
    /// The daemon.
    pub fn containerd(&self) -> &Containerd {
        &self.containerd
    }

    /// A name that nothing else has.
    pub fn next_name(&self, what: &str) -> String {
        format!(
            "{}-{what}-{}",
            self.test,
            self.next.fetch_add(1, Ordering::Relaxed)
        )
    }

    /// A container to be run.
    pub fn run(&self) -> Run<'_> {
        Run::new(self, self.next_name("c"))
    }

    /// A container that sleeps, to run programs in.
    #[track_caller]
    pub fn sleeper(&self) -> Container<'_> {
        self.run().command(["sleep", "3600"]).detach()
    }

    /// A directory for the test's files, removed with the value.
    pub fn directory(&self) -> tempfile::TempDir {
        tempfile::tempdir_in(&Environment::get().directory)
            .expect("the tests' directory can be written")
    }

    /// Where the host has what the container writes: the upper directory of its overlay.
    pub fn upper_directory(&self, container: &str) -> PathBuf {
        let mut command = self.containerd.ctr();
        let mounts =
            finish(command.args(["snapshots", "mounts", "/nowhere", container])).succeeded();
        let line = mounts.stdout();
        let option = line
            .split([' ', ',', '='])
            .skip_while(|word| *word != "upperdir")
            .nth(1);
        option
            .unwrap_or_else(|| panic!("no upperdir in {line}"))
            .into()
    }

    /// Looks for leftovers now, for a test that makes more than one round.
    ///
    /// # Panics
    ///
    /// When there are any, with `what` has happened before.
    #[track_caller]
    pub fn assert_clean(&self, what: &str) {
        let left = Host::left_since(&self.before, &self.containerd.bundles());
        assert!(left.is_empty(), "{what}: left over on the host: {left:#?}");
    }

    /// Ends and removes all containers.
    pub fn remove_containers(&self) {
        let list = |what: &str| {
            let mut command = self.containerd.ctr();
            finish(command.args([what, "ls", "-q"]))
                .stdout()
                .lines()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        for task in list("tasks") {
            finish(
                self.containerd
                    .ctr()
                    .args(["tasks", "delete", "--force", &task]),
            );
        }
        for container in list("containers") {
            finish(
                self.containerd
                    .ctr()
                    .args(["containers", "delete", &container]),
            );
        }
    }
}
