//! `thaw gc`.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

use super::output::json;
use crate::cleanup::{self, collect_garbage};
use crate::facts;
use crate::paths::TEMPLATE_DIRECTORY;
use crate::template::TemplateStore;

/// Something that nobody owns.
#[derive(Debug, Serialize)]
struct Garbage {
    /// What it is.
    kind: Kind,
    /// Where it is.
    directory: PathBuf,
    /// What came of it.
    outcome: Outcome,
    /// Why it is still there.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// What may be garbage.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// A sandbox whose shim is gone, with its processes, socket, cgroup and directory.
    Sandbox,
    /// A template of which the builder is gone.
    Build,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Found,
    Removed,
    Failed,
}

impl Garbage {
    fn found(kind: Kind, directory: PathBuf) -> Self {
        Self {
            kind,
            directory,
            outcome: Outcome::Found,
            error: None,
        }
    }

    fn removed(kind: Kind, directory: PathBuf, result: std::io::Result<()>) -> Self {
        let error = result.err().map(|error| error.to_string());
        Self {
            kind,
            directory,
            outcome: if error.is_none() {
                Outcome::Removed
            } else {
                Outcome::Failed
            },
            error,
        }
    }

    fn line(&self) -> String {
        let directory = self.directory.display();
        match (self.outcome, &self.error) {
            (Outcome::Found, _) => format!("would remove {directory}"),
            (Outcome::Removed, _) => format!("removed {directory}"),
            (Outcome::Failed, error) => {
                format!(
                    "cannot remove {directory}: {}",
                    error.as_deref().unwrap_or("unknown")
                )
            }
        }
    }
}

/// Remove what killed processes have left behind, or only say what that is.
pub(super) fn run(dry: bool, as_json: bool, output: &mut dyn Write) -> Result<bool> {
    let store = TemplateStore::new(TEMPLATE_DIRECTORY);
    run_in(facts::root(), &store, dry, as_json, output)
}

/// `false` when something could not be removed.
fn run_in(
    root: &Path,
    store: &TemplateStore,
    dry: bool,
    as_json: bool,
    output: &mut dyn Write,
) -> Result<bool> {
    let looking = || format!("looking for sandboxes in {}", root.display());
    let mut all = Vec::new();
    if dry {
        let builds = store.stale(root).into_iter();
        all.extend(builds.map(|path| Garbage::found(Kind::Build, path)));
        let sandboxes = cleanup::find_garbage(root).with_context(looking)?;
        all.extend(
            sandboxes
                .into_iter()
                .map(|path| Garbage::found(Kind::Sandbox, path)),
        );
    } else {
        let builds = store.remove_stale(root).into_iter();
        all.extend(builds.map(|(path, result)| Garbage::removed(Kind::Build, path, result)));
        let sandboxes = collect_garbage(root).with_context(looking)?;
        all.extend(
            sandboxes
                .into_iter()
                .map(|one| Garbage::removed(Kind::Sandbox, one.directory, one.removed)),
        );
    }
    if as_json {
        json(output, &all)?;
    } else {
        for one in &all {
            writeln!(output, "{}", one.line())?;
        }
    }
    Ok(all.iter().all(|one| one.outcome != Outcome::Failed))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::facts::{Facts, FactsFile};

    /// A host with a sandbox that can be removed, one that cannot, and a build.
    fn host() -> tempfile::TempDir {
        let host = tempfile::tempdir().unwrap();
        let root = host.path().join("run");
        for sandbox in ["good", "stuck"] {
            let facts = Facts {
                namespace: "default".into(),
                sandbox: sandbox.into(),
                socket: root.join("socket"),
                ..Facts::default()
            };
            FactsFile::create(&root, facts).unwrap();
        }
        fs::write(root.join("default/stuck/precious"), "").unwrap();
        fs::create_dir_all(host.path().join("templates/.building-1-0")).unwrap();
        host
    }

    fn run(host: &Path, dry: bool, as_json: bool) -> (bool, String) {
        let mut output = Vec::new();
        let store = TemplateStore::new(host.join("templates"));
        let done = run_in(&host.join("run"), &store, dry, as_json, &mut output).unwrap();
        (done, String::from_utf8(output).unwrap())
    }

    #[test]
    fn test_what_is_removed_and_what_is_not_are_told() {
        let host = host();
        let good = host.path().join("run/default/good");
        let build = host.path().join("templates/.building-1-0");
        let (done, text) = run(host.path(), false, false);
        assert!(!done);
        for path in [&good, &build] {
            assert!(
                text.contains(&format!("removed {}\n", path.display())),
                "{text}"
            );
            assert!(!path.exists());
        }
        assert!(
            text.contains("cannot remove") && text.contains("default/stuck"),
            "{text}"
        );
    }

    #[test]
    fn test_a_dry_run_tells_and_removes_nothing() {
        let host = host();
        let (done, text) = run(host.path(), true, false);
        assert!(done);
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(
            text.lines().all(|line| line.starts_with("would remove /")),
            "{text}"
        );
        assert!(host.path().join("run/default/good").exists());
        assert!(host.path().join("templates/.building-1-0").exists());
        assert_eq!(run(host.path(), true, false).1, text);
    }

    #[test]
    fn test_json_has_the_same() {
        let host = host();
        let (_, text) = run(host.path(), true, true);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value[1]["outcome"], "found");
        let (_, text) = run(host.path(), false, true);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value[0]["kind"], "build");
        assert_eq!(value[1]["outcome"], "removed");
        assert_eq!(value[2]["outcome"], "failed");
        assert!(
            value[2]["error"]
                .as_str()
                .unwrap()
                .contains("default/stuck")
        );
    }
}
