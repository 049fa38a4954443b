//! What containerd says to `start` beside the command line: standard input and environment.

use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

use containerd_shim_protos::bootstrap_api::{BootstrapParams, LogLevel};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{EnumOrUnknown, Message};

use crate::settings::{self, RuntimeOptions, SettingsError};

/// Most bytes of standard input: a ttrpc message, which the same things travel in elsewhere.
const LIMIT: u64 = 4 << 20;

/// Where shims have their sockets when containerd does not say.
const SOCKET_DIRECTORY: &str = "/run/containerd/s";

/// Standard input of `start`, understood.
#[derive(Debug)]
pub struct Bootstrap {
    /// From containerd 2.3 on.
    params: Option<BootstrapParams>,
    /// Runtime options: before containerd 2.3 they are all that is there.
    options: Option<Any>,
}

impl Bootstrap {
    /// Read standard input to its end.
    pub fn read(id: &str, namespace: &str) -> io::Result<Self> {
        let mut bytes = Vec::new();
        // A person at a terminal would have to end it.
        if !io::stdin().is_terminal() {
            io::stdin().take(LIMIT).read_to_end(&mut bytes)?;
        }
        Self::parse(&bytes, id, namespace)
    }

    fn parse(bytes: &[u8], id: &str, namespace: &str) -> io::Result<Self> {
        let params = parse(bytes, id, namespace);
        let options = match &params {
            // What else is sent along is not for this runtime to refuse.
            Some(params) => params
                .extensions
                .iter()
                .filter_map(|extension| extension.value.as_ref())
                .find(|value| settings::is_known_type(&value.type_url))
                .cloned(),
            None => Some(Any::parse_from_bytes(bytes).map_err(|error| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("standard input is neither runtime options nor parameters of a start: {error}"),
                )
            })?),
        };
        Ok(Self { params, options })
    }

    /// The runtime options.
    pub fn options(&self) -> Result<Option<RuntimeOptions>, SettingsError> {
        match &self.options {
            Some(options) => RuntimeOptions::from_any(&options.type_url, &options.value),
            None => Ok(None),
        }
    }

    /// Whether containerd understands a structured answer.
    pub fn is_modern(&self) -> bool {
        self.params.is_some()
    }

    /// containerd's gRPC address: what it said, else that of the command line.
    pub fn grpc_address<'a>(&'a self, flag: &'a str) -> &'a str {
        let said = self
            .params
            .as_ref()
            .map(|params| params.containerd_grpc_address.as_str());
        said.filter(|address| !address.is_empty() && flag.is_empty())
            .unwrap_or(flag)
    }

    /// Where events go: containerd's ttrpc address.
    pub fn events_address(&self) -> Option<String> {
        let environment = std::env::var("TTRPC_ADDRESS").ok();
        let said = self
            .params
            .as_ref()
            .map(|params| params.containerd_ttrpc_address.clone());
        [said, environment]
            .into_iter()
            .flatten()
            .find(|address| !address.is_empty())
    }

    /// containerd's program for publishing events: what it said, else that of the command line.
    pub fn publish_program(&self, flag: &str) -> Option<PathBuf> {
        let said = self
            .params
            .as_ref()
            .map(|params| params.containerd_binary.as_str());
        let program = said.filter(|path| !path.is_empty()).unwrap_or(flag);
        (!program.is_empty()).then(|| program.into())
    }

    /// Where the shim's socket goes.
    pub fn socket_directory(&self) -> PathBuf {
        let said = self
            .params
            .as_ref()
            .and_then(|params| params.socket_dir.as_deref());
        Path::new(
            said.filter(|path| !path.is_empty())
                .unwrap_or(SOCKET_DIRECTORY),
        )
        .to_owned()
    }

    /// Whether containerd logs debug messages.
    pub fn wants_debug(&self) -> bool {
        let info = EnumOrUnknown::new(LogLevel::LOG_LEVEL_INFO).value();
        self.params
            .as_ref()
            .is_some_and(|params| params.log_level.value() < info)
    }
}

/// Parameters, or nothing for the runtime options that an older containerd sends. Options parse as
/// parameters and the other way round, so it is the contents that tell them apart: parameters repeat
/// what the command line says.
fn parse(bytes: &[u8], id: &str, namespace: &str) -> Option<BootstrapParams> {
    let params = BootstrapParams::parse_from_bytes(bytes).ok()?;
    (!id.is_empty() && params.instance_id == id && params.namespace == namespace).then_some(params)
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::bootstrap_api::Extension;

    use super::*;

    fn bootstrap(bytes: &[u8]) -> Bootstrap {
        Bootstrap::parse(bytes, "web", "default").unwrap()
    }

    /// Generic runtime options with a TOML text.
    fn options() -> Any {
        Any {
            type_url: "runtimeoptions.v1.Options".into(),
            value: [&[3 << 3 | 2, 13], &b"max_vcpus = 2"[..]].concat(),
            ..Any::default()
        }
    }

    #[test]
    fn test_parameters_of_containerd_2_3() {
        let params = BootstrapParams {
            instance_id: "web".into(),
            namespace: "default".into(),
            log_level: LogLevel::LOG_LEVEL_DEBUG.into(),
            containerd_ttrpc_address: "/run/c.ttrpc".into(),
            containerd_grpc_address: "/run/c.sock".into(),
            socket_dir: Some("/run/s".into()),
            ..BootstrapParams::default()
        };
        let bootstrap = bootstrap(&params.write_to_bytes().unwrap());
        assert!(bootstrap.is_modern() && bootstrap.wants_debug());
        assert_eq!(bootstrap.events_address().as_deref(), Some("/run/c.ttrpc"));
        assert_eq!(bootstrap.grpc_address(""), "/run/c.sock");
        assert_eq!(bootstrap.grpc_address("/flag"), "/flag");
        assert_eq!(bootstrap.socket_directory(), Path::new("/run/s"));
    }

    /// As containerd 2.3 encodes it, written by hand from its definition of `BootstrapParams`
    /// (containerd, `api/runtime/bootstrap/v1/bootstrap.proto`).
    const PARAMETERS: &[u8] = b"\
        \x0a\x03web\
        \x12\x07default\
        \x18\xfc\xff\xff\xff\xff\xff\xff\xff\xff\x01\
        \x22\x06v2.3.0\
        \x2a\x0cunix:///t.sk\
        \x32\x0d/run/c/c.sock\
        \x3a\x0f/usr/containerd\
        \x42\x1f\x0a\x1d\x0a\x19runtimeoptions.v1.Options\x12\x00\
        \x4a\x06/run/s";

    #[test]
    fn test_bytes_of_containerd_2_3() {
        let bootstrap = bootstrap(PARAMETERS);
        assert!(bootstrap.is_modern() && bootstrap.wants_debug());
        assert_eq!(bootstrap.events_address().as_deref(), Some("unix:///t.sk"));
        assert_eq!(bootstrap.grpc_address(""), "/run/c/c.sock");
        assert_eq!(
            bootstrap.publish_program("/flag"),
            Some("/usr/containerd".into())
        );
        assert_eq!(bootstrap.socket_directory(), Path::new("/run/s"));
        let params = bootstrap.params.unwrap();
        assert_eq!(params.containerd_version, "v2.3.0");
        let [extension] = &params.extensions[..] else {
            panic!("{params:?}")
        };
        assert_eq!(extension.value.type_url, "runtimeoptions.v1.Options");
    }

    #[test]
    fn test_what_a_later_containerd_adds_is_passed_over() {
        // A number, a text, and an extension of an unknown type.
        let added = b"\x50\x2a\x7a\x05later\x42\x07\x0a\x05\x0a\x03a/B";
        let bootstrap = bootstrap(&[PARAMETERS, added].concat());
        assert!(bootstrap.is_modern());
        assert_eq!(bootstrap.socket_directory(), Path::new("/run/s"));
        // A level as text, which it was while the protocol was being made.
        let level = b"\x0a\x03web\x12\x07default\x1a\x05debug";
        assert!(super::parse(level, "web", "default").is_some());
    }

    #[test]
    fn test_publish_program_is_the_flag_s_without_parameters() {
        let bootstrap = bootstrap(b"");
        assert_eq!(bootstrap.publish_program("/flag"), Some("/flag".into()));
        assert_eq!(bootstrap.publish_program(""), None);
    }

    #[test]
    fn test_options_of_older_containerds_and_nothing() {
        for bytes in [options().write_to_bytes().unwrap(), Vec::new()] {
            let bootstrap = bootstrap(&bytes);
            assert!(!bootstrap.is_modern() && !bootstrap.wants_debug());
            assert_eq!(bootstrap.grpc_address("/flag"), "/flag");
            assert_eq!(bootstrap.socket_directory(), Path::new(SOCKET_DIRECTORY));
            assert_eq!(bootstrap.options().unwrap().is_some(), !bytes.is_empty());
        }
        let other = Any {
            type_url: "kata.Options".into(),
            ..Any::default()
        };
        let error = bootstrap(&other.write_to_bytes().unwrap()).options();
        assert!(error.unwrap_err().to_string().contains("kata.Options"));
        assert!(Bootstrap::parse(&[0xff; 9], "web", "default").is_err());
    }

    #[test]
    fn test_options_of_containerd_2_3_are_found_among_what_else_is_sent() {
        let other = Any {
            type_url: "containerd.io/nri.v1.PluginConfig".into(),
            ..Any::default()
        };
        let extension = |value| Extension {
            value: Some(value).into(),
            ..Extension::default()
        };
        let mut params = BootstrapParams {
            instance_id: "web".into(),
            namespace: "default".into(),
            extensions: vec![extension(other)],
            ..BootstrapParams::default()
        };
        let without = bootstrap(&params.write_to_bytes().unwrap());
        assert_eq!(without.options().unwrap(), None);
        params.extensions.push(extension(options()));
        let with = bootstrap(&params.write_to_bytes().unwrap());
        assert!(with.options().unwrap().is_some());
    }
}
