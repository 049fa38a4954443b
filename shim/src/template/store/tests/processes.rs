//! Several processes on one store.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use super::*;

/// Set in the processes that these tests start: where the store is.
const DIRECTORY_VARIABLE: &str = "THAW_TEST_TEMPLATE_DIRECTORY";

/// How long their builds take, in milliseconds.
const DELAY_VARIABLE: &str = "THAW_TEST_BUILD_DELAY";

/// Says when a build begins.
struct Announced(FakeBuilder);

impl Builder for Announced {
    fn build(
        &self,
        inputs: &KeyInputs,
        state: &File,
        memory: &File,
    ) -> Result<WorkingSet, BuildError> {
        println!("\nBUILDING");
        self.0.build(inputs, state, memory)
    }
}

fn store(root: &Path) -> TemplateStore {
    TemplateStore {
        directory: root.join("templates"),
        markers: Markers::new(root.join("markers")),
        budget: budget::DISK_BUDGET,
    }
}

#[test]
#[ignore = "a process of the other tests here"]
fn test_process_that_obtains() {
    let Some(root) = std::env::var_os(DIRECTORY_VARIABLE).map(PathBuf::from) else {
        return;
    };
    let delay = std::env::var(DELAY_VARIABLE).unwrap().parse().unwrap();
    let delay = Duration::from_millis(delay);
    let builder = Announced(FakeBuilder {
        delay,
        ..FakeBuilder::default()
    });
    let template = store(&root).obtain_with(&inputs(), &builder).unwrap();
    println!("\nORIGIN {:?}", template.origin);
}

fn spawn(root: &Path, delay_ms: u32) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture"])
        .arg("template::store::tests::processes::test_process_that_obtains")
        .env(DIRECTORY_VARIABLE, root)
        .env(DELAY_VARIABLE, delay_ms.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn output(child: Child) -> String {
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success());
    String::from_utf8(done.stdout).unwrap()
}

/// Wait until a process builds.
fn await_build(child: &mut Child) {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "BUILDING"));
}

#[test]
fn test_processes_at_once_build_one_template() {
    let root = tempfile::tempdir().unwrap();
    let children: Vec<_> = (0..4).map(|_| spawn(root.path(), 300)).collect();
    let text: String = children.into_iter().map(output).collect();
    assert_eq!(text.matches("BUILDING").count(), 1, "{text}");
    assert_eq!(text.matches("ORIGIN Built").count(), 1, "{text}");
    assert_eq!(text.matches("ORIGIN Stored").count(), 3, "{text}");
}

#[test]
fn test_killed_builder_leaves_its_work_to_who_waits_and_its_remains_are_removed() {
    let root = tempfile::tempdir().unwrap();
    let mut killed = spawn(root.path(), 60_000);
    await_build(&mut killed);
    let waiting = spawn(root.path(), 0);
    killed.kill().unwrap();
    killed.wait().unwrap();
    let text = output(waiting);
    assert_eq!(text.matches("ORIGIN Built").count(), 1, "{text}");
    let names = fs::read_dir(root.path().join("templates")).unwrap();
    let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "template and lock: {names:?}");
}
