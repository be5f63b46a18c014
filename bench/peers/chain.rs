//! Shepherd's `ChainIndex`.

use crate::measure::{Quantiles, Stopwatch};
use crate::subject::{Prompt, Subject};
use kv_index::{ChainBlockMap, ChainIndex, ContentHash, StoredBlock};
use kv_index::{SequenceHash as ChainHash, compute_content_hash, compute_request_content_hashes};
use kvspoa::units::{BlockHash, TokenId};
use kvspoa::workload::{BLOCK_TOKENS, Workload};

pub struct Chain {
    index: ChainIndex,
    workers: Vec<(u32, ChainBlockMap)>,
}

impl Subject for Chain {
    type Query = Vec<ContentHash>;

    fn new(ranks: u16) -> Self {
        let index = ChainIndex::new();
        let worker = |rank: u16| index.intern_worker(&format!("worker-{rank}")).expect("few workers");
        let workers = (0..ranks).map(|rank| (worker(rank), ChainBlockMap::new())).collect();
        Self { index, workers }
    }

    fn block_hash(tokens: &[TokenId]) -> BlockHash {
        let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        BlockHash(compute_content_hash(&ids).0)
    }

    fn query(&self, prompt: &Prompt) -> Self::Query {
        compute_request_content_hashes(&prompt.ids, BLOCK_TOKENS as usize)
    }

    fn apply(&mut self, workload: &Workload, watch: &mut Stopwatch) {
        let pairs = workload.names().iter().zip(workload.blocks());
        let blocks: Vec<StoredBlock> = pairs
            .map(|(name, block)| StoredBlock {
                seq_hash: ChainHash(name.0),
                content_hash: ContentHash(block.0),
            })
            .collect();
        watch.time(|| {
            let mut rest = &blocks[..];
            for (rank, stored) in workload.stores() {
                let (own, others) = rest.split_at(stored.engine_hashes.len());
                rest = others;
                let (worker, map) = &mut self.workers[rank.index()];
                let parent = stored.parent.map(|parent| ChainHash(parent.0));
                self.index.apply_stored(*worker, own, parent, map).expect("the parent is known");
            }
        });
    }

    fn find(&mut self, query: &Self::Query) -> u64 {
        let mut sum = 0;
        self.index.score_into(query, |hash| hash.0, false, |_, score| sum += u64::from(score));
        sum
    }

    fn remove_first(&mut self, steps: &mut Quantiles) {
        let (worker, map) = self.workers.remove(0);
        steps.time(|| self.index.remove_worker(worker, map));
    }
}
