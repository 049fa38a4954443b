//! `thaw gc`.

use std::io::Write;

use anyhow::Result;

use crate::paths::TEMPLATE_DIRECTORY;
use crate::template::TemplateStore;

/// Remove what killed processes have left behind.
pub(super) fn run(_output: &mut dyn Write) -> Result<bool> {
    TemplateStore::new(TEMPLATE_DIRECTORY).remove_stale();
    Ok(true)
}
