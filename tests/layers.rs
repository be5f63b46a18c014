//! What the sources and the documents say of each other: modules import only downwards, in the order that
//! ARCHITECTURE.md explains, the README names every metric, and the dashboard and the alerts name none that is not there.

use std::{collections::HashMap, fs, path::Path};

/// From the bottom up; what stands in one row may not import each other.
const LAYERS: &[&[&str]] = &[
    &["units"],
    &["hash", "machine", "metrics", "pulse", "recent"],
    &["spop"],
    &["events", "lifecycle", "request", "haproxy_config"],
    &["config"],
    &["prompt", "index", "replica"],
    &["select"],
    &["peers"],
    &["pool", "record"],
    &["route"],
    &["admin", "client", "sim"],
    &["hub"],
    &["agent"],
    &["demo", "doctor", "replay"],
    &["cli"],
];

#[test]
fn a_module_imports_only_from_lower_layers() {
    let rank: HashMap<&str, usize> = LAYERS
        .iter()
        .enumerate()
        .flat_map(|(rank, modules)| modules.iter().map(move |module| (*module, rank)))
        .collect();
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    let mut checked = 0;
    for path in rust_files(&src) {
        let relative = path.strip_prefix(&src).expect("below src");
        let first = relative.iter().next().expect("a name").to_string_lossy();
        let module = first.trim_end_matches(".rs");
        if matches!(module, "lib" | "main") {
            continue;
        }
        let own =
            *rank.get(module).unwrap_or_else(|| panic!("{module} has no layer: add it to tests/layers.rs"));
        let text = fs::read_to_string(&path).expect("readable source");
        for imported in imports(&text) {
            let Some(theirs) = rank.get(imported.as_str()) else { continue };
            checked += 1;
            if imported != module && *theirs >= own {
                wrong.push(format!("{} imports {imported}", relative.display()));
            }
        }
    }
    assert!(checked > 20, "only {checked} imports were seen: the reader of `use` lines is broken");
    assert!(wrong.is_empty(), "upward imports:\n{}", wrong.join("\n"));
}

/// Every metric that the code registers.
fn metrics(root: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for path in rust_files(&root.join("src/metrics")).into_iter().chain([root.join("src/metrics.rs")]) {
        let text = fs::read_to_string(&path).expect("readable source");
        names.extend(text.split("\"kvspoa_").skip(1).map(word));
    }
    assert!(names.len() > 30, "only {} metrics were seen", names.len());
    names
}

#[test]
fn the_readme_names_every_metric() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = fs::read_to_string(root.join("README.md")).expect("the README");
    let mut names = metrics(root);
    names
        .retain(|name| ![format!("`{name}`"), format!("`{name}{{")].iter().any(|form| readme.contains(form)));
    assert!(names.is_empty(), "the README lacks {names:?}");
}

#[test]
fn the_dashboard_and_the_alerts_name_no_metric_that_is_not_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let known = metrics(root);
    for (file, least) in [("docs/grafana.json", 25), ("docs/alerts.yml", 12)] {
        let text = fs::read_to_string(root.join(file)).expect("readable");
        let named: Vec<String> = text.split("kvspoa_").skip(1).map(word).collect();
        assert!(named.len() >= least, "{file} names only {} metrics", named.len());
        let is_known = |name: &String| {
            let name =
                ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            known.iter().any(|known| known == name)
        };
        let unknown: Vec<&String> = named.iter().filter(|name| !is_known(name)).collect();
        assert!(unknown.is_empty(), "{file}: {unknown:?}");
    }
    let dashboard = fs::read_to_string(root.join("docs/grafana.json")).expect("readable");
    serde_json::from_str::<serde_json::Value>(&dashboard).expect("the dashboard is JSON");
}

/// The crate's modules that `text` names, by `crate::module` or in a `use crate::{module::…, module::…}` list.
fn imports(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("crate::") {
        let rest = &text[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            None => found.push(word(rest)),
            Some(list) => {
                let (mut depth, mut expect) = (0, true);
                for (at, c) in list.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => expect = true,
                        c if expect && !c.is_whitespace() => {
                            found.push(word(&list[at..]));
                            expect = false;
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    found
}

fn word(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

fn rust_files(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    found
}
