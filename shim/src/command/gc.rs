//! `thaw gc`.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

use crate::cleanup::collect_garbage;
use crate::facts;
use crate::paths::TEMPLATE_DIRECTORY;
use crate::template::TemplateStore;

/// Remove what killed processes have left behind.
pub(super) fn run(output: &mut dyn Write) -> Result<bool> {
    TemplateStore::new(TEMPLATE_DIRECTORY).remove_stale();
    collect(facts::root(), output)
}

/// Remove the sandboxes below `root` whose shims are gone, and say which. `false` when something
/// could not be removed.
fn collect(root: &Path, output: &mut dyn Write) -> Result<bool> {
    let abandoned = collect_garbage(root)
        .with_context(|| format!("looking for sandboxes in {}", root.display()))?;
    let mut complete = true;
    for sandbox in abandoned {
        let directory = sandbox.directory.display();
        match sandbox.removed {
            Ok(()) => writeln!(output, "removed {directory}")?,
            Err(error) => {
                complete = false;
                writeln!(output, "cannot remove {directory}: {error}")?;
            }
        }
    }
    Ok(complete)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::facts::{Facts, FactsFile};

    #[test]
    fn test_what_is_removed_and_what_is_not_are_told() {
        let root = tempfile::tempdir().unwrap();
        for sandbox in ["good", "stuck"] {
            let facts = Facts {
                namespace: "default".into(),
                sandbox: sandbox.into(),
                socket: root.path().join("socket"),
                ..Facts::default()
            };
            FactsFile::create(root.path(), facts).unwrap();
        }
        fs::write(root.path().join("default/stuck/precious"), "").unwrap();
        let mut output = Vec::new();
        assert!(!collect(root.path(), &mut output).unwrap());
        let text = String::from_utf8(output).unwrap();
        let good = root.path().join("default/good");
        assert!(
            text.contains(&format!("removed {}\n", good.display())),
            "{text}"
        );
        assert!(
            text.contains("cannot remove") && text.contains("default/stuck"),
            "{text}"
        );
        assert!(!good.exists());
    }
}
