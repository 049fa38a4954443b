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
    Ps {
        json: bool,
    },
    Top {
        sandbox: Named,
        json: bool,
    },
    Logs {
        sandbox: Named,
        follow: bool,
        json: bool,
    },
    Gc {
        dry: bool,
        json: bool,
    },
    Metrics {
        address: Option<String>,
    },
}

/// A sandbox, by its own or a container's name.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub id: String,
    pub namespace: Option<String>,
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
    dry: bool,
    follow: bool,
    vcpus: Option<u8>,
    memory_mib: Option<u32>,
    namespace: Option<String>,
    address: Option<String>,
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
            Arg::Short('n') | Arg::Long("dry-run") => given.dry = true,
            Arg::Short('f') | Arg::Long("follow") => given.follow = true,
            Arg::Long("namespace") => given.namespace = Some(parser.value()?.string()?),
            Arg::Long("listen") => given.address = Some(parser.value()?.string()?),
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
            Some("ps") => Command::Ps {
                json: take(&mut self.json),
            },
            Some("top") => Command::Top {
                sandbox: self.named("top", &mut words)?,
                json: take(&mut self.json),
            },
            Some("logs") => {
                let follow = take(&mut self.follow);
                Command::Logs {
                    sandbox: self.named("logs", &mut words)?,
                    follow,
                    // What comes bit by bit is no list.
                    json: !follow && take(&mut self.json),
                }
            }
            Some("gc") => Command::Gc {
                dry: take(&mut self.dry),
                json: take(&mut self.json),
            },
            Some("metrics") => Command::Metrics {
                address: self.address.take(),
            },
            Some(other) => return Err(format!("there is no command {other:?}").into()),
            None => return Err("a command is missing".into()),
        };
        self.finish(words.next())?;
        Ok(command)
    }

    /// The sandbox that `command` is to be about.
    fn named(
        &mut self,
        command: &str,
        words: &mut impl Iterator<Item = String>,
    ) -> Result<Named, lexopt::Error> {
        let id = words
            .next()
            .ok_or_else(|| format!("`{command}` takes the ID of a sandbox or container"))?;
        Ok(Named {
            id,
            namespace: self.namespace.take(),
        })
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
            (self.dry, "--dry-run"),
            (self.follow, "--follow"),
            (self.namespace.is_some(), "--namespace"),
            (self.address.is_some(), "--listen"),
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
        let named = |namespace: Option<&str>| Named {
            id: "web".to_owned(),
            namespace: namespace.map(str::to_owned),
        };
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
            (
                "gc",
                Command::Gc {
                    dry: false,
                    json: false,
                },
            ),
            (
                "gc -n --json",
                Command::Gc {
                    dry: true,
                    json: true,
                },
            ),
            ("ps --json", Command::Ps { json: true }),
            (
                "top web",
                Command::Top {
                    sandbox: named(None),
                    json: false,
                },
            ),
            (
                "logs -f web --namespace k8s.io",
                Command::Logs {
                    sandbox: named(Some("k8s.io")),
                    follow: true,
                    json: false,
                },
            ),
            ("metrics", Command::Metrics { address: None }),
            (
                "metrics --listen unix:/run/m",
                Command::Metrics {
                    address: Some("unix:/run/m".to_owned()),
                },
            ),
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
            "gc now",
            "gc -f",
            "ps web",
            "ps -n",
            "top",
            "top a b",
            "top web --follow",
            "logs",
            "logs web -f --json",
            "metrics --json",
            "metrics --listen",
            "ps --namespace a",
            "trace a b",
            "doctor --yaml",
        ] {
            let result = parsed(line);
            assert!(result.is_err(), "{line}: {result:?}");
        }
    }
}
