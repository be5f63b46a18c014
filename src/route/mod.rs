//! The pipeline of one request: what HAProxy asked → tokens → overlaps → choice → the answer.

mod decision;
mod explanation;
mod gauges;
mod readiness;
mod reason;
mod workers;

pub use decision::{Chosen, Decision, Known, Stages, State};
pub use explanation::Explanation;
pub use readiness::Readiness;
pub use reason::{Outcome, Reason};
pub use workers::{NotDone, Workers};

use crate::{
    metrics::{PoolMetrics, RouteMetrics},
    pool::Pool,
    prompt,
    request::{Endpoint, RoutingRequest, body::BodyError, partial},
    select::Ask,
    spop::{Actions, Handler, Unanswered},
    units::RequestId,
};
use bytes::Bytes;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

/// Without tokens a prompt's length is guessed from its body: bytes of JSON per token of English or code.
const BYTES_PER_TOKEN: usize = 4;

/// All pools and what is needed to decide.
#[derive(Debug)]
pub struct Router {
    pools: Vec<(Arc<Pool>, PoolMetrics)>,
    by_backend: HashMap<String, usize>,
    workers: Workers,
    inline_bytes: usize,
    deadline: Duration,
    metrics: RouteMetrics,
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

/// A prompt as far as the choice needs it.
struct Prompt {
    /// What is looked up.
    made: Arc<prompt::Prompt>,
    /// Whether the body was not cut.
    is_whole_body: bool,
    /// What the choice and its booking count with: the tokens of all prompts of the request.
    total: usize,
    known: Known,
    is_repeat: bool,
    parse: Duration,
    tokenize: Duration,
}

impl Router {
    /// A router over these pools. After three quarters of `deadline` no prompt is begun or gone on with, so that there
    /// is time to choose by what is known until then; the SPOP server bounds the whole.
    #[must_use]
    pub fn new(pools: &[Arc<Pool>], workers: Workers, inline_bytes: usize, deadline: Duration) -> Self {
        let reasons: Vec<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        Self {
            by_backend: pools.iter().zip(0..).map(|(pool, at)| (pool.backend.clone(), at)).collect(),
            pools: pools
                .iter()
                .map(|pool| (Arc::clone(pool), PoolMetrics::register(&pool.backend)))
                .collect(),
            workers,
            inline_bytes,
            deadline,
            metrics: RouteMetrics::register(&reasons),
        }
    }

    /// The pools, in the order of the configuration.
    pub fn pools(&self) -> impl Iterator<Item = &Arc<Pool>> {
        self.pools.iter().map(|(pool, _)| pool)
    }

    fn pool(&self, backend: &str) -> Option<&Arc<Pool>> {
        self.by_backend.get(backend).and_then(|at| self.pools.get(*at)).map(|(pool, _)| pool)
    }

    /// The pool, where there is only one.
    #[must_use]
    pub fn only_pool(&self) -> Option<&str> {
        match &self.pools[..] {
            [(pool, _)] => Some(&pool.backend),
            _ => None,
        }
    }

    /// Decides about a request and books the choice.
    pub async fn decide(&self, request: RoutingRequest, received: Instant) -> Decision {
        let mut decision = self.run(request, received, true).await;
        self.send_tokens(&mut decision);
        decision.stages.total = received.elapsed();
        self.observe(&decision);
        decision.log();
        decision
    }

    /// Sends the tokens ahead to a replica that takes them, before HAProxy sends the request. The request names them only
    /// if they are on their way.
    fn send_tokens(&self, decision: &mut Decision) {
        let Some(prompt) = decision.prompt.as_ref().filter(|prompt| prompt.takes_tokens) else { return };
        let Some(channel) = decision.target().and_then(|rank| rank.tokens.as_ref()) else { return };
        let key = channel.push(&prompt.tokens.ids);
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
        if self.pool(&request.pool).is_none() {
            return Err(UnknownPool(request.pool));
        }
        Ok(self.run(request, Instant::now(), false).await.explanation(options.token_ids))
    }

    async fn run(&self, request: RoutingRequest, received: Instant, book: bool) -> Decision {
        let Some(pool) = self.pool(&request.pool) else {
            return Decision::none(Reason::UnknownPool, None);
        };
        if request.method != "POST" {
            return Decision::none(Reason::NotPost, Some(Arc::clone(pool)));
        }
        let prompt = self.prompt(pool, &request, received + self.deadline * 3 / 4).await;
        let prompted = Instant::now();
        let mut decision = match prompt {
            Ok(prompt) => choose(pool, &request, Ok(prompt), book),
            Err(reason) if reason.outcome() == Outcome::LoadOnly => choose(pool, &request, Err(reason), book),
            Err(reason) => Decision::none(reason, Some(Arc::clone(pool))),
        };
        decision.stages.prompt = prompted - received;
        decision
    }

    fn observe(&self, decision: &Decision) {
        if let Some(counter) = self.metrics.decisions.get(decision.reason.index()) {
            counter.increment(1);
        }
        let (Some(tokens), Some(chosen)) = (decision.tokens(), decision.chosen) else { return };
        self.metrics.prompt_tokens.increment(tokens.len() as u64);
        self.metrics.matched_tokens.increment(u64::from(chosen.matched_tokens));
        self.metrics.history_tokens.increment(u64::from(chosen.history_tokens));
        if let (Some(pool), Some(choice)) = (&decision.pool, &decision.choice) {
            let best = choice.terms.iter().map(|terms| terms.confirmed.tokens()).max().unwrap_or(0);
            pool.matching.see(tokens.len(), best);
        }
        let Stages { prompt, lookup, choice, total, .. } = decision.stages;
        self.metrics.times(total, prompt, lookup, choice);
    }

    /// The prompt's tokens: here for a short body, on a thread of the pool for a long one.
    async fn prompt(
        &self,
        pool: &Arc<Pool>,
        request: &RoutingRequest,
        deadline: Instant,
    ) -> Result<Prompt, Reason> {
        let endpoint = Endpoint::from_path(&request.path).ok_or_else(|| {
            let is_known = Endpoint::is_without_cache(&request.path);
            if is_known { Reason::NoPromptCache } else { Reason::UnknownEndpoint }
        })?;
        if request.content_encoding.is_some() {
            return Err(Reason::BodyCompressed);
        }
        let preparing = Preparing {
            pool: Arc::clone(pool),
            endpoint,
            body: request.body.clone(),
            is_complete: request.complete,
            content_length: request.content_length,
            until: deadline,
        };
        if request.body.len() <= self.inline_bytes {
            return preparing.run();
        }
        self.workers.run(deadline, move || preparing.run()).await?
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

/// A body to be turned into tokens.
struct Preparing {
    pool: Arc<Pool>,
    endpoint: Endpoint,
    body: Bytes,
    is_complete: bool,
    content_length: Option<u64>,
    until: Instant,
}

impl Preparing {
    fn run(&self) -> Result<Prompt, Reason> {
        let started = Instant::now();
        let renderers = self.pool.renderers();
        let model = renderers.model();
        let key = model.repeats().key(self.endpoint, &self.body).filter(|_| self.is_complete);
        if let Some(made) = key.and_then(|key| model.repeats().get(key)) {
            return Ok(self.prompt(made, true, true, started.elapsed(), Duration::ZERO));
        }
        let whole = self.is_complete.then(|| model.read(self.endpoint, &self.body));
        let (mut ask, is_whole_body) = match whole {
            // A body may end early although nothing says so.
            None | Some(Err(BodyError::Cut)) => {
                let of_no_use = if self.is_complete { Reason::BodyMalformed } else { Reason::BodyCut };
                (partial::parse(self.endpoint, &self.body).map_err(|_| of_no_use)?, false)
            }
            Some(ask) => (ask?, true),
        };
        // Engines may tell of another context later.
        let keeps = is_whole_body && !ask.goes_by_context();
        if let Some(context) = self.pool.known_context() {
            ask.set_context(context as usize);
        }
        let parsed = Instant::now();
        let tokens = model.tokens(&ask, &|| Instant::now() >= self.until)?;
        let made = Arc::new(prompt::Prompt {
            tokens,
            media: ask.media,
            identity_is_known: ask.identity_is_known,
            takes_tokens: ask.takes_tokens,
            model: ask.model,
            cache_salt: ask.cache_salt,
        });
        if let Some(key) = key.filter(|_| keeps) {
            model.repeats().keep(key, &made);
        }
        Ok(self.prompt(made, false, is_whole_body, parsed - started, parsed.elapsed()))
    }

    fn prompt(
        &self,
        made: Arc<prompt::Prompt>,
        is_repeat: bool,
        is_whole_body: bool,
        parse: Duration,
        tokenize: Duration,
    ) -> Prompt {
        let tokens = &made.tokens;
        let known = match (tokens.is_whole, made.identity_is_known) {
            (true, _) => Known::Whole,
            (false, true) => Known::Beginning,
            (false, false) => Known::Unsure,
        };
        let total = if tokens.is_whole { tokens.total } else { self.estimate(tokens.total) };
        Prompt { total, known, is_repeat, is_whole_body, parse, tokenize, made }
    }

    /// The tokens of the whole prompt, by those that are known of it.
    fn estimate(&self, known: usize) -> usize {
        let body_bytes = self.content_length.unwrap_or(0).max(self.body.len() as u64);
        let by_length = claimed_tokens(&self.pool, body_bytes);
        // At least one more, so that all known blocks may count as cached.
        by_length.max(known + 1)
    }
}

/// The tokens of a body of which only the length is known. A client may claim any length: an engine takes no more than
/// its context.
fn claimed_tokens(pool: &Pool, body_bytes: u64) -> usize {
    let tokens = usize::try_from(body_bytes).unwrap_or(usize::MAX) / BYTES_PER_TOKEN;
    tokens.min(pool.context_tokens() as usize)
}

/// Stands for the session of a body that was cut, where the client names none: what its conversation begins with. A
/// power of two of bytes, as the place of the cut differs a little from turn to turn.
fn session_of_beginning(body: &[u8]) -> Option<u64> {
    let length = 1_usize << body.len().checked_ilog2()?;
    body.get(..length).map(RoutingRequest::session_of)
}

/// Looks the prompt up, scores all ranks and, with `book`, books the choice in the same critical section.
fn choose(
    pool: &Arc<Pool>,
    request: &RoutingRequest,
    prompt: Result<Prompt, Reason>,
    book: bool,
) -> Decision {
    let started = Instant::now();
    let (tokens, media, root, prompt_tokens) = match &prompt {
        Ok(prompt) => {
            let made = &prompt.made;
            let root = pool.root(made.model.as_deref(), made.cache_salt.as_deref());
            (Some(&made.tokens.ids[..]), &made.media[..], root, prompt.total)
        }
        Err(_) => {
            let body_bytes = request.content_length.unwrap_or(request.body.len() as u64);
            (None, &[][..], pool.key.plain_root(), claimed_tokens(pool, body_bytes))
        }
    };
    let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
    let found = pool.lookup(tokens, media, root, prompt_tokens, started);
    let looked_up = Instant::now();
    // Without an id the end would never be told: then nothing is booked.
    let book = book && request.id.is_some();
    let is_cut = match &prompt {
        Ok(prompt) => !prompt.is_whole_body,
        Err(reason) => !request.complete || *reason == Reason::BodyCut,
    };
    let beginning = || session_of_beginning(&request.body).filter(|_| is_cut);
    let ask = Ask {
        id: request.id.unwrap_or(RequestId(0)),
        prompt: found.prompt,
        session: request.session.or_else(beginning),
    };
    let choice = {
        let mut scheduler = pool.scheduler.lock();
        if book {
            scheduler.book(&ask, &found.candidates, looked_up)
        } else {
            scheduler.choose(&ask, &found.candidates, looked_up)
        }
    };
    let made = prompt.as_ref().ok().map(|prompt| (prompt.is_repeat, prompt.parse, prompt.tokenize));
    let mut decision =
        Decision::chosen(pool, prompt.map(|prompt| (prompt.made, prompt.known)), choice, found.streams);
    decision.servers = found.servers;
    decision.ranks = found.ranks;
    if let Some((is_repeat, parse, tokenize)) = made {
        decision.is_repeat = is_repeat;
        decision.stages.parse = parse;
        decision.stages.tokenize = tokenize;
    }
    decision.stages.lookup = looked_up - started;
    decision.stages.choice = looked_up.elapsed();
    decision
}
