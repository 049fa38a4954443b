//! The store: find a template, or make it.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use thaw_vmm_control::{ReadOnlyView, Shape};

use super::abandonment::Abandonment;
use super::boot::VmmBuilder;
use super::budget;
use super::build::{Builder, Unpublished, build_and_publish, build_in_memory};
use super::cache::DigestCache;
use super::digest::{Digest, FileIdentity};
use super::key::{KeyInputs, TemplateKey};
use super::lock::{KeyLock, ScratchDirectory, last_use, note_use};
use super::manifest::Manifest;
use super::marker::{Marker, Markers};
use super::{Origin, Template, TemplateError};
use crate::paths::{Installation, RUNTIME_DIRECTORY};
use crate::process_identity::boot_id;

/// The templates of one directory. Any number of processes may use it at once.
pub struct TemplateStore {
    directory: PathBuf,
    markers: Markers,
    budget: u64,
}

/// A published template, for people.
#[derive(Debug)]
pub struct StoredTemplate {
    /// Its key.
    pub key: TemplateKey,
    /// Disk space that it takes.
    pub allocated_bytes: u64,
    /// When it was last obtained, in nanoseconds since 1970.
    pub last_use_ns: Option<i64>,
    /// What its manifest says, or why it cannot be used.
    pub manifest: Result<Manifest, String>,
    /// What is known about its files.
    pub trust: Trust,
}

/// What is known about a published template's files without reading them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// Their digests were right in this boot and they have not been touched since.
    Verified,
    /// They will be digested before the next use.
    Unverified,
    /// They are not what the manifest says.
    Damaged,
}

/// A published template, open.
struct Entry {
    manifest: Manifest,
    manifest_file: File,
    state: File,
    memory: File,
}

/// What there is under a key.
enum Found {
    Absent,
    Damaged(String),
    Unverified(Entry),
    Verified(Entry),
}

impl TemplateStore {
    /// The store in `directory`, usually [`crate::paths::TEMPLATE_DIRECTORY`]. Nothing is touched
    /// yet.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        // containerd's namespaces cannot begin with a dot, so nothing else has this name.
        let markers = Path::new(RUNTIME_DIRECTORY).join(".templates");
        Self {
            directory: directory.into(),
            markers: Markers::new(markers),
            budget: budget::DISK_BUDGET,
        }
    }

    /// The same store, with another bound on the disk space that all templates take together.
    pub fn with_budget_mib(mut self, mib: u32) -> Self {
        self.budget = u64::from(mib) << 20;
        self
    }

    /// Where the templates are.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The key that a template of `shape` has on this host with this installation.
    pub fn key(
        &self,
        installation: &Installation,
        shape: Shape,
    ) -> Result<TemplateKey, TemplateError> {
        Ok(self.inputs(installation, shape)?.key())
    }

    fn inputs(
        &self,
        installation: &Installation,
        shape: Shape,
    ) -> Result<KeyInputs, TemplateError> {
        let mut cache = DigestCache::load(&self.directory);
        let inputs = KeyInputs::gather(installation, shape, &mut cache)?;
        if let Err(error) = cache.store() {
            let directory = self.directory.display();
            tracing::debug!(%directory, %error, "cannot keep the digests of thaw's files");
        }
        Ok(inputs)
    }

    /// The template of `shape`. Blocks: for well under a millisecond when there is one that was
    /// verified in this boot, for the time of a digest at its first use after a boot, and for
    /// seconds when it has to be built, or is being built by someone else.
    ///
    /// Where the store cannot be written, the template is built in memory, for this call only. A build
    /// fails as soon as `abandonment` is declared.
    pub fn obtain(
        &self,
        installation: &Installation,
        shape: Shape,
        abandonment: &Abandonment,
    ) -> Result<Template, TemplateError> {
        let inputs = self.inputs(installation, shape)?;
        self.obtain_with(&inputs, &VmmBuilder::new(installation, abandonment))
    }

    pub(super) fn obtain_with(
        &self,
        inputs: &KeyInputs,
        builder: &dyn Builder,
    ) -> Result<Template, TemplateError> {
        let key = inputs.key();
        if let Found::Verified(entry) = self.find(key) {
            return Ok(self.stored(key, entry, Origin::Stored));
        }
        let lock = self
            .prepare()
            .and_then(|()| KeyLock::acquire(&self.directory, key));
        let lock = lock.map_err(|error| self.cannot_keep(&error)).ok();
        // Somebody else may have built or verified it meanwhile.
        let damage = match self.find(key) {
            Found::Verified(entry) => return Ok(self.stored(key, entry, Origin::Stored)),
            Found::Unverified(entry) => match self.verify_entry(key, &entry) {
                Ok(()) => return Ok(self.stored(key, entry, Origin::Stored)),
                Err(reason) => Some(reason),
            },
            Found::Damaged(reason) => Some(reason),
            Found::Absent => None,
        };
        if let Some(reason) = damage {
            tracing::warn!(
                key = key.short(),
                reason,
                "template is damaged and will be built again"
            );
        }
        if lock.is_some()
            && let Some(template) = self.build_stored(inputs, key, builder)?
        {
            return Ok(template);
        }
        let (state, memory, working_set) =
            build_in_memory(builder, inputs).map_err(failed(inputs.shape))?;
        tracing::warn!(shape = %inputs.shape, "template was built in memory, for this sandbox only");
        Ok(Template {
            state,
            memory,
            shape: inputs.shape,
            key,
            origin: Origin::Memory,
            working_set,
        })
    }

    /// Build and publish; `None` when the files cannot be written. The caller has the lock.
    fn build_stored(
        &self,
        inputs: &KeyInputs,
        key: TemplateKey,
        builder: &dyn Builder,
    ) -> Result<Option<Template>, TemplateError> {
        ScratchDirectory::remove_stale(&self.directory);
        // Damaged remains are in the way, and their space may be needed.
        if let Err(error) = budget::remove_files(&self.directory, &self.markers, key) {
            self.cannot_keep(&error);
            return Ok(None);
        }
        let target = self.directory.join(key.to_string());
        match build_and_publish(builder, inputs, &self.directory, &target) {
            Ok(()) => {}
            Err(Unpublished::NotStored(reason)) => {
                self.cannot_keep(&reason);
                return Ok(None);
            }
            Err(Unpublished::Failed(error)) => return Err(failed(inputs.shape)(error)),
        }
        match self.find(key) {
            Found::Unverified(entry) | Found::Verified(entry) => {
                // Its digests were made from the files a moment ago.
                self.mark(key, entry.marker());
                let template = self.stored(key, entry, Origin::Built);
                budget::enforce(&self.directory, &self.markers, key, self.budget);
                Ok(Some(template))
            }
            Found::Damaged(reason) => {
                self.cannot_keep(&reason);
                Ok(None)
            }
            Found::Absent => Ok(None),
        }
    }

    /// Say why a template will only be in memory.
    fn cannot_keep(&self, reason: &dyn std::fmt::Display) {
        let directory = self.directory.display();
        tracing::warn!(%directory, %reason, "templates cannot be kept");
    }

    /// Make the directory, for its owner only.
    fn prepare(&self) -> io::Result<()> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.directory)
    }

    fn stored(&self, key: TemplateKey, entry: Entry, origin: Origin) -> Template {
        note_use(&self.directory, key);
        Template {
            state: entry.state,
            memory: entry.memory,
            shape: entry.manifest.shape(),
            key,
            origin,
            working_set: entry.manifest.working_set,
        }
    }

    /// What there is under `key`, without reading state or memory.
    fn find(&self, key: TemplateKey) -> Found {
        let entry = match Entry::open(&self.directory, key) {
            Ok(Some(entry)) => entry,
            Ok(None) => return Found::Absent,
            Err(reason) => return Found::Damaged(reason),
        };
        let trusted = self
            .markers
            .read(key)
            .is_some_and(|marker| entry.marker().is_ok_and(|current| current == marker));
        if trusted {
            Found::Verified(entry)
        } else {
            Found::Unverified(entry)
        }
    }

    /// Compare the files' digests with the manifest's, and remember when they are right.
    fn verify_entry(&self, key: TemplateKey, entry: &Entry) -> Result<(), String> {
        // As they are before they are read: a change from now on shows.
        let marker = entry.marker();
        match entry.check_digests() {
            Ok(()) => {
                self.mark(key, marker);
                Ok(())
            }
            Err(reason) => {
                self.markers.remove(key);
                Err(reason)
            }
        }
    }

    fn mark(&self, key: TemplateKey, marker: io::Result<Marker>) {
        match marker {
            Ok(marker) => self.markers.write(key, &marker),
            Err(error) => {
                tracing::debug!(key = key.short(), %error, "cannot remember a verification");
            }
        }
    }

    /// Verify the full digests of a published template. `Err` in the result says what is damaged;
    /// it will be built again at its next use.
    pub fn verify(&self, key: TemplateKey) -> Result<Result<(), String>, TemplateError> {
        let _lock = self.lock_existing(key)?;
        match Entry::open(&self.directory, key) {
            Ok(Some(entry)) => Ok(self.verify_entry(key, &entry)),
            Ok(None) => Err(self.unknown(&key.to_string())),
            Err(reason) => {
                self.markers.remove(key);
                Ok(Err(reason))
            }
        }
    }

    /// Remove a published template. Running guests are not affected.
    pub fn remove(&self, key: TemplateKey) -> Result<(), TemplateError> {
        let lock = self.lock_existing(key)?;
        budget::remove(&self.directory, &self.markers, key, lock)
            .map_err(|error| TemplateError::system(format!("removing template {key}"), error))
    }

    /// Remove what killed builders have left here and in `runtime`, usually
    /// [`RUNTIME_DIRECTORY`]; what that was, and what came of it.
    pub fn remove_stale(&self, runtime: &Path) -> Vec<(PathBuf, io::Result<()>)> {
        let removed = [&self.directory, runtime].map(ScratchDirectory::remove_stale);
        removed.into_iter().flatten().collect()
    }

    /// What killed builders have left here and in `runtime`.
    pub fn stale(&self, runtime: &Path) -> Vec<PathBuf> {
        let found = [&self.directory, runtime].map(ScratchDirectory::stale);
        found
            .into_iter()
            .flatten()
            .map(ScratchDirectory::leave)
            .collect()
    }

    fn lock_existing(&self, key: TemplateKey) -> Result<KeyLock, TemplateError> {
        if fs::symlink_metadata(self.directory.join(key.to_string())).is_err() {
            return Err(self.unknown(&key.to_string()));
        }
        KeyLock::acquire(&self.directory, key)
            .map_err(|error| TemplateError::system(format!("locking template {key}"), error))
    }

    /// Keys of all published templates.
    pub fn keys(&self) -> Result<Vec<TemplateKey>, TemplateError> {
        budget::keys(&self.directory).map_err(|error| {
            TemplateError::system(format!("listing {}", self.directory.display()), error)
        })
    }

    /// The one template whose key begins with `prefix`.
    pub fn resolve(&self, prefix: &str) -> Result<TemplateKey, TemplateError> {
        let mut matching = self
            .keys()?
            .into_iter()
            .filter(|key| key.to_string().starts_with(prefix));
        match (matching.next(), matching.next()) {
            (Some(key), None) if !prefix.is_empty() => Ok(key),
            (Some(_), _) => Err(TemplateError::Ambiguous(prefix.to_owned())),
            (None, _) => Err(self.unknown(prefix)),
        }
    }

    fn unknown(&self, key: &str) -> TemplateError {
        TemplateError::Unknown {
            directory: self.directory.clone(),
            key: key.to_owned(),
        }
    }

    /// All published templates, without reading their state and memory.
    pub fn list(&self) -> Result<Vec<StoredTemplate>, TemplateError> {
        let describe = |key: TemplateKey| {
            let (manifest, trust) = match self.find(key) {
                Found::Verified(entry) => (Ok(entry.manifest), Trust::Verified),
                Found::Unverified(entry) => (Ok(entry.manifest), Trust::Unverified),
                Found::Damaged(reason) => (Err(reason), Trust::Damaged),
                Found::Absent => return None,
            };
            Some(StoredTemplate {
                key,
                allocated_bytes: budget::allocated_bytes(&self.directory, key),
                last_use_ns: last_use(&self.directory, key),
                manifest,
                trust,
            })
        };
        Ok(self.keys()?.into_iter().filter_map(describe).collect())
    }
}

fn failed(shape: Shape) -> impl Fn(super::BuildError) -> TemplateError {
    move |source| TemplateError::Build { shape, source }
}

impl Entry {
    /// Open the template of `key`, if there is one. `Err` says why what is there is none.
    fn open(directory: &Path, key: TemplateKey) -> Result<Option<Self>, String> {
        let path = directory.join(key.to_string());
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        // All three files come from one directory, also while it is being replaced.
        let opened = openat(
            nix::fcntl::AT_FDCWD,
            &path,
            flags | OFlag::O_DIRECTORY,
            Mode::empty(),
        );
        let directory = match opened {
            Ok(directory) => directory,
            Err(Errno::ENOENT) => return Ok(None),
            Err(error) => return Err(format!("opening {}: {error}", path.display())),
        };
        // A VMM is given what is opened here: it must not be able to open it anew for writing.
        let directory = ReadOnlyView::of(&directory)
            .map_err(|error| format!("mounting {} read-only: {error}", path.display()))?;
        let open = |name: &str| -> Result<File, String> {
            // Not blocking, in case that something put a FIFO there.
            let file = openat(&directory, name, flags | OFlag::O_NONBLOCK, Mode::empty())
                .map(File::from)
                .map_err(|error| format!("{name}: {error}"))?;
            match file.metadata() {
                Ok(metadata) if metadata.is_file() => Ok(file),
                Ok(_) => Err(format!("{name}: not a file")),
                Err(error) => Err(format!("{name}: {error}")),
            }
        };
        let manifest_file = open("manifest.json")?;
        let mut text = Vec::with_capacity(4096);
        (&manifest_file)
            .take(Manifest::MAX_BYTES + 1)
            .read_to_end(&mut text)
            .map_err(|error| format!("manifest.json: {error}"))?;
        let manifest = Manifest::parse(&text, key).map_err(|error| error.to_string())?;
        let entry = Self {
            state: open("state")?,
            memory: open("memory")?,
            manifest,
            manifest_file,
        };
        entry.check_size("state", &entry.state, entry.manifest.state.size)?;
        entry.check_size("memory", &entry.memory, entry.manifest.memory.size)?;
        Ok(Some(entry))
    }

    fn check_size(&self, name: &str, file: &File, expected: u64) -> Result<(), String> {
        match file.metadata() {
            Ok(metadata) if metadata.len() == expected => Ok(()),
            Ok(metadata) => Err(format!(
                "{name}: {} bytes instead of {expected}",
                metadata.len()
            )),
            Err(error) => Err(format!("{name}: {error}")),
        }
    }

    /// Read both files and compare their digests with the manifest's.
    fn check_digests(&self) -> Result<(), String> {
        let check = |name: &str, digest: io::Result<Digest>, expected: Digest| match digest {
            Ok(digest) if digest == expected => Ok(()),
            Ok(_) => Err(format!("{name}: its digest is not the manifest's")),
            Err(error) => Err(format!("{name}: {error}")),
        };
        check(
            "state",
            Digest::of_file(&self.state),
            self.manifest.state.sha256,
        )?;
        check(
            "memory",
            Digest::of_sparse_file(&self.memory),
            self.manifest.memory.sha256,
        )
    }

    /// The marker that fits the files as they are now.
    fn marker(&self) -> io::Result<Marker> {
        Ok(Marker {
            boot_id: boot_id()?,
            manifest: FileIdentity::of(&self.manifest_file)?,
            state: FileIdentity::of(&self.state)?,
            memory: FileIdentity::of(&self.memory)?,
        })
    }
}

#[cfg(test)]
mod tests;
