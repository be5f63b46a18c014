//! The agent among its peers: what they tell is booked, and they are told what is booked here.

use super::AgentError;
use crate::{
    config,
    metrics::{PeerMetrics, PeersMetrics},
    peers::{self, Listener, News, Outbox, Secret, What},
    pool::Pools,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// How often peers are told which bookings are still there. They hold one for three times as long.
const RENEWAL: Duration = Duration::from_secs(10);

/// The connections to and from the peers, before they are at work.
#[derive(Debug)]
pub(super) struct Peers {
    listener: Option<Listener>,
    connect: Vec<String>,
    secret: Secret,
    outbox: Outbox,
}

/// Reads the secret that the configuration names, if it does.
pub(super) fn secret(config: &config::Peers) -> Result<Option<Secret>, AgentError> {
    let load = |path: &std::path::PathBuf| {
        Secret::load(path).map_err(|source| AgentError::Secret { path: path.clone(), source })
    };
    config.secret_file.as_ref().map(load).transpose()
}

impl Peers {
    /// Binds the listener. `None` where no peers are configured.
    ///
    /// # Errors
    /// [`AgentError::Peers`], [`AgentError::Secret`].
    pub(super) async fn start(config: &config::Peers, outbox: Outbox) -> Result<Option<Self>, AgentError> {
        let Some(secret) = secret(config)? else { return Ok(None) };
        let listener = match &config.listen {
            Some(at) => Some(Listener::bind(at.as_str()).await.map_err(AgentError::Peers)?),
            None => None,
        };
        let connect: Vec<String> = config.connect.iter().map(ToString::to_string).collect();
        Ok((listener.is_some() || !connect.is_empty()).then_some(Self { listener, connect, secret, outbox }))
    }

    /// Hears and tells until `stop`.
    pub(super) fn run(self, pools: &Arc<Pools>, tasks: &TaskTracker, stop: &CancellationToken) {
        for peer in self.connect {
            let metrics = PeerMetrics::register(&peer);
            let telling = peers::tell(peer, self.secret.clone(), self.outbox.clone(), metrics);
            tasks.spawn(stop.clone().run_until_cancelled_owned(telling));
        }
        tasks.spawn(stop.clone().run_until_cancelled_owned(renew(Arc::clone(pools))));
        let Some(listener) = self.listener else { return };
        let (pools, metrics) = (Arc::clone(pools), PeersMetrics::register());
        let not_booked = metrics.not_booked.clone();
        let on_news = move |News { pool, what }| {
            let is_booking = matches!(what, What::Booked(_));
            let is_taken = pools.of_backend(&pool).is_some_and(|pool| pool.take_news(what, Instant::now()));
            if is_booking && !is_taken {
                not_booked.increment(1);
            }
        };
        let secret = self.secret;
        tasks.spawn(stop.clone().run_until_cancelled_owned(async move {
            let Err(error) = listener.run(secret, metrics, on_news).await;
            tracing::error!(%error, "peers are no longer heard: the load of each agent is weighed apart");
        }));
    }
}

async fn renew(pools: Arc<Pools>) {
    let mut ticks = tokio::time::interval(RENEWAL);
    loop {
        ticks.tick().await;
        pools.table().iter().for_each(|pool| pool.tell_alive());
    }
}
