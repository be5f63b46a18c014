//! kvspoa's index.

use crate::measure::{Quantiles, Stopwatch};
use crate::subject::{Prompt, Subject};
use kvspoa::events::{Batch, Groups, KvEvent};
use kvspoa::hash::HashKey;
use kvspoa::index::{Index, IndexConfig, Overlaps};
use kvspoa::units::{BlockHash, RankId, SequenceHash, TokenId};
use kvspoa::wire::Payload;
use kvspoa::workload::{BLOCK_TOKENS, Workload};
use std::hint::black_box;
use std::sync::LazyLock;

/// The key of the workload and of the index.
pub static KEY: LazyLock<HashKey> = LazyLock::new(|| HashKey::from_seed(1));

pub struct Ours {
    pub index: Index,
    overlaps: Overlaps,
}

/// No limit: what a workload takes is what is measured.
const CONFIG: IndexConfig =
    IndexConfig { max_bytes: 1 << 40, max_waiting_blocks: 65_536, max_ghost_blocks: 8192 };

impl Subject for Ours {
    type Query = Vec<SequenceHash>;

    fn new(ranks: u16) -> Self {
        let mut index = Index::new(KEY.clone(), CONFIG);
        assert!((0..ranks).all(|rank| index.add_rank(RankId(rank))));
        Self { index, overlaps: Overlaps::default() }
    }

    fn block_hash(tokens: &[TokenId]) -> BlockHash {
        KEY.block(tokens)
    }

    fn query(&self, prompt: &Prompt) -> Self::Query {
        KEY.sequence(KEY.plain_root(), &prompt.tokens, BLOCK_TOKENS as u32)
    }

    fn apply(&mut self, workload: &Workload, watch: &mut Stopwatch) {
        watch.time(|| {
            for (rank, event) in workload.events() {
                self.index.apply(rank, &event);
            }
        });
    }

    fn find(&mut self, query: &Self::Query) -> u64 {
        self.index.find(query, &mut self.overlaps);
        self.overlaps.iter().map(|(_, overlap)| u64::from(overlap.gpu_blocks)).sum()
    }

    fn remove_first(&mut self, steps: &mut Quantiles) {
        steps.time(|| self.index.remove_rank(RankId(0)));
        while steps.time(|| self.index.sweep(1)) {}
    }

    fn decode(payloads: &[Payload]) -> Option<usize> {
        let (mut batch, mut groups) = (Batch::new(), Groups::default());
        let mut blocks = 0;
        for payload in payloads {
            batch.decode(&payload.bytes, &KEY, &mut groups).expect("well-formed");
            for event in black_box(&batch).events() {
                if let KvEvent::Stored(stored) = event {
                    blocks += stored.block_hashes.len();
                }
            }
        }
        Some(blocks)
    }

    fn ingest(&mut self, payloads: &[Payload], watch: &mut Stopwatch) -> bool {
        let (mut batch, mut groups) = (Batch::new(), Groups::default());
        watch.time(|| {
            for payload in payloads {
                batch.decode(&payload.bytes, &KEY, &mut groups).expect("well-formed");
                for event in batch.events() {
                    self.index.apply(payload.rank, &event);
                }
            }
        });
        true
    }
}
