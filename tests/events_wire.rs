//! The decoder of KV events, on frames recorded from vLLM and against a slow decoder that is built on rmp-serde.

mod events_support;

use events_support::{Event, Oracle, Value, json_events, names, owned, records};
use kvspoa::events::{Batch, Groups, SkipReason};
use kvspoa::hash::HashKey;
use kvspoa::units::{EngineHash, TokenId};
use proptest::prelude::*;

fn key() -> HashKey {
    HashKey::from_seed(1)
}

/// Everything that the live messages of a recording say.
fn live_events(name: &str) -> Vec<Event> {
    let (mut batch, mut groups, mut events) = (Batch::new(), Groups::default(), Vec::new());
    for record in records(name).iter().filter(|record| !record.replayed) {
        batch.decode(record.message().1, &key(), &mut groups).expect("decodes");
        events.extend(owned(&batch));
    }
    events
}

#[test]
fn every_recorded_batch_says_the_same_as_the_slow_decoder() {
    for name in names() {
        let (mut batch, mut groups, mut oracle) = (Batch::new(), Groups::default(), Oracle::default());
        for record in records(&name).iter().filter(|record| !record.is_end()) {
            let (seq, payload) = record.message();
            batch.decode(payload, &key(), &mut groups).expect("decodes");
            assert_eq!(owned(&batch), oracle.events(payload, &key()), "{name} {seq}");
            for reason in [SkipReason::Malformed, SkipReason::UnknownEvent, SkipReason::UnknownMedium] {
                assert_eq!(batch.skipped(reason), 0, "{name} {seq} {reason:?}");
            }
            assert!(!batch.lost_blocks(), "{name} {seq}");
            assert!(batch.timestamp_seconds() > 1.7e9, "{name} {seq}");
            let rank = if name == "managers-dp-rank-3" { 3 } else { 0 };
            assert_eq!(batch.rank(), Some(rank), "{name} {seq}");
        }
    }
}

#[test]
fn every_recorded_batch_holds_the_events_of_the_record_beside_it() {
    let hash = |value: &serde_json::Value| match (value.as_u64(), value.as_str()) {
        (Some(hash), _) => EngineHash(hash),
        (None, Some(hex)) => EngineHash(u64::from_str_radix(&hex[hex.len() - 16..], 16).expect("hex")),
        _ => panic!("no hash: {value}"),
    };
    for name in names() {
        let hybrid = name.contains("hybrid");
        let mut decoded = live_events(&name).into_iter();
        let mut compared = 0;
        for event in json_events(&name) {
            let windowed = hybrid && {
                // In tiny-gemma3 the window is group 0, in the other recording group 1.
                let window_group = if name.starts_with("gemma3") { 0 } else { 1 };
                event["group_idx"].as_u64() == Some(window_group)
            };
            if windowed {
                continue;
            }
            compared += 1;
            let hashes: Vec<EngineHash> =
                event["block_hashes"].as_array().into_iter().flatten().map(hash).collect();
            match (event["type"].as_str().expect("a type"), decoded.next().expect("an event")) {
                ("BlockStored", Event::Stored { parent, engine_hashes, block_hashes, .. }) => {
                    assert_eq!(engine_hashes, hashes, "{name}");
                    let expected = Some(&event["parent_block_hash"]).filter(|p| !p.is_null()).map(hash);
                    assert_eq!(parent, expected, "{name}");
                    let tokens: Vec<TokenId> = event["token_ids"]
                        .as_array()
                        .expect("tokens")
                        .iter()
                        .map(|token| TokenId(token.as_u64().expect("a token") as u32))
                        .collect();
                    let block_tokens = event["block_size"].as_u64().expect("a size").max(1) as usize;
                    assert_eq!(block_hashes.len(), tokens.len() / block_tokens, "{name}");
                    // An image is named with its place in the block.
                    let keys = event["extra_keys"].as_array().into_iter().flatten();
                    let pictured =
                        keys.filter_map(|of_block| of_block.as_array()).flatten().any(|k| k.is_array());
                    if !pictured {
                        let hashed: Vec<_> =
                            tokens.chunks(block_tokens).map(|block| key().block(block)).collect();
                        assert_eq!(block_hashes, hashed, "{name}");
                    }
                }
                ("BlockRemoved", Event::Removed { engine_hashes, .. }) => {
                    assert_eq!(engine_hashes, hashes, "{name}")
                }
                ("AllBlocksCleared", Event::Cleared) => {}
                (kind, other) => panic!("{name}: {kind} became {other:?}"),
            }
        }
        assert_eq!(decoded.next(), None, "{name}");
        assert!(compared > 0, "{name}");
    }
}

#[test]
fn older_encodings_say_the_same_as_far_as_their_fields_go() {
    let now = live_events("managers-bs16-int");
    for version in ["0.9.2", "0.10.2", "0.14.0", "0.18.0", "0.23.0", "0.24.0", "0.26.0"] {
        let then = live_events(&format!("legacy-{version}"));
        assert_eq!(then.len(), now.len(), "{version}");
        let has_extra_keys = !matches!(version, "0.9.2" | "0.10.2" | "0.14.0");
        let mut differ = 0;
        for (then, now) in then.iter().zip(&now) {
            if then == now {
                continue;
            }
            differ += 1;
            // Without extra keys, salts and pictures are unknown; without a LoRA name (before 0.14), adapters too.
            match (then, now) {
                (
                    Event::Stored { tier: t1, parent: p1, engine_hashes: e1, .. },
                    Event::Stored { tier: t2, parent: p2, engine_hashes: e2, .. },
                ) => assert_eq!((t1, p1, e1), (t2, p2, e2), "{version}"),
                other => panic!("{version}: {other:?}"),
            }
        }
        let expected = match version {
            "0.9.2" | "0.10.2" => 4, // salt, LoRA, LoRA with salt, picture
            "0.14.0" => 3,           // the same without LoRA alone
            _ => 0,
        };
        assert_eq!(differ, expected, "{version}");
        assert_eq!(has_extra_keys, differ == 0, "{version}");
    }
}

#[test]
fn the_hybrid_recordings_count_their_full_attention_group_alone() {
    for name in ["gemma3-hybrid", "managers-hybrid"] {
        let (mut batch, mut groups) = (Batch::new(), Groups::default());
        let (mut kept, mut windowed) = (0, 0);
        for record in records(name).iter().filter(|record| !record.replayed) {
            batch.decode(record.message().1, &key(), &mut groups).expect("decodes");
            kept += batch.events().len();
            windowed += batch.skipped(SkipReason::WindowGroup);
        }
        assert!(batch.has_window_groups(), "{name}");
        let expected =
            if name == "gemma3-hybrid" { (35 + 54 + 1, 28 + 7 + 24) } else { (24 + 39 + 1, 24 + 39) };
        assert_eq!((kept, windowed), expected, "{name}");
    }
}

#[test]
fn the_offload_recordings_name_their_chunk() {
    let mut batch = Batch::new();
    for name in ["qwen3-bs32-offload", "qwen3-offload-placeholder"] {
        let mut chunks = Vec::new();
        let mut groups = Groups::default();
        for record in records(name).iter().filter(|record| !record.replayed) {
            batch.decode(record.message().1, &key(), &mut groups).expect("decodes");
            chunks.extend(batch.cpu_chunk_blocks());
        }
        assert!(!chunks.is_empty() && chunks.iter().all(|chunk| *chunk == 1), "{name}: {chunks:?}");
    }
}

/// A value that is no event, or a broken field.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Nil),
        any::<bool>().prop_map(Value::Bool),
        any::<u64>().prop_map(Value::Uint),
        (i64::MIN..0).prop_map(Value::Int),
        any::<f64>().prop_map(Value::Float),
        "[a-z]{0,40}".prop_map(Value::Text),
        proptest::collection::vec(any::<u8>(), 0..40).prop_map(Value::Bytes),
    ];
    leaf.prop_recursive(3, 24, 6, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::List),
            proptest::collection::vec((inner.clone(), inner), 0..4).prop_map(Value::Map),
        ]
    })
}

fn text(value: &str) -> Value {
    Value::Text(value.to_owned())
}

fn hash_value(bytes: bool) -> impl Strategy<Value = Value> {
    any::<u64>().prop_map(move |hash| {
        if bytes {
            let mut long = [9u8; 32];
            long[24..].copy_from_slice(&hash.to_be_bytes());
            Value::Bytes(long.to_vec())
        } else {
            Value::Uint(hash)
        }
    })
}

/// The fields of a well-formed store by name, in the order of the arrays.
fn store_fields() -> impl Strategy<Value = Vec<(&'static str, Value)>> {
    (1usize..6, 1usize..20, any::<bool>()).prop_flat_map(|(blocks, block_tokens, bytes)| {
        let salt_and_lora = (proptest::option::of("[a-c]{1,3}"), proptest::option::of("[a-c]{1,3}"));
        let picture = proptest::option::of((0..blocks, -40i64..40));
        (
            proptest::collection::vec(hash_value(bytes), blocks),
            proptest::option::of(hash_value(bytes)),
            proptest::collection::vec(0u32..200_000, blocks * block_tokens),
            salt_and_lora,
            picture,
            prop_oneof![Just(Value::Nil), Just(text("GPU")), Just(text("CPU")), Just(text("STORAGE"))],
            (0u64..3, prop_oneof![Just("full_attention"), Just("mla_attention"), Just("sliding_window")]),
        )
            .prop_map(
                move |(hashes, parent, tokens, (salt, lora), picture, medium, (group, kind))| {
                    let extra_keys = (0..blocks).map(|at| {
                        let mut keys = Vec::new();
                        keys.extend(lora.as_deref().map(text));
                        if let Some((_, offset)) = picture.filter(|(block, _)| *block == at) {
                            let offset =
                                if offset < 0 { Value::Int(offset) } else { Value::Uint(offset as u64) };
                            keys.push(Value::List(vec![text("picture"), offset]));
                        }
                        if at == 0 && parent.is_none() {
                            keys.extend(salt.as_deref().map(text));
                        }
                        if keys.is_empty() { Value::Nil } else { Value::List(keys) }
                    });
                    vec![
                        ("block_hashes", Value::List(hashes)),
                        ("parent_block_hash", parent.clone().unwrap_or(Value::Nil)),
                        (
                            "token_ids",
                            Value::List(tokens.iter().map(|t| Value::Uint(u64::from(*t))).collect()),
                        ),
                        ("block_size", Value::Uint(block_tokens as u64)),
                        ("lora_id", Value::Nil),
                        ("medium", medium),
                        ("lora_name", lora.as_deref().map_or(Value::Nil, text)),
                        ("extra_keys", Value::List(extra_keys.collect())),
                        ("group_idx", Value::Uint(group)),
                        ("kv_cache_spec_kind", text(kind)),
                    ]
                },
            )
    })
}

/// A well-formed event: as an array, or as a map in any order with unknown fields in between.
fn event() -> impl Strategy<Value = Value> {
    let removed =
        (proptest::collection::vec(hash_value(false), 0..4), 0u64..3).prop_map(|(hashes, group)| {
            (
                "BlockRemoved",
                vec![
                    ("block_hashes", Value::List(hashes)),
                    ("medium", text("GPU")),
                    ("group_idx", Value::Uint(group)),
                ],
            )
        });
    let fields = prop_oneof![
        4 => store_fields().prop_map(|fields| ("BlockStored", fields)),
        3 => removed,
        1 => Just(("AllBlocksCleared", Vec::new())),
    ];
    let array = fields.clone().prop_map(|(tag, fields)| {
        Value::List(std::iter::once(text(tag)).chain(fields.into_iter().map(|(_, value)| value)).collect())
    });
    let map = (fields, any_value()).prop_flat_map(|((tag, fields), unknown)| {
        let mut pairs: Vec<(Value, Value)> = fields.into_iter().map(|(n, v)| (text(n), v)).collect();
        pairs.push((text("type"), text(tag)));
        pairs.push((text("a_field_of_the_future"), unknown));
        Just(pairs).prop_shuffle().prop_map(Value::Map)
    });
    prop_oneof![array, map]
}

fn batch_of(events: Vec<Value>) -> Vec<u8> {
    let mut bytes = Vec::new();
    Value::List(vec![Value::Float(1.5), Value::List(events), Value::Uint(0)]).encode(&mut bytes);
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn well_formed_events_say_the_same_as_to_the_slow_decoder(events in proptest::collection::vec(event(), 0..8)) {
        let payload = batch_of(events);
        let mut batch = Batch::new();
        batch.decode(&payload, &key(), &mut Groups::default()).expect("decodes");
        prop_assert_eq!(owned(&batch), Oracle::default().events(&payload, &key()));
        prop_assert!(!batch.lost_blocks());
    }

    #[test]
    fn events_beside_a_broken_one_are_not_affected(
        events in proptest::collection::vec(event(), 1..5), broken in any_value(), at in any::<prop::sample::Index>()
    ) {
        let mut batch = Batch::new();
        batch.decode(&batch_of(events.clone()), &key(), &mut Groups::default()).expect("decodes");
        let alone = owned(&batch);
        let mut mixed = events;
        mixed.insert(at.index(mixed.len() + 1), broken);
        batch.decode(&batch_of(mixed), &key(), &mut Groups::default()).expect("decodes");
        prop_assert_eq!(owned(&batch), alone);
    }

    #[test]
    fn no_bytes_make_the_decoder_fail_otherwise_than_by_an_error(
        events in proptest::collection::vec(event(), 0..4),
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6)
    ) {
        let mut payload = batch_of(events);
        for (at, byte) in flips {
            let at = at.index(payload.len());
            payload[at] = byte;
        }
        let mut batch = Batch::new();
        let _ = batch.decode(&payload, &key(), &mut Groups::default());
        prop_assert!(batch.events().len() <= payload.len());
    }
}
