//! The command line.

use std::ffi::OsString;

use lexopt::{Arg, Parser, ValueExt};

/// A command line, understood.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Arguments {
    pub command: Command,
    pub verbose: bool,
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command {
    Help,
    Version,
    Doctor {
        json: bool,
    },
    TemplateBuild {
        vcpus: Option<u8>,
        memory_mib: Option<u32>,
    },
    TemplateList {
        json: bool,
    },
    /// Of one template, or of all.
    TemplateVerify {
        key: Option<String>,
    },
    /// Of one template, or of all.
    TemplateRemove {
        key: Option<String>,
    },
    Trace {
        id: Option<String>,
        json: bool,
    },
    Gc,
}

/// Everything that may be given, before it is known whether the command takes it.
#[derive(Default)]
struct Given {
    words: Vec<String>,
    verbose: bool,
    json: bool,
    all: bool,
    help: bool,
    version: bool,
    vcpus: Option<u8>,
    memory_mib: Option<u32>,
}

/// Parse arguments that follow the program's name.
pub(super) fn parse(
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<Arguments, lexopt::Error> {
    let mut parser = Parser::from_args(arguments);
    let mut given = Given::default();
    while let Some(argument) = parser.next()? {
        match argument {
            Arg::Short('h') | Arg::Long("help") => given.help = true,
            Arg::Short('V') | Arg::Long("version") => given.version = true,
            Arg::Short('v') | Arg::Long("verbose") => given.verbose = true,
            Arg::Long("json") => given.json = true,
            Arg::Long("all") => given.all = true,
            Arg::Long("vcpus") => given.vcpus = Some(parser.value()?.parse()?),
            Arg::Long("memory") => given.memory_mib = Some(parser.value()?.parse()?),
            Arg::Value(word) => given.words.push(word.string()?),
            other => return Err(other.unexpected()),
        }
    }
    let verbose = given.verbose;
    Ok(Arguments {
        command: given.command()?,
        verbose,
    })
}

impl Given {
    fn command(mut self) -> Result<Command, lexopt::Error> {
        let words = std::mem::take(&mut self.words);
        let mut words = words.into_iter();
        let first = words.next();
        if self.help || matches!(first.as_deref(), Some("help")) {
            return Ok(Command::Help);
        }
        if self.version || matches!(first.as_deref(), Some("version")) {
            return Ok(Command::Version);
        }
        let command = match first.as_deref() {
            Some("doctor") => Command::Doctor {
                json: take(&mut self.json),
            },
            Some("template") => self.template(&mut words)?,
            Some("trace") => Command::Trace {
                id: words.next(),
                json: take(&mut self.json),
            },
            Some("gc") => Command::Gc,
            Some(other) => return Err(format!("there is no command {other:?}").into()),
            None => return Err("a command is missing".into()),
        };
        self.finish(words.next())?;
        Ok(command)
    }

    fn template(
        &mut self,
        words: &mut impl Iterator<Item = String>,
    ) -> Result<Command, lexopt::Error> {
        match words.next().as_deref() {
            Some("build") => Ok(Command::TemplateBuild {
                vcpus: self.vcpus.take(),
                memory_mib: self.memory_mib.take(),
            }),
            Some("list") => Ok(Command::TemplateList {
                json: take(&mut self.json),
            }),
            Some("verify") => Ok(Command::TemplateVerify { key: words.next() }),
            Some("remove") => match (words.next(), take(&mut self.all)) {
                (Some(key), false) => Ok(Command::TemplateRemove { key: Some(key) }),
                (None, true) => Ok(Command::TemplateRemove { key: None }),
                _ => Err("`template remove` takes a KEY or --all".into()),
            },
            Some(other) => Err(format!("there is no command \"template {other}\"").into()),
            None => Err("`template` takes build, list, verify or remove".into()),
        }
    }

    /// Everything that was given must have been used.
    fn finish(&self, word: Option<String>) -> Result<(), lexopt::Error> {
        if let Some(word) = word {
            return Err(format!("{word:?} is one argument too many").into());
        }
        let unused = [
            (self.json, "--json"),
            (self.all, "--all"),
            (self.vcpus.is_some(), "--vcpus"),
            (self.memory_mib.is_some(), "--memory"),
        ];
        match unused.into_iter().find(|(given, _)| *given) {
            Some((_, option)) => Err(format!("this command does not take {option}").into()),
            None => Ok(()),
        }
    }
}

fn take(flag: &mut bool) -> bool {
    std::mem::take(flag)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, String> {
        let arguments = line.split_whitespace().map(OsString::from);
        parse(arguments)
            .map(|arguments| arguments.command)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn test_commands_are_understood() {
        let key = || Some("ab".to_owned());
        for (line, command) in [
            ("help", Command::Help),
            ("template build --help", Command::Help),
            ("--version", Command::Version),
            ("doctor", Command::Doctor { json: false }),
            ("doctor --json", Command::Doctor { json: true }),
            (
                "template build",
                Command::TemplateBuild {
                    vcpus: None,
                    memory_mib: None,
                },
            ),
            (
                "template build --vcpus 4 --memory=1024",
                Command::TemplateBuild {
                    vcpus: Some(4),
                    memory_mib: Some(1024),
                },
            ),
            ("template list --json", Command::TemplateList { json: true }),
            ("template verify", Command::TemplateVerify { key: None }),
            ("template verify ab", Command::TemplateVerify { key: key() }),
            ("template remove ab", Command::TemplateRemove { key: key() }),
            (
                "template remove --all",
                Command::TemplateRemove { key: None },
            ),
            (
                "trace",
                Command::Trace {
                    id: None,
                    json: false,
                },
            ),
            (
                "trace ab --json",
                Command::Trace {
                    id: key(),
                    json: true,
                },
            ),
            ("gc", Command::Gc),
        ] {
            assert_eq!(parsed(line), Ok(command), "{line}");
        }
        assert!(parse(["-v".into(), "gc".into()]).unwrap().verbose);
    }

    #[test]
    fn test_what_a_command_does_not_take_is_refused() {
        for line in [
            "",
            "start",
            "template",
            "template make",
            "template remove",
            "template remove ab --all",
            "template remove ab cd",
            "template build --vcpus",
            "template build --vcpus 300",
            "template build --memory 1G",
            "template list --all",
            "doctor --vcpus 2",
            "gc --json",
            "gc now",
            "trace a b",
            "doctor --yaml",
        ] {
            let result = parsed(line);
            assert!(result.is_err(), "{line}: {result:?}");
        }
    }
}
