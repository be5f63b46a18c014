//! The index against the engine's own word: recordings of vLLM whose answers say how many tokens were cached.

mod events_support;

use events_support::{Event, Record, json, names, owned, records};
use kvspoa::events::{Batch, Groups};
use kvspoa::hash::{HashKey, MediaItem};
use kvspoa::index::{Index, IndexConfig, Overlap, Overlaps};
use kvspoa::units::{BlockHash, EngineHash, RankId, SequenceHash, Tier, TokenId};
use serde_json::Value;
use std::collections::HashMap;

const RANK: RankId = RankId(0);

/// The prompt of a request that had one prompt and one answer.
fn prompt(step: &Value) -> Option<Vec<TokenId>> {
    let ids = step.get("prompt_token_ids")?.as_array()?;
    let ids = match ids.first()? {
        Value::Array(first) if ids.len() == 1 => first,
        Value::Array(_) => return None,
        _ => ids,
    };
    ids.iter().map(|id| Some(TokenId(u32::try_from(id.as_u64()?).ok()?))).collect()
}

/// What the engine said that it had cached of a request's prompt.
fn cached_tokens(step: &Value) -> Option<u64> {
    step.pointer("/usage/prompt_tokens_details/cached_tokens").or_else(|| step.get("cached_tokens"))?.as_u64()
}

/// Where the chain of the request starts.
fn root(step: &Value, key: &HashKey) -> SequenceHash {
    let salt = ["/body/cache_salt", "/options/cache_salt"].iter().find_map(|at| step.pointer(at)?.as_str());
    let lora = step.pointer("/options/lora_request").and_then(Value::as_str);
    key.root(lora.and_then(|lora| lora.split('\'').nth(1)), salt)
}

/// The media in the request's prompt, as the driver of vLLM's managers wrote them down.
fn media(step: &Value) -> Vec<MediaItem> {
    let Some(text) = step.pointer("/options/mm_features").and_then(Value::as_str) else { return Vec::new() };
    let item = |text: &str| {
        let number = |name: &str| {
            let after = text.split_once(name).expect("there").1;
            after.chars().take_while(char::is_ascii_digit).collect::<String>().parse().expect("a number")
        };
        let identifier = text.split('\'').next().expect("quoted").to_owned();
        MediaItem { identifier, first_token: number("offset="), tokens: number("length=") }
    };
    text.split("identifier='").skip(1).map(item).collect()
}

/// One recording followed by an index and by plain sets.
struct Follower {
    key: HashKey,
    index: Index,
    batch: Batch,
    groups: Groups,
    sets: Sets,
}

/// What the GPU holds by the rules alone: copies of each block, and what it stands behind.
#[derive(Default)]
struct Sets {
    copies: HashMap<EngineHash, u32>,
    links: HashMap<EngineHash, (Option<EngineHash>, SequenceHash, BlockHash)>,
}

impl Sets {
    fn apply(&mut self, event: &Event) {
        match event {
            Event::Stored { tier: Tier::Gpu, parent, root, engine_hashes, block_hashes } => {
                // A cached prefix that is named again from the start is no second copy.
                let announced =
                    parent.is_none() && engine_hashes.iter().all(|hash| self.copies.contains_key(hash));
                let mut before = *parent;
                for (hash, block) in engine_hashes.iter().zip(block_hashes) {
                    if !announced {
                        *self.copies.entry(*hash).or_default() += 1;
                    }
                    self.links.insert(*hash, (before, *root, *block));
                    before = Some(*hash);
                }
            }
            Event::Removed { tier: Tier::Gpu, engine_hashes } => {
                for hash in engine_hashes {
                    if let Some(copies) = self.copies.get_mut(hash) {
                        *copies -= 1;
                        if *copies == 0 {
                            self.copies.remove(hash);
                        }
                    }
                }
            }
            Event::Cleared => self.copies.clear(),
            Event::Stored { .. } | Event::Removed { .. } => {}
        }
    }

    /// Every prompt ever stored, up to each of its blocks: its sequence hashes, and how many of them are held.
    fn prompts(&self, key: &HashKey) -> Vec<(Vec<SequenceHash>, u32)> {
        self.links.keys().filter_map(|last| self.prompt(key, *last)).collect()
    }

    fn prompt(&self, key: &HashKey, last: EngineHash) -> Option<(Vec<SequenceHash>, u32)> {
        let mut chain = vec![last];
        let mut at;
        loop {
            at = self.links.get(chain.last()?)?;
            match at.0 {
                Some(parent) => chain.push(parent),
                None => break,
            }
        }
        chain.reverse();
        let mut before = at.1;
        let mut sequence = Vec::new();
        for hash in &chain {
            before = key.chain(before, self.links.get(hash)?.2);
            sequence.push(before);
        }
        let held = chain.iter().take_while(|hash| self.copies.contains_key(hash)).count();
        Some((sequence, held as u32))
    }
}

impl Follower {
    fn new() -> Self {
        let key = HashKey::from_seed(1);
        let mut index = Index::new(key.clone(), IndexConfig::default());
        assert!(index.add_rank(RANK));
        Self { key, index, batch: Batch::new(), groups: Groups::default(), sets: Sets::default() }
    }

    fn apply(&mut self, record: &Record) {
        self.batch.decode(record.message().1, &self.key, &mut self.groups).expect("decodes");
        for event in self.batch.events() {
            self.index.apply(RANK, &event);
        }
        self.index.end_batch(RANK);
        owned(&self.batch).iter().for_each(|event| self.sets.apply(event));
    }

    fn overlap(&self, sequence: &[SequenceHash]) -> Overlap {
        let mut overlaps = Overlaps::default();
        self.index.find(sequence, &mut overlaps);
        overlaps.get(RANK)
    }
}

/// Follows a recording, and compares the overlap before each request with what the engine reports after it.
/// Returns how many requests were compared, how many found anything, and how many found blocks in the CPU tier.
fn compare(name: &str, block_tokens: u32) -> [u32; 3] {
    let mut follower = Follower::new();
    let (records, json) = (records(name), json(name));
    let mut seen = [0; 3];
    for step in json["steps"].as_array().expect("steps") {
        if let (Some(cached), Some(tokens)) = (cached_tokens(step), prompt(step)) {
            let root = root(step, &follower.key);
            let sequence = follower.key.sequence_with_media(root, &tokens, &media(step), block_tokens);
            let overlap = follower.overlap(&sequence);
            // The engine always computes the last token.
            let most = (tokens.len() as u32 - 1) / block_tokens;
            let expected = u64::from(overlap.blocks().min(most) * block_tokens);
            if follower.groups.has_window_groups() {
                assert!(expected >= cached, "{name}: {} ({overlap:?})", step["step"]);
            } else {
                assert_eq!(expected, cached, "{name}: {} ({overlap:?})", step["step"]);
            }
            seen[0] += 1;
            seen[1] += u32::from(cached > 0);
            seen[2] += u32::from(overlap.cpu_blocks > 0);
        }
        let range = |at| step["records"][at].as_u64().expect("a range") as usize;
        for record in records[range(0)..range(1)].iter().filter(|record| !record.replayed) {
            follower.apply(record);
        }
    }
    seen
}

#[test]
fn the_overlap_is_what_vllm_found_with_a_cpu_tier_that_names_blocks_only() {
    let [compared, _, with_cpu] = compare("qwen3-offload-placeholder", 32);
    assert!(compared >= 23 && with_cpu >= 2, "{compared} {with_cpu}");
}

#[test]
fn the_overlap_is_what_vllm_found_with_a_cpu_tier_that_evicts() {
    let [compared, ..] = compare("qwen3-offload-evict", 32);
    assert!(compared >= 23, "{compared}");
}

#[test]
fn the_overlap_is_what_vllms_own_managers_found_with_salts_adapters_and_evictions() {
    for name in ["managers-bs16-int", "managers-bs16-bytes"] {
        let [compared, found, _] = compare(name, 16);
        assert!(compared >= 20 && found >= 4, "{name}: {compared} {found}");
    }
    assert!(compare("managers-dp-rank-3", 16)[0] >= 1);
}

#[test]
fn the_overlap_is_what_vllms_own_managers_found_of_whole_blocks_and_images() {
    // Of a prompt that is a whole number of blocks, the last one is computed again, into a second copy.
    let [compared, found, _] = compare("managers-whole", 16);
    assert!(compared >= 18 && found >= 9, "{compared} {found}");
}

#[test]
fn a_prompt_with_an_image_matches_by_the_images_hash_and_without_it_only_what_stands_before() {
    for name in ["managers-bs16-int", "managers-bs16-bytes"] {
        let json = json(name);
        let steps = json["steps"].as_array().expect("steps");
        let step = steps.iter().find(|step| !media(step).is_empty()).expect("one with an image");
        let (tokens, items) = (prompt(step).expect("a prompt"), media(step));
        let mut follower = Follower::new();
        let end = step["records"][1].as_u64().expect("a range") as usize;
        records(name)[..end].iter().filter(|record| !record.replayed).for_each(|r| follower.apply(r));
        let matched = |items: &[MediaItem]| {
            let key = &follower.key;
            let sequence = key.sequence_with_media(key.plain_root(), &tokens, items, 16);
            follower.overlap(&sequence).gpu_blocks as usize
        };
        let before = items[0].first_token / 16;
        assert!(before > 0 && before < tokens.len() / 16);
        assert_eq!(matched(&items), tokens.len() / 16);
        assert_eq!(matched(&[]), before, "text of the same ids");
        let other = MediaItem { identifier: "another".to_owned(), ..items[0].clone() };
        let moved = MediaItem { first_token: items[0].first_token + 1, ..items[0].clone() };
        assert_eq!([matched(&[other]), matched(&[moved])], [before; 2]);
    }
}

#[test]
fn the_overlap_of_a_hybrid_model_is_an_upper_bound() {
    assert!(compare("managers-hybrid", 16)[0] >= 5);
}

#[test]
fn after_every_recorded_batch_the_index_holds_what_plain_sets_hold() {
    // Encodings without extra keys give blocks of another salt or adapter the same identity; see below for those.
    let ambiguous = ["legacy-0.9.2", "legacy-0.10.2", "legacy-0.14.0"];
    for name in names().into_iter().filter(|name| !ambiguous.contains(&name.as_str())) {
        let mut follower = Follower::new();
        let (mut compared, mut last_seq) = (0, None);
        for record in records(&name).iter().filter(|record| !record.replayed) {
            let seq = record.message().0;
            if last_seq.is_some_and(|last| seq <= last) {
                follower = Follower::new();
            }
            last_seq = Some(seq);
            follower.apply(record);
            for (sequence, held) in follower.sets.prompts(&follower.key) {
                assert_eq!(follower.overlap(&sequence).gpu_blocks, held, "{name}: batch {seq}");
                compared += 1;
            }
        }
        assert!(compared > 0, "{name}");
    }
}

#[test]
fn every_older_encoding_of_a_stream_gives_the_same_index() {
    let now = "managers-bs16-int";
    let json = json(now);
    let steps = json["steps"].as_array().expect("steps");
    let is_plain = |step: &&Value| {
        ["cache_salt", "lora_request", "mm_features"].iter().all(|name| step["options"].get(*name).is_none())
    };
    // What older encodings can't tell apart from these is left out.
    let special: Vec<TokenId> = steps
        .iter()
        .filter(|step| !is_plain(step))
        .filter_map(|step| prompt(step)?.first().copied())
        .collect();
    for version in ["0.9.2", "0.10.2", "0.14.0", "0.18.0", "0.23.0", "0.24.0", "0.26.0"] {
        let has_extra_keys = !matches!(version, "0.9.2" | "0.10.2" | "0.14.0");
        let prompts: Vec<&Value> = steps.iter().filter(|step| prompt(step).is_some()).collect();
        let (mut then, mut today) = (Follower::new(), Follower::new());
        let old: Vec<Record> =
            records(&format!("legacy-{version}")).into_iter().filter(|r| !r.replayed).collect();
        let new: Vec<Record> = records(now).into_iter().filter(|r| !r.replayed).collect();
        assert_eq!(old.len(), new.len());
        let mut matched = 0;
        for (old, new) in old.iter().zip(&new) {
            then.apply(old);
            today.apply(new);
            for step in &prompts {
                let tokens = prompt(step).expect("has one");
                if !has_extra_keys && special.contains(&tokens[0]) {
                    continue;
                }
                let sequence = then.key.sequence(root(step, &then.key), &tokens, 16);
                let overlap = then.overlap(&sequence);
                assert_eq!(overlap, today.overlap(&sequence), "{version}: {}", step["step"]);
                matched += overlap.gpu_blocks;
            }
        }
        assert!(matched > 0, "{version}");
    }
}
