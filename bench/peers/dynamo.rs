//! Dynamo's radix trees: the plain one, and the compressed one that its router uses with one writing thread.

use crate::measure::{Quantiles, Stopwatch};
use crate::subject::{Prompt, Subject};
use dynamo_kv_router::indexer::concurrent_radix_tree_compressed::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{KvIndexerInterface, RadixTree, ThreadPoolIndexer};
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent, WorkerWithDpRank,
    compute_block_hash_for_seq, compute_seq_hash_for_block,
};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};
use kvspoa::events::Stored;
use kvspoa::units::{BlockHash, RankId, TokenId};
use kvspoa::wire::Payload;
use kvspoa::workload::{BLOCK_TOKENS, Workload};
use std::hint::black_box;
use tokio::runtime::{Builder, Runtime};

/// Events made at a time, off the watch: the trees take them by value.
const CHUNK: usize = 16_384;

/// `ConcurrentRadixTreeCompressed` behind its thread pool of one, which is Dynamo's default.
pub struct Compressed {
    runtime: Runtime,
    indexer: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
}

/// `RadixTree`, called directly.
pub struct Radix(RadixTree);

fn hash_prompt(ids: &[u32]) -> Vec<LocalBlockHash> {
    let hashes = compute_block_hash_for_seq(ids, BLOCK_TOKENS as u32, BlockHashOptions::default());
    // Its router makes both for every request.
    black_box(compute_seq_hash_for_block(&hashes));
    hashes
}

fn block_hash(tokens: &[TokenId]) -> BlockHash {
    let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
    let hashes = compute_block_hash_for_seq(&ids, BLOCK_TOKENS as u32, BlockHashOptions::default());
    BlockHash(hashes[0].0)
}

fn event(event_id: u64, rank: RankId, stored: &Stored<'_>) -> RouterEvent {
    let pairs = stored.engine_hashes.iter().zip(stored.block_hashes);
    let blocks = pairs
        .map(|(name, block)| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(name.0),
            tokens_hash: LocalBlockHash(block.0),
            mm_extra_info: None,
        })
        .collect();
    let parent_hash = stored.parent.map(|parent| ExternalSequenceBlockHash(parent.0));
    let store = KvCacheStoreData { parent_hash, start_position: None, blocks };
    let event = KvCacheEvent { event_id, data: KvCacheEventData::Stored(store), dp_rank: 0 };
    RouterEvent::new(u64::from(rank.0), event)
}

/// All events in chunks, made off the watch.
fn in_chunks(workload: &Workload, mut take: impl FnMut(Vec<RouterEvent>)) {
    let mut events = workload.stores().zip(0..).map(|((rank, stored), id)| event(id, rank, &stored));
    loop {
        let chunk: Vec<RouterEvent> = events.by_ref().take(CHUNK).collect();
        if chunk.is_empty() {
            break;
        }
        take(chunk);
    }
}

fn sum(scores: &OverlapScores) -> u64 {
    scores.scores.values().map(|score| u64::from(*score)).sum()
}

/// Payloads → events with block hashes, as Dynamo's listener makes them.
fn decode(payloads: &[Payload], mut take: impl FnMut(RouterEvent)) {
    let mut normalizers: Vec<ZmqEventNormalizer> = Vec::new();
    let mut event_id = 0;
    for payload in payloads {
        let rank = payload.rank.index();
        while normalizers.len() <= rank {
            normalizers.push(ZmqEventNormalizer::new(BLOCK_TOKENS as u32));
        }
        let batch = decode_event_batch(&payload.bytes).expect("well-formed");
        let worker = WorkerWithDpRank::new(rank as u64, 0);
        for raw in batch.events {
            event_id += 1;
            let placed = normalizers[rank].normalize(raw, event_id, worker).expect("a store");
            take(placed.into_router_event().expect("of a worker"));
        }
    }
}

fn count(event: &RouterEvent) -> usize {
    match &event.event.data {
        KvCacheEventData::Stored(store) => store.blocks.len(),
        _ => 0,
    }
}

impl Subject for Compressed {
    type Query = Vec<LocalBlockHash>;

    fn new(_ranks: u16) -> Self {
        let runtime = Builder::new_current_thread().build().expect("a runtime");
        let guard = runtime.enter();
        let indexer = ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), 1, BLOCK_TOKENS as u32);
        drop(guard);
        Self { runtime, indexer }
    }

    fn block_hash(tokens: &[TokenId]) -> BlockHash {
        block_hash(tokens)
    }

    fn query(&self, prompt: &Prompt) -> Self::Query {
        hash_prompt(&prompt.ids)
    }

    fn apply(&mut self, workload: &Workload, watch: &mut Stopwatch) {
        in_chunks(workload, |events| {
            watch.time(|| {
                for event in events {
                    self.indexer.enqueue_event(event).expect("the thread lives");
                }
                self.runtime.block_on(self.indexer.flush_and_wait()).expect("the thread lives");
            });
        });
    }

    fn find(&mut self, query: &Self::Query) -> u64 {
        sum(&self.indexer.backend().find_matches_impl(query, false))
    }

    fn remove_first(&mut self, steps: &mut Quantiles) {
        steps.time(|| self.runtime.block_on(self.indexer.remove_worker(0)));
    }

    fn decode(payloads: &[Payload]) -> Option<usize> {
        let mut blocks = 0;
        decode(payloads, |event| blocks += count(black_box(&event)));
        Some(blocks)
    }

    fn ingest(&mut self, payloads: &[Payload], watch: &mut Stopwatch) -> bool {
        watch.time(|| {
            decode(payloads, |event| self.indexer.enqueue_event(event).expect("the thread lives"));
            self.runtime.block_on(self.indexer.flush_and_wait()).expect("the thread lives");
        });
        true
    }
}

impl Subject for Radix {
    type Query = Vec<LocalBlockHash>;

    fn new(_ranks: u16) -> Self {
        Self(RadixTree::new())
    }

    fn block_hash(tokens: &[TokenId]) -> BlockHash {
        block_hash(tokens)
    }

    fn query(&self, prompt: &Prompt) -> Self::Query {
        hash_prompt(&prompt.ids)
    }

    fn apply(&mut self, workload: &Workload, watch: &mut Stopwatch) {
        in_chunks(workload, |events| {
            watch.time(|| {
                for event in events {
                    self.0.apply_event(event).expect("the parent is known");
                }
            });
        });
    }

    fn find(&mut self, query: &Self::Query) -> u64 {
        // It takes its query by value; the copy is less than a tenth of the time.
        sum(&self.0.find_matches(query.clone(), false))
    }

    fn remove_first(&mut self, steps: &mut Quantiles) {
        steps.time(|| self.0.remove_worker(0));
    }
}
