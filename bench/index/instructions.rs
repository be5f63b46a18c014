//! What `scripts/instructions` counts: each function of `counted` runs once under callgrind, which counts the
//! instructions within it. Prints over how many units of work each count is to be spread.

use kvspoa::events::{Batch, Groups, KvEvent};
use kvspoa::hash::HashKey;
use kvspoa::index::{Index, IndexConfig, Overlaps};
use kvspoa::units::{EngineHash, RankId, SequenceHash, Tier, TokenId};
use kvspoa::wire::{self, Payload};
use kvspoa::workload::{BLOCK_TOKENS, Shape, Workload, long_prompts, short_prompts};

const RANKS: u16 = 8;

/// A workload that callgrind runs in a second: what a block costs hardly depends on how many there are.
const SHAPE: Shape = Shape { ranks: RANKS, conversations: 100, documents: 4, bulk: false };

mod counted {
    use super::*;
    use std::hint::black_box;

    // Each says its name, so that no two are the same code and become one function.

    #[inline(never)]
    pub(super) fn hash(key: &HashKey, prompts: &[Vec<TokenId>]) {
        let mut hashes = Vec::new();
        for prompt in prompts {
            hashes.clear();
            key.sequence_into(key.plain_root(), black_box(prompt), BLOCK_TOKENS as u32, &mut hashes);
            black_box(&hashes);
        }
    }

    #[inline(never)]
    pub(super) fn find_512(index: &Index, queries: &[Vec<SequenceHash>]) {
        black_box("find_512");
        find(index, queries);
    }

    #[inline(never)]
    pub(super) fn find_8192(index: &Index, queries: &[Vec<SequenceHash>]) {
        black_box("find_8192");
        find(index, queries);
    }

    #[inline(always)]
    fn find(index: &Index, queries: &[Vec<SequenceHash>]) {
        let mut overlaps = Overlaps::default();
        for query in queries {
            index.find(black_box(query), &mut overlaps);
            black_box(&overlaps);
        }
    }

    #[inline(never)]
    pub(super) fn apply_decoded(index: &mut Index, workload: &Workload) {
        black_box("apply_decoded");
        workload.events().for_each(|(rank, event)| _ = index.apply(rank, black_box(&event)));
    }

    #[inline(never)]
    pub(super) fn apply_bulk(index: &mut Index, workload: &Workload) {
        black_box("apply_bulk");
        workload.events().for_each(|(rank, event)| _ = index.apply(rank, black_box(&event)));
    }

    #[inline(never)]
    pub(super) fn remove(index: &mut Index, names: &[Vec<EngineHash>]) {
        for (names, rank) in names.iter().zip(0..) {
            // As an engine evicts: the last blocks of chains first.
            for name in names.iter().rev() {
                let event = KvEvent::Removed { tier: Tier::Gpu, engine_hashes: std::slice::from_ref(name) };
                index.apply(RankId(rank), black_box(&event));
            }
        }
    }

    #[inline(never)]
    pub(super) fn wire(key: &HashKey, payloads: &[Payload]) {
        let (mut batch, mut groups) = (Batch::new(), Groups::default());
        for payload in payloads {
            batch.decode(black_box(&payload.bytes), key, &mut groups).expect("well-formed");
            black_box(&batch);
        }
    }
}

fn main() {
    let key = HashKey::from_seed(1);
    let block_hash = |tokens: &[TokenId]| key.block(tokens);
    let workload = Workload::new(&key, &block_hash, SHAPE);
    let bulk = Workload::new(&key, &block_hash, SHAPE.in_bulk());
    let (short, long) = (short_prompts(&SHAPE, 100), long_prompts(&SHAPE, 20));
    let hashed = |prompts: &[Vec<TokenId>]| -> Vec<Vec<SequenceHash>> {
        prompts.iter().map(|prompt| key.sequence(key.plain_root(), prompt, BLOCK_TOKENS as u32)).collect()
    };
    let (short_hashes, long_hashes) = (hashed(&short), hashed(&long));
    let payloads = wire::payloads(&workload);
    let mut names = vec![Vec::new(); usize::from(RANKS)];
    workload.stores().for_each(|(rank, stored)| names[rank.index()].extend(stored.engine_hashes));

    counted::hash(&key, &short);
    println!("hash {} block", short_hashes.iter().map(Vec::len).sum::<usize>());
    let mut index = empty(&key);
    counted::apply_bulk(&mut index, &bulk);
    println!("apply_bulk {} block", bulk.entries());
    let mut index = empty(&key);
    counted::apply_decoded(&mut index, &workload);
    println!("apply_decoded {} block", workload.entries());
    counted::find_512(&index, &short_hashes);
    println!("find_512 {} find", short.len());
    counted::find_8192(&index, &long_hashes);
    println!("find_8192 {} find", long.len());
    counted::remove(&mut index, &names);
    println!("remove {} block", workload.entries());
    counted::wire(&key, &payloads);
    println!("wire {} block", workload.entries());
    assert_eq!(index.stats().runs, 0, "all blocks were removed");
}

fn empty(key: &HashKey) -> Index {
    let mut index = Index::new(key.clone(), IndexConfig::default());
    assert!((0..RANKS).all(|rank| index.add_rank(RankId(rank))));
    index
}
