//! kvspoa's index.

use crate::measure::{Quantiles, Stopwatch};
use crate::subject::{Prompt, Subject};
use kvspoa::events::{Batch, Groups, KvEvent};
use kvspoa::hash::HashKey;
use kvspoa::index::{Index, IndexConfig, LOOK_AHEAD_EVENTS, Overlaps};
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

impl Ours {
    /// Some events at a time, as kvspoa applies a batch.
    fn apply_all<'e>(&mut self, mut events: impl Iterator<Item = (RankId, KvEvent<'e>)>) {
        let mut next = Vec::with_capacity(LOOK_AHEAD_EVENTS);
        loop {
            next.extend(events.by_ref().take(LOOK_AHEAD_EVENTS));
            if next.is_empty() {
                break;
            }
            next.iter().for_each(|(rank, event)| self.index.look_ahead(*rank, event));
            for (rank, event) in next.drain(..) {
                self.index.apply(rank, &event);
            }
        }
    }
}

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
            self.apply_all(workload.events());
        });
    }

    fn find(&mut self, query: &Self::Query) -> u64 {
        self.index.find(query, &mut self.overlaps);
        self.overlaps.iter().map(|(_, overlap)| u64::from(overlap.gpu_blocks)).sum()
    }

    fn remove_first(&mut self, steps: &mut Quantiles) {
        steps.time_on_cpu(|| self.index.remove_rank(RankId(0)));
        while steps.time_on_cpu(|| self.index.sweep(1)) {}
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
                self.apply_all(batch.events().map(|event| (payload.rank, event)));
            }
        });
        true
    }
}
