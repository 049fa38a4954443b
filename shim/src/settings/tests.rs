use protobuf::CodedOutputStream;

use super::fields::FIELDS;
use super::*;

fn annotations(list: &[(&str, &str)]) -> HashMap<String, String> {
    let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    list.iter().map(owned).collect()
}

/// Settings from a configuration, options and annotations; or the error's text.
fn resolve(
    configuration: Option<&str>,
    options: Option<&str>,
    given: &[(&str, &str)],
) -> Result<Settings, String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.toml");
    if let Some(text) = configuration {
        std::fs::write(&path, text).unwrap();
    }
    let options = options.map(|body| {
        let any = encode(&[(3, body)]);
        RuntimeOptions::from_any("runtimeoptions.v1.Options", &any)
            .unwrap()
            .unwrap()
    });
    Settings::resolve_with(&path, options.as_ref(), &annotations(given))
        .map_err(|error| error.to_string().replace(path.to_str().unwrap(), "FILE"))
}

/// A message with text fields.
fn encode(fields: &[(u32, &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut output = CodedOutputStream::vec(&mut bytes);
    for (number, text) in fields {
        output.write_string(*number, text).unwrap();
    }
    output.flush().unwrap();
    drop(output);
    bytes
}

#[test]
fn test_nothing_set_is_the_defaults() {
    assert_eq!(resolve(None, None, &[]), Ok(Settings::default()));
    assert_eq!(
        resolve(Some("\n# nothing\n"), Some(" "), &[("other", "x")]),
        Ok(Settings::default())
    );
}

#[test]
fn test_each_source_goes_before_the_one_below_it() {
    let file = "default_vcpus = 3\nmax_vcpus = 5\nconsole = \"off\"\nlog_level = 'debug'\n";
    let options = "default_vcpus = 4\nconsole = \"keep\"";
    let settings = resolve(Some(file), Some(options), &[("io.thaw.console", "on")]).unwrap();
    assert_eq!((settings.max_vcpus, settings.default_vcpus), (5, 4));
    assert_eq!(settings.console, ConsoleLog::On);
    assert_eq!(settings.log_level, Some(Level::DEBUG));
    let settings = resolve(Some(file), Some(options), &[("io.thaw.default_vcpus", "1")]).unwrap();
    assert_eq!(
        (settings.default_vcpus, settings.console),
        (1, ConsoleLog::Keep)
    );
}

#[test]
fn test_every_field_is_set_by_its_name() {
    let text = "default_vcpus = 1\nmax_vcpus = 2\ndefault_memory_mib = 256\n\
        max_memory_mib = 4096\nmemory_overhead_mib = 128\nconsole = 'keep'\nlog_level = 'warning'\ntemplate_budget_mib = 100";
    let settings = resolve(Some(text), None, &[]).unwrap();
    let expected = Settings {
        default_vcpus: 1,
        max_vcpus: 2,
        default_memory_mib: 256,
        max_memory_mib: Some(4096),
        memory_overhead_mib: 128,
        console: ConsoleLog::Keep,
        log_level: Some(Level::WARN),
        template_budget_mib: 100,
    };
    assert_eq!(settings, expected);
    assert_eq!(text.lines().count(), FIELDS.len(), "a field is not tried");
}

#[test]
fn test_what_is_wrong_is_told_with_place_field_and_what_may_be_there() {
    for (text, expected) in [
        (
            "\n\nvcpus = 1",
            "FILE, line 3: there is no field \"vcpus\"; the fields are default_vcpus, ",
        ),
        (
            "max_vcpus = 0",
            "FILE, line 1: max_vcpus is a whole number from 1 to 16, not 0",
        ),
        (
            "max_vcpus = \"4\"",
            "FILE, line 1: max_vcpus is a whole number from 1 to 16, not \"4\"",
        ),
        (
            "console = true",
            "FILE, line 1: console is one of off, on, keep, not true",
        ),
        (
            "console = 'yes'",
            "FILE, line 1: console is one of off, on, keep, not \"yes\"",
        ),
        (
            "log_level = 3",
            "FILE, line 1: log_level is one of error, warning, info, debug, not 3",
        ),
        (
            "default_memory_mib = 64",
            "FILE, line 1: default_memory_mib is a whole number from 128 to ",
        ),
        (
            "memory_overhead_mib = 1.5",
            "FILE, line 1: memory_overhead_mib is a whole number from 32 ",
        ),
        (
            "template_budget_mib = []",
            "FILE, line 1: template_budget_mib is a whole number from 1 ",
        ),
        (
            "[console]\nx = 1",
            "FILE, line 1: console is one of off, on, keep, not a table",
        ),
        (
            "[sandbox]\nx = 1",
            "FILE, line 1: there is no field \"sandbox\"",
        ),
        ("a =", "FILE, line 1: "),
        ("max_vcpus = 1\nmax_vcpus = 2", "FILE, line 2: "),
    ] {
        let error = resolve(Some(text), None, &[]).unwrap_err();
        assert!(error.starts_with(expected), "{text:?}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
    let error = resolve(None, Some("\nconsole = 1"), &[]).unwrap_err();
    assert!(
        error.starts_with("runtime options, config_body, line 2: console is"),
        "{error}"
    );
    let error = resolve(None, None, &[("io.thaw.vcpus", "1")]).unwrap_err();
    assert!(
        error.starts_with("annotation io.thaw.vcpus: there is no field \"vcpus\""),
        "{error}"
    );
    let error = resolve(None, None, &[("io.thaw.max_vcpus", "many\n")]).unwrap_err();
    assert!(
        error.starts_with("annotation io.thaw.max_vcpus: max_vcpus is a whole"),
        "{error}"
    );
    assert!(!error.contains('\n'), "{error}");
}

#[test]
fn test_what_holds_for_a_host_is_not_set_for_a_container() {
    for error in [
        resolve(None, Some("template_budget_mib = 100"), &[]).unwrap_err(),
        resolve(None, None, &[("io.thaw.template_budget_mib", "100")]).unwrap_err(),
    ] {
        assert!(error.contains("set it in /etc/thaw/config.toml"), "{error}");
    }
}

#[test]
fn test_an_unreadable_or_endless_configuration_is_refused_by_its_path() {
    let directory = tempfile::tempdir().unwrap();
    for path in [directory.path(), Path::new("/dev/zero")] {
        let error = Settings::resolve_with(path, None, &HashMap::new()).unwrap_err();
        assert!(
            error.to_string().contains(path.to_str().unwrap()),
            "{error}"
        );
    }
}

#[test]
fn test_options_of_known_types_with_and_without_prefix() {
    let body = encode(&[(3, "max_vcpus = 2")]);
    for prefix in ["", "types.containerd.io/", "type.googleapis.com/", "/"] {
        let url = format!("{prefix}runtimeoptions.v1.Options");
        assert!(is_known_type(&url));
        let options = RuntimeOptions::from_any(&url, &body).unwrap().unwrap();
        assert_eq!(options.text, "max_vcpus = 2");
        assert_eq!(RuntimeOptions::from_any(&url, &[]).unwrap(), None);
    }
    assert_eq!(RuntimeOptions::from_any("", &[]).unwrap(), None);
    assert_eq!(
        RuntimeOptions::from_any("containerd.runc.v1.Options", &[]).unwrap(),
        None
    );
    // `systemd_cgroup`, which CRI sets.
    let systemd = [9 << 3, 1];
    assert_eq!(
        RuntimeOptions::from_any("containerd.runc.v1.Options", &systemd).unwrap(),
        None
    );
}

#[test]
fn test_options_from_a_file_name_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("thaw.toml");
    let any = encode(&[
        (1, "io.containerd.thaw.v2.options"),
        (2, path.to_str().unwrap()),
    ]);
    let from = |any: &[u8]| {
        RuntimeOptions::from_any("runtimeoptions.v1.Options", any)
            .map_err(|error| error.to_string())
    };
    let error = from(&any).unwrap_err();
    assert!(
        error.contains("thaw.toml") && error.contains("no such file"),
        "{error}"
    );
    std::fs::write(&path, "console = 'loud'").unwrap();
    let options = from(&any).unwrap();
    let error = Settings::resolve_with(Path::new("/none"), options.as_ref(), &HashMap::new());
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("thaw.toml, line 1: console is one of"),
        "{error}"
    );
}

#[test]
fn test_options_that_are_not_known_are_refused_by_name() {
    let from = |url: &str, any: &[u8]| {
        RuntimeOptions::from_any(url, any)
            .map_err(|error| error.to_string())
            .unwrap_err()
    };
    let generic = "runtimeoptions.v1.Options";
    for (error, expected) in [
        (from("kata.Options", &[]), "\"kata.Options\""),
        (from("", &[8, 1]), "of type \"\""),
        (from(generic, &encode(&[(4, "x")])), "field 4"),
        (
            from(generic, &[0xff, 0xff]),
            "not runtimeoptions.v1.Options",
        ),
        (
            from(generic, &encode(&[(1, "io.containerd.kata.v2")])),
            "\"io.containerd.kata.v2\"",
        ),
        (
            from(generic, &encode(&[(2, "/a"), (3, "b")])),
            "both config_path and config_body",
        ),
        (
            from(generic, &encode(&[(2, "thaw.toml")])),
            "is not absolute",
        ),
        (
            from("containerd.runc.v1.Options", &encode(&[(6, "/bin/crun")])),
            "field binary_name",
        ),
    ] {
        assert!(error.starts_with("runtime options: "), "{error}");
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn test_the_example_and_the_table_are_the_schema() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let example = std::fs::read_to_string(root.join("packaging/config.toml")).unwrap();
    // What is commented out is each field with its default.
    assert_eq!(resolve(Some(&example), None, &[]), Ok(Settings::default()));
    let set: String = example
        .lines()
        .filter_map(|line| {
            line.strip_prefix("#")
                .filter(|rest| !rest.starts_with([' ', '#']))
        })
        .map(|line| format!("{line}\n"))
        .collect();
    let settings = resolve(Some(&set), None, &[]).unwrap();
    let expected = Settings {
        log_level: Some(Level::INFO),
        max_memory_mib: Some(65536),
        ..Settings::default()
    };
    assert_eq!(settings, expected);
    let table = std::fs::read_to_string(root.join("shim/README.md")).unwrap();
    for field in FIELDS {
        assert!(
            set.contains(&format!("{} = ", field.name)),
            "{} is not in the example",
            field.name
        );
        assert!(
            table.contains(&format!("| `{}` |", field.name)),
            "{} is not in the table",
            field.name
        );
    }
}
