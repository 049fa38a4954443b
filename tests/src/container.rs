//! Containers, run with containerd's own client.

use std::ffi::OsStr;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::command::{Finished, finish, finish_when_ready, finish_within};
use crate::environment::{Environment, IMAGE, USER_IMAGE};
use crate::testbed::{LIMIT, Testbed};

/// A `ctr run` that is being put together. The container is removed when it has ended.
#[derive(Debug)]
pub struct Run<'a> {
    bed: &'a Testbed,
    id: String,
    runtime: &'static str,
    image: &'static str,
    options: Vec<String>,
    command: Vec<String>,
}

impl<'a> Run<'a> {
    pub(crate) fn new(bed: &'a Testbed, id: String) -> Self {
        Self {
            bed,
            id,
            runtime: &Environment::get().runtime,
            image: IMAGE,
            options: Vec::new(),
            command: Vec::new(),
        }
    }

    /// The container's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Under a certain name.
    #[must_use]
    pub fn named(mut self, id: &str) -> Self {
        self.id = id.to_owned();
        self
    }

    /// Adds options of `ctr run`.
    #[must_use]
    pub fn options<S: Into<String>>(mut self, options: impl IntoIterator<Item = S>) -> Self {
        self.options.extend(options.into_iter().map(Into::into));
        self
    }

    /// With a certain runtime, whatever is under test.
    #[must_use]
    pub fn runtime(mut self, name: &'static str) -> Self {
        self.runtime = name;
        self
    }

    /// From the image whose programs are run by user 1000.
    #[must_use]
    pub fn as_user(mut self) -> Self {
        self.image = USER_IMAGE;
        self
    }

    /// The program and its arguments.
    #[must_use]
    pub fn command<S: Into<String>>(mut self, words: impl IntoIterator<Item = S>) -> Self {
        self.command = words.into_iter().map(Into::into).collect();
        self
    }

    /// A line for the container's shell.
    #[must_use]
    pub fn shell(self, line: &str) -> Self {
        self.command(["sh", "-c", line])
    }

    /// The whole command, for tests that start it themselves.
    pub fn to_command(&self, flags: &[&str]) -> Command {
        let mut command = self.bed.containerd().ctr();
        command
            .args(["run", "--runtime", self.runtime])
            .args(flags)
            .args(&self.options);
        command.arg(self.image).arg(&self.id).args(&self.command);
        command
    }

    /// Runs it to its end.
    #[track_caller]
    pub fn output(&self) -> Finished {
        finish(&mut self.to_command(&["--rm"]))
    }

    /// Runs it to its end, with something to read.
    #[track_caller]
    pub fn output_with_input(&self, input: &[u8]) -> Finished {
        finish_within(&mut self.to_command(&["--rm"]), input, LIMIT)
    }

    /// Runs it to its end; it gets `input` and the end of it once it has said `ready`.
    #[track_caller]
    pub fn output_with_input_when_ready(&self, input: &[u8]) -> Finished {
        finish_when_ready(&mut self.to_command(&["--rm"]), input)
    }

    /// Starts it beside the test, whose output is not read until [`Child::wait_with_output`].
    #[track_caller]
    pub fn spawn(&self) -> Child {
        let mut command = self.to_command(&["--rm"]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
            .spawn()
            .expect("ctr is where tests/environment has put it")
    }

    /// Starts it and returns when it runs, leaving it to the caller.
    #[track_caller]
    pub fn detach(self) -> Container<'a> {
        finish(&mut self.to_command(&["--detach"])).succeeded();
        self.detached()
    }

    /// The container, where the caller has started it detached.
    pub fn detached(self) -> Container<'a> {
        Container {
            bed: self.bed,
            id: self.id,
        }
    }
}

/// A container that runs, or has ended, and is not yet removed.
#[derive(Debug)]
pub struct Container<'a> {
    bed: &'a Testbed,
    /// Its id.
    pub id: String,
}

impl Container<'_> {
    fn task(&self, words: &[&str]) -> Finished {
        finish(self.bed.containerd().ctr().arg("tasks").args(words))
    }

    /// Runs a program in it.
    #[track_caller]
    pub fn exec<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Finished {
        finish(&mut self.exec_command(words))
    }

    /// Runs a line for its shell in it.
    #[track_caller]
    pub fn exec_shell(&self, line: &str) -> Finished {
        self.exec(["sh", "-c", line])
    }

    /// The command that runs a program in it.
    pub fn exec_command<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Command {
        let mut command = self.bed.containerd().ctr();
        command
            .args([
                "tasks",
                "exec",
                "--exec-id",
                &self.bed.next_name("exec"),
                &self.id,
            ])
            .args(words);
        command
    }

    /// Its state as containerd knows it, in capitals; nothing when there is no task.
    pub fn status(&self) -> Option<String> {
        let list = self.task(&["ls"]).succeeded().stdout();
        let mut fields = list
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        let line = fields.find(|fields| fields.first() == Some(&self.id.as_str()))?;
        line.get(2).map(|status| (*status).to_owned())
    }

    /// The host's pid of its first process, as the shim reports it.
    pub fn pid(&self) -> i32 {
        let list = self.task(&["ls"]).succeeded().stdout();
        let line = list
            .lines()
            .find(|line| line.split_whitespace().next() == Some(&self.id));
        let pid = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
        pid.unwrap_or_else(|| panic!("{} is not among the tasks:\n{list}", self.id))
    }

    /// Sends a signal to its first process.
    pub fn signal(&self, name: &str) -> Finished {
        self.task(&["kill", "--signal", name, &self.id])
    }

    /// Waits until its first process has ended, deletes the task, and returns the exit status that
    /// containerd has for it.
    #[track_caller]
    pub fn ended(&self) -> i32 {
        let begun = Instant::now();
        while self.status().is_some_and(|status| status != "STOPPED") {
            assert!(begun.elapsed() < LIMIT, "{} does not end", self.id);
            thread::sleep(Duration::from_millis(100));
        }
        let deleted = self.task(&["delete", &self.id]);
        // The client says it in words, and ends with 0.
        let stderr = deleted.stderr();
        let code = stderr
            .split("non-zero exit code ")
            .nth(1)
            .map(|rest| rest.trim().trim_end_matches('"'));
        match code {
            Some(code) => code
                .parse()
                .unwrap_or_else(|_| panic!("no exit code: {deleted}")),
            None => deleted.succeeded().code,
        }
    }

    /// Ends it with SIGKILL and removes it and its snapshot.
    #[track_caller]
    pub fn remove(self) {
        self.task(&["delete", "--force", &self.id]);
        finish(
            self.bed
                .containerd()
                .ctr()
                .args(["containers", "delete", &self.id]),
        )
        .succeeded();
    }
}
