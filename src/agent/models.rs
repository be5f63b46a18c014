//! What the engines say of their models: the LoRA adapters that requests may name.
//!
//! Without it the first request for an adapter that no event has named yet would be credited with the base model's
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
            adapters(&answer.body).iter().for_each(|name| pool.adapters.learn(name));
            true
        }
        _ => false,
    }
}

/// The models that have a parent (vLLM `ModelCard.parent`).
fn adapters(list: &[u8]) -> Vec<String> {
    let list: Value = serde_json::from_slice(list).unwrap_or_default();
    let models = list.get("data").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let adapter = |model: &Value| {
        let parent = model.get("parent")?.as_str()?;
        model.get("id")?.as_str().filter(|id| *id != parent).map(str::to_owned)
    };
    models.iter().filter_map(adapter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_adapters_are_the_models_with_a_parent() {
        let list = br#"{"object":"list","data":[{"id":"qwen3","parent":null},{"id":"sql","parent":"qwen3"},{"id":7}]}"#;
        assert_eq!(adapters(list), ["sql"]);
        assert!(adapters(b"not JSON").is_empty());
    }
}
