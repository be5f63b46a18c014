//! The decision record as `/explain` shows it. The names are a contract; more may be added.

use super::{Decision, State};
use crate::{
    pool::{Rank, RankState, ServerView, Stream},
    prompt::TokenIds,
    replica::ServerState,
    select::{Excluded, Terms},
};
use serde::Serialize;

/// Where a request would go, and why.
#[derive(Debug, Serialize)]
pub struct Explanation {
    /// Tokens of the prompt as the engine counts them; null where they are not known.
    prompt_tokens: Option<usize>,
    /// Length of the rendered text.
    text_bytes: usize,
    /// Pieces of the text between added tokens, and how many of them were tokenized before.
    pieces: usize,
    reused_pieces: usize,
    /// An equal body came before, and its prompt was still known: nothing was parsed, rendered or tokenized.
    repeat: bool,
    /// Tokens per block on the chosen replica.
    block_size: Option<u32>,
    /// exact, degraded or load_only.
    state: State,
    /// How the decision ended (`route/reason.rs`).
    reason: &'static str,
    /// Why there are no tokens, where there are none: the field of the body, the line of the template.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    /// What told the candidates apart (`select::Reason`).
    decided_by: Option<&'static str>,
    /// What is done about it: `on`, or in `shadow` and `off` HAProxy balances all the same.
    mode: &'static str,
    /// The HAProxy server; null where HAProxy would choose.
    chosen: Option<String>,
    /// Its data-parallel rank.
    rank: Option<u16>,
    /// Prompt tokens in its cache, all tiers, confirmed by its events.
    matched_tokens: Option<u32>,
    /// Every candidate as it was scored.
    replicas: Vec<ReplicaExplanation>,
    /// Microseconds per stage.
    micros: Micros,
    /// The prompt's token ids, where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Serialize)]
struct Micros {
    /// Parsing, rendering and tokenizing, with the wait for a thread.
    prompt: u64,
    /// Of this, parsing the body.
    parse: u64,
    /// Of this, running the chat template.
    render: u64,
    /// Of this, tokenizing.
    tokenize: u64,
    /// Hashing and index.
    lookup: u64,
    /// Scoring.
    choice: u64,
}

/// One candidate as it was scored.
#[derive(Debug, Serialize)]
struct ReplicaExplanation {
    server: String,
    rank: u16,
    /// The revision by which its prompts are rendered; absent: the pool's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    revision: Option<String>,
    /// How far its cache is known: exact, degraded, no_events, load_only.
    state: &'static str,
    /// Why it is not exact.
    #[serde(skip_serializing_if = "Option::is_none")]
    state_reason: Option<&'static str>,
    /// HAProxy's state of the server: up, down, maint or drain; null where HAProxy has not told.
    server_state: Option<&'static str>,
    /// HAProxy's weight of the server; null where HAProxy has not told.
    weight: Option<u32>,
    /// Why it cannot be chosen (`select::Excluded`).
    #[serde(skip_serializing_if = "Option::is_none")]
    excluded: Option<&'static str>,
    /// Prompt tokens in its GPU cache, confirmed by its events.
    gpu_tokens: u32,
    /// Prompt tokens that continue them in host memory.
    cpu_tokens: u32,
    /// Prompt tokens that continue those on disk.
    disk_tokens: u32,
    /// Prompt tokens beyond these that count as present because a booked request brings them.
    booked_tokens: u32,
    /// Prompt tokens beyond all of these that were sent there of late, where its events do not tell all: not confirmed.
    history_tokens: u32,
    /// The last batch of events applied.
    applied_seq: Option<u64>,
    /// Booked prompt tokens whose prefill is not done.
    prefill_tokens: u64,
    /// Blocks of the running requests' prompts, and of their answers where these are followed.
    decode_blocks: usize,
    /// Booked requests.
    requests: u32,
    /// Prompt tokens that it would have to compute.
    uncached_tokens: u32,
    /// What one of these costs.
    own_weight: f64,
    /// The cost; the least wins. Null where it cannot be chosen.
    cost: Option<f64>,
    /// Whether its cost is within the band of ties.
    tied: bool,
}

impl Decision {
    /// The record for a person.
    #[must_use]
    pub fn explanation(&self, with_token_ids: bool) -> Explanation {
        let terms = self.choice.as_ref().map_or(&[][..], |choice| &choice.terms);
        let of_rank = |terms: &Terms| {
            let rank = self.ranks.get(terms.rank)?;
            Some((rank, self.streams.iter().find(|stream| stream.rank == terms.rank)))
        };
        let replicas = terms
            .iter()
            .filter_map(|terms| {
                let (rank, stream) = of_rank(terms)?;
                Some(ReplicaExplanation::new(rank, terms, stream, self.servers.get(terms.rank)))
            })
            .collect();
        let mut known =
            self.streams.iter().filter_map(|stream| stream.block_tokens.map(|size| (stream.rank, size)));
        let chosen_size =
            known.clone().find(|(rank, _)| self.chosen.is_some_and(|chosen| chosen.rank == *rank));
        let work = self.prompt.as_ref().map(|prompt| prompt.tokens.work).unwrap_or_default();
        let ids = |tokens: &TokenIds| tokens.iter().map(|token| token.0).collect();
        Explanation {
            prompt_tokens: self.tokens().map(TokenIds::len),
            text_bytes: work.text_bytes,
            pieces: work.pieces,
            reused_pieces: work.reused_pieces,
            repeat: self.is_repeat,
            block_size: chosen_size.or_else(|| known.next()).map(|(_, size)| size),
            state: self.state,
            reason: self.reason.as_str(),
            why: self.unprompted.map(|why| why.to_string()),
            decided_by: self.choice.as_ref().map(|choice| choice.reason.as_str()),
            mode: self.handling.as_str(),
            chosen: self.target().map(|target| target.server.to_string()),
            rank: self.target().map(|target| target.rank),
            matched_tokens: self.chosen.map(|chosen| chosen.matched_tokens),
            replicas,
            micros: Micros {
                prompt: self.stages.prompt.as_micros() as u64,
                parse: self.stages.parse.as_micros() as u64,
                render: self.stages.render.as_micros() as u64,
                tokenize: self.stages.tokenize.as_micros() as u64,
                lookup: self.stages.lookup.as_micros() as u64,
                choice: self.stages.choice.as_micros() as u64,
            },
            token_ids: self.tokens().filter(|_| with_token_ids).map(ids),
        }
    }
}

impl ReplicaExplanation {
    fn new(rank: &Rank, terms: &Terms, stream: Option<&Stream>, server: Option<&ServerView>) -> Self {
        let state = stream.map_or(RankState::NoEvents, |stream| stream.state);
        Self {
            server: rank.server.to_string(),
            rank: rank.rank,
            revision: rank.replica.revision.clone(),
            state: state.as_str(),
            state_reason: state.reason(),
            server_state: server.and_then(|server| server.state).map(ServerState::as_str),
            weight: server.map(|server| server.weight),
            excluded: terms.excluded.map(Excluded::as_str),
            gpu_tokens: terms.confirmed.gpu_tokens,
            cpu_tokens: terms.confirmed.cpu_tokens,
            disk_tokens: terms.confirmed.disk_tokens,
            booked_tokens: terms.booked_tokens,
            history_tokens: terms.history_tokens,
            applied_seq: stream.and_then(|stream| stream.applied_seq),
            prefill_tokens: terms.load.prefill_tokens,
            decode_blocks: terms.load.booked_blocks,
            requests: terms.load.requests,
            uncached_tokens: terms.uncached_tokens,
            own_weight: terms.own_weight,
            cost: terms.excluded.is_none().then_some(terms.cost),
            tied: terms.tied,
        }
    }
}
