//! What makes the pool's prompts. It is replaced while requests are decided: each keeps the one it began with.

use super::Pool;
use crate::{
    config,
    prompt::{CacheStats, Fingerprint, Model, ModelError, ModelOptions},
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// What makes the pool's prompts at one moment.
#[derive(Debug)]
pub struct Renderers {
    model: Arc<Model>,
    source: Source,
    /// Of models that were replaced, so that counters go on.
    past: CacheStats,
}

/// What a model was loaded from. An equal source makes an equal model.
#[derive(PartialEq, Debug)]
struct Source {
    files: Fingerprint,
    rendering: config::Rendering,
}

/// The old renderers are freed once no decision has them, which is to be the case after its deadline. It is no fault if
/// this is not waited for: then a decision frees them.
const RETIRES_WITHIN: Duration = Duration::from_secs(10);
const RETIRE_POLL: Duration = Duration::from_millis(10);

impl Renderers {
    fn load(pool: &config::Pool, before: Option<&Self>) -> Result<Self, ModelError> {
        let options = ModelOptions::from(&pool.rendering);
        let dir = pool.model_dir.as_deref();
        let files = Fingerprint::of(dir, &options);
        let source = Source { files, rendering: pool.rendering.clone() };
        if let Some(before) = before.filter(|before| before.source == source) {
            return Ok(Self { model: Arc::clone(&before.model), source, past: before.past });
        }
        let model = match dir {
            Some(dir) => Model::load_with(dir, options)?,
            None => Model::embedded_with(options)?,
        };
        if let Some(renderer) = model.native_renderer() {
            tracing::warn!(
                pool = pool.backend,
                renderer,
                "vLLM makes this model's prompts by code of its own, which is not done here: chats are routed by load alone"
            );
        }
        let past = before.and_then(Self::cache_stats).unwrap_or_default();
        Ok(Self { model: Arc::new(model), source, past: CacheStats { bytes: 0, ..past } })
    }

    /// The first renderers of a pool.
    pub(super) fn first(pool: &config::Pool) -> Result<Self, ModelError> {
        Self::load(pool, None)
    }

    /// Renders and tokenizes as the pool's engines do.
    #[must_use]
    pub const fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// What is kept of tokenized pieces, counted on from models that were replaced; `None` if the tokenizer is of a kind
    /// that cannot be cached.
    #[must_use]
    pub fn cache_stats(&self) -> Option<CacheStats> {
        Some(self.past + self.model.cache_stats()?)
    }

    /// The memory of all that is kept of earlier requests, in bytes.
    #[must_use]
    pub fn cache_bytes(&self) -> usize {
        self.model.cache_bytes()
    }
}

impl Pool {
    /// What makes the prompts now. A decision takes it once.
    #[must_use]
    pub fn renderers(&self) -> Arc<Renderers> {
        self.renderers.load_full()
    }

    /// Loads what the pool is to render with by another configuration, or by other files at the same place: for
    /// [`Self::use_renderers`]. What has not changed is taken over with all that it has cached. Takes a second for a
    /// large vocabulary, and its memory once more for as long as both are there: not for a thread that serves.
    ///
    /// # Errors
    /// The model directory can't be used. Nothing has changed then.
    pub fn load_renderers(&self, pool: &config::Pool) -> Result<Renderers, ModelError> {
        Renderers::load(pool, Some(&self.renderers()))
    }

    /// Makes the prompts of all requests from now on by these. Those under way keep what they began with; this waits for
    /// them, so that some hundred megabytes are freed here and not by one of them: not for a thread that serves.
    pub fn use_renderers(&self, renderers: Renderers) {
        let old = self.renderers.swap(Arc::new(renderers));
        let until = Instant::now() + RETIRES_WITHIN;
        while Arc::strong_count(&old) > 1 && Instant::now() < until {
            std::thread::sleep(RETIRE_POLL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{pool::testing, request::Endpoint};

    const BODY: &[u8] = br#"{"messages": [{"role": "user", "content": "Hi"}]}"#;

    fn tokens(model: &Model) -> usize {
        let ask = model.read(Endpoint::ChatCompletions, BODY).expect("a body");
        model.tokenize(&ask.prompt).expect("tokens").len()
    }

    fn with_template(path: &std::path::Path) -> config::Pool {
        let rendering =
            config::Rendering { chat_template: Some(path.to_owned()), ..config::Rendering::default() };
        config::Pool { backend: "be".to_owned(), rendering, ..config::Pool::default() }
    }

    #[test]
    fn what_has_not_changed_is_taken_over_and_what_has_is_loaded_anew() {
        let pool = testing::pool(1, 1);
        let same = pool.load_renderers(&config::Pool::default()).expect("a model");
        assert!(Arc::ptr_eq(same.model(), pool.renderers().model()));
        let dir = tempfile::tempdir().expect("a directory");
        let config = with_template(&dir.path().join("t.jinja"));
        assert!(pool.load_renderers(&config).is_err(), "there is no such file");
        for (text, expected) in [("{{ messages[0].content }}", true), ("one {{ 1 + 1 }}", false)] {
            std::fs::write(dir.path().join("t.jinja"), text).expect("a file");
            let before = pool.renderers();
            let renderers = pool.load_renderers(&config).expect("a model");
            assert!(!Arc::ptr_eq(renderers.model(), before.model()));
            drop(before);
            pool.use_renderers(renderers);
            let ids = pool.renderers().model().tokenize_text("Hi").expect("tokens");
            assert_eq!(tokens(pool.renderers().model()) == ids.len(), expected, "{text}");
        }
    }

    #[test]
    fn a_decision_under_way_keeps_its_renderers_and_the_last_of_them_is_freed_by_who_replaces_them() {
        let pool = testing::pool(1, 1);
        let begun_with = pool.renderers();
        let (old, expected) = (Arc::downgrade(begun_with.model()), tokens(begun_with.model()));
        let template = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(template.path(), "x").expect("a file");
        let renderers = pool.load_renderers(&with_template(template.path())).expect("a model");
        std::thread::scope(|scope| {
            let replacing = scope.spawn(|| pool.use_renderers(renderers));
            while Arc::ptr_eq(pool.renderers().model(), begun_with.model()) {
                std::thread::yield_now();
            }
            assert_eq!(tokens(begun_with.model()), expected);
            assert!(!replacing.is_finished());
            drop(begun_with);
        });
        assert_eq!(old.strong_count(), 0);
    }

    #[test]
    fn counters_go_on_over_a_reload() {
        let pool = testing::pool(1, 1);
        let misses = |pool: &Pool| pool.renderers().cache_stats().expect("a cache").misses;
        let long = "word ".repeat(100);
        pool.renderers().model().tokenize_text(&long).expect("tokens");
        let before = misses(&pool);
        assert!(before > 0);
        let template = tempfile::NamedTempFile::new().expect("a file");
        pool.use_renderers(pool.load_renderers(&with_template(template.path())).expect("a model"));
        assert_eq!(misses(&pool), before);
        pool.renderers().model().tokenize_text(&long).expect("tokens");
        assert_eq!(misses(&pool), 2 * before);
    }
}
