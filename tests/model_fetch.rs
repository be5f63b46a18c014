//! `kvspoa model fetch` against a hub of the test's own, which speaks the paths of Hugging Face's.

mod support;

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use support::origin::{Origin, response};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const TOKENIZER: &str = include_str!("../src/prompt/tiny/tokenizer.json");
const TOKENIZER_CONFIG: &str = include_str!("../src/prompt/tiny/tokenizer_config.json");

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn git_blob(text: &str) -> String {
    let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    context.update(format!("blob {}\0{text}", text.len()).as_bytes());
    hex(context.finish().as_ref())
}

/// A hub whose large files lie elsewhere, and that elsewhere, where `tokenizer` is what it has under that name.
fn hub(tokenizer: &'static str) -> (Origin, Origin) {
    let store = Origin::start(Arc::new(move |connection, _| connection.send(&response(tokenizer))));
    let elsewhere = format!("http://{}/large?signature=secret", store.address);
    let hub = Origin::start(Arc::new(move |connection, request| {
        let target = request.start.split(' ').nth(1).unwrap_or_default();
        let answer = match target {
            "/api/models/owner/tiny/revision/main?blobs=true" => response(
                &json!({ "sha": COMMIT, "siblings": [
                    { "rfilename": "README.md", "blobId": git_blob("") },
                    { "rfilename": "model.safetensors", "blobId": git_blob(""), "lfs": { "sha256": "0" } },
                    { "rfilename": "tokenizer.json", "blobId": git_blob("a pointer"),
                      "lfs": { "sha256": hex(digest(&SHA256, TOKENIZER.as_bytes()).as_ref()) } },
                    { "rfilename": "tokenizer_config.json", "blobId": git_blob(TOKENIZER_CONFIG) },
                ] })
                .to_string(),
            ),
            _ if target == format!("/owner/tiny/resolve/{COMMIT}/tokenizer_config.json") => {
                response(TOKENIZER_CONFIG)
            }
            _ if target == format!("/owner/tiny/resolve/{COMMIT}/tokenizer.json") => {
                format!("HTTP/1.1 302 Found\r\nlocation: {elsewhere}\r\ncontent-length: 0\r\n\r\n")
                    .into_bytes()
            }
            _ => b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_vec(),
        };
        connection.send(&answer);
    }));
    (hub, store)
}

fn fetch(hub: &str, cache: &Path, more: &[&str]) -> Output {
    let cache = cache.to_str().expect("UTF-8");
    Command::new(env!("CARGO_BIN_EXE_kvspoa"))
        .args(["model", "fetch", "owner/tiny", "--hub", hub, "--cache", cache])
        .args(more)
        .env("HF_TOKEN", "hf_secret")
        .output()
        .expect("it runs")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The folder that it printed.
fn folder(output: &Output) -> PathBuf {
    assert!(output.status.success(), "{}", said(output));
    PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
}

#[test]
fn a_model_is_fetched_once_at_its_commit_and_checked_offline() {
    let (hub, store) = hub(TOKENIZER);
    let address = format!("http://{}", hub.address);
    let dir = tempfile::tempdir().expect("a directory");
    let cache = dir.path().join("models");
    let fetched = folder(&fetch(&address, &cache, &[]));
    assert_eq!(fetched, cache.join("owner--tiny").join(COMMIT));
    assert_eq!(std::fs::read_to_string(fetched.join("tokenizer.json")).expect("a file"), TOKENIZER);
    assert!(!fetched.join("README.md").exists());

    // The token went to the hub, and not to where it sent us.
    let authorization = |origin: &Origin| {
        let requests = origin.requests();
        requests.iter().map(|request| request.header("authorization").map(str::to_owned)).collect::<Vec<_>>()
    };
    assert_eq!(authorization(&hub), vec![Some("Bearer hf_secret".to_owned()); 3]);
    assert_eq!(authorization(&store), [None]);

    // It is what the agent needs.
    let config = dir.path().join("kvspoa.toml");
    let text = format!(
        "haproxy.socket = \"/h\"\n[[pool]]\nbackend = \"b\"\nmodel_dir = \"{}\"\n",
        fetched.display()
    );
    std::fs::write(&config, text).expect("written");
    let check = Command::new(env!("CARGO_BIN_EXE_kvspoa")).arg("check").arg("--config").arg(&config).output();
    assert!(check.expect("it runs").status.success());

    // A pinned commit that is there needs no hub, nor does --offline.
    let nobody = format!("http://{}", support::nobody());
    assert_eq!(folder(&fetch(&nobody, &cache, &["--revision", COMMIT])), fetched);
    assert_eq!(folder(&fetch(&nobody, &cache, &["--offline"])), fetched);
    assert!(said(&fetch(&nobody, &cache, &[])).contains("cannot connect"));
    std::fs::write(fetched.join("tokenizer.json"), "{}").expect("written");
    let changed = fetch(&nobody, &cache, &["--offline"]);
    assert!(
        !changed.status.success() && said(&changed).contains("not the file that was fetched"),
        "{}",
        said(&changed)
    );
}

#[test]
fn what_is_not_what_the_hub_lists_is_not_kept() {
    let (hub, _store) = hub("something else");
    let address = format!("http://{}", hub.address);
    let cache = tempfile::tempdir().expect("a directory");
    let output = fetch(&address, cache.path(), &[]);
    assert_eq!(output.status.code(), Some(70), "{}", said(&output));
    assert!(said(&output).contains("tokenizer.json: the checksum is not the hub's"), "{}", said(&output));
    let left = std::fs::read_dir(cache.path().join("owner--tiny")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "nothing that looks whole, and nothing that does not");
    let absent = fetch(&address, cache.path(), &["--revision", "none"]);
    assert!(said(&absent).contains("answers 404 (no such model or revision"), "{}", said(&absent));
    assert!(!said(&absent).contains("hf_secret"));
}
