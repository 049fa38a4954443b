use std::collections::BTreeSet;

use super::*;
use crate::counters;
use crate::trace::Summary;

/// One sample of a text, checked.
#[derive(Debug, PartialEq)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

/// Parse a text strictly: by the grammar of the format, and each family once, with help and type before
/// its samples, none twice, counters not negative, histograms complete and cumulative.
fn parse(text: &str) -> Result<Vec<Sample>, String> {
    if !text.ends_with('\n') {
        return Err("the last line has no end".into());
    }
    let (mut samples, mut seen) = (Vec::new(), BTreeSet::new());
    let (mut families, mut family, mut kind, mut helped) =
        (BTreeSet::new(), String::new(), String::new(), String::new());
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').ok_or(format!("no help: {line}"))?;
            check_name(name)?;
            if help.is_empty() || !families.insert(name.to_owned()) {
                return Err(format!("an empty or second help: {line}"));
            }
            helped = name.to_owned();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, given) = rest.split_once(' ').ok_or(format!("no type: {line}"))?;
            if name != helped || !["counter", "gauge", "histogram"].contains(&given) {
                return Err(format!("a type without help, or none: {line}"));
            }
            (family, kind) = (name.to_owned(), given.to_owned());
        } else {
            let sample = parse_sample(line)?;
            let suffixes: &[&str] = match kind.as_str() {
                "histogram" => &["_bucket", "_sum", "_count"],
                _ => &[""],
            };
            if !suffixes
                .iter()
                .any(|suffix| sample.name == format!("{family}{suffix}"))
            {
                return Err(format!("not of the family {family}: {line}"));
            }
            if kind == "counter" && !(family.ends_with("_total") && sample.value >= 0.0) {
                return Err(format!("no counter: {line}"));
            }
            if !seen.insert(format!("{}{:?}", sample.name, sample.labels)) {
                return Err(format!("a second time: {line}"));
            }
            samples.push(sample);
        }
    }
    check_histograms(&samples)?;
    Ok(samples)
}

fn check_name(name: &str) -> Result<(), String> {
    let good = |(place, c): (usize, char)| {
        c.is_ascii_alphabetic() || c == '_' || c == ':' || place > 0 && c.is_ascii_digit()
    };
    if name.is_empty() || !name.chars().enumerate().all(good) {
        return Err(format!("no name of a metric: {name:?}"));
    }
    Ok(())
}

fn parse_sample(line: &str) -> Result<Sample, String> {
    let wrong = |what: &str| format!("{what}: {line}");
    let end = line.find(['{', ' ']).ok_or_else(|| wrong("no value"))?;
    let name = &line[..end];
    check_name(name)?;
    let mut labels = BTreeMap::new();
    let mut rest = &line[end..];
    if let Some(list) = rest.strip_prefix('{') {
        rest = list;
        loop {
            let (label, value) = rest.split_once("=\"").ok_or_else(|| wrong("no label"))?;
            check_name(label)?;
            if label.contains(':') {
                return Err(wrong("a colon in a label's name"));
            }
            let mut text = String::new();
            let mut letters = value.char_indices();
            let end = loop {
                match letters.next().ok_or_else(|| wrong("an open label"))? {
                    (end, '"') => break end,
                    (_, '\\') => text.push(match letters.next() {
                        Some((_, 'n')) => '\n',
                        Some((_, c @ ('"' | '\\'))) => c,
                        _ => return Err(wrong("an unknown escape")),
                    }),
                    (_, c) => text.push(c),
                }
            };
            if labels.insert(label.to_owned(), text).is_some() {
                return Err(wrong("a label twice"));
            }
            rest = &value[end + 1..];
            match rest.chars().next() {
                Some(',') => rest = &rest[1..],
                Some('}') => break,
                _ => return Err(wrong("no end of the labels")),
            }
        }
        rest = &rest[1..];
    }
    let value = rest
        .strip_prefix(' ')
        .ok_or_else(|| wrong("no blank before the value"))?;
    if value.is_empty() || value.contains(' ') {
        return Err(wrong("no value alone"));
    }
    let value = match value {
        "+Inf" => f64::INFINITY,
        value => value.parse().map_err(|_| wrong("no number"))?,
    };
    let name = name.to_owned();
    Ok(Sample {
        name,
        labels,
        value,
    })
}

fn check_histograms(samples: &[Sample]) -> Result<(), String> {
    let mut series: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for sample in samples
        .iter()
        .filter(|sample| sample.name.ends_with("_bucket"))
    {
        let mut labels = sample.labels.clone();
        let bound = labels.remove("le").ok_or("a bucket without a bound")?;
        let bound = if bound == "+Inf" {
            f64::INFINITY
        } else {
            bound.parse().map_err(|_| bound)?
        };
        let name = sample.name.trim_end_matches("_bucket");
        series
            .entry(format!("{name}{labels:?}"))
            .or_default()
            .push((bound, sample.value));
    }
    for (key, buckets) in series {
        let growing = buckets
            .windows(2)
            .all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1);
        let (last_bound, all) = buckets[buckets.len() - 1];
        let of = |suffix: &str| {
            samples.iter().find(|sample| {
                let name = sample.name.strip_suffix(suffix);
                name.is_some_and(|name| format!("{name}{:?}", sample.labels) == key)
            })
        };
        let count = of("_count").ok_or(format!("{key} has no count"))?;
        of("_sum").ok_or(format!("{key} has no sum"))?;
        if !growing || last_bound != f64::INFINITY || count.value != all {
            return Err(format!("{key} is no histogram: {buckets:?}"));
        }
    }
    Ok(())
}

fn value(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    let labels = labels
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let labels: BTreeMap<_, _> = labels.collect();
    let found = samples
        .iter()
        .find(|sample| sample.name == name && sample.labels == labels);
    found
        .unwrap_or_else(|| panic!("no {name} {labels:?} in {samples:#?}"))
        .value
}

#[test]
fn test_what_is_told_is_what_prometheus_reads() {
    let directory = tempfile::tempdir().unwrap();
    let summary = Summary {
        restore_ns: Some(60_000_000),
        create_ns: Some(90_000_000_000),
        ..Summary::default()
    };
    for _ in 0..3 {
        counters::count_start(directory.path(), &summary).unwrap();
    }
    counters::count_failure(directory.path(), "unavailable", "a \"b\"\\\n").unwrap();
    let metrics = Metrics {
        sandboxes: Vec::new(),
        counters: counters::read(directory.path()).unwrap(),
        templates: templates(directory.path()).unwrap(),
    };
    let samples = parse(&metrics.text()).unwrap();
    assert_eq!(value(&samples, "thaw_starts_total", &[]), 3.0);
    let labels = [("reason", "unavailable"), ("after", "a \"b\"\\\n")];
    assert_eq!(value(&samples, "thaw_start_failures_total", &labels), 1.0);
    let bucket = |phase, le| {
        value(
            &samples,
            "thaw_start_phase_seconds_bucket",
            &[("phase", phase), ("le", le)],
        )
    };
    assert_eq!(
        (bucket("restore", "0.05"), bucket("restore", "0.1")),
        (0.0, 3.0)
    );
    assert_eq!(
        (bucket("create", "60"), bucket("create", "+Inf")),
        (0.0, 3.0)
    );
    let sum = value(
        &samples,
        "thaw_start_phase_seconds_sum",
        &[("phase", "restore")],
    );
    assert!((sum - 0.18).abs() < 1e-9);
    assert_eq!(
        value(&samples, "thaw_templates", &[("state", "verified")]),
        0.0
    );
    assert_eq!(
        value(&samples, "thaw_sandboxes", &[("state", "running")]),
        0.0
    );
    assert_eq!(
        value(&samples, "thaw_memory_bytes", &[("item", "page_tables")]),
        0.0
    );
}

#[test]
fn test_the_check_itself_is_strict() {
    let head = "# HELP a_total x\n# TYPE a_total counter\n";
    for bad in [
        "a_total 1".to_owned(),
        "a_total 1\n".to_owned(),
        format!("{head}b_total 1\n"),
        format!("{head}a_total -1\n"),
        format!("{head}a_total  1\n"),
        format!("{head}a_total{{x=\"1}} 1\n"),
        format!("{head}a_total{{x=\"\\t\"}} 1\n"),
        format!("{head}a_total 1\na_total 2\n"),
        format!("{head}{head}a_total 1\n"),
        format!("{head}a_total one\n"),
        "# HELP h x\n# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_sum 1\nh_count 2\n".to_owned(),
    ] {
        assert!(parse(&bad).is_err(), "{bad}");
    }
    assert!(parse(&format!("{head}a_total{{x=\"\\\\\"}} 1\n")).is_ok());
}
