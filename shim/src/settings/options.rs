//! Runtime options, as containerd hands them over: with the start (on standard input) and again with
//! the creation of the task.
//!
//! CRI, Docker and `ctr` send `runtimeoptions.v1.Options` to a runtime that is not runc's; it has a
//! TOML text, or the path of one. Its definition is not among containerd's published protocol crates,
//! so its three fields are decoded here:
//!
//! ```text
//! string type_url = 1;    // of the contents
//! string config_path = 2;
//! bytes config_body = 3;
//! ```

use std::path::Path;

use protobuf::CodedInputStream;
use protobuf::rt::WireType;

use super::{SettingsError, read};

/// The message of generic runtime options, by its old name too.
const GENERIC: [&str; 2] = ["runtimeoptions.v1.Options", "cri.runtimeoptions.v1.Options"];

/// The message of runc's options.
const RUNC: &str = "containerd.runc.v1.Options";

/// What may be said about the contents of generic options.
const CONTENTS: [&str; 2] = ["io.containerd.thaw.v2.options", "io.containerd.thaw.v2"];

/// Fields of runc's options (containerd's `api/types/runc/options/oci.proto`), by number.
const RUNC_FIELDS: [(u32, &str); 12] = [
    (1, "no_pivot_root"),
    (2, "no_new_keyring"),
    (3, "shim_cgroup"),
    (4, "io_uid"),
    (5, "io_gid"),
    (6, "binary_name"),
    (7, "root"),
    (9, "systemd_cgroup"),
    (10, "criu_image_path"),
    (11, "criu_work_path"),
    (12, "task_api_address"),
    (13, "task_api_version"),
];

/// The one of them that says what thaw does by itself: the form of `cgroupsPath` tells.
const SYSTEMD_CGROUP: u32 = 9;

/// What containers of one runtime are to have: a TOML text, and where it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeOptions {
    /// For messages.
    pub(super) place: String,
    /// The settings.
    pub(super) text: String,
}

/// Whether options of this type are understood.
pub fn is_known_type(type_url: &str) -> bool {
    let name = message_name(type_url);
    name == RUNC || GENERIC.contains(&name)
}

fn message_name(type_url: &str) -> &str {
    type_url.rsplit('/').next().unwrap_or(type_url)
}

impl RuntimeOptions {
    /// The options in an `Any` of this type and value; `None` where nothing is set.
    pub fn from_any(type_url: &str, value: &[u8]) -> Result<Option<Self>, SettingsError> {
        match message_name(type_url) {
            name if GENERIC.contains(&name) => generic(value),
            RUNC => runc(value).map(|()| None),
            "" if value.is_empty() => Ok(None),
            other => Err(refused(format!(
                "of type {:?}, which thaw does not know: give {}, with the fields of {}",
                other.chars().take(128).collect::<String>(),
                GENERIC[0],
                super::CONFIGURATION
            ))),
        }
    }
}

fn refused(problem: impl Into<String>) -> SettingsError {
    SettingsError::refused("runtime options", problem)
}

fn generic(value: &[u8]) -> Result<Option<RuntimeOptions>, SettingsError> {
    let Generic {
        contents,
        path,
        body,
    } = Generic::decode(value)?;
    if !contents.is_empty() && !CONTENTS.contains(&message_name(&contents)) {
        return Err(refused(format!(
            "type_url says {contents:?}: thaw takes {:?}, or none",
            CONTENTS[0]
        )));
    }
    match (path.as_str(), body) {
        ("", body) if body.is_empty() => Ok(None),
        ("", body) => {
            let text = String::from_utf8(body)
                .map_err(|_| refused("config_body is not a TOML text in UTF-8"))?;
            Ok(Some(RuntimeOptions {
                place: "runtime options, config_body".to_owned(),
                text,
            }))
        }
        (path, body) if body.is_empty() => {
            if !path.starts_with('/') {
                return Err(refused(format!("config_path {path:?} is not absolute")));
            }
            let text = read(Path::new(path))?
                .ok_or_else(|| refused(format!("config_path {path:?}: there is no such file")))?;
            Ok(Some(RuntimeOptions {
                place: format!("runtime options, {path}"),
                text,
            }))
        }
        _ => Err(refused(
            "both config_path and config_body are given: give one of them",
        )),
    }
}

/// Generic options, decoded.
#[derive(Default)]
struct Generic {
    contents: String,
    path: String,
    body: Vec<u8>,
}

impl Generic {
    fn decode(value: &[u8]) -> Result<Self, SettingsError> {
        let malformed = |error| refused(format!("not {}: {error}", GENERIC[0]));
        let mut options = Self::default();
        let mut input = CodedInputStream::from_bytes(value);
        while let Some(tag) = input.read_raw_tag_or_eof().map_err(malformed)? {
            match (tag >> 3, WireType::new(tag & 7)) {
                (1, Some(WireType::LengthDelimited)) => {
                    options.contents = input.read_string().map_err(malformed)?;
                }
                (2, Some(WireType::LengthDelimited)) => {
                    options.path = input.read_string().map_err(malformed)?;
                }
                (3, Some(WireType::LengthDelimited)) => {
                    options.body = input.read_bytes().map_err(malformed)?;
                }
                (number, _) => {
                    return Err(refused(format!(
                        "field {number} of {} is unknown",
                        GENERIC[0]
                    )));
                }
            }
        }
        Ok(options)
    }
}

/// Refuse runc's options but for those that change nothing here. What runc would do with the others
/// thaw does not do, and leaving it out without a word would surprise.
fn runc(value: &[u8]) -> Result<(), SettingsError> {
    let malformed = |error| refused(format!("not {RUNC}: {error}"));
    let mut input = CodedInputStream::from_bytes(value);
    while let Some(tag) = input.read_raw_tag_or_eof().map_err(malformed)? {
        let number = tag >> 3;
        let Some(wire_type) = WireType::new(tag & 7) else {
            return Err(refused(format!("not {RUNC}")));
        };
        if number != SYSTEMD_CGROUP {
            let name = RUNC_FIELDS.iter().find(|(known, _)| *known == number);
            let name = name.map_or_else(|| number.to_string(), |(_, name)| (*name).to_owned());
            return Err(refused(format!(
                "field {name} of {RUNC} is for runc and has no meaning in thaw: leave it out"
            )));
        }
        input.skip_field(wire_type).map_err(malformed)?;
    }
    Ok(())
}
