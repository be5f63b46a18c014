//! What makes the pool's prompts. It is replaced while requests are decided: each keeps what it began with.
//!
//! Mostly that is one model. While a fleet changes from one template to the next, replicas of both are there, and a
//! request is rendered for each.

use super::Pool;
use crate::{
    config,
    prompt::{CacheStats, Fingerprint, Model, ModelError, ModelOptions},
    units::Revision,
};
use parking_lot::Mutex;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// What makes the pool's prompts at one moment.
#[derive(Debug)]
pub struct Renderers {
    /// The pool's own comes first.
    all: Vec<Renderer>,
    /// Of models that were replaced, so that counters go on.
    past: CacheStats,
}

#[derive(Debug)]
struct Renderer {
    revision: Revision,
    model: Arc<Model>,
    source: Source,
}

/// What a model was loaded from. An equal source makes an equal model.
#[derive(PartialEq, Debug)]
struct Source {
    dir: Option<PathBuf>,
    files: Fingerprint,
    rendering: config::Rendering,
    cache_bytes: usize,
}

/// The names of revisions by their numbers, which are never given to another name: bookings and ranks outlive renderers.
#[derive(Debug, Default)]
pub(super) struct Revisions(Mutex<Vec<String>>);

/// The old renderers are freed once no decision has them, which is to be the case after its deadline. It is no fault if
/// this is not waited for: then a decision frees them.
const RETIRES_WITHIN: Duration = Duration::from_secs(10);
const RETIRE_POLL: Duration = Duration::from_millis(10);

impl Revisions {
    fn number(&self, name: &str) -> Revision {
        let mut names = self.0.lock();
        let at = names.iter().position(|known| known == name).unwrap_or_else(|| {
            names.push(name.to_owned());
            names.len() - 1
        });
        // 0 is the pool's own.
        Revision(u32::try_from(at + 1).unwrap_or(u32::MAX))
    }
}

impl Source {
    fn load(&self, pool: &str) -> Result<Arc<Model>, ModelError> {
        let options = ModelOptions { cache_bytes: self.cache_bytes, ..ModelOptions::from(&self.rendering) };
        let model = match &self.dir {
            Some(dir) => Model::load_with(dir, options)?,
            None => Model::embedded_with(options)?,
        };
        if let Some(renderer) = model.native_renderer() {
            tracing::warn!(
                pool,
                renderer,
                "vLLM makes this model's prompts by code of its own, which is not done here: chats are routed by load alone"
            );
        }
        Ok(Arc::new(model))
    }
}

impl Renderers {
    fn load(pool: &config::Pool, revisions: &Revisions, before: Option<&Self>) -> Result<Self, ModelError> {
        let own = (Revision(0), pool.model_dir.as_deref(), &pool.rendering);
        let others = pool.revisions.iter().map(|revision| {
            let config::Revision { name, model_dir, rendering } = revision;
            (revisions.number(name), model_dir.as_deref(), rendering)
        });
        let load = |(revision, dir, rendering): (Revision, Option<&Path>, &config::Rendering)| {
            let source = Source {
                dir: dir.map(Path::to_owned),
                files: Fingerprint::of(dir, rendering.chat_template.as_deref()),
                rendering: rendering.clone(),
                cache_bytes: pool.cache_bytes,
            };
            let same = before.into_iter().flat_map(|before| &before.all).find(|known| known.source == source);
            let model = match same {
                Some(same) => Arc::clone(&same.model),
                None => source.load(&pool.backend)?,
            };
            Ok(Renderer { revision, model, source })
        };
        let all = std::iter::once(own).chain(others).map(load).collect::<Result<_, _>>()?;
        Ok(Self { all, past: CacheStats::default() })
    }

    /// The first renderers of a pool.
    pub(super) fn first(pool: &config::Pool, revisions: &Revisions) -> Result<Self, ModelError> {
        Self::load(pool, revisions, None)
    }

    /// Renders and tokenizes as the engines of a revision do; `None` where the configuration names it no more.
    #[must_use]
    pub fn of(&self, revision: Revision) -> Option<&Arc<Model>> {
        self.all.iter().find(|renderer| renderer.revision == revision).map(|renderer| &renderer.model)
    }

    /// Whether both render with the same models, and each for the same revision.
    #[must_use]
    pub fn is_same_as(&self, other: &Self) -> bool {
        let one = |renderer: &Renderer| (renderer.revision, Arc::as_ptr(&renderer.model));
        self.all.iter().map(one).eq(other.all.iter().map(one))
    }

    /// Whether a request may bring a chat template of its own, which may be much work however short it is.
    #[must_use]
    pub fn take_templates(&self) -> bool {
        self.models().any(|model| model.takes_request_templates())
    }

    fn models(&self) -> impl Iterator<Item = &Arc<Model>> {
        self.all.iter().map(|renderer| &renderer.model)
    }

    fn has(&self, model: &Arc<Model>) -> bool {
        self.models().any(|known| Arc::ptr_eq(known, model))
    }

    /// What is kept of tokenized pieces, counted on from models that were replaced.
    #[must_use]
    pub fn cache_stats(&self) -> CacheStats {
        self.models().filter_map(|model| model.cache_stats()).fold(self.past, |sum, one| sum + one)
    }

    /// The memory of all that is kept of earlier requests, in bytes.
    #[must_use]
    pub fn cache_bytes(&self) -> usize {
        self.models().map(|model| model.cache_bytes()).sum()
    }
}

impl Pool {
    /// What makes the prompts now. A decision takes it once.
    #[must_use]
    pub fn renderers(&self) -> Arc<Renderers> {
        self.renderers.load_full()
    }

    /// The number of a revision by its name; the pool's own without one.
    pub(super) fn revision(&self, name: Option<&str>) -> Revision {
        name.map_or(Revision(0), |name| self.revisions.number(name))
    }

    /// Loads what the pool is to render with by another configuration, or by other files at the same place: for
    /// [`Self::use_renderers`]. What has not changed is taken over with all that it has cached. Takes a second for a
    /// large vocabulary, and its memory once more for as long as both are there: not for a thread that serves.
    ///
    /// # Errors
    /// A model directory can't be used. Nothing has changed then.
    pub fn load_renderers(&self, pool: &config::Pool) -> Result<Renderers, ModelError> {
        Renderers::load(pool, &self.revisions, Some(&self.renderers()))
    }

    /// Makes the prompts of all requests from now on by these. Those under way keep what they began with.
    pub fn use_renderers(&self, mut renderers: Renderers) -> Replaced {
        let before = self.renderers();
        let replaced = before.models().filter(|model| !renderers.has(model));
        renderers.past =
            replaced.filter_map(|model| model.cache_stats()).fold(before.past, |sum, one| sum + one);
        renderers.past.bytes = 0;
        Replaced(self.renderers.swap(Arc::new(renderers)))
    }
}

/// What made prompts before, and may still do so for requests under way.
#[derive(Debug)]
#[must_use = "some hundred megabytes are to be freed"]
pub struct Replaced(Arc<Renderers>);

impl Replaced {
    /// Frees it once no request has it, so that none of them has to: not for a thread that serves.
    pub fn free(self) {
        let until = Instant::now() + RETIRES_WITHIN;
        while Arc::strong_count(&self.0) > 1 && Instant::now() < until {
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

    fn config() -> config::Pool {
        config::Pool {
            backend: "be".to_owned(),
            cache_bytes: testing::CACHE_BYTES,
            ..config::Pool::default()
        }
    }

    fn own(pool: &Pool) -> Arc<Model> {
        Arc::clone(pool.renderers().of(Revision(0)).expect("the own"))
    }

    fn with_template(path: &std::path::Path) -> config::Pool {
        let rendering =
            config::Rendering { chat_template: Some(path.to_owned()), ..config::Rendering::default() };
        config::Pool { rendering, ..config() }
    }

    #[test]
    fn what_has_not_changed_is_taken_over_and_what_has_is_loaded_anew() {
        let pool = testing::pool(1, 1);
        let same = pool.load_renderers(&config()).expect("a model");
        assert!(Arc::ptr_eq(same.of(Revision(0)).expect("the own"), &own(&pool)));
        let dir = tempfile::tempdir().expect("a directory");
        let config = with_template(&dir.path().join("t.jinja"));
        assert!(pool.load_renderers(&config).is_err(), "there is no such file");
        for (text, expected) in [("{{ messages[0].content }}", true), ("one {{ 1 + 1 }}", false)] {
            std::fs::write(dir.path().join("t.jinja"), text).expect("a file");
            let before = pool.renderers();
            let renderers = pool.load_renderers(&config).expect("a model");
            assert!(!Arc::ptr_eq(
                renderers.of(Revision(0)).expect("the own"),
                before.of(Revision(0)).expect("the own")
            ));
            drop(before);
            pool.use_renderers(renderers).free();
            let ids = own(&pool).tokenize_text("Hi").expect("tokens");
            assert_eq!(tokens(&own(&pool)) == ids.len(), expected, "{text}");
        }
    }

    #[test]
    fn a_decision_under_way_keeps_its_renderers_and_the_last_of_them_is_freed_by_who_replaces_them() {
        let pool = testing::pool(1, 1);
        let begun = pool.renderers();
        let model = |renderers: &Renderers| Arc::downgrade(renderers.of(Revision(0)).expect("the own"));
        let old = model(&begun);
        let expected = tokens(begun.of(Revision(0)).expect("the own"));
        let template = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(template.path(), "x").expect("a file");
        let renderers = pool.load_renderers(&with_template(template.path())).expect("a model");
        std::thread::scope(|scope| {
            let replacing = scope.spawn(|| pool.use_renderers(renderers).free());
            while model(&pool.renderers()).ptr_eq(&old) {
                std::thread::yield_now();
            }
            assert_eq!(tokens(begun.of(Revision(0)).expect("the own")), expected);
            assert!(!replacing.is_finished());
            drop(begun);
        });
        assert_eq!(old.strong_count(), 0);
    }

    #[test]
    fn counters_go_on_over_a_reload() {
        let pool = testing::pool(1, 1);
        let misses = |pool: &Pool| pool.renderers().cache_stats().misses;
        let long = "word ".repeat(100);
        own(&pool).tokenize_text(&long).expect("tokens");
        let before = misses(&pool);
        assert!(before > 0);
        let template = tempfile::NamedTempFile::new().expect("a file");
        pool.use_renderers(pool.load_renderers(&with_template(template.path())).expect("a model")).free();
        assert_eq!(misses(&pool), before);
        own(&pool).tokenize_text(&long).expect("tokens");
        assert_eq!(misses(&pool), 2 * before);
    }
}
