//! The tests that containerd has for its clients, on thaw: `make test-long`.
//!
//! They come as one program with a containerd 1.6 of its own (tests/containerd-client). Those about
//! images, the content store, snapshots, leases and the daemon's settings never meet a runtime and are
//! not run. Of the others all are, but for these:
//!
//! | not run | why |
//! |---|---|
//! | `TestCheckpoint*` | checkpoints are refused by name |
//! | `TestContainerRuntimeOptionsv1`, `TestContainerRuntimeOptionsv2`, `TestDaemonRuntimeRoot`, `TestShimInCgroup`, `TestDaemonCustomCgroup` | about the options of runc's shims and a cgroup of their kind |
//! | `TestContainerKillInitPidHost`, `TestContainerKillAll` | a container in the host's pid namespace is refused by name |
//! | `TestUserNamespaces` | needs an image of a registry |
//! | `TestShimDoesNotLeakPipes`, `TestShimOOMScore`, `TestContainerPids` | look at processes of runc and at its pids on the host |
//! | `TestKillContainerDeletedByRunc` | has runc delete the container behind containerd's back |
//! | `TestTaskUpdate` | looks for the limit in the cgroup on the host of the container's pid |
//! | `TestBindLowPortNonOpt` | ends `nc` by SIGTERM, which Debian's does not catch and a first process ignores |
//! | `TestContainerExecLargeOutputWithTTY`, in the lab | counts to a million a hundred times, which takes hours there |

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use thaw_tests::{Environment, Testbed, Version, on_containerd};

/// Those that meet a runtime.
const TESTS: &[&str] = &[
    "TestContainerList",
    "TestNewContainer",
    "TestContainerStart",
    "TestContainerOutput",
    "TestContainerExec",
    "TestContainerLargeExecArgs",
    "TestContainerCloseIO",
    "TestDeleteRunningContainer",
    "TestContainerKill",
    "TestContainerNoBinaryExists",
    "TestContainerExecNoBinaryExists",
    "TestWaitStoppedTask",
    "TestWaitStoppedProcess",
    "TestTaskForceDelete",
    "TestProcessForceDelete",
    "TestContainerHostname",
    "TestContainerExitedAtSet",
    "TestDeleteContainerExecCreated",
    "TestContainerMetrics",
    "TestDeletedContainerMetrics",
    "TestContainerExtensions",
    "TestContainerUpdate",
    "TestContainerInfo",
    "TestContainerLabels",
    "TestShimSockLength",
    "TestShortRunningTaskPid",
    "TestRegressionIssue4769",
    "TestRegressionIssue6429",
    "TestDaemonRestart",
    "TestContainerKillInitKillsChildWhenNotHostPid",
    "TestTaskResize",
    "TestContainerImage",
    "TestContainerNoImage",
    "TestContainerNoSTDIN",
    "TestTaskSpec",
    "TestContainerUsername",
    "TestContainerPTY",
    "TestRestartMonitor",
    "TestDaemonReconnectsToShimIOPipesOnRestart",
    "TestContainerAttach",
    "TestContainerUser",
    "TestContainerAttachProcess",
    "TestContainerLoadUnexistingProcess",
    "TestContainerUserID",
    "TestContainerHook",
    "TestDaemonRestartWithRunningShim",
    "TestBindLowPortNonRoot",
];

/// What takes hours where the processor is emulated.
const NOT_IN_THE_LAB: &str = "TestContainerExecLargeOutputWithTTY";

/// All of them pass. $THAW_CONTAINERD_CLIENT names the program; $THAW_CONTAINERD_CLIENT_RUN picks some,
/// as a regular expression.
#[test]
#[ignore = "takes half an hour: make test-long"]
fn containerd_client() {
    on_containerd(Version::V1_6, "containerd-client", |_: &Testbed| {
        let environment = Environment::get();
        let program = std::env::var("THAW_CONTAINERD_CLIENT")
            .expect("THAW_CONTAINERD_CLIENT names what tests/containerd-client/build prints");
        let mut tests = TESTS.to_vec();
        if !environment.in_lab {
            tests.push(NOT_IN_THE_LAB);
        }
        let all = format!("^({})$", tests.join("|"));
        let run = std::env::var("THAW_CONTAINERD_CLIENT_RUN").unwrap_or(all);
        let programs = environment.containerd(Version::V1_6);
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new(program);
        command
            .args([
                "-test.v",
                "-test.timeout=90m",
                "-test.run",
                &run,
                "-no-criu",
                "-test.root",
            ])
            .current_dir(&environment.directory)
            .env("PATH", format!("{}:{path}", programs.display()))
            .env("TEST_RUNTIME", &environment.runtime);
        let (succeeded, output, errors) = follow(&mut command);
        let named = |verdict: &str| -> BTreeSet<String> {
            let begin = format!("--- {verdict}: ");
            let names = output.lines().filter_map(|line| line.strip_prefix(&begin));
            names
                .filter_map(|rest| rest.split(' ').next())
                .map(str::to_owned)
                .collect()
        };
        let (passed, skipped) = (named("PASS"), named("SKIP"));
        println!("passed {}: {passed:?}\nskipped: {skipped:?}", passed.len());
        assert!(
            succeeded && !passed.is_empty(),
            "failed: {:?}\n{}\n{}",
            named("FAIL"),
            tail(&output),
            tail(&errors)
        );
    });
}

/// Runs a program to its end, which its own limit of time brings about, and tells of each test when it has
/// ended. Whether it succeeded, and what it wrote.
fn follow(command: &mut Command) -> (bool, String, String) {
    let errors = Environment::get()
        .directory
        .join("containerd-client.errors");
    let file = File::create(&errors).expect("a file of the tests' directory");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(file)
        .spawn()
        .expect("the program that was built");
    let mut output = String::new();
    let pipe = BufReader::new(child.stdout.take().expect("a pipe"));
    for line in pipe.lines().map_while(Result::ok) {
        if line.starts_with("--- ") || line.starts_with("=== CONT") {
            println!("{line}");
        }
        output.push_str(&line);
        output.push('\n');
    }
    let status = child.wait().expect("a child of this process");
    let errors = fs::read(&errors).unwrap_or_default();
    (
        status.success(),
        output,
        String::from_utf8_lossy(&errors).into_owned(),
    )
}

/// The end of a long text.
fn tail(text: &str) -> &str {
    let start = text.len().saturating_sub(40_000);
    let boundary = (start..text.len()).find(|&index| text.is_char_boundary(index));
    &text[boundary.unwrap_or(text.len())..]
}
