//! What is remembered about a verified template, so that it is not digested at every start.

use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::digest::FileIdentity;
use super::key::TemplateKey;

/// Identities of a template's files at the time at which their digests were right. Kept on a file
/// system that a boot empties; the boot id is there in case that it is not.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Marker {
    pub boot_id: String,
    pub manifest: FileIdentity,
    pub state: FileIdentity,
    pub memory: FileIdentity,
}

/// The markers of one store's templates.
pub(super) struct Markers {
    directory: PathBuf,
}

impl Markers {
    pub fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    fn path(&self, key: TemplateKey) -> PathBuf {
        self.directory.join(format!("{key}.json"))
    }

    /// The marker of `key`; one that cannot be read is none.
    pub fn read(&self, key: TemplateKey) -> Option<Marker> {
        let mut text = Vec::with_capacity(1024);
        File::open(self.path(key))
            .ok()?
            .take(4096)
            .read_to_end(&mut text)
            .ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Remember. Where that is not possible, the template is digested again next time.
    pub fn write(&self, key: TemplateKey, marker: &Marker) {
        let result = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.directory)
            .and_then(|()| {
                super::publish::write_atomically(&self.directory, &self.path(key), |file| {
                    file.write_all(&serde_json::to_vec(marker)?)
                })
            });
        if let Err(error) = result {
            let directory = self.directory.display();
            tracing::debug!(%directory, %error, "cannot remember that a template was verified");
        }
    }

    /// Forget what is remembered of `key`.
    pub fn remove(&self, key: TemplateKey) {
        match std::fs::remove_file(self.path(key)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(key = key.short(), %error, "cannot forget a template's verification");
            }
            _ => {}
        }
    }
}
