//! What an operator can set, for a host, a runtime class or one container.
//!
//! There is one schema ([`fields`]); the table in `README.md` is its documentation. A value comes from,
//! the last that has one first:
//!
//! 1. built-in defaults;
//! 2. `/etc/thaw/config.toml`;
//! 3. runtime options of containerd (`runtimeoptions.v1.Options`, a TOML text or the path of one);
//! 4. annotations `io.thaw.FIELD` of the container that a sandbox is started for.
//!
//! All of them are checked, each value by itself, before anything is made for a container. What is
//! not known is refused: a misspelt name must not look like a setting that has no effect.

mod fields;
mod options;
mod text;

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;
use tracing::Level;

pub use options::{RuntimeOptions, is_known_type};

use fields::{Field, Value};

/// The configuration of this host.
pub const CONFIGURATION: &str = "/etc/thaw/config.toml";

/// What annotations of thaw begin with.
pub const ANNOTATION_PREFIX: &str = "io.thaw.";

/// Most bytes of a TOML text.
const MOST_BYTES: u64 = 64 << 10;

/// What becomes of what the guest's kernel prints on its console.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConsoleLog {
    /// Its end is kept in memory, for the log message about a guest that dies.
    Off,
    /// It is in a file too, as long as the sandbox is there.
    On,
    /// The file stays for some time after the end of the sandbox.
    Keep,
}

/// All that can be set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// vCPUs of a sandbox whose container has no limit of CPU time; never more than the host has.
    pub default_vcpus: u8,
    /// Most vCPUs of a sandbox, whatever its container's limit is.
    pub max_vcpus: u8,
    /// Memory of a sandbox whose container has no limit, in MiB.
    pub default_memory_mib: u32,
    /// Most memory of a sandbox with a container that has no limit, in MiB; the host's where nothing is
    /// set.
    pub max_memory_mib: Option<u32>,
    /// What is added to a container's limit before the memory class is chosen, in MiB.
    pub memory_overhead_mib: u32,
    /// The guest's console.
    pub console: ConsoleLog,
    /// What the shim logs; as containerd does where nothing is set.
    pub log_level: Option<Level>,
    /// Disk space that all templates of the host may take together, in MiB.
    pub template_budget_mib: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            default_vcpus: 2,
            max_vcpus: thaw_vmm_control::Shape::MAX_VCPUS,
            default_memory_mib: 2048,
            max_memory_mib: None,
            memory_overhead_mib: 64,
            console: ConsoleLog::On,
            log_level: None,
            template_budget_mib: 8192,
        }
    }
}

/// Why settings are refused. Each text says where, which field, and what may be there.
#[derive(Debug, Error)]
pub enum SettingsError {
    /// A file that was named cannot be read.
    #[error("reading {}: {source}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Something in it is not understood.
    #[error("{place}: {problem}")]
    Refused {
        /// Where it stands: file and line, annotation, or runtime options.
        place: String,
        /// What is wrong, and what may be there.
        problem: String,
    },
}

impl SettingsError {
    fn refused(place: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Refused {
            place: place.into(),
            problem: problem.into(),
        }
    }
}

impl Settings {
    /// The settings for a container on this host.
    pub fn resolve(
        options: Option<&RuntimeOptions>,
        annotations: &HashMap<String, String>,
    ) -> Result<Self, SettingsError> {
        Self::resolve_with(Path::new(CONFIGURATION), options, annotations)
    }

    /// The settings of this host, for what concerns no container.
    pub fn of_host() -> Result<Self, SettingsError> {
        Self::resolve(None, &HashMap::new())
    }

    /// As [`Settings::resolve`], with another file for the host's configuration.
    fn resolve_with(
        configuration: &Path,
        options: Option<&RuntimeOptions>,
        annotations: &HashMap<String, String>,
    ) -> Result<Self, SettingsError> {
        let mut settings = Self::default();
        if let Some(file) = read(configuration)? {
            text::apply(
                &mut settings,
                &configuration.display().to_string(),
                &file,
                true,
            )?;
        }
        if let Some(options) = options {
            text::apply(&mut settings, &options.place, &options.text, false)?;
        }
        settings.apply_annotations(annotations)?;
        Ok(settings)
    }

    fn apply_annotations(
        &mut self,
        annotations: &HashMap<String, String>,
    ) -> Result<(), SettingsError> {
        let mut own: Vec<_> = annotations
            .iter()
            .filter(|(name, _)| name.starts_with(ANNOTATION_PREFIX))
            .collect();
        // Of several that are wrong, always the same one is told.
        own.sort();
        for (name, value) in own {
            let place = format!("annotation {name}");
            let refused = |problem| SettingsError::refused(place.clone(), problem);
            let field = Field::find(&name[ANNOTATION_PREFIX.len()..]).map_err(refused)?;
            let value = match value.parse() {
                Ok(number) => Value::Integer(number),
                Err(_) => Value::Text(value),
            };
            field.apply(self, value, false).map_err(refused)?;
        }
        Ok(())
    }
}

/// The text of the configuration at `path`; `None` where there is none.
fn read(path: &Path) -> Result<Option<String>, SettingsError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(SettingsError::Read {
                path: path.to_owned(),
                source,
            });
        }
    };
    let mut text = String::new();
    let read = file.take(MOST_BYTES + 1).read_to_string(&mut text);
    match read {
        Ok(length) if length as u64 > MOST_BYTES => Err(SettingsError::refused(
            path.display().to_string(),
            format!("is longer than {MOST_BYTES} bytes"),
        )),
        Ok(_) => Ok(Some(text)),
        Err(source) => Err(SettingsError::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

#[cfg(test)]
mod tests;
