//! Requests that come again: retries, health checks, clients that ask the same thing.

use super::Tokens;
use crate::hash::MediaItem;
use crate::recent::{CacheStats, Key, Recent};
use crate::request::Endpoint;
use crate::request::limits::Limits;
use std::sync::Arc;

/// Few, so that each holds the ids of long prompts.
const SHARDS: usize = 2;

/// What one request's body came to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Prompt {
    /// The tokens.
    pub tokens: Tokens,
    /// A hash of what the conversation begins with ([`crate::request::body::PromptInput::head`]).
    pub head: u64,
    /// The media in them.
    pub media: Vec<MediaItem>,
    /// What the request says of lengths.
    pub limits: Limits,
    /// Whether nothing that was not seen can change them.
    pub identity_is_known: bool,
    /// Whether the engine could take the tokens in the prompt's place: [`crate::request::body::Ask::takes_tokens`].
    pub takes_tokens: bool,
    /// The model or LoRA adapter asked for.
    pub model: Option<String>,
    /// The request's salt.
    pub cache_salt: Option<String>,
}

/// The prompts of lately, by the whole body; bounded in bytes.
#[derive(Debug)]
pub struct Repeats(Option<Recent<Arc<Prompt>>>);

/// The name of a body.
#[derive(Clone, Copy, Debug)]
pub struct BodyKey(Key);

impl Repeats {
    pub(super) fn new(capacity_bytes: usize) -> Self {
        Self(Some(Recent::new(capacity_bytes, SHARDS)))
    }

    /// For a model whose prompts are not made from their bodies alone.
    pub(super) fn none() -> Self {
        Self(None)
    }

    /// The name of a whole body; `None` where none is ever kept.
    #[must_use]
    pub fn key(&self, endpoint: Endpoint, body: &[u8]) -> Option<BodyKey> {
        self.0.as_ref().map(|recent| BodyKey(recent.key(endpoint as u64, body)))
    }

    /// The prompt of that body, if it was made lately.
    #[must_use]
    pub fn get(&self, key: BodyKey) -> Option<Arc<Prompt>> {
        self.0.as_ref()?.get(key.0)
    }

    /// Keeps a prompt that is whole; another one depends on more than its body.
    pub fn keep(&self, key: BodyKey, prompt: &Arc<Prompt>) {
        let Some(recent) = self.0.as_ref().filter(|_| prompt.tokens.is_whole) else { return };
        let texts = [&prompt.model, &prompt.cache_salt].into_iter().flatten().map(String::capacity);
        let media = prompt.media.iter().map(|item| size_of::<MediaItem>() + item.identifier.capacity());
        let ids = prompt.tokens.ids.memory_bytes();
        let bytes = size_of::<Prompt>() + ids + texts.sum::<usize>() + media.sum::<usize>();
        recent.insert(key.0, Arc::clone(prompt), bytes);
    }

    pub(super) fn stats(&self) -> CacheStats {
        self.0.as_ref().map(Recent::stats).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::TokenId;

    fn prompt(is_whole: bool) -> Arc<Prompt> {
        let tokens = Tokens { ids: vec![TokenId(7)].into(), total: 1, is_whole, ..Tokens::default() };
        Arc::new(Prompt {
            tokens,
            head: 0,
            media: Vec::new(),
            limits: Limits::default(),
            identity_is_known: true,
            takes_tokens: true,
            model: Some("m".into()),
            cache_salt: None,
        })
    }

    #[test]
    fn a_body_is_known_again_at_its_own_endpoint() {
        let repeats = Repeats::new(1 << 20);
        let key = |endpoint, body: &str| repeats.key(endpoint, body.as_bytes()).expect("a key");
        repeats.keep(key(Endpoint::ChatCompletions, "{}"), &prompt(true));
        assert_eq!(repeats.get(key(Endpoint::ChatCompletions, "{}")), Some(prompt(true)));
        assert_eq!(repeats.get(key(Endpoint::Completions, "{}")), None);
        assert_eq!(repeats.get(key(Endpoint::ChatCompletions, "{} ")), None);
    }

    #[test]
    fn what_depends_on_more_than_the_body_is_not_kept() {
        let repeats = Repeats::new(1 << 20);
        let key = repeats.key(Endpoint::Messages, b"{}").expect("a key");
        repeats.keep(key, &prompt(false));
        assert_eq!(repeats.get(key), None);
        assert!(Repeats::none().key(Endpoint::Messages, b"{}").is_none());
    }
}
