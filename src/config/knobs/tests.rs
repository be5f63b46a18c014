use super::*;
use crate::{
    config::{Loaded, Origin, Overrides, parse_replica_file},
    haproxy_config::{Form as Part, HaproxyConfigArgs},
};
use clap::{Args, FromArgMatches};
use std::{collections::BTreeSet, ffi::OsString, path::Path};

/// What the environment must look like for these.
type Variables<'a> = &'a [(&'a str, &'a str)];

fn load(file: &str, flags: &[&str], variables: Variables<'_>) -> Result<Loaded, String> {
    let command = Overrides::augment_args(clap::Command::new("kvspoa"));
    let line = ["kvspoa"].iter().chain(flags);
    let matches = command.try_get_matches_from(line).map_err(|error| error.to_string())?;
    let overrides = Overrides::from_arg_matches(&matches).map_err(|error| error.to_string())?;
    let variables = variables.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
    let overrides = overrides.with_environment(variables).map_err(|error| error.to_string())?;
    Loaded::parse(file, Path::new("/etc/kvspoa.toml"), &overrides).map_err(|error| error.to_string())
}

const FILE: &str = "haproxy.socket = \"/h\"\npeers.secret_file = \"/s\"\n[[pool]]\nbackend = \"b\"\n";

fn setting(loaded: &Loaded, key: &str) -> (String, Origin) {
    let key = key.replace("pool.", "pool[b].");
    let setting = loaded.settings.iter().find(|setting| setting.key == key);
    let setting = setting.unwrap_or_else(|| panic!("no {key}"));
    (setting.text(), setting.origin.clone())
}

/// A value that is no default, as a flag or variable has it and as it is shown.
fn sample(knob: &Knob) -> (&'static str, &'static str) {
    match knob.form {
        Form::Text("ADDR") => ("127.0.0.1:7", "127.0.0.1:7"),
        Form::Text("FILE") => ("/f", "/f"),
        Form::Text("HEADER") => ("x-other", "x-other"),
        Form::Text("POLICY") => ("dynamo", "dynamo"),
        Form::Count(_) => ("7", "7"),
        Form::Bytes => ("1MiB", "1MiB"),
        Form::Time => ("3s", "3s"),
        Form::Weight(_) => ("0.5", "0.5"),
        Form::Switch => ("1", "true"),
        form => panic!("{}: no sample of {form:?}", knob.key),
    }
}

#[test]
fn every_key_of_the_file_has_a_row_and_every_row_a_key() {
    let of_file: BTreeSet<String> =
        page::defaults().into_keys().map(|key| key.replace("pool.override.", "pool.replica.")).collect();
    let of_table: BTreeSet<String> = keys().map(|knob| knob.key.to_owned()).collect();
    assert_eq!(of_file, of_table, "src/config/raw.rs (left) and src/config/knobs (right)");
    assert_eq!(keys().count(), of_table.len(), "a key has two rows");
}

#[test]
fn every_quantity_has_bounds() {
    let bounds = page::bounds();
    let counts = |form| matches!(form, Form::Count(_) | Form::Bytes | Form::Time | Form::Weight(_));
    let unbounded: Vec<&str> = keys()
        .filter(|knob| counts(knob.form) != bounds.contains_key(knob.key))
        .map(|knob| knob.key)
        .collect();
    assert_eq!(unbounded, ["select.seed"]);
}

#[test]
fn a_file_of_replicas_has_the_same_keys() {
    for knob in keys() {
        if let Some(key) = knob.key.strip_prefix("pool.replica.").filter(|key| *key != "server") {
            let file = format!(r#"{{"replicas": [{{"server": "s", "{key}": null}}]}}"#);
            assert_eq!(parse_replica_file(&file).map(|replicas| replicas.len()), Ok(1), "{key}");
        }
    }
}

/// `UPDATE=1` writes it.
#[test]
fn the_page_of_the_configuration_is_that_of_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md");
    let page = page::page();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &page).expect("written");
    }
    let stands = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(stands == page, "docs/configuration.md is out of date: UPDATE=1 cargo test --lib config::knobs");
}

#[test]
fn every_row_says_what_it_is_and_what_breaks() {
    for knob in keys().chain(process()).chain(of_haproxy()) {
        let texts = match knob.breaks {
            Breaks::Sides(low, high) => [low, high],
            Breaks::Wrong(why) => [why, why],
        };
        assert!(!knob.what.is_empty() && texts.iter().all(|text| !text.is_empty()), "{}", knob.key);
        let cells = [knob.what, knob.unset, texts[0], texts[1]];
        assert!(cells.iter().all(|text| !text.contains(['|', '\n'])), "{} would break the table", knob.key);
    }
}

#[test]
fn every_flag_and_variable_sets_its_key_and_is_named_as_the_origin() {
    for knob in keys() {
        let (given, shown) = match (knob.flag, knob.variable()) {
            (None, None) => continue,
            _ => sample(knob),
        };
        let (default, origin) = setting(&load(FILE, &[], &[]).expect("valid"), knob.key);
        assert!(default != shown && origin != Origin::Flag(String::new()), "{}: no other value", knob.key);
        if let Some(flag) = knob.flag {
            let flag = format!("--{flag}");
            let loaded = load(FILE, &[&flag, given], &[]).expect(&flag);
            assert_eq!(setting(&loaded, knob.key), (shown.to_owned(), Origin::Flag(flag)));
        }
        if let Some(name) = knob.variable() {
            let loaded = load(FILE, &[], &[(&name, given)]).expect(&name);
            assert_eq!(setting(&loaded, knob.key), (shown.to_owned(), Origin::Variable(name)));
        }
    }
}

#[test]
fn every_name_of_others_that_sets_a_key_does() {
    let mut set = 0;
    for Foreign { name, effect, .. } in FOREIGN {
        let Some(knob) = effect.key().and_then(find) else { continue };
        let (given, shown) = match *name {
            "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_TIMEOUT_S" => ("2.5", "2s"),
            "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS" => ("300", "5m"),
            _ => sample(knob),
        };
        let loaded = load(FILE, &[], &[(name, given)]).expect(name);
        let origin = Origin::Variable((*name).to_owned());
        assert_eq!(setting(&loaded, knob.key), (shown.to_owned(), origin), "{name}");
        set += 1;
    }
    assert_eq!(set, 13);
}

#[test]
fn of_names_that_set_nothing_the_values_are_read_all_the_same() {
    for Foreign { name, default, effect, .. } in FOREIGN {
        if effect.key().and_then(find).is_none() && *default != "none" {
            let loaded = load(FILE, &[], &[(name, default)]).expect(name);
            assert!(loaded.settings.iter().all(|s| s.origin != Origin::Variable((*name).to_owned())));
        }
    }
    for (name, value) in [
        ("KV_INDEXER_THREADS", "0"),
        ("RAY_SERVE_INGRESS_ROUTER_REPLICAS_PER_NODE", "two"),
        ("RAY_SERVE_LLM_KV_TOKEN_STAGING_TTL_S", "-1"),
        ("RAY_SERVE_LLM_KV_TOKEN_STAGING_MAX_ENTRIES", "1.5"),
        ("RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE", "8MiB"),
        ("RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_TIMEOUT_S", "NaN"),
        ("RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY", "true"),
        ("RAY_SERVE_LLM_ENABLE_DECODE_BLOCK_PROGRESS", "true"),
        ("RAY_SERVE_SESSION_ID_HEADER_KEY", "a b"),
        ("KV_EVENTS_PORT_BASE", "65536"),
        ("KV_EVENTS_PORT_BASE", "auto"),
        ("DYN_ROUTER_HOST_CACHE_HIT_WEIGHT", "1.5"),
        ("DYN_ROUTER_TEMPERATURE", "inf"),
        ("DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS", "0"),
    ] {
        let error = load(FILE, &[], &[(name, value)]).expect_err(name);
        assert!(error.starts_with(&format!("{name}: ")) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn a_flag_wins_over_our_variable_over_a_name_of_others_over_the_file() {
    let file = format!("haproxy.session_header = \"x-file\"\n{FILE}");
    let (ours, rays) = ("KVSPOA_HAPROXY_SESSION_HEADER", "RAY_SERVE_SESSION_ID_HEADER_KEY");
    let header = |flags: &[&str], variables: Variables<'_>| {
        setting(&load(&file, flags, variables).expect("valid"), "haproxy.session_header").0
    };
    assert_eq!(header(&[], &[]), "x-file");
    assert_eq!(header(&[], &[(rays, "x-ray")]), "x-ray");
    assert_eq!(header(&[], &[(ours, "x-ours"), (rays, "x-ray")]), "x-ours");
    assert_eq!(header(&["--session-header", "x-flag"], &[(ours, "x-ours"), (rays, "x-ray")]), "x-flag");
    assert_eq!(header(&[], &[(rays, "")]), "", "Ray's way to have none");
}

#[test]
fn a_value_in_the_file_is_told_with_its_line_and_a_pools_with_its_pool() {
    let file = "[spop]\ndeadline = \"300ms\"\n[[pool]]\nbackend = \"be.1\"\nevents.port_base = 6000\n\
                [[pool.replica]]\nserver = \"s1\"\nevents = [\"tcp://a:1\", \"tcp://b:1\"]\n";
    let loaded = load(file, &[], &[]).expect("valid");
    let told = |key: &str| {
        let setting = loaded.settings.iter().find(|setting| setting.key == key).expect(key);
        (setting.text(), setting.origin.to_string())
    };
    let of = |text: &str, origin: &str| (text.to_owned(), origin.to_owned());
    assert_eq!(told("spop.deadline"), of("300ms", "/etc/kvspoa.toml:2"));
    assert_eq!(told("spop.listen"), of("127.0.0.1:9101", "default"));
    assert_eq!(told("pool[be.1].events.port_base"), of("6000", "/etc/kvspoa.toml:5"));
    assert_eq!(
        told("pool[be.1].replica[s1].events"),
        of("[\"tcp://a:1\",\"tcp://b:1\"]", "/etc/kvspoa.toml:8")
    );
    assert_eq!(told("pool[be.1].model_dir"), of("a tiny model, for trials", "default"));
    let with_port = load(file, &[], &[("KV_EVENTS_PORT_BASE", "7000")]).expect("valid");
    assert_eq!(with_port.config.pools[0].event_ports.base, 7000);
}

#[test]
fn a_wrong_flag_is_named_in_one_line() {
    for (flags, what) in [
        (["--deadline", "5"], "--deadline: `5` is not a time"),
        (["--policy", "best"], "--policy: unknown variant `best`"),
        (["--decode-progress", "yes"], "--decode-progress: `yes` is neither 1 nor 0"),
        (["--kv-events-port-base", "0"], "--kv-events-port-base: 0 must be from 1 to 65535"),
    ] {
        let error = load(FILE, &flags, &[]).expect_err(what);
        assert!(error.starts_with(what) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn a_name_of_ours_that_does_not_exist_is_an_error_and_others_are_warned_of() {
    let error = load(FILE, &[], &[(SLIP, "300ms")]).expect_err("a slip");
    assert!(error.starts_with(&format!("{SLIP}: no such variable")), "{error}");
    let warnings = |name: &str, value: &str| load(FILE, &[], &[(name, value)]).expect(name).warnings;
    for name in ["RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZ", "DYN_ROUTER_TEMPERTURE", "KV_EVENTS_PORT"]
    {
        assert!(warnings(name, "1").concat().contains(name));
    }
    for (name, value) in [
        ("RAY_SERVE_HAPROXY_MAXCONN", "4096"),
        ("DYN_ROUTER_MODE", "kv"),
        ("KV_REST_API_URL", "https://example.org"),
        ("KVSPOA_HAPROXY", "/usr/sbin/haproxy"),
        ("KVSPOA_LOG", "warn"),
        // Of Kubernetes, for Services named `kvspoa` and `kvspoa-admin`.
        ("KVSPOA_SERVICE_HOST", "10.0.0.1"),
        ("KVSPOA_SERVICE_PORT", "9101"),
        ("KVSPOA_SERVICE_PORT_SPOP", "9101"),
        ("KVSPOA_PORT", "tcp://10.0.0.1:9101"),
        ("KVSPOA_PORT_9101_TCP", "tcp://10.0.0.1:9101"),
        ("KVSPOA_PORT_9101_TCP_ADDR", "10.0.0.1"),
        ("KVSPOA_ADMIN_PORT_9102_TCP_PROTO", "tcp"),
    ] {
        assert_eq!(warnings(name, value), Vec::<String>::new(), "{name}");
    }
}

/// What our own scripts, tests and documents call a variable must not stop the agent.
#[test]
fn every_variable_that_the_repository_names_is_known() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders: Vec<_> = ["src", "tests", "scripts", "bench", "docs"].map(|name| root.join(name)).into();
    let mut known = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder of the repository") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                if !path.ends_with("fixtures") && !path.ends_with("target") {
                    folders.push(path);
                }
                continue;
            }
            let Ok(text) = std::fs::read_to_string(&path) else { continue };
            for rest in text.split("KVSPOA_").skip(1) {
                let end = rest.find(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_');
                let name = format!("KVSPOA_{}", &rest[..end.unwrap_or(rest.len())]);
                let is_example = name == "KVSPOA_" || name == SLIP;
                assert!(is_example || !is_unknown_of_ours(&name), "{name} in {}", path.display());
                known += 1;
            }
        }
    }
    assert!(known > 30, "{known}");
}

/// A name that is none of ours.
const SLIP: &str = "KVSPOA_SPOP_DEADLIN";

#[test]
fn what_is_set_in_vain_is_said() {
    let warnings = |policy: &str, variables: Variables<'_>| {
        load(FILE, &["--policy", policy], variables).expect("valid").warnings
    };
    let scale = [("DYN_ROUTER_PREFILL_LOAD_SCALE", "2")];
    assert_eq!(warnings("dynamo", &scale), Vec::<String>::new());
    assert!(warnings("cost", &scale).concat().contains("DYN_ROUTER_PREFILL_LOAD_SCALE"));
    let off = [("RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY", "0")];
    assert!(warnings("cost", &off).concat().contains("FORWARD_BODY"));
}

#[test]
fn the_defaults_of_the_printed_forms_are_those_of_the_table() {
    let command = HaproxyConfigArgs::augment_args(clap::Command::new("haproxy-config"));
    for knob in of_haproxy() {
        let Some(flag) = knob.flag else { continue };
        let arg = command.get_arguments().find(|arg| arg.get_long() == Some(flag)).expect(flag);
        assert_eq!(arg.get_default_values(), [knob.unset], "{flag}");
    }
    assert!(Part::Agent.source().contains("check inter 500ms fastinter 100ms downinter 200ms"));
    assert!(Part::Backend.source().contains("var(proc.kv_fails) -m int ge 5"));
}

#[test]
fn the_keys_of_the_readme_exist() {
    let readme = include_str!("../../../README.md");
    let section = readme.split("## Configuration").nth(1).and_then(|rest| rest.split("\n## ").next());
    let cells = section.expect("a section").lines().filter_map(|line| line.strip_prefix("| `"));
    let named = cells.flat_map(|line| line.split(" |").next().expect("a cell").split(", "));
    let named: Vec<&str> = named.map(|key| key.trim_matches('`')).collect();
    assert!(named.len() > 10, "{named:?}");
    for key in named {
        let is_list = find(&format!("{key}.server")).is_some();
        assert!(is_list || find(key).is_some(), "{key}");
    }
}
