//! All the I/O: asks everybody, and judges nothing.

mod agent;
mod haproxy;
mod pool;
mod question;
mod replica;
mod state;
mod stream;
mod through;

pub(super) use state::{agent_pages, haproxy_answers, machine};

use super::{DoctorArgs, facts::Facts};
use crate::{
    client::{Access, AccessError},
    config::{self, Config},
    prompt::{Model, ModelError, ModelOptions},
};
use std::{collections::HashMap, io::IsTerminal, path::Path, sync::Arc};

/// Why nothing can be gathered: the configuration names what cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unusable {
    /// A model.
    #[error("pool {pool}: model_dir: {source}")]
    Model { pool: String, source: ModelError },
    /// Certificates or a key.
    #[error("pool {pool}: http: {source}")]
    Access { pool: String, source: AccessError },
}

/// What is needed to ask the replicas of one pool.
#[derive(Clone, Debug)]
struct Means {
    pool: Arc<config::Pool>,
    /// By the names of their revisions; the pool's own without one.
    models: Arc<HashMap<Option<String>, Arc<Model>>>,
    access: Access,
    /// The agent's admin port, if it answers.
    admin: Option<String>,
    /// Whether a request may be sent to each rank.
    asks: bool,
}

/// Everything that a configuration names.
pub(super) async fn all(config: &Config, args: &DoctorArgs) -> Result<Facts, Unusable> {
    let mut agent = agent::facts(config).await;
    let haproxy = match &config.haproxy.socket {
        Some(socket) => Some(haproxy::facts(socket).await),
        None => None,
    };
    let cfg = (!args.haproxy_cfg.is_empty()).then(|| haproxy::cfg(&args.haproxy_cfg));
    let mut pools = Vec::new();
    let mut through = None;
    for pool in &config.pools {
        let unusable = |source| Unusable::Access { pool: pool.backend.clone(), source };
        let means = Means {
            access: Access::load(&pool.http).map_err(unusable)?,
            models: Arc::new(models(pool)?),
            pool: Arc::new(pool.clone()),
            admin: agent.samples.is_ok().then(|| agent.admin.clone()),
            asks: !args.passive,
        };
        progress(&format!("asking the replicas of {} …", pool.backend));
        pools.push(pool::facts(&means, config.haproxy.socket.as_ref(), agent.readiness.as_ref()).await);
        if through.is_none()
            && let Some(url) = &args.through
        {
            progress(&format!("sending a request through {url} …"));
            through = Some(through::facts(&means, url).await);
        }
    }
    // With what our own requests have moved.
    agent::refresh(&mut agent).await;
    Ok(Facts { agent, haproxy, cfg, pools, through })
}

/// Busy engines may take their time. Only for who watches: the report stands on standard output.
fn progress(what: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("{what}");
    }
}

impl Means {
    /// Renders and tokenizes as the replicas of a revision do. The configuration has been checked: there is one.
    fn model(&self, revision: Option<&String>) -> Option<&Arc<Model>> {
        self.models.get(&revision.cloned())
    }
}

fn models(pool: &config::Pool) -> Result<HashMap<Option<String>, Arc<Model>>, Unusable> {
    let own = (None, pool.model_dir.as_deref(), &pool.rendering);
    let others = pool.revisions.iter().map(|revision| {
        let config::Revision { name, model_dir, rendering } = revision;
        (Some(name.clone()), model_dir.as_deref(), rendering)
    });
    let load = |(name, dir, rendering): (Option<String>, Option<&Path>, &config::Rendering)| {
        // Some dozen short prompts are made of it.
        let options = ModelOptions { cache_bytes: 0, ..ModelOptions::from(rendering) };
        let loaded = match dir {
            Some(dir) => Model::load_with(dir, options),
            None => Model::embedded_with(options),
        };
        let loaded = loaded.map_err(|source| Unusable::Model { pool: pool.backend.clone(), source })?;
        Ok((name, Arc::new(loaded)))
    };
    std::iter::once(own).chain(others).map(load).collect()
}
