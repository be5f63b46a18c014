//! Stores behind a block that nothing told of, as events were missed, and where they stand all the same: in a prompt that
//! is booked there.

use crate::{
    events::{KvEvent, Stored},
    hash::HashKey,
    index::Index,
    select::{PromptBlocks, SequenceKey},
    units::{BlockHash, EngineHash, RankId, SequenceHash, Tier},
};
use std::sync::Arc;

/// Places in prompts that are tried for the orphans of one batch, a chained hash each: those of four prompts of 128,000 tokens in
/// blocks of 16.
const TRIES: usize = 1 << 15;

/// A store behind an unknown block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Orphan {
    parent: EngineHash,
    blocks: Box<[BlockHash]>,
}

/// The stores of a batch whose place is not known, now that it is applied.
#[must_use]
pub fn orphans<'a>(index: &Index, rank: RankId, events: impl Iterator<Item = KvEvent<'a>>) -> Vec<Orphan> {
    if !index.has_waiting(rank) {
        return Vec::new();
    }
    let stores = events.filter_map(|event| match event {
        KvEvent::Stored(Stored { tier: Tier::Gpu, parent: Some(parent), block_hashes, .. }) => {
            index.sequence(rank, parent).is_none().then(|| Orphan { parent, blocks: block_hashes.into() })
        }
        _ => None,
    });
    stores.collect()
}

/// What each orphan stands behind, for [`Index::adopt`], where it goes on one of `prompts`; the likely ones come first.
#[must_use]
pub fn places<'a>(
    key: &HashKey,
    orphans: &[Orphan],
    prompts: &'a [(Arc<PromptBlocks>, SequenceKey)],
) -> Vec<(EngineHash, &'a [SequenceHash])> {
    let mut tries = TRIES;
    let place = |orphan: &Orphan| Some((orphan.parent, find(key, orphan, prompts, &mut tries)?));
    orphans.iter().filter_map(place).collect()
}

/// The beginning of a prompt behind which the orphan stands; `None` also where there are several such beginnings: texts that
/// are equal from some block on tell nothing of what comes before.
fn find<'a>(
    key: &HashKey,
    orphan: &Orphan,
    prompts: &'a [(Arc<PromptBlocks>, SequenceKey)],
    tries: &mut usize,
) -> Option<&'a [SequenceHash]> {
    let mut found: Option<&[SequenceHash]> = None;
    for (prompt, sequence_key) in prompts {
        let chain = prompt.sequence(*sequence_key);
        let places = chain.len().min(*tries);
        *tries -= places;
        for place in (1..places).filter(|place| goes_on(key, orphan, chain, *place)) {
            let before = chain.get(..place)?;
            if found.is_some_and(|found| found.last() != before.last()) {
                return None;
            }
            found = Some(before);
        }
    }
    found
}

/// Whether the orphan's blocks are the prompt's from `place` on, as far as both go.
fn goes_on(key: &HashKey, orphan: &Orphan, chain: &[SequenceHash], place: usize) -> bool {
    let Some((before, behind)) = chain.split_at_checked(place) else { return false };
    let Some(before) = before.last() else { return false };
    let parents = std::iter::once(before).chain(behind);
    let mut blocks = orphan.blocks.iter().zip(parents).zip(behind);
    blocks.all(|((block, parent), hash)| key.chain(*parent, *block) == *hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::TokenId;

    fn key() -> HashKey {
        HashKey::from_seed(1)
    }

    fn prompt(texts: &[u32]) -> (Arc<PromptBlocks>, SequenceKey) {
        let tokens: Vec<TokenId> = texts.iter().copied().map(TokenId).collect();
        let chain = key().sequence(key().plain_root(), &tokens, 1);
        let prompt = PromptBlocks::new(tokens.len() as u32, [(1, chain)]);
        (Arc::new(prompt), SequenceKey::of_size(1))
    }

    fn orphan(texts: &[u32]) -> Orphan {
        let blocks = texts.iter().map(|text| key().block(&[TokenId(*text)])).collect();
        Orphan { parent: EngineHash(7), blocks }
    }

    /// How many blocks stand before the orphan, in the prompts.
    fn place(texts: &[u32], prompts: &[&[u32]]) -> Option<usize> {
        let prompts: Vec<_> = prompts.iter().map(|texts| prompt(texts)).collect();
        places(&key(), &[orphan(texts)], &prompts).first().map(|(_, chain)| chain.len())
    }

    #[test]
    fn it_stands_where_its_blocks_do() {
        assert_eq!(place(&[4, 5], &[&[9, 8, 7], &[1, 2, 3, 4, 5, 6]]), Some(3));
        assert_eq!(place(&[4, 5], &[&[1, 2, 3, 4]]), Some(3), "the rest is the answer");
        assert_eq!(place(&[4, 9], &[&[1, 2, 3, 4, 5, 6]]), None);
        assert_eq!(place(&[1, 2], &[&[1, 2, 3]]), None, "nothing stands before the first block");
        assert_eq!(place(&[4, 5], &[]), None);
    }

    #[test]
    fn where_several_beginnings_fit_none_is_taken() {
        assert_eq!(place(&[4, 5], &[&[1, 2, 3, 4, 5], &[1, 2, 3, 4, 5, 6]]), Some(3), "they are the same");
        assert_eq!(place(&[4, 5], &[&[1, 2, 3, 4, 5], &[9, 2, 3, 4, 5]]), None);
        assert_eq!(place(&[4], &[&[1, 4, 2, 4]]), None);
        assert_eq!(place(&[4, 2, 4], &[&[1, 4, 2, 4, 9]]), Some(1), "what follows tells which it is");
    }

    #[test]
    fn only_so_many_places_are_tried() {
        let long: Vec<u32> = (10..10 + TRIES as u32).collect();
        assert_eq!(place(&[4, 5], &[&long, &[1, 2, 3, 4, 5]]), None);
        assert_eq!(place(&[4, 5], &[&[1, 2, 3, 4, 5], &long]), Some(3));
    }
}
