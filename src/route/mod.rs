//! The pipeline of one request: what HAProxy asked → tokens → overlaps → choice → the answer.

mod decision;
mod explanation;
mod gauges;
mod preparing;
mod readiness;
mod reason;
mod recording;
mod status;
mod workers;

pub use decision::{Chosen, Decision, Known, Stages, State};
pub use explanation::Explanation;
pub use preparing::Unprompted;
pub use readiness::{ConfigState, Readiness};
pub use reason::{Outcome, Reason};
pub use status::{Fault, PoolStatus, RankStatus, ReplicaStatus, Status};
pub use workers::{NotDone, Workers};

use crate::{
    config::{Handling, Mode},
    metrics::RouteMetrics,
    pool::{Pool, PoolTable, Pools},
    record::Recorder,
    request::{Endpoint, RoutingRequest},
    select::Ask,
    spop::{Actions, Handler, Unanswered},
    units::RequestId,
};
use arc_swap::ArcSwap;
use bytes::Bytes;
use parking_lot::Mutex;
use preparing::{Preparing, Prompt, Prompts};
use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

/// Without tokens a prompt's length is guessed from its body: bytes of JSON per token of English or code.
const BYTES_PER_TOKEN: usize = 4;

/// All pools and what is needed to decide.
#[derive(Debug)]
pub struct Router {
    pools: Arc<Pools>,
    limits: ArcSwap<RouteLimits>,
    metrics: RouteMetrics,
    recorder: Option<Recorder>,
    /// Held by who brings the pools' metrics up to date.
    refreshing: Mutex<()>,
    config_state: ArcSwap<ConfigState>,
}

/// What a request's way through the router is bounded by.
#[derive(Clone, Debug)]
pub struct RouteLimits {
    /// The threads for long prompts.
    pub workers: Workers,
    /// Bodies up to this size, in bytes, are tokenized where they arrive; but not where they may bring a template.
    pub inline_bytes: usize,
    /// The time for one decision. After three quarters of it no prompt is begun or gone on with, so that there is time to
    /// choose by what is known until then; the SPOP server bounds the whole.
    pub deadline: Duration,
}

/// For what a decision is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Purpose {
    /// HAProxy asks, which does without an answer where the pool's mode says so.
    Answer,
    /// Somebody asks who needs an answer.
    AnswerAnyway,
    /// To be looked at: nothing is booked.
    Look,
}

impl Purpose {
    fn mode(self, pool: &Pool) -> Mode {
        match self {
            Self::Answer | Self::Look => pool.mode.get(),
            Self::AnswerAnyway => Mode::ON,
        }
    }
}

/// What [`Router::explain`] may add.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExplainOptions {
    /// The prompt's token ids.
    pub token_ids: bool,
}

/// `/explain` was asked about a pool that is not configured.
#[derive(Debug, thiserror::Error)]
#[error("no pool named \"{0}\" is configured")]
pub struct UnknownPool(String);

impl Router {
    /// A router over these pools.
    #[must_use]
    pub fn new(pools: Arc<Pools>, limits: RouteLimits) -> Self {
        let reasons: Vec<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        Self {
            pools,
            limits: ArcSwap::from_pointee(limits),
            metrics: RouteMetrics::register(&reasons),
            recorder: None,
            refreshing: Mutex::default(),
            config_state: ArcSwap::default(),
        }
    }

    /// The same, whose decisions are kept.
    #[must_use]
    pub fn recorded_by(self, recorder: Option<Recorder>) -> Self {
        Self { recorder, ..self }
    }

    /// Who keeps the decisions.
    #[must_use]
    pub const fn recorder(&self) -> Option<&Recorder> {
        self.recorder.as_ref()
    }

    /// The pools as they are now.
    #[must_use]
    pub fn pools(&self) -> Arc<PoolTable> {
        self.pools.table()
    }

    /// The name of the pool, where there is only one.
    #[must_use]
    pub fn only_pool(&self) -> Option<String> {
        self.pools.table().only().map(|pool| pool.backend.clone())
    }

    /// What `/readyz` says of the configuration.
    #[must_use]
    pub fn config_state(&self) -> ConfigState {
        ConfigState::clone(&self.config_state.load())
    }

    /// Sets what `/readyz` says of the configuration.
    pub fn set_config_state(&self, state: ConfigState) {
        self.config_state.store(Arc::new(state));
    }

    /// The bounds as they are now.
    #[must_use]
    pub fn limits(&self) -> Arc<RouteLimits> {
        self.limits.load_full()
    }

    /// Sets the bounds of requests that come from now on.
    pub fn set_limits(&self, limits: RouteLimits) {
        self.limits.store(Arc::new(limits));
    }

    /// Decides about a request as the pool's mode says, and books the choice where HAProxy is told of it.
    pub async fn decide(&self, request: RoutingRequest, received: Instant) -> Decision {
        self.decide_for(Purpose::Answer, request, received).await
    }

    /// The same whatever the pool's mode is: for who has no `balance` to fall back to.
    pub async fn decide_anyway(&self, request: RoutingRequest, received: Instant) -> Decision {
        self.decide_for(Purpose::AnswerAnyway, request, received).await
    }

    async fn decide_for(&self, purpose: Purpose, request: RoutingRequest, received: Instant) -> Decision {
        let asked_at = SystemTime::now();
        let mut decision = self.run(request, received, purpose).await;
        if decision.handling == Handling::On {
            self.send_tokens(&mut decision);
        }
        decision.stages.total = received.elapsed();
        self.observe(&decision);
        if let Some(recorder) = &self.recorder {
            recording::note(recorder, &decision, asked_at);
        }
        decision.log();
        decision
    }

    /// Sends the tokens ahead to a replica that takes them, before HAProxy sends the request. The request names them only
    /// if they are on their way.
    fn send_tokens(&self, decision: &mut Decision) {
        let Some(prompt) = decision.prompt.as_ref().filter(|prompt| prompt.takes_tokens) else { return };
        let Some(channel) = decision.target().and_then(|rank| rank.tokens.as_ref()) else { return };
        let key = channel.push(prompt.tokens.ids.iter());
        let counter = if key.is_some() { &self.metrics.tokens_sent } else { &self.metrics.tokens_not_sent };
        counter.increment(1);
        decision.token_key = key;
    }

    /// Decides without booking.
    ///
    /// # Errors
    /// The pool is not configured.
    pub async fn explain(
        &self,
        request: RoutingRequest,
        options: ExplainOptions,
    ) -> Result<Explanation, UnknownPool> {
        if self.pools.of_backend(&request.pool).is_none() {
            return Err(UnknownPool(request.pool));
        }
        Ok(self.run(request, Instant::now(), Purpose::Look).await.explanation(options.token_ids))
    }

    async fn run(&self, request: RoutingRequest, received: Instant, purpose: Purpose) -> Decision {
        let Some(pool) = self.pools.of_backend(&request.pool) else {
            return Decision::none(Reason::UnknownPool, None);
        };
        let mode = purpose.mode(&pool);
        if mode.is_off() && purpose != Purpose::Look {
            let none = Decision::none(Reason::Off, Some(pool));
            return Decision { handling: Handling::Off, ..none };
        }
        if request.method != "POST" {
            return Decision::none(Reason::NotPost, Some(pool));
        }
        let prompts = self.prompts(&pool, &request, received).await;
        let prompted = Instant::now();
        let known = prompts.as_ref().map_err(|reason| *reason).and_then(Prompts::any).map(|_| ());
        let mut decision = match known {
            Err(reason) if reason.outcome() == Outcome::NoOpinion => Decision::none(reason, Some(pool)),
            _ => choose(&pool, &request, prompts, mode, purpose),
        };
        decision.stages.prompt = prompted - received;
        decision
    }

    fn observe(&self, decision: &Decision) {
        if let Some(counter) = self.metrics.decisions.get(decision.reason.index()) {
            counter.increment(1);
        }
        let of_prompt = decision.tokens().zip(decision.chosen);
        if let Some(pool) = &decision.pool {
            let (prompt, matched) = of_prompt
                .map_or((0, 0), |(tokens, chosen)| (tokens.len() as u64, chosen.matched_tokens.into()));
            pool.tally.add(decision.handling, prompt, matched);
        }
        let Some((tokens, chosen)) = of_prompt else { return };
        if decision.handling == Handling::On {
            self.metrics.prompt_tokens.increment(tokens.len() as u64);
            self.metrics.matched_tokens.increment(u64::from(chosen.matched_tokens));
            self.metrics.history_tokens.increment(u64::from(chosen.history_tokens));
        }
        if let (Some(pool), Some(choice)) = (&decision.pool, &decision.choice) {
            let best = choice.terms.iter().map(|terms| terms.confirmed.tokens()).max().unwrap_or(0);
            pool.matching.see(tokens.len(), best);
        }
        let Stages { prompt, lookup, choice, total, .. } = decision.stages;
        self.metrics.times(total, prompt, lookup, choice);
    }

    /// The prompt's tokens: here for a short body, on a thread of the pool for a long one.
    async fn prompts(
        &self,
        pool: &Arc<Pool>,
        request: &RoutingRequest,
        received: Instant,
    ) -> Result<Prompts, Reason> {
        let (deadline, workers) = {
            let limits = self.limits.load();
            let is_short = request.body.len() <= limits.inline_bytes && !pool.renderers().take_templates();
            (received + limits.deadline * 3 / 4, (!is_short).then(|| limits.workers.clone()))
        };
        let endpoint = Endpoint::from_path(&request.path).ok_or_else(|| {
            let is_known = Endpoint::is_without_cache(&request.path);
            if is_known { Reason::NoPromptCache } else { Reason::UnknownEndpoint }
        })?;
        if request.content_encoding.is_some() {
            return Err(Reason::BodyCompressed);
        }
        let preparing = Preparing {
            pool: Arc::clone(pool),
            ranks: pool.ranks(),
            endpoint,
            body: request.body.clone(),
            is_complete: request.complete,
            content_length: request.content_length,
            until: deadline,
        };
        match workers {
            None => Ok(preparing.run()),
            Some(workers) => Ok(workers.run(deadline, move || preparing.run()).await?),
        }
    }
}

/// Answers HAProxy by the router's decisions.
#[derive(Clone, Debug)]
pub struct RouteHandler(pub Arc<Router>);

impl Handler for RouteHandler {
    async fn notify(&self, messages: Bytes, received: Instant) -> Actions {
        match RoutingRequest::from_payload(&messages) {
            Ok(request) => self.0.decide(request, received).await.actions(),
            Err(error) => {
                tracing::debug!(%error, "a NOTIFY is none of ours");
                self.0.observe(&Decision::none(Reason::MessageMalformed, None));
                Actions::default()
            }
        }
    }

    fn unanswered(&self, why: Unanswered) {
        let reason = match why {
            Unanswered::Late => Reason::Deadline,
            Unanswered::Panicked => Reason::Internal,
        };
        self.0.observe(&Decision::none(reason, None));
    }
}

/// The tokens of a body of which only the length is known. A client may claim any length: an engine takes no more than
/// its context.
fn claimed_tokens(pool: &Pool, body_bytes: u64) -> usize {
    let tokens = usize::try_from(body_bytes).unwrap_or(usize::MAX) / BYTES_PER_TOKEN;
    tokens.min(pool.context_tokens() as usize)
}

/// Spreads a number over all 64 bits. A UUID's low half has fixed bits at its top.
fn spread(number: u64) -> u64 {
    xxhash_rust::xxh3::xxh3_64(&number.to_le_bytes())
}

/// Stands for the session of a body that was cut, where the client names none: what its conversation begins with. A
/// power of two of bytes, as the place of the cut differs a little from turn to turn.
fn session_of_beginning(body: &[u8]) -> Option<u64> {
    let length = 1_usize << body.len().checked_ilog2()?;
    body.get(..length).map(RoutingRequest::session_of)
}

/// Looks the prompt up and scores all ranks. Where HAProxy is to be told, the choice is booked in the same critical
/// section; in the shadow, the request is looked for where HAProxy places it.
fn choose(
    pool: &Arc<Pool>,
    request: &RoutingRequest,
    prompts: Result<Prompts, Reason>,
    mode: Mode,
    purpose: Purpose,
) -> Decision {
    let started = Instant::now();
    let any = prompts.as_ref().map_err(|reason| *reason).and_then(Prompts::any);
    let prompt_tokens = any.map_or_else(
        |_| {
            let body_bytes = request.content_length.unwrap_or(request.body.len() as u64);
            claimed_tokens(pool, body_bytes)
        },
        |prompt| prompt.total,
    );
    let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
    let rendered = prompts.as_ref().map(|prompts| prompts.rendered(pool)).unwrap_or_default();
    let found = pool.lookup(&rendered, prompt_tokens, started);
    let looked_up = Instant::now();
    let is_cut = match any {
        Ok(prompt) => !prompt.is_whole_body,
        Err(reason) => !request.complete || reason == Reason::BodyCut,
    };
    let beginning = || session_of_beginning(&request.body).filter(|_| is_cut);
    let ask = Ask {
        id: request.id.unwrap_or(RequestId(0)),
        prompt: found.prompt,
        session: request.session.or_else(beginning),
    };
    // What tells one conversation from another, else one request from another: that a share is one of requests too.
    let stands_for_session =
        request.session.or(any.ok().map(|prompt| prompt.made.head)).or(request.id.map(|id| id.0 as u64));
    let handling = mode.handling(spread(stands_for_session.unwrap_or_default()));
    // Without an id the end would never be told: then nothing is booked.
    let choice = match request.id.filter(|_| purpose != Purpose::Look).map(|_| handling) {
        Some(Handling::On) => pool.book(&ask, &found.candidates, looked_up),
        Some(Handling::Shadow) => pool.scheduler.lock().expect(&ask, &found.candidates, looked_up),
        Some(Handling::Off) | None => pool.scheduler.lock().choose(&ask, &found.candidates, looked_up),
    };
    let chosen = choice.rank.and_then(|rank| found.ranks.get(rank));
    let prompt = match (&prompts, chosen) {
        (Err(reason), _) => Err(*reason),
        (Ok(prompts), Some(rank)) => prompts.of(rank.revision),
        (Ok(_), None) => any,
    };
    let is_known_to_all = found
        .ranks
        .revisions()
        .iter()
        .all(|revision| prompts.as_ref().is_ok_and(|of| of.of(*revision).is_ok()));
    let mut decision = Decision::chosen(
        pool,
        prompt.map(|prompt| (Arc::clone(&prompt.made), prompt.known)),
        is_known_to_all,
        choice,
        found.streams,
    );
    decision.handling = handling;
    decision.ask = Some(ask);
    decision.servers = found.servers;
    decision.ranks = found.ranks;
    match prompt {
        Ok(prompt) => decision.is_repeat = prompt.is_repeat,
        Err(reason) => decision.unprompted = prompts.as_ref().ok().and_then(|prompts| prompts.why(reason)),
    }
    for (_, Prompt { times, .. }) in prompts.iter().flat_map(Prompts::known) {
        decision.stages.parse += times.parse;
        decision.stages.render += times.render;
        decision.stages.tokenize += times.tokenize;
    }
    decision.stages.lookup = looked_up - started;
    decision.stages.choice = looked_up.elapsed();
    decision
}

#[cfg(test)]
mod revision_tests;
