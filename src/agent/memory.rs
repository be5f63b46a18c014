//! The memory that the agent takes at most.

use super::network_threads;
use crate::{
    config::{self, Config},
    select::SchedulerConfig,
};
use std::{fs, path::Path};

/// What a model takes while it is loaded, in times of its `tokenizer.json`: 15 to 24 with four vocabularies of 128,000 to
/// 262,000 tokens. Half of it is free again afterwards.
const TIMES_TOKENIZER: u64 = 24;

/// What fastokens keeps of words on each thread that tokenizes, in bytes: tables of at most 64 MiB for short words, 32 MiB and
/// their places for longer ones, and 4 MiB.
const WORDS_BYTES: u64 = 108 << 20;

/// Of so many models a thread keeps words; of the others it begins anew.
const MODELS_OF_WORDS: usize = 4;

/// What the large parts of the agent hold at their bounds, in bytes, by the key that sets the bound or by what it is.
#[must_use]
pub fn memory_bounds(config: &Config) -> Vec<(&'static str, u64)> {
    let of_all_pools = |bytes: usize| (bytes as u64).saturating_mul(config.pools.len() as u64);
    let of_prompts = |pool: &config::Pool| pool.cache_bytes.saturating_mul(1 + pool.revisions.len()) as u64;
    let models = || config.pools.iter().flat_map(models_of);
    let models_of_words = models().count().min(MODELS_OF_WORDS) as u64;
    let threads = (network_threads() + config.prompt.threads) as u64;
    vec![
        ("index.max_bytes of each pool", of_all_pools(config.index_max_bytes)),
        ("record.max_bytes", config.record.max_bytes as u64),
        ("spop.max_bytes_in_flight", config.spop.max_bytes_in_flight as u64),
        (
            "prompt.cache_bytes of each model",
            config.pools.iter().map(of_prompts).fold(0, u64::saturating_add),
        ),
        ("models", models().map(model_bytes).fold(0, u64::saturating_add)),
        ("words that threads know", threads * models_of_words * WORDS_BYTES),
        ("bookings and histories", of_all_pools(SchedulerConfig::default().max_bytes())),
    ]
}

/// The directories of a pool's models; each revision has one of its own in memory.
fn models_of(pool: &config::Pool) -> impl Iterator<Item = &Path> {
    let of_revisions = pool.revisions.iter().map(|revision| revision.model_dir.as_deref());
    of_revisions.chain([pool.model_dir.as_deref()]).flatten()
}

/// 0 for a model that is not there: `check` says so elsewhere.
fn model_bytes(dir: &Path) -> u64 {
    fs::metadata(dir.join("tokenizer.json")).map_or(0, |file| file.len().saturating_mul(TIMES_TOKENIZER))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Overrides;

    #[test]
    fn each_model_counts_and_what_threads_know_of_it() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join("tokenizer.json"), "x".repeat(1000)).expect("a file");
        let of = |pools: &[&str]| {
            let pools: String = pools.iter().map(|pool| format!("[[pool]]\n{pool}\n")).collect();
            let pools = format!("haproxy.socket = \"/run/haproxy.sock\"\n{pools}");
            let text = pools.replace("DIR", &dir.path().display().to_string());
            let config = Config::parse(&text, Path::new("/kvspoa.toml"), &Overrides::default())
                .expect("a configuration");
            let threads = (network_threads() + config.prompt.threads) as u64;
            let bounds = memory_bounds(&config);
            let bytes = |name: &str| bounds.iter().find(|(known, _)| *known == name).expect("a part").1;
            (bytes("models"), bytes("words that threads know") / threads / WORDS_BYTES)
        };
        let one = "backend = \"a\"\nmodel_dir = \"DIR\"";
        let two = "backend = \"b\"\nmodel_dir = \"DIR\"";
        let gone = "backend = \"c\"\nmodel_dir = \"/nowhere\"";
        assert_eq!(of(&["backend = \"a\""]), (0, 0));
        assert_eq!(of(&[one]), (1000 * TIMES_TOKENIZER, 1));
        assert_eq!(of(&[one, two, gone]), (2 * 1000 * TIMES_TOKENIZER, 3));
    }
}
