//! The decision record: the one truth about one request, from which the answer to HAProxy, the metrics, the log line
//! and `/explain` are made.

use super::{Reason, Unprompted};
use crate::{
    config::Handling,
    pool::{Pool, Rank, RankState, Ranks, Servers, Stream},
    prompt::{Prompt, TokenIds},
    replica::TokenKey,
    select::{Ask, Choice},
    spop::{Actions, Scope},
    units::RankId,
};
use serde::Serialize;
use std::{sync::Arc, time::Duration};

/// How far a decision rests on the engine's own truth.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Tokens and all caches are known exactly.
    Exact,
    /// The tokens are known, but not every replica's cache is known exactly.
    Degraded,
    /// Neither tokens nor caches helped, nor what was sent to the replica before.
    LoadOnly,
}

impl State {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Degraded => "degraded",
            Self::LoadOnly => "load_only",
        }
    }

    /// `was_sent`: the choice rests on what was sent to its replica before.
    fn of(known: Option<Known>, is_known_to_all: bool, streams: &[Stream], was_sent: bool) -> Self {
        let is_followed = streams.iter().any(|stream| stream.state.is_trusted());
        if known.is_none() || !is_followed && !was_sent {
            Self::LoadOnly
        } else if known == Some(Known::Unsure) || !is_known_to_all {
            Self::Degraded
        } else if streams.iter().all(|stream| stream.state == RankState::Exact) {
            Self::Exact
        } else {
            Self::Degraded
        }
    }
}

/// How much of a prompt its tokens are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Known {
    /// All of it.
    Whole,
    /// Certainly its first ones.
    Beginning,
    /// Its first ones, if nothing that was not seen changes them.
    Unsure,
}

/// The time that each stage of a decision took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stages {
    /// Parsing, rendering and tokenizing, with the wait for a thread.
    pub prompt: Duration,
    /// Of this, parsing the body.
    pub parse: Duration,
    /// Of this, running the chat template.
    pub render: Duration,
    /// Of this, tokenizing.
    pub tokenize: Duration,
    /// Hashing the tokens and looking them up.
    pub lookup: Duration,
    /// Scoring and booking.
    pub choice: Duration,
    /// From the frame's arrival to the answer.
    pub total: Duration,
}

/// All that was known and decided about one request.
#[derive(Debug)]
pub struct Decision {
    /// How it ended.
    pub reason: Reason,
    /// What it rests on.
    pub state: State,
    /// Whether HAProxy is told of it.
    pub handling: Handling,
    /// What was asked, where it came to a choice.
    pub ask: Option<Ask>,
    /// The pool, where it is one of ours.
    pub pool: Option<Arc<Pool>>,
    /// The prompt, where it is known.
    pub prompt: Option<Arc<Prompt>>,
    /// Why there is none, where more is known of that than the reason says.
    pub unprompted: Option<Unprompted>,
    /// The prompt was made before, for an equal body.
    pub is_repeat: bool,
    /// The candidates as they were scored; `None`: it did not come to that.
    pub choice: Option<Choice>,
    /// The rank chosen.
    pub chosen: Option<Chosen>,
    /// Names the tokens that were sent ahead to the rank.
    pub token_key: Option<TokenKey>,
    /// Each candidate's stream at that moment.
    pub streams: Vec<Stream>,
    /// The servers at that moment.
    pub servers: Arc<Servers>,
    /// The ranks at that moment.
    pub ranks: Arc<Ranks>,
    /// Times.
    pub stages: Stages,
}

/// The rank chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chosen {
    /// Which.
    pub rank: RankId,
    /// Prompt tokens that its cache holds, on any tier, confirmed by its events.
    pub matched_tokens: u32,
    /// Prompt tokens that continue them and were sent there of late, which no event has confirmed.
    pub history_tokens: u32,
    /// How far its cache was known.
    pub state: RankState,
}

impl Decision {
    /// A decision not to have an opinion.
    #[must_use]
    pub fn none(reason: Reason, pool: Option<Arc<Pool>>) -> Self {
        Self {
            reason,
            state: State::LoadOnly,
            handling: Handling::On,
            ask: None,
            pool,
            prompt: None,
            unprompted: None,
            is_repeat: false,
            choice: None,
            chosen: None,
            token_key: None,
            streams: Vec::new(),
            servers: Arc::default(),
            ranks: Arc::default(),
            stages: Stages::default(),
        }
    }

    /// The record of a choice. `prompt` is its prompt and how much of it, or why it is not known: as the chosen replica
    /// has it, and `is_known_to_all` tells whether it is known for all replicas.
    #[must_use]
    pub fn chosen(
        pool: &Arc<Pool>,
        prompt: Result<(Arc<Prompt>, Known), Reason>,
        is_known_to_all: bool,
        choice: Choice,
        streams: Vec<Stream>,
    ) -> Self {
        let chosen = choice.chosen().map(|terms| Chosen {
            rank: terms.rank,
            matched_tokens: terms.confirmed.tokens(),
            history_tokens: terms.history_tokens,
            state: streams
                .iter()
                .find(|stream| stream.rank == terms.rank)
                .map_or(RankState::NoEvents, |stream| stream.state),
        });
        let reason = match (&prompt, chosen) {
            (_, None) => Reason::NoReplica,
            (Err(reason), _) => *reason,
            (Ok((_, known)), Some(chosen)) => match (known, chosen.matched_tokens, chosen.history_tokens) {
                (Known::Whole, 0, 0) => Reason::NoOverlap,
                (Known::Whole, 0, _) => Reason::History,
                (Known::Whole, _, _) => Reason::Overlap,
                (_, 0, 0) => Reason::BeginningNoOverlap,
                (_, 0, _) => Reason::BeginningHistory,
                (_, _, _) => Reason::BeginningOverlap,
            },
        };
        Self {
            reason,
            state: State::of(
                prompt.as_ref().ok().map(|(_, known)| *known),
                is_known_to_all,
                &streams,
                chosen.is_some_and(|chosen| chosen.history_tokens > 0),
            ),
            handling: Handling::On,
            ask: None,
            pool: Some(Arc::clone(pool)),
            prompt: prompt.ok().map(|(prompt, _)| prompt),
            unprompted: None,
            is_repeat: false,
            choice: Some(choice),
            chosen,
            token_key: None,
            streams,
            servers: Arc::default(),
            ranks: Arc::default(),
            stages: Stages::default(),
        }
    }

    /// The prompt's tokens, where they are known.
    #[must_use]
    pub fn tokens(&self) -> Option<&TokenIds> {
        self.prompt.as_ref().map(|prompt| &prompt.tokens.ids)
    }

    /// The rank chosen, by the names that HAProxy and the engine know.
    #[must_use]
    pub fn target(&self) -> Option<&Rank> {
        self.ranks.get(self.chosen?.rank)
    }

    /// What HAProxy is told: variables of the transaction, under the names of `haproxy/kvspoa.spoe.conf`. Without a
    /// choice there are none, which HAProxy takes as "no opinion". In the shadow there is no server among them; a reason of
    /// its own tells HAProxy's log so.
    #[must_use]
    pub fn actions(&self) -> Actions {
        let mut actions = Actions::default();
        if self.handling == Handling::Shadow {
            actions.set_var(Scope::Transaction, "reason", Handling::Shadow.as_str());
            return actions;
        }
        let (Some(chosen), Some(target)) = (self.chosen, self.target()) else { return actions };
        actions.set_var(Scope::Transaction, "server", &*target.server);
        if self.ranks.ranked() {
            actions.set_var(Scope::Transaction, "dp_rank", u32::from(target.rank));
        }
        if let Some(key) = self.token_key {
            actions.set_var(Scope::Transaction, "token_key", &*key.to_string());
        }
        actions.set_var(Scope::Transaction, "match", chosen.matched_tokens);
        actions.set_var(Scope::Transaction, "reason", self.reason.as_str());
        actions.set_var(Scope::Transaction, "state", self.state.as_str());
        actions
    }

    /// Logs the record at level debug; never the prompt.
    pub fn log(&self) {
        tracing::debug!(
            pool = self.pool.as_ref().map(|pool| pool.backend.as_str()),
            server = self.target().map(|target| &*target.server),
            mode = self.handling.as_str(),
            reason = self.reason.as_str(),
            why = self.unprompted.map(tracing::field::display),
            state = self.state.as_str(),
            prompt_tokens = self.tokens().map(TokenIds::len),
            matched_tokens = self.chosen.map(|chosen| chosen.matched_tokens),
            history_tokens = self.chosen.map(|chosen| chosen.history_tokens),
            prompt_us = self.stages.prompt.as_micros() as u64,
            lookup_us = self.stages.lookup.as_micros() as u64,
            choice_us = self.stages.choice.as_micros() as u64,
            total_us = self.stages.total.as_micros() as u64,
            "decided"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_rests_on_no_more_than_the_caches_that_are_known() {
        let of = |states: &[RankState]| {
            let stream = |state: &RankState| Stream {
                rank: RankId(0),
                state: *state,
                misses_events: false,
                is_starting: false,
                applied_seq: None,
                block_tokens: None,
            };
            let streams: Vec<_> = states.iter().map(stream).collect();
            [false, true].map(|was_sent| State::of(Some(Known::Whole), true, &streams, was_sent))
        };
        let (starting, gap) = (RankState::LoadOnly("connecting"), RankState::Degraded("no_replay"));
        assert_eq!(of(&[RankState::Exact, RankState::Exact]), [State::Exact; 2]);
        assert_eq!(of(&[RankState::Exact, starting]), [State::Degraded; 2]);
        assert_eq!(of(&[gap, RankState::NoEvents]), [State::Degraded; 2]);
        assert_eq!(of(&[starting, RankState::NoEvents]), [State::LoadOnly, State::Degraded]);
        assert_eq!(State::of(None, true, &[], false), State::LoadOnly);
    }
}
