//! What the replicas serve: whether it is the model whose tokenizer and template the pool has, and by which names.

use super::{Pool, ServerRanks};
use crate::replica::ServedModel;
use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use std::{
    collections::HashSet,
    sync::{Arc, atomic::Ordering},
};

/// The names by which requests may ask for a model of the pool; of no use while a replica has not told its own.
#[derive(Debug, Default)]
pub(super) struct ServedNames {
    all: ArcSwapOption<HashSet<String>>,
    /// Held by who gathers them: else an older list could come last.
    gathering: Mutex<()>,
}

/// Who answers 404 to every other name.
const STRICT_OWNER: &str = "vllm";

impl ServerRanks {
    /// Whether the replica serves another model than the pool's.
    #[must_use]
    pub fn serves_other_model(&self) -> bool {
        self.other_model.load(Ordering::Relaxed)
    }
}

impl Pool {
    /// Takes in what a replica serves: its LoRA adapters, its longest prompt, and whether it is the pool's model. Without
    /// the adapters, the first request for one that no event has named yet would be credited with the base model's blocks.
    pub fn take_models(&self, server: &str, models: &[ServedModel]) {
        for model in models {
            if model.parent.is_some() {
                self.adapters.learn(&model.id);
            }
            if let Some(tokens) = model.max_model_len {
                self.learn_context(tokens);
            }
        }
        let ranks = self.ranks();
        let base: Vec<&ServedModel> = models.iter().filter(|model| model.parent.is_none()).collect();
        let (Some(of_pool), Some(first)) =
            (ranks.servers().find(|of_pool| *of_pool.name == *server), base.first())
        else {
            return;
        };
        let is_strict = models.iter().all(|model| model.owned_by.as_deref() == Some(STRICT_OWNER));
        let names = is_strict.then(|| models.iter().map(|model| model.id.clone()).collect::<Vec<_>>());
        if of_pool.names.load().as_deref() != names.as_ref() {
            of_pool.names.store(names.map(Arc::new));
            self.gather_names();
        }
        let expected = self.served.lock().get_or_insert_with(|| name(first).to_owned()).clone();
        let is_other = !base.iter().any(|model| serves(model, &expected));
        of_pool.metrics.other_model.set(f64::from(u8::from(is_other)));
        let was_other = of_pool.other_model.swap(is_other, Ordering::Relaxed);
        if is_other && !was_other {
            tracing::warn!(
                pool = self.backend,
                server,
                serves = first.id,
                expected,
                "the replica serves another model than the pool's: no prompt will match it (is pool.model right?)"
            );
        }
    }
}

impl Pool {
    /// Whether an engine may know the model that a request names: one of a list, an adapter that events or the configuration
    /// name, or any while not all replicas have told theirs.
    #[must_use]
    pub fn may_serve(&self, model: Option<&str>) -> bool {
        // The first one is meant.
        let Some(model) = model.filter(|model| !model.is_empty()) else { return true };
        self.names.all.load().as_ref().is_none_or(|names| names.contains(model))
            || self.adapters.contains(model)
    }

    /// Takes the names of all replicas together, when one of them has told others, or come or gone.
    pub(super) fn gather_names(&self) {
        let _gathering = self.names.gathering.lock();
        let ranks = self.ranks();
        let lists: Option<Vec<_>> = ranks.servers().map(|server| server.names.load_full()).collect();
        let names = lists.filter(|lists| !lists.is_empty());
        let names = names.map(|lists| lists.iter().flat_map(|list| list.iter().cloned()).collect());
        self.names.all.store(names.map(Arc::new));
    }
}

/// What the model is: rather where it comes from than how it is called here.
fn name(model: &ServedModel) -> &str {
    model.root.as_deref().unwrap_or(&model.id)
}

/// By its name or its origin; of a folder or a hub's name the last part counts, in whatever case.
fn serves(model: &ServedModel, expected: &str) -> bool {
    let last =
        |path: &str| path.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
    let names = [Some(model.id.as_str()), model.root.as_deref()];
    names.into_iter().flatten().any(|name| name == expected || last(name) == last(expected))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config,
        hash::HashKey,
        pool::testing,
        replica::parse_models,
        select::{Policy, Scheduler, SchedulerConfig},
    };
    use std::time::{Duration, Instant};

    fn list(models: &[(&str, &str)]) -> Vec<ServedModel> {
        let model = |(id, root): &(&str, &str)| format!(r#"{{"id":"{id}","root":"{root}","parent":null}}"#);
        let models: Vec<String> = models.iter().map(model).collect();
        parse_models(format!(r#"{{"data":[{}]}}"#, models.join(",")).as_bytes())
    }

    fn others(pool: &Pool) -> Vec<String> {
        let ranks = pool.ranks();
        let others = ranks.servers().filter(|server| server.serves_other_model());
        others.map(|server| server.name.to_string()).collect()
    }

    #[test]
    fn without_a_name_the_first_replica_tells_what_all_must_serve() {
        let pool = testing::pool(1, 3);
        pool.take_models("s1", &list(&[("chat", "Qwen/Qwen3-8B")]));
        pool.take_models("s2", &list(&[("other-name", "/models/qwen3-8b/")]));
        pool.take_models("s3", &list(&[("chat", "/models/llama")]));
        assert_eq!(others(&pool), ["s3"]);
        pool.take_models("s3", &list(&[("chat", "Qwen/Qwen3-8B")]));
        pool.take_models("s1", &[]);
        assert_eq!(others(&pool), Vec::<String>::new(), "an empty list tells nothing");
        pool.take_models("s1", &list(&[("chat", "Qwen/Qwen3-14B")]));
        assert_eq!(others(&pool), ["s1"]);
    }

    #[test]
    fn a_model_that_no_replica_lists_is_unknown_once_all_have_told() {
        let pool = testing::pool(1, 2);
        let told = |ids: &[&str], owner: &str| {
            let model = |id: &&str| format!(r#"{{"id":"{id}","owned_by":"{owner}"}}"#);
            let models: Vec<String> = ids.iter().map(model).collect();
            parse_models(format!(r#"{{"data":[{}]}}"#, models.join(",")).as_bytes())
        };
        let known = |names: [&str; 3]| names.map(|name| pool.may_serve(Some(name)));
        pool.take_models("s1", &told(&["chat", "chat-2"], "vllm"));
        assert_eq!(known(["chat", "sql", "none"]), [true; 3], "s2 may serve anything");
        pool.take_models("s2", &told(&["chat"], "vllm"));
        assert_eq!(known(["chat", "chat-2", "none"]), [true, true, false]);
        assert!(pool.may_serve(None) && pool.may_serve(Some("")));
        pool.adapters.learn("sql");
        assert_eq!(known(["chat", "sql", "none"]), [true, true, false]);
        pool.take_models("s2", &told(&["chat", "new"], "vllm"));
        assert_eq!(known(["chat", "new", "none"]), [true, true, false]);
        pool.leave("s1");
        assert_eq!(known(["chat", "chat-2", "none"]), [true, false, false]);
        pool.take_models("s2", &told(&["chat"], "sglang"));
        assert_eq!(known(["chat", "chat-2", "none"]), [true; 3], "such an engine takes any name");
        pool.take_models("s2", &told(&["chat"], "vllm"));
        let third = config::Replica {
            server: "s3".to_owned(),
            ranks: vec![config::Rank::default()],
            ..config::Replica::default()
        };
        pool.join(&third, Instant::now()).expect("room");
        assert_eq!(known(["chat", "chat-2", "none"]), [true; 3], "s3 has not told");
    }

    #[test]
    fn a_configured_name_is_one_of_those_under_which_the_model_is_served() {
        let config = config::Pool { model: Some("chat".to_owned()), ..config::Pool::default() };
        let scheduler = Scheduler::new(Policy::default(), SchedulerConfig::default(), 1);
        let second = Duration::from_secs(1);
        let pool =
            Pool::new(&config, &HashKey::from_seed(1), 1 << 20, scheduler, second, second).expect("a model");
        let replica = config::Replica {
            server: "s1".to_owned(),
            ranks: vec![config::Rank::default()],
            ..config::Replica::default()
        };
        pool.join(&replica, Instant::now()).expect("room");
        pool.take_models("s1", &list(&[("first", "/m/x"), ("chat", "/m/x")]));
        assert_eq!(others(&pool), Vec::<String>::new());
        pool.take_models("s1", &list(&[("first", "/m/x")]));
        assert_eq!(others(&pool), ["s1"]);
        pool.leave("s1");
        assert_eq!(others(&pool), Vec::<String>::new());
    }
}
