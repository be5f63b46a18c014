//! A body → the prompts that the pool's renderers make of it: mostly one.

use super::{Known, Reason, claimed_tokens};
use crate::{
    pool::{Pool, Ranks, Rendered},
    prompt::{self, Model, PromptError},
    request::{Endpoint, body::BodyError, partial},
    units::Revision,
};
use bytes::Bytes;
use smallvec::SmallVec;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// A body to be turned into tokens.
pub(super) struct Preparing {
    pub(super) pool: Arc<Pool>,
    /// Whose renderers count.
    pub(super) ranks: Arc<Ranks>,
    pub(super) endpoint: Endpoint,
    pub(super) body: Bytes,
    pub(super) is_complete: bool,
    pub(super) content_length: Option<u64>,
    /// After this no prompt is gone on with.
    pub(super) until: Instant,
}

/// A prompt as far as the choice needs it.
pub(super) struct Prompt {
    /// What is looked up.
    pub(super) made: Arc<prompt::Prompt>,
    /// Whether the body was not cut.
    pub(super) is_whole_body: bool,
    /// What the choice and its booking count with: the tokens of all prompts of the request.
    pub(super) total: usize,
    pub(super) known: Known,
    pub(super) is_repeat: bool,
    pub(super) times: Times,
}

/// What one renderer took for a prompt.
#[derive(Clone, Copy, Default)]
pub(super) struct Times {
    pub(super) parse: Duration,
    pub(super) render: Duration,
    pub(super) tokenize: Duration,
}

/// Why there is no prompt, in the words of who found out; none of them holds text of the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unprompted {
    /// The body.
    #[error(transparent)]
    Body(#[from] BodyError),
    /// What was to be made of it.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// Something else, of which the reason says all.
    #[error("{}", .0.as_str())]
    Other(Reason),
}

impl From<Reason> for Unprompted {
    fn from(reason: Reason) -> Self {
        Self::Other(reason)
    }
}

impl Unprompted {
    fn reason(self) -> Reason {
        match self {
            Self::Body(error) => error.into(),
            Self::Prompt(error) => error.into(),
            Self::Other(reason) => reason,
        }
    }

    /// Whether it tells more than its reason.
    const fn tells_more(self) -> bool {
        !matches!(self, Self::Other(_))
    }
}

/// The prompts of one body by what made them, or why there is none.
pub(super) struct Prompts(SmallVec<[(Revision, Result<Prompt, Unprompted>); 1]>);

impl Prompts {
    /// The prompt of the replicas of a revision.
    pub(super) fn of(&self, revision: Revision) -> Result<&Prompt, Reason> {
        let found = self.0.iter().find(|(known, _)| *known == revision);
        // The ranks may be others since then.
        found.map_or(Err(Reason::UnknownRevision), |(_, prompt)| prompt.as_ref().map_err(|why| why.reason()))
    }

    /// All that there are.
    pub(super) fn known(&self) -> impl Iterator<Item = (Revision, &Prompt)> {
        self.0.iter().filter_map(|(revision, prompt)| Some((*revision, prompt.as_ref().ok()?)))
    }

    /// One of them, and if there is none, why.
    pub(super) fn any(&self) -> Result<&Prompt, Reason> {
        self.known()
            .next()
            .map(|(_, prompt)| prompt)
            .ok_or_else(|| self.missing().next().map_or(Reason::UnknownRevision, Unprompted::reason))
    }

    /// More of why there is none, where it is for this reason.
    pub(super) fn why(&self, reason: Reason) -> Option<Unprompted> {
        self.missing().find(|why| why.tells_more() && why.reason() == reason)
    }

    fn missing(&self) -> impl Iterator<Item = Unprompted> {
        self.0.iter().filter_map(|(_, prompt)| prompt.as_ref().err().copied())
    }

    /// As they are looked up.
    pub(super) fn rendered(&self, pool: &Pool) -> SmallVec<[Rendered<'_>; 1]> {
        let known = self.known().map(|(revision, prompt)| {
            let made = &prompt.made;
            Rendered {
                revision,
                tokens: &made.tokens.ids,
                media: &made.media,
                root: pool.root(made.model.as_deref(), made.cache_salt.as_deref()),
                prompt_tokens: u32::try_from(prompt.total).unwrap_or(u32::MAX),
            }
        });
        known.collect()
    }
}

impl Preparing {
    pub(super) fn run(&self) -> Prompts {
        let renderers = self.pool.renderers();
        let prompt = |revision: &Revision| {
            let model = renderers.of(*revision).ok_or(Reason::UnknownRevision.into());
            (*revision, model.and_then(|model| self.by(model)))
        };
        Prompts(self.ranks.revisions().iter().map(prompt).collect())
    }

    fn by(&self, model: &Model) -> Result<Prompt, Unprompted> {
        let started = Instant::now();
        let key = model.repeats().key(self.endpoint, &self.body).filter(|_| self.is_complete);
        let context = self.pool.known_context().map(|tokens| tokens as usize);
        let is_served = |name: Option<&str>| model.takes_any_model_name() || self.pool.may_serve(name);
        // Engines may have told of others since.
        let still_holds = |made: &Arc<prompt::Prompt>| {
            is_served(made.model.as_deref()) && made.limits.within(context).allow(made.tokens.ids.len())
        };
        if let Some(made) = key.and_then(|key| model.repeats().get(key)).filter(still_holds) {
            return Ok(self.prompt(made, true, true, Times { parse: started.elapsed(), ..Times::default() }));
        }
        let whole = self.is_complete.then(|| model.read(self.endpoint, &self.body));
        let (mut ask, is_whole_body) = match whole {
            // A body may end early although nothing says so.
            None | Some(Err(BodyError::Cut)) => {
                let of_no_use = if self.is_complete { Reason::BodyMalformed } else { Reason::BodyCut };
                (partial::parse(self.endpoint, &self.body).map_err(|_| Unprompted::from(of_no_use))?, false)
            }
            Some(ask) => (ask?, true),
        };
        if !is_served(ask.model.as_deref()) {
            return Err(Reason::UnknownModel.into());
        }
        // Engines may tell of another context later.
        let has_own_template = ask.has_own_template();
        let keeps = is_whole_body && !ask.limits.go_by_context() && !has_own_template;
        ask.limits = ask.limits.within(context);
        let parsed = Instant::now();
        let tokens = model.tokens(&ask, &|| Instant::now() >= self.until)?;
        let render = tokens.work.rendering;
        let times =
            Times { parse: parsed - started, render, tokenize: parsed.elapsed().saturating_sub(render) };
        let made = Arc::new(prompt::Prompt {
            tokens,
            head: ask.prompt.head(),
            media: ask.media,
            limits: ask.limits,
            // Behind the cut there may be a template.
            identity_is_known: ask.identity_is_known
                && (is_whole_body || has_own_template || !model.takes_request_templates()),
            takes_tokens: ask.takes_tokens,
            model: ask.model,
            cache_salt: ask.cache_salt,
        });
        if let Some(key) = key.filter(|_| keeps) {
            model.repeats().keep(key, &made);
        }
        Ok(self.prompt(made, false, is_whole_body, times))
    }

    fn prompt(
        &self,
        made: Arc<prompt::Prompt>,
        is_repeat: bool,
        is_whole_body: bool,
        times: Times,
    ) -> Prompt {
        let tokens = &made.tokens;
        let known = match (tokens.is_whole, made.identity_is_known) {
            (true, _) => Known::Whole,
            (false, true) => Known::Beginning,
            (false, false) => Known::Unsure,
        };
        let total = if tokens.is_whole { tokens.total } else { self.estimate(tokens.total) };
        Prompt { total, known, is_repeat, is_whole_body, times, made }
    }

    /// The tokens of the whole prompt, by those that are known of it.
    fn estimate(&self, known: usize) -> usize {
        let body_bytes = self.content_length.unwrap_or(0).max(self.body.len() as u64);
        let by_length = claimed_tokens(&self.pool, body_bytes);
        // At least one more, so that all known blocks may count as cached.
        by_length.max(known + 1)
    }
}
