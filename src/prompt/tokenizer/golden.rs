//! Real vocabularies: the ids that Python's `tokenizers` makes of difficult texts (`scripts/token-goldens`), against
//! those of both libraries here, and of the cache.
//!
//! The vocabularies are not part of the repository: `scripts/fetch-tokenizers` fetches them.

use super::*;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// FNV-1a, 64 bits, over the ids as little-endian numbers.
fn digest(ids: &[TokenId]) -> String {
    let bytes = ids.iter().flat_map(|id| id.0.to_le_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

fn vocabulary(name: &str) -> Option<Vec<u8>> {
    let cache = || {
        let own = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
        Some(std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(own)?.join("kvspoa/tokenizers"))
    };
    let dir = std::env::var_os("KVSPOA_TOKENIZERS").map(PathBuf::from).or_else(cache)?;
    std::fs::read(dir.join(name).join("tokenizer.json")).ok()
}

/// Compares all ways of tokenizing with Python's, if the vocabulary is there.
fn compare(name: &str) {
    let texts: Vec<String> =
        serde_json::from_str(include_str!("../../../tests/fixtures/tokens/corpus.json")).expect("a fixture");
    let digests: BTreeMap<String, Vec<String>> =
        serde_json::from_str(include_str!("../../../tests/fixtures/tokens/digests.json")).expect("a fixture");
    let digests = &digests[name];
    assert_eq!(texts.len(), digests.len());
    let Some(json) = vocabulary(name) else {
        println!("skipped: `scripts/fetch-tokenizers {name}` fetches the vocabulary");
        return;
    };
    let reference = HuggingFace::from_json(&json).expect("the reference");
    let cached = Tokenizer::load(&json, 64 << 20).expect("a tokenizer");
    assert!(format!("{:?}", cached.backend).starts_with("Fast"), "the fast library is not used");
    assert!(cached.cached.is_some(), "the cache is not used");
    let mut wrong = Vec::new();
    for (at, (text, of_python)) in texts.iter().zip(digests).enumerate() {
        let of = |library: &dyn Tokenize| {
            let mut ids = Vec::new();
            library.encode(text, &mut ids).map(|()| ids)
        };
        let all = [
            ("tokenizers", of(&reference)),
            ("fastokens", of(&*cached.backend)),
            ("the cache while empty", cached.encode(text, false)),
            ("the cache", cached.encode(text, false)),
        ];
        for (way, ids) in all {
            if ids.as_deref().map(digest).as_ref() != Ok(of_python) {
                wrong.push(format!("text {at}, {way}"));
            }
        }
    }
    assert!(wrong.is_empty(), "unlike Python:\n{}", wrong.join("\n"));
    let stats = cached.cache_stats().expect("a cache");
    assert!(stats.hits > texts.len() as u64 / 2, "{stats:?}");
}

macro_rules! vocabularies {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            compare(stringify!($name));
        })*
    };
}

vocabularies! { qwen3 llama3_1 deepseek_v3 gemma3 mistral_nemo gptoss }
