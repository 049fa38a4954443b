//! Settings as a TOML text.

use toml_edit::{Document, Item, Value as TomlValue};

use super::fields::{Field, Value};
use super::{Settings, SettingsError};

/// Apply all fields of `text`, which stands at `place`; of a host's configuration if `from_host`.
pub(super) fn apply(
    settings: &mut Settings,
    place: &str,
    text: &str,
    from_host: bool,
) -> Result<(), SettingsError> {
    let line = |offset: Option<usize>| {
        let before = offset.and_then(|offset| text.as_bytes().get(..offset));
        let line = before.map(|before| 1 + before.iter().filter(|byte| **byte == b'\n').count());
        line.map_or_else(|| place.to_owned(), |line| format!("{place}, line {line}"))
    };
    let document = Document::parse(text).map_err(|error| {
        let problem = error.message().trim().replace('\n', ", ");
        SettingsError::refused(line(error.span().map(|span| span.start)), problem)
    })?;
    let table = document.as_table();
    for (name, item) in table {
        let key = table.key(name).and_then(toml_edit::Key::span);
        let at = line(key.or_else(|| item.span()).map(|span| span.start));
        let field = Field::find(name).map_err(|problem| SettingsError::refused(&at, problem))?;
        field
            .apply(settings, value(item), from_host)
            .map_err(|problem| SettingsError::refused(&at, problem))?;
    }
    Ok(())
}

fn value(item: &Item) -> Value<'_> {
    match item {
        Item::Value(TomlValue::Integer(number)) => Value::Integer(*number.value()),
        Item::Value(TomlValue::String(text)) => Value::Text(text.value()),
        Item::Value(TomlValue::Boolean(flag)) if *flag.value() => Value::Other("true"),
        Item::Value(TomlValue::Boolean(_)) => Value::Other("false"),
        Item::Value(TomlValue::Float(_)) => Value::Other("a fraction"),
        Item::Value(TomlValue::Array(_)) | Item::ArrayOfTables(_) => Value::Other("a list"),
        _ => Value::Other("a table"),
    }
}
