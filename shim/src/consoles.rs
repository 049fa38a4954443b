//! What the consoles of ended sandboxes have said, where that is to be kept: `/run/thaw/.consoles`.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::facts::{CONSOLE, Facts};

/// The directory of what the consoles of ended sandboxes have said, below `root`.
pub fn directory(root: &Path) -> PathBuf {
    root.join(".consoles")
}

/// Where the console output of a sandbox that has ended is kept. Neither name can have the character
/// between them.
pub fn path(root: &Path, namespace: &str, sandbox: &str) -> PathBuf {
    directory(root).join(format!("{namespace}@{sandbox}.log"))
}

/// How many consoles of ended sandboxes are kept.
const KEPT: usize = 32;

/// Keep what the console in `directory` has said, as `facts` ask for, and remove what was kept for
/// longest. There is nothing to keep of a silent guest.
pub fn keep(directory: &Path, facts: &Facts) -> io::Result<()> {
    let root = directory.parent().and_then(Path::parent);
    let (Some(root), true) = (root, facts.keep_console) else {
        return Ok(());
    };
    let kept = self::directory(root);
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700).create(&kept)?;
    let target = path(root, &facts.namespace, &facts.sandbox);
    match fs::rename(directory.join(CONSOLE), target) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        other => other?,
    }
    let mut files: Vec<_> = fs::read_dir(&kept)?
        .flatten()
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    files.sort();
    for (_, path) in &files[..files.len().saturating_sub(KEPT)] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{FactsFile, remove_directory};

    #[test]
    fn test_consoles_are_kept_where_that_is_wanted_and_not_for_ever() {
        let root = tempfile::tempdir().unwrap();
        let end = |sandbox: &str, keep_console| {
            let facts = Facts {
                sandbox: sandbox.into(),
                namespace: "default".into(),
                keep_console,
                ..Facts::default()
            };
            let file = FactsFile::create(root.path(), facts).unwrap();
            fs::write(file.console(), sandbox).unwrap();
            end_of(&file);
            let kept = path(root.path(), "default", sandbox);
            fs::read_to_string(kept).unwrap_or_default()
        };
        fn end_of(file: &FactsFile) {
            keep(file.directory(), &file.get()).unwrap();
            remove_directory(file.directory()).unwrap();
            // Nothing is there to be kept any more.
            keep(file.directory(), &file.get()).unwrap();
        }
        assert_eq!(end("silent", false), "");
        for number in 0..KEPT + 3 {
            let name = format!("loud{number}");
            assert_eq!(end(&name, true), name);
        }
        assert_eq!(fs::read_dir(directory(root.path())).unwrap().count(), KEPT);
    }
}
