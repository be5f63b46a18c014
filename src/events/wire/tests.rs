use super::*;
use crate::events::{KvEvent, Stored};
use crate::hash::MediaItem;
use crate::units::{BlockHash, TokenId};
use serde_json::{Value, json};

fn key() -> HashKey {
    HashKey::from_seed(7)
}

fn payload(events: &Value) -> Vec<u8> {
    rmp_serde::to_vec(&json!([12.5, events, 3])).expect("encodes")
}

fn decode(events: &Value) -> Batch {
    let mut batch = Batch::new();
    batch.decode(&payload(events), &key(), &mut Groups::default()).expect("a batch");
    batch
}

fn tokens(from: u32, count: u32) -> Vec<u32> {
    (from..from + count).collect()
}

fn block(tokens: &[u32]) -> BlockHash {
    let tokens: Vec<TokenId> = tokens.iter().copied().map(TokenId).collect();
    key().block(&tokens)
}

/// A plain store of two blocks of four tokens, as a map.
fn stored() -> Value {
    json!({"type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": null, "token_ids": tokens(0, 8),
           "block_size": 4, "lora_id": null, "medium": "GPU", "lora_name": null})
}

fn with(mut event: Value, changes: &Value) -> Value {
    let fields = event.as_object_mut().expect("a map");
    for (name, value) in changes.as_object().expect("a map") {
        fields.insert(name.clone(), value.clone());
    }
    event
}

fn only_stored(batch: &Batch) -> Stored<'_> {
    let events: Vec<KvEvent<'_>> = batch.events().collect();
    match events[..] {
        [KvEvent::Stored(stored)] => stored,
        _ => panic!("expected one store: {events:?}"),
    }
}

#[test]
fn a_map_and_an_array_say_the_same() {
    let map = decode(&json!([stored(), {"type": "BlockRemoved", "block_hashes": [11], "medium": "CPU"},
                             {"type": "AllBlocksCleared"}]));
    let array = decode(&json!([
        ["BlockStored", [11, 12], null, tokens(0, 8), 4, null, "GPU", null],
        ["BlockRemoved", [11], "CPU"],
        ["AllBlocksCleared"]
    ]));
    let events: Vec<KvEvent<'_>> = map.events().collect();
    assert_eq!(events, array.events().collect::<Vec<_>>());
    assert_eq!(
        events,
        [
            KvEvent::Stored(Stored {
                tier: Tier::Gpu,
                parent: None,
                root: key().plain_root(),
                engine_hashes: &[EngineHash(11), EngineHash(12)],
                block_hashes: &[block(&[0, 1, 2, 3]), block(&[4, 5, 6, 7])],
            }),
            KvEvent::Removed { tier: Tier::Cpu, engine_hashes: &[EngineHash(11)] },
            KvEvent::Cleared,
        ]
    );
    assert_eq!((map.timestamp_seconds(), map.rank(), map.block_tokens()), (12.5, Some(3), Some(4)));
    assert!(map.has_cleared());
}

#[test]
fn a_batch_may_end_before_the_rank_or_go_on_after_it() {
    let mut batch = Batch::new();
    let mut decode = |value: Value| {
        let bytes = rmp_serde::to_vec(&value).expect("encodes");
        batch.decode(&bytes, &key(), &mut Groups::default()).map(|()| (batch.rank(), batch.events().len()))
    };
    assert_eq!(decode(json!([1.0, [stored()]])), Ok((None, 1)));
    assert_eq!(decode(json!([1, [stored()], null])), Ok((None, 1)));
    assert_eq!(decode(json!([1.0, [], 5, {"later": "field"}, 6])), Ok((Some(5), 0)));
    assert_eq!(decode(json!([1.0])), Err(BatchError::NotABatch));
    assert_eq!(decode(json!({"ts": 1.0})), Err(BatchError::NotABatch));
    assert_eq!(decode(json!([1.0, "events"])), Err(BatchError::NotABatch));
}

#[test]
fn fields_may_come_in_any_order_be_absent_or_be_unknown() {
    let batch =
        decode(&json!([{"block_size": 4, "token_ids": tokens(0, 8), "new_in_1_0": [{"a": [1, 2]}, null],
                                "block_hashes": [11, 12], "type": "BlockStored"}]));
    let plain = decode(&json!([stored()]));
    assert_eq!(only_stored(&batch), only_stored(&plain));
    let long = decode(&json!([["BlockStored", [11, 12], null, tokens(0, 8), 4, null, null, null, null, 0,
                               "full_attention", null, "LOCAL", {"x": 1}]]));
    assert_eq!(only_stored(&long), only_stored(&plain));
}

#[test]
fn a_bad_event_costs_that_event_and_never_the_batch() {
    let batch = decode(&json!([
        with(stored(), &json!({"token_ids": "text"})),
        with(stored(), &json!({"token_ids": [-1, 2, 3, 4, 5, 6, 7, 8]})),
        with(stored(), &json!({"token_ids": tokens(0, 7)})),
        with(stored(), &json!({"block_size": 0})),
        with(stored(), &json!({"extra_keys": [null]})),
        with(stored(), &json!({"parent_block_hash": 12})),
        {"type": "BlockCompressed", "block_hashes": [1]},
        {"block_hashes": [1]},
        with(stored(), &json!({"block_hashes": []})),
        with(stored(), &json!({"medium": "TAPE"})),
        {"type": "BlockRemoved", "block_hashes": [1], "medium": 7},
        [], 17, null, "AllBlocksCleared",
        stored()
    ]));
    only_stored(&batch);
    let skipped = |reason| batch.skipped(reason);
    assert_eq!(skipped(SkipReason::Malformed), 8);
    assert_eq!(skipped(SkipReason::LengthMismatch), 3);
    assert_eq!(skipped(SkipReason::OwnParent), 1);
    assert_eq!(skipped(SkipReason::UnknownEvent), 1);
    assert_eq!(skipped(SkipReason::Empty), 1);
    assert_eq!(skipped(SkipReason::UnknownMedium), 1);
    assert!(batch.lost_blocks());
}

#[test]
fn what_is_not_for_us_loses_no_blocks() {
    let batch = decode(&json!([{"type": "New"}, with(stored(), &json!({"medium": "TAPE"})),
                               with(stored(), &json!({"kv_cache_spec_kind": "mamba", "group_idx": 1}))]));
    assert_eq!(batch.events().len(), 0);
    assert!(!batch.lost_blocks());
}

#[test]
fn media_of_all_engines_have_a_tier() {
    let tier = |medium: Value| {
        let batch = decode(&json!([with(stored(), &json!({"medium": medium}))]));
        only_stored(&batch).tier
    };
    for name in [json!(null), json!(""), json!("GPU"), json!("gpu"), json!("DEVICE")] {
        assert_eq!(tier(name), Tier::Gpu);
    }
    for name in ["CPU", "CPU_PINNED", "CPU_TIER1", "cpu"] {
        assert_eq!(tier(json!(name)), Tier::Cpu);
    }
    for name in ["CPU_TIER2", "DISK", "STORAGE", "FS", "OBJ", "EXTERNAL"] {
        assert_eq!(tier(json!(name)), Tier::Disk);
    }
}

#[test]
fn a_remote_block_is_outside_of_the_replica() {
    let batch = decode(&json!([with(stored(), &json!({"medium": "CPU", "locality": "REMOTE"}))]));
    assert_eq!(only_stored(&batch).tier, Tier::Disk);
    let batch = decode(&json!([with(stored(), &json!({"medium": "CPU", "locality": "LOCAL"}))]));
    assert_eq!(only_stored(&batch).tier, Tier::Cpu);
}

#[test]
fn the_lora_name_and_the_salt_belong_to_the_root() {
    let keys = |lora: Value, extra: Value| with(stored(), &json!({"lora_name": lora, "extra_keys": extra}));
    let plain_blocks = [block(&[0, 1, 2, 3]), block(&[4, 5, 6, 7])];
    for (event, lora, salt) in [
        (keys(json!(null), json!([null, null])), None, None),
        (keys(json!("a"), json!([["a"], ["a"]])), Some("a"), None),
        (keys(json!(null), json!([["s"], null])), None, Some("s")),
        (keys(json!("a"), json!([["a", "s"], ["a"]])), Some("a"), Some("s")),
        (keys(json!("a"), json!([["a", "a"], ["a"]])), Some("a"), Some("a")),
        (with(stored(), &json!({"cache_salt": "s"})), None, Some("s")),
        (
            json!(["BlockStored", [11, 12], null, tokens(0, 8), 4, null, "GPU", {"cache_salt": "s", "x": 1}]),
            None,
            Some("s"),
        ),
    ] {
        let batch = decode(&json!([event]));
        let stored = only_stored(&batch);
        assert_eq!(stored.root, key().root(lora, salt), "{event}");
        assert_eq!(stored.block_hashes, plain_blocks, "{event}");
    }
}

#[test]
fn media_items_belong_to_their_blocks_and_the_salt_is_found_behind_them() {
    let batch = decode(&json!([with(
        stored(),
        &json!({"lora_name": "a", "extra_keys": [["a", ["image", 3], "s"], ["a", ["image", -1]]]})
    )]));
    let stored = only_stored(&batch);
    assert_eq!(stored.root, key().root(Some("a"), Some("s")));
    let media = [MediaItem { identifier: "image".to_owned(), first_token: 3, tokens: 4 }];
    let prompt: Vec<TokenId> = (0..8).map(TokenId).collect();
    let root = stored.root;
    let chain = stored.block_hashes.iter().scan(root, |at, block| {
        *at = key().chain(*at, *block);
        Some(*at)
    });
    assert_eq!(chain.collect::<Vec<_>>(), key().sequence_with_media(root, &prompt, &media, 4));
}

#[test]
fn extra_keys_of_a_kind_that_is_not_known_belong_to_their_blocks_too() {
    let blocks = |extra: Value| {
        let batch = decode(&json!([with(stored(), &json!({"extra_keys": [extra, null]}))]));
        only_stored(&batch).block_hashes.to_vec()
    };
    let plain = [block(&[0, 1, 2, 3]), block(&[4, 5, 6, 7])];
    let odd = [
        json!([["a"]]),
        json!([["a", 1, 2]]),
        json!([[1, "a"]]),
        json!([["a", 1.5]]),
        json!([7]),
        json!([["a", 1]]),
    ];
    let hashed: Vec<_> = odd.into_iter().map(blocks).collect();
    for (at, one) in hashed.iter().enumerate() {
        assert_eq!(one[1], plain[1]);
        assert!(one[0] != plain[0] && hashed[..at].iter().all(|other| one[0] != other[0]), "{at}");
    }
}

#[test]
fn a_string_beyond_the_first_block_of_a_chain_is_no_salt() {
    let batch =
        decode(&json!([with(stored(), &json!({"parent_block_hash": 5, "extra_keys": [["x"], null]}))]));
    let stored = only_stored(&batch);
    assert_eq!(stored.root, key().plain_root());
    assert_ne!(stored.block_hashes[0], block(&[0, 1, 2, 3]));
    assert_eq!(stored.block_hashes[1], block(&[4, 5, 6, 7]));
}

#[test]
fn a_cpu_store_without_tokens_names_its_blocks_only() {
    let batch = decode(&json!([{"type": "BlockStored", "block_hashes": [9], "parent_block_hash": null,
        "token_ids": [], "block_size": 0, "lora_id": null, "medium": "CPU", "lora_name": null, "group_idx": 0}]));
    let stored = only_stored(&batch);
    assert_eq!((stored.tier, stored.engine_hashes), (Tier::Cpu, &[EngineHash(9)][..]));
    assert_eq!(stored.block_hashes, []);
    assert_eq!(batch.block_tokens(), None);
}

#[test]
fn the_chunk_divides_every_cpu_store() {
    let cpu = |hashes: &[u64]| json!({"type": "BlockStored", "block_hashes": hashes, "medium": "CPU", "token_ids": [], "block_size": 0});
    assert_eq!(decode(&json!([cpu(&[1, 2, 3, 4]), cpu(&[5, 6])])).cpu_chunk_blocks(), Some(2));
    assert_eq!(decode(&json!([cpu(&[1, 2, 3, 4]), cpu(&[5, 6, 7])])).cpu_chunk_blocks(), Some(1));
    assert_eq!(decode(&json!([stored()])).cpu_chunk_blocks(), None);
}

#[test]
fn only_whole_prefix_groups_of_a_hybrid_model_count_also_for_removals() {
    let mut groups = Groups::default();
    let mut batch = Batch::new();
    let window = with(stored(), &json!({"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}));
    let full = with(stored(), &json!({"group_idx": 1, "kv_cache_spec_kind": "full_attention"}));
    batch.decode(&payload(&json!([window, full])), &key(), &mut groups).expect("a batch");
    only_stored(&batch);
    assert_eq!(batch.skipped(SkipReason::WindowGroup), 1);
    assert!(batch.has_window_groups());
    let removed = |group: u32| json!({"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": group});
    batch.decode(&payload(&json!([removed(0), removed(1)])), &key(), &mut groups).expect("a batch");
    assert_eq!(batch.events().len(), 1);
    assert_eq!(batch.skipped(SkipReason::WindowGroup), 1);
    assert!(batch.has_window_groups(), "the stream is remembered");
}

#[test]
fn a_payload_cut_anywhere_is_an_error_and_keeps_the_events_before() {
    let whole = payload(&json!([stored(), with(stored(), &json!({"extra_keys": [["s"], null]}))]));
    let mut batch = Batch::new();
    let mut most = 0;
    for length in 0..whole.len() {
        let cut = &whole[..length];
        assert_eq!(batch.decode(cut, &key(), &mut Groups::default()), Err(BatchError::Truncated), "{length}");
        most = most.max(batch.events().len());
    }
    assert_eq!(most, 2);
}

#[test]
fn decoding_again_allocates_nothing() {
    let bytes = payload(&json!([stored(), stored(), stored()]));
    let mut batch = Batch::new();
    batch.decode(&bytes, &key(), &mut Groups::default()).expect("a batch");
    let places = |batch: &Batch| {
        (
            batch.entries.as_ptr(),
            batch.engine_hashes.as_ptr(),
            batch.block_hashes.as_ptr(),
            batch.tokens.as_ptr(),
        )
    };
    let before = places(&batch);
    batch.decode(&bytes, &key(), &mut Groups::default()).expect("a batch");
    assert_eq!(places(&batch), before);
}
