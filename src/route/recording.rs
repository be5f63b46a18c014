//! What is kept of a decision.

use super::Decision;
use crate::{
    record::{Decided, Recorder},
    select::SequenceKey,
    units::RequestId,
};
use std::{sync::Arc, time::SystemTime};

/// Hands a decision over to be kept, if it came to a choice about a request of which the end will be told.
pub(super) fn note(recorder: &Recorder, decision: &Decision, at: SystemTime) {
    let (Some(ask), Some(pool), Some(choice)) = (&decision.ask, &decision.pool, &decision.choice) else {
        return;
    };
    // By the rank chosen, or where there is none by any: the replicas of a pool are mostly alike.
    let Some(terms) = choice.chosen().or_else(|| choice.terms.first()) else { return };
    let Some(rank) = decision.ranks.get(terms.rank).filter(|_| ask.id != RequestId(0)) else { return };
    let key = SequenceKey { revision: rank.revision, block_tokens: terms.block_tokens };
    let held = choice.terms.iter().filter(|terms| terms.confirmed.tokens() > 0).filter_map(|terms| {
        let rank = decision.ranks.get(terms.rank)?;
        Some((Arc::clone(&rank.server), terms.confirmed.tokens()))
    });
    recorder.decided(Decided {
        request: ask.id,
        at,
        pool: pool.backend.clone(),
        mode: decision.handling.as_str(),
        session: ask.session.or(decision.prompt.as_ref().map(|prompt| prompt.head)),
        prompt: Arc::clone(&ask.prompt),
        key,
        chosen: decision.target().map(|rank| Arc::clone(&rank.server)),
        held: held.collect(),
    });
}
