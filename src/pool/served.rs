//! Whether the replicas serve the model whose tokenizer and template the pool has.

use super::{Pool, ServerRanks};
use crate::replica::ServedModel;
use std::sync::atomic::Ordering;

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
