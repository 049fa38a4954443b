//! Where thaw's own files are.
//!
//! Programs and images find each other relative to the running program, so that an installed tree
//! can be moved: `<prefix>/bin/…` → `<prefix>/libexec/thaw/thaw-vmm`, `<prefix>/share/thaw/…`.

use std::path::{Path, PathBuf};

use thiserror::Error;

/// Runtime state of all sandboxes, gone with the next boot.
pub const RUNTIME_DIRECTORY: &str = "/run/thaw";

/// The templates of this host.
pub const TEMPLATE_DIRECTORY: &str = "/var/lib/thaw/templates";

/// One installed tree of thaw: the files that a sandbox is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installation {
    /// The VMM program.
    pub vmm: PathBuf,
    /// The guest's kernel, an ELF `vmlinux`.
    pub kernel: PathBuf,
    /// The guest's initramfs, which holds the agent.
    pub initramfs: PathBuf,
}

/// Why there is no complete installation.
#[derive(Debug, Error)]
pub enum InstallationError {
    /// The running program's own path cannot be read.
    #[error("finding thaw's files: reading /proc/self/exe: {0}; is /proc mounted?")]
    Program(std::io::Error),
    /// The program is not in a `bin` directory.
    #[error(
        "finding thaw's files: {} is not in PREFIX/bin; install thaw with `make install` and run it from there",
        .0.display()
    )]
    NotInstalled(PathBuf),
    /// A file of the installation is not there.
    #[error(
        "thaw is not completely installed: {} is missing ({source}); install it again with `make install`",
        .path.display()
    )]
    Missing {
        /// The file.
        path: PathBuf,
        /// Why it could not be examined.
        source: std::io::Error,
    },
    /// Something else than a file is at a file's place.
    #[error(
        "thaw is not completely installed: {} is not a file; install it again with `make install`",
        .0.display()
    )]
    NotAFile(PathBuf),
}

impl Installation {
    /// The installation that the running program belongs to.
    pub fn find() -> Result<Self, InstallationError> {
        // What /proc says, so symbolic links to the program lead to the tree it is really in.
        let program = std::env::current_exe().map_err(InstallationError::Program)?;
        Self::of_program(&program)
    }

    /// The installation that the program at `program` (no symbolic link) belongs to.
    fn of_program(program: &Path) -> Result<Self, InstallationError> {
        let bin = program.parent().filter(|bin| bin.ends_with("bin"));
        match bin.and_then(Path::parent) {
            Some(prefix) => Self::at(prefix),
            None => Err(InstallationError::NotInstalled(program.to_owned())),
        }
    }

    /// The installation below `prefix`; each of its files is there.
    pub fn at(prefix: &Path) -> Result<Self, InstallationError> {
        let installation = Self::expected_at(prefix);
        for path in installation.files() {
            let metadata =
                std::fs::metadata(path).map_err(|source| InstallationError::Missing {
                    path: path.to_owned(),
                    source,
                })?;
            if !metadata.is_file() {
                return Err(InstallationError::NotAFile(path.to_owned()));
            }
        }
        Ok(installation)
    }

    /// Where the files of an installation below `prefix` belong, there or not.
    pub fn expected_at(prefix: &Path) -> Self {
        Self {
            vmm: prefix.join("libexec/thaw/thaw-vmm"),
            kernel: prefix.join("share/thaw/vmlinux"),
            initramfs: prefix.join("share/thaw/initramfs"),
        }
    }

    /// All its files.
    pub fn files(&self) -> [&Path; 3] {
        [&self.vmm, &self.kernel, &self.initramfs]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[&str]) -> tempfile::TempDir {
        let prefix = tempfile::tempdir().unwrap();
        for file in files {
            let path = prefix.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, b"x").unwrap();
        }
        prefix
    }

    #[test]
    fn test_complete_tree_is_found_from_a_program_in_bin() {
        let prefix = tree(&[
            "libexec/thaw/thaw-vmm",
            "share/thaw/vmlinux",
            "share/thaw/initramfs",
        ]);
        let found = Installation::of_program(&prefix.path().join("bin/thaw")).unwrap();
        assert_eq!(found.kernel, prefix.path().join("share/thaw/vmlinux"));
    }

    #[test]
    fn test_missing_file_is_named() {
        let prefix = tree(&["libexec/thaw/thaw-vmm", "share/thaw/vmlinux"]);
        let error = Installation::at(prefix.path()).unwrap_err().to_string();
        assert!(error.contains("share/thaw/initramfs is missing"), "{error}");
        assert!(error.contains("make install"), "{error}");
    }

    #[test]
    fn test_directory_in_place_of_a_file_is_refused() {
        let prefix = tree(&[
            "libexec/thaw/thaw-vmm",
            "share/thaw/vmlinux",
            "share/thaw/initramfs/x",
        ]);
        assert!(matches!(
            Installation::at(prefix.path()),
            Err(InstallationError::NotAFile(path)) if path.ends_with("initramfs")
        ));
    }

    #[test]
    fn test_program_outside_of_bin_is_refused() {
        assert!(matches!(
            Installation::of_program(Path::new("/target/debug/thaw")),
            Err(InstallationError::NotInstalled(_))
        ));
    }
}
