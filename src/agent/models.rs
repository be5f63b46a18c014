//! What the engines say of their models: the LoRA adapters that requests may name, and the longest prompt.
//!
//! Without the former the first request for an adapter that no event has named yet would be credited with the base model's
//! blocks.

use crate::{
    client,
    config::{Config, HostPort},
    pool::Pool,
};
use serde_json::Value;
use std::{sync::Arc, time::Duration};

/// Adapters are loaded by hand, and events name them too.
const INTERVAL: Duration = Duration::from_secs(60);

/// While an engine starts it does not answer.
const RETRY: Duration = Duration::from_secs(5);

/// An engine that hangs must not hold up what the others say.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The replicas of each pool that can be asked.
#[derive(Debug)]
pub(super) struct ModelLists(Vec<(Arc<Pool>, HostPort)>);

impl ModelLists {
    pub(super) fn new(config: &Config, pools: &[Arc<Pool>]) -> Self {
        let of_pool = |(config, pool): (&crate::config::Pool, &Arc<Pool>)| {
            let addresses = config.replicas.iter().filter_map(|replica| replica.http.clone());
            addresses.map(|address| (Arc::clone(pool), address)).collect::<Vec<_>>()
        };
        Self(config.pools.iter().zip(pools).flat_map(of_pool).collect())
    }

    /// Asks all replicas again and again, at once, for as long as it is polled.
    pub(super) async fn follow(self) {
        let mut asking = tokio::task::JoinSet::new();
        for (pool, address) in self.0 {
            asking.spawn(async move {
                loop {
                    let answered = ask(&pool, address.as_str()).await;
                    tokio::time::sleep(if answered { INTERVAL } else { RETRY }).await;
                }
            });
        }
        while asking.join_next().await.is_some() {}
    }
}

/// Asks one replica; returns whether it answered.
async fn ask(pool: &Pool, address: &str) -> bool {
    match tokio::time::timeout(TIMEOUT, client::get(address, "/v1/models")).await {
        Ok(Ok(answer)) if answer.status == 200 => {
            let list: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
            adapters(&list).for_each(|name| pool.adapters.learn(name));
            longest_prompts(&list).for_each(|tokens| pool.learn_context(tokens));
            true
        }
        _ => false,
    }
}

/// The models of vLLM's `ModelList`.
fn models(list: &Value) -> impl Iterator<Item = &Value> {
    list.get("data").and_then(Value::as_array).into_iter().flatten()
}

/// Those that have a parent (vLLM `ModelCard.parent`).
fn adapters(list: &Value) -> impl Iterator<Item = &str> {
    models(list).filter_map(|model| {
        let parent = model.get("parent")?.as_str()?;
        model.get("id")?.as_str().filter(|id| *id != parent)
    })
}

/// vLLM `ModelCard.max_model_len`, which adapters do not have.
fn longest_prompts(list: &Value) -> impl Iterator<Item = u32> {
    models(list).filter_map(|model| u32::try_from(model.get("max_model_len")?.as_u64()?).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_adapters_are_the_models_with_a_parent() {
        let list = json!({ "object": "list", "data": [
            { "id": "qwen3", "parent": null, "max_model_len": 40_960 },
            { "id": "sql", "parent": "qwen3", "max_model_len": null },
            { "id": 7, "max_model_len": -1 },
            { "id": "odd", "max_model_len": 1_u64 << 40 },
        ] });
        assert_eq!(adapters(&list).collect::<Vec<_>>(), ["sql"]);
        assert_eq!(longest_prompts(&list).collect::<Vec<_>>(), [40_960]);
        assert_eq!(models(&Value::Null).count(), 0);
    }
}
