//! The command line that containerd gives to a shim: Go's `flag` package, one dash or two, `-flag
//! value` or `-flag=value`, boolean flags without a value, flags before the action.

use std::path::PathBuf;

use thiserror::Error;

/// What the shim is asked to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Action {
    /// Serve the task API: nothing named, which only a person does.
    #[default]
    None,
    /// Start a shim for a container and print where it listens.
    Start,
    /// Remove what is left of a container whose shim is gone.
    Delete,
    /// Print what this runtime is (`-info`).
    Info,
    /// Print the version (`-v`).
    Version,
}

/// The flags, as given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flags {
    /// The action.
    pub action: Action,
    /// containerd's namespace.
    pub namespace: String,
    /// Id of the container.
    pub id: String,
    /// containerd's gRPC address.
    pub address: String,
    /// Path of containerd, for shims that publish events by executing it.
    pub publish_binary: String,
    /// Directory of the container's bundle.
    pub bundle: PathBuf,
    /// Log more.
    pub debug: bool,
}

/// A command line that is none of containerd's.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum InvalidFlags {
    /// A flag that no containerd gives.
    #[error("unknown flag -{0}; this program is started by containerd, see `thaw` for commands")]
    Unknown(String),
    /// A flag at the end, without its value.
    #[error("flag -{0} needs a value")]
    NoValue(String),
    /// A boolean flag with another value.
    #[error("flag -{0} is true or false, not {1:?}")]
    NotBoolean(String, String),
    /// An action that is not in the shim protocol.
    #[error("unknown action {0:?}: containerd asks for `start` or `delete`")]
    UnknownAction(String),
}

impl Flags {
    /// The flags in `arguments`, program name not among them.
    pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Self, InvalidFlags> {
        let mut flags = Self::default();
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let Some(name) = argument
                .strip_prefix("--")
                .or_else(|| argument.strip_prefix('-'))
            else {
                // The first that is no flag ends them, as in Go.
                flags.set_action(&argument)?;
                break;
            };
            let (name, value) = match name.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (name, None),
            };
            let mut text = || {
                value
                    .clone()
                    .or_else(|| arguments.next())
                    .ok_or_else(|| no_value(name))
            };
            match name {
                "namespace" => flags.namespace = text()?,
                "id" => flags.id = text()?,
                "address" => flags.address = text()?,
                "publish-binary" => flags.publish_binary = text()?,
                "bundle" => flags.bundle = text()?.into(),
                "socket" => drop(text()?),
                "debug" => flags.debug = boolean(name, value)?,
                "v" | "version" => {
                    if boolean(name, value)? {
                        flags.action = Action::Version;
                    }
                }
                "info" => {
                    if boolean(name, value)? {
                        flags.action = Action::Info;
                    }
                }
                _ => return Err(InvalidFlags::Unknown(name.to_owned())),
            }
        }
        Ok(flags)
    }

    fn set_action(&mut self, word: &str) -> Result<(), InvalidFlags> {
        let action = match word {
            "start" => Action::Start,
            "delete" => Action::Delete,
            _ => return Err(InvalidFlags::UnknownAction(word.to_owned())),
        };
        if self.action == Action::None {
            self.action = action;
        }
        Ok(())
    }
}

fn no_value(name: &str) -> InvalidFlags {
    InvalidFlags::NoValue(name.to_owned())
}

/// A boolean flag's value, in the spellings that Go takes.
fn boolean(name: &str, value: Option<String>) -> Result<bool, InvalidFlags> {
    match value.as_deref() {
        None | Some("1" | "t" | "T" | "true" | "TRUE" | "True") => Ok(true),
        Some("0" | "f" | "F" | "false" | "FALSE" | "False") => Ok(false),
        Some(other) => Err(InvalidFlags::NotBoolean(name.to_owned(), other.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Flags, InvalidFlags> {
        Flags::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn test_containerd_s_start_and_delete_lines() {
        let flags = parse(
            "-namespace default -address /run/containerd/containerd.sock \
             -publish-binary /usr/bin/containerd -id web -debug start",
        )
        .unwrap();
        assert_eq!(flags.action, Action::Start);
        assert_eq!(
            (flags.namespace.as_str(), flags.id.as_str()),
            ("default", "web")
        );
        assert_eq!(flags.address, "/run/containerd/containerd.sock");
        assert!(flags.debug);

        let flags = parse("--namespace=k8s.io --id=web -bundle /run/b delete").unwrap();
        assert_eq!(flags.action, Action::Delete);
        assert_eq!(flags.bundle, PathBuf::from("/run/b"));
        assert!(!flags.debug);
    }

    #[test]
    fn test_questions_need_no_other_flag() {
        assert_eq!(parse("-v").unwrap().action, Action::Version);
        assert_eq!(parse("-version=true").unwrap().action, Action::Version);
        assert_eq!(parse("-info").unwrap().action, Action::Info);
        assert_eq!(parse("-v=false").unwrap().action, Action::None);
    }

    #[test]
    fn test_malformed_lines_are_refused_by_name() {
        assert_eq!(parse("-id"), Err(no_value("id")));
        assert_eq!(
            parse("-frobnicate x start"),
            Err(InvalidFlags::Unknown("frobnicate".into()))
        );
        assert_eq!(
            parse("destroy"),
            Err(InvalidFlags::UnknownAction("destroy".into()))
        );
        assert_eq!(
            parse("-debug=maybe start"),
            Err(InvalidFlags::NotBoolean("debug".into(), "maybe".into()))
        );
    }
}
