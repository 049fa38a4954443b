//! The schema: every field that can be set, what it takes, and where it may be set.

use tracing::Level;

use super::{CONFIGURATION, ConsoleLog, Settings};

/// A value, as it stands in one of the sources.
#[derive(Debug, Clone, Copy)]
pub(super) enum Value<'a> {
    /// A number.
    Integer(i64),
    /// A text.
    Text(&'a str),
    /// Something that no field takes, in words.
    Other(&'a str),
}

/// A field.
pub(super) struct Field {
    /// Its name.
    pub name: &'static str,
    kind: Kind,
    /// Whether it concerns the host and no single container.
    host_wide: bool,
}

/// What a field takes, and what it changes.
enum Kind {
    /// A whole number in a range.
    Integer {
        least: i64,
        most: i64,
        set: fn(&mut Settings, i64),
    },
    /// One of some words.
    Word {
        words: &'static [&'static str],
        set: fn(&mut Settings, &str),
    },
}

/// The largest memory class, in MiB.
const MOST_MEMORY_MIB: i64 = 1 << 20;

/// More than any guest's kernel takes for itself, in MiB.
const MOST_OVERHEAD_MIB: i64 = 64 << 10;

/// All fields.
pub(super) const FIELDS: &[Field] = &[
    Field {
        name: "default_vcpus",
        kind: Kind::Integer {
            least: 1,
            most: thaw_vmm_control::Shape::MAX_VCPUS as i64,
            set: |settings, value| settings.default_vcpus = value as u8,
        },
        host_wide: false,
    },
    Field {
        name: "max_vcpus",
        kind: Kind::Integer {
            least: 1,
            most: thaw_vmm_control::Shape::MAX_VCPUS as i64,
            set: |settings, value| settings.max_vcpus = value as u8,
        },
        host_wide: false,
    },
    Field {
        name: "default_memory_mib",
        kind: Kind::Integer {
            least: 128,
            most: MOST_MEMORY_MIB,
            set: |settings, value| settings.default_memory_mib = value as u32,
        },
        host_wide: false,
    },
    Field {
        name: "max_memory_mib",
        kind: Kind::Integer {
            least: 128,
            most: MOST_MEMORY_MIB,
            set: |settings, value| settings.max_memory_mib = Some(value as u32),
        },
        host_wide: false,
    },
    Field {
        name: "memory_overhead_mib",
        kind: Kind::Integer {
            least: 32,
            most: MOST_OVERHEAD_MIB,
            set: |settings, value| settings.memory_overhead_mib = value as u32,
        },
        host_wide: false,
    },
    Field {
        name: "console",
        kind: Kind::Word {
            words: &["off", "on", "keep"],
            set: |settings, word| {
                settings.console = match word {
                    "off" => ConsoleLog::Off,
                    "keep" => ConsoleLog::Keep,
                    _ => ConsoleLog::On,
                };
            },
        },
        host_wide: false,
    },
    Field {
        name: "log_level",
        kind: Kind::Word {
            words: &["error", "warning", "info", "debug"],
            set: |settings, word| {
                settings.log_level = Some(match word {
                    "error" => Level::ERROR,
                    "warning" => Level::WARN,
                    "debug" => Level::DEBUG,
                    _ => Level::INFO,
                });
            },
        },
        host_wide: false,
    },
    Field {
        name: "template_budget_mib",
        kind: Kind::Integer {
            least: 1,
            most: u32::MAX as i64,
            set: |settings, value| settings.template_budget_mib = value as u32,
        },
        host_wide: true,
    },
];

impl Field {
    /// The field of that name, or words that say which there are.
    pub fn find(name: &str) -> Result<&'static Self, String> {
        FIELDS
            .iter()
            .find(|field| field.name == name)
            .ok_or_else(|| {
                let names: Vec<_> = FIELDS.iter().map(|field| field.name).collect();
                format!(
                    "there is no field {name:?}; the fields are {}",
                    names.join(", ")
                )
            })
    }

    /// Set the field to `value`, which comes from the host's configuration if `from_host`. An error
    /// says what the field takes.
    pub fn apply(
        &self,
        settings: &mut Settings,
        value: Value<'_>,
        from_host: bool,
    ) -> Result<(), String> {
        let name = self.name;
        if self.host_wide && !from_host {
            return Err(format!(
                "{name} holds for all containers of a host: set it in {CONFIGURATION}"
            ));
        }
        match (&self.kind, value) {
            (Kind::Integer { least, most, set }, Value::Integer(number))
                if (*least..=*most).contains(&number) =>
            {
                set(settings, number);
                Ok(())
            }
            (Kind::Integer { least, most, .. }, value) => Err(format!(
                "{name} is a whole number from {least} to {most}, not {}",
                value.shown()
            )),
            (Kind::Word { words, set }, Value::Text(word)) if words.contains(&word) => {
                set(settings, word);
                Ok(())
            }
            (Kind::Word { words, .. }, value) => Err(format!(
                "{name} is one of {}, not {}",
                words.join(", "),
                value.shown()
            )),
        }
    }
}

impl Value<'_> {
    fn shown(&self) -> String {
        match self {
            Self::Integer(number) => number.to_string(),
            // It may be anybody's.
            Self::Text(text) => format!("{:?}", text.chars().take(64).collect::<String>()),
            Self::Other(what) => (*what).to_owned(),
        }
    }
}
