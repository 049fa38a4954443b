//! The hooks of a spec that run on the host.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{SpecError, nullable};

/// Hooks that run on the host, by the moment at which they run. Those that run in the container are the
/// guest's and stay in the JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Hooks {
    /// Before the container is created; the older name of the next.
    #[serde(deserialize_with = "nullable")]
    pub prestart: Vec<Hook>,
    /// When its namespaces are there, before it is created.
    #[serde(rename = "createRuntime", deserialize_with = "nullable")]
    pub create_runtime: Vec<Hook>,
    /// After its program was started.
    #[serde(deserialize_with = "nullable")]
    pub poststart: Vec<Hook>,
    /// After it was deleted.
    #[serde(deserialize_with = "nullable")]
    pub poststop: Vec<Hook>,
}

/// One program that is run as a hook.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hook {
    /// The program, an absolute path on the host.
    pub path: PathBuf,
    /// Its arguments, the first of which is its name; without any its path is that.
    #[serde(deserialize_with = "nullable")]
    pub args: Vec<String>,
    /// Its environment as `NAME=value`; without, the shim's own.
    pub env: Option<Vec<String>>,
    /// Seconds after which it has failed.
    pub timeout: Option<i64>,
}

impl Hook {
    /// For how long it may run.
    pub fn limit(&self) -> Option<Duration> {
        let seconds = u64::try_from(self.timeout?).ok()?;
        Some(Duration::from_secs(seconds))
    }
}

/// Names, in the spec, of the hooks that run on the host.
pub const ON_HOST: [&str; 4] = ["prestart", "createRuntime", "poststart", "poststop"];

impl Hooks {
    fn by_name(&self) -> [(&'static str, &[Hook]); 4] {
        let [prestart, create_runtime, poststart, poststop] = ON_HOST;
        [
            (prestart, &self.prestart),
            (create_runtime, &self.create_runtime),
            (poststart, &self.poststart),
            (poststop, &self.poststop),
        ]
    }

    /// Refuse what could only fail once other hooks have run.
    pub(super) fn check(&self) -> Result<(), SpecError> {
        for (name, hooks) in self.by_name() {
            for (index, hook) in hooks.iter().enumerate() {
                let refused = |what: String| {
                    let text = format!("hooks.{name}[{index}].{what}");
                    Err(SpecError::Unsupported(text))
                };
                if !hook.path.is_absolute() {
                    let path = hook.path.display();
                    return refused(format!("path: {path:?} is not an absolute path"));
                }
                if hook.timeout.is_some_and(|seconds| seconds <= 0) {
                    return refused("timeout: must be greater than zero".to_owned());
                }
                let texts = hook.args.iter().chain(hook.env.iter().flatten());
                if texts.into_iter().any(|text| text.contains('\0')) {
                    return refused("args or env: contains a zero byte".to_owned());
                }
            }
        }
        Ok(())
    }
}
