//! `thaw template`.

use std::io::Write;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use thaw_vmm_control::Shape;

use super::output::{ago, bytes, table};
use crate::paths::{Installation, TEMPLATE_DIRECTORY};
use crate::settings::Settings;
use crate::spec;
use crate::template::{Abandonment, Origin, StoredTemplate, TemplateStore, Trust};

fn store() -> TemplateStore {
    TemplateStore::new(TEMPLATE_DIRECTORY)
}

/// `thaw template build`.
pub(super) fn build(
    vcpus: Option<u8>,
    memory_mib: Option<u32>,
    output: &mut dyn Write,
) -> Result<bool> {
    let host = std::thread::available_parallelism().map_or(1, usize::from);
    let settings = Settings::of_host()?;
    let memory = crate::daemon::host_memory();
    let unlimited = spec::shape(&spec::Spec::default(), &settings, host, memory)?;
    let vcpus = vcpus.unwrap_or(unlimited.vcpus());
    let shape = Shape::new(vcpus, memory_mib.unwrap_or(unlimited.memory_mib()))?;
    let installation = Installation::find()?;
    let begin = Instant::now();
    let store = store().with_budget_mib(settings.template_budget_mib);
    let template = store.obtain(&installation, shape, &Abandonment::default())?;
    let (key, seconds) = (template.key, begin.elapsed().as_secs_f32());
    match template.origin {
        Origin::Built => writeln!(output, "built {key} ({shape}) in {seconds:.1} s")?,
        Origin::Stored => writeln!(output, "{key} ({shape}) is there already")?,
        Origin::Memory => bail!(
            "a template of shape {shape} can be built but not kept in {TEMPLATE_DIRECTORY}: \
             make room there or let root write to it"
        ),
    }
    Ok(true)
}

/// One template, as `--json` gives it.
#[derive(Serialize)]
struct Listed {
    key: String,
    shape: Option<Shape>,
    disk_bytes: u64,
    built_at: Option<u64>,
    last_use_ns: Option<i64>,
    state: State,
    #[serde(skip_serializing_if = "Option::is_none")]
    damage: Option<String>,
}

/// What may be said about a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// The next start takes it as it is.
    Ready,
    /// The next start digests it first.
    Unverified,
    /// Made for another kernel, processor or version of thaw; goes when space is needed.
    Outdated,
    /// The next start builds it again.
    Damaged,
}

impl Listed {
    fn new(stored: StoredTemplate, store: &TemplateStore, own: Option<&Installation>) -> Self {
        let shape = stored
            .manifest
            .as_ref()
            .ok()
            .map(|manifest| manifest.shape());
        let current = match (shape, own) {
            (Some(shape), Some(own)) => store.key(own, shape).is_ok_and(|key| key == stored.key),
            _ => true,
        };
        let state = match stored.trust {
            Trust::Damaged => State::Damaged,
            _ if !current => State::Outdated,
            Trust::Verified => State::Ready,
            Trust::Unverified => State::Unverified,
        };
        Self {
            key: stored.key.to_string(),
            shape,
            disk_bytes: stored.allocated_bytes,
            built_at: stored
                .manifest
                .as_ref()
                .ok()
                .map(|manifest| manifest.built_at()),
            last_use_ns: stored.last_use_ns,
            state,
            damage: stored.manifest.err(),
        }
    }

    fn row(&self) -> Vec<String> {
        let unknown = || "-".to_owned();
        let state = match (self.state, &self.damage) {
            (State::Ready, _) => "ready".to_owned(),
            (State::Unverified, _) => "ready, not verified in this boot".to_owned(),
            (State::Outdated, _) => "outdated".to_owned(),
            (State::Damaged, Some(reason)) => format!("damaged: {reason}"),
            (State::Damaged, None) => "damaged".to_owned(),
        };
        let used = self
            .last_use_ns
            .and_then(|ns| u64::try_from(ns / 1_000_000_000).ok());
        vec![
            self.key[..12].to_owned(),
            self.shape.map_or_else(unknown, |shape| shape.to_string()),
            bytes(self.disk_bytes),
            self.built_at.map_or_else(unknown, ago),
            used.map_or_else(unknown, ago),
            state,
        ]
    }
}

/// `thaw template list`.
pub(super) fn list(json: bool, output: &mut dyn Write) -> Result<bool> {
    let store = store();
    // Without one, nothing can be said about which templates are outdated.
    let own = Installation::find().ok();
    let listed = store
        .list()?
        .into_iter()
        .map(|stored| Listed::new(stored, &store, own.as_ref()));
    let listed: Vec<_> = listed.collect();
    if json {
        serde_json::to_writer_pretty(&mut *output, &listed)?;
        writeln!(output)?;
        return Ok(true);
    }
    if listed.is_empty() {
        writeln!(
            output,
            "no templates in {TEMPLATE_DIRECTORY}; the first start builds one"
        )?;
        return Ok(true);
    }
    let heading = ["KEY", "SHAPE", "DISK", "BUILT", "USED", "STATE"]
        .map(str::to_owned)
        .to_vec();
    let rows: Vec<_> = std::iter::once(heading)
        .chain(listed.iter().map(Listed::row))
        .collect();
    table(output, &rows)?;
    Ok(true)
}

/// `thaw template verify`.
pub(super) fn verify(key: Option<&str>, output: &mut dyn Write) -> Result<bool> {
    let store = store();
    let keys = match key {
        Some(key) => vec![store.resolve(key)?],
        None => store.keys()?,
    };
    if keys.is_empty() {
        writeln!(output, "there are no templates")?;
    }
    let mut good = true;
    for key in keys {
        match store.verify(key)? {
            Ok(()) => writeln!(output, "{key} ok")?,
            Err(reason) => {
                good = false;
                writeln!(
                    output,
                    "{key} damaged: {reason}; the next start builds it again"
                )?;
            }
        }
    }
    Ok(good)
}

/// `thaw template remove`.
pub(super) fn remove(key: Option<&str>, output: &mut dyn Write) -> Result<bool> {
    let store = store();
    let keys = match key {
        Some(key) => vec![store.resolve(key)?],
        None => store.keys().context("finding all templates")?,
    };
    for key in keys {
        store.remove(key)?;
        writeln!(output, "removed {key}")?;
    }
    Ok(true)
}
