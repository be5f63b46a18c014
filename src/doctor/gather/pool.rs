//! One pool: its replicas by the agent's own rule, and what each of them says.

use super::{Means, haproxy, replica, stream};
use crate::{
    config::{ReplicaSource, SocketAddr, parse_replica_file},
    doctor::facts::{Pages, PoolFacts, Readiness, ReplicaFacts},
    replica::{Membership, Sources, parse_engine_page},
};
use std::{collections::HashMap, path::Path};
use tokio::task::JoinSet;

/// Replicas that are asked at the same time.
const AT_ONCE: usize = 16;

pub(super) async fn facts(
    means: &Means,
    socket: Option<&SocketAddr>,
    readiness: Option<&Readiness>,
) -> PoolFacts {
    let pool = &means.pool;
    let servers = match socket {
        Some(socket) => Some(haproxy::servers(socket, &pool.backend).await),
        None => None,
    };
    let mut membership = Membership::new(pool);
    if let Some(Ok(servers)) = &servers {
        membership.take_servers(servers);
    }
    let mut file = None;
    if let ReplicaSource::File(path) = &pool.source {
        match list(path) {
            Ok(replicas) => membership.take_list(replicas),
            Err(why) => file = Some(format!("{}: {why}", path.display())),
        }
    }
    let asked: Vec<_> = membership
        .asked()
        .map(|(server, http, asks_sources)| (server.to_owned(), http.clone(), asks_sources))
        .collect();
    let pages = in_turns(asked.iter().cloned().map(|(server, http, asks_sources)| {
        let means = means.clone();
        async move {
            let (pages, sources) = replica::pages(&means, &http).await;
            (server, http, asks_sources, pages, sources)
        }
    }));
    let mut told: HashMap<String, Pages> = HashMap::new();
    for (server, http, asks_sources, pages, sources) in pages.await {
        if asks_sources {
            membership.take_sources(&server, &http, sources);
        }
        told.insert(server, pages);
    }
    let replicas = membership.desired().into_iter().map(|found| {
        let (means, pages) = (means.clone(), told.remove(&found.server));
        let applied = |rank: u16| {
            let of_rank = readiness?.ranks.iter().find(|known| {
                known.pool == means.pool.backend && known.server == found.server && known.rank == rank
            });
            of_rank?.applied_seq
        };
        let applied: Vec<Option<u64>> = (0..).zip(&found.ranks).map(|(rank, _)| applied(rank)).collect();
        async move {
            let parity = replica::parity(&means, &found).await;
            let ranks = stream::ranks(&means, &found, pages.as_ref(), &applied).await;
            let http = found.http.as_ref().map(ToString::to_string);
            ReplicaFacts { server: found.server, http, pages, parity, ranks }
        }
    });
    let mut replicas = in_turns(replicas).await;
    replicas.sort_by(|a, b| a.server.cmp(&b.server));
    PoolFacts { backend: pool.backend.clone(), servers, file, replicas }
}

fn list(path: &Path) -> Result<Vec<crate::config::Replica>, String> {
    parse_replica_file(&std::fs::read_to_string(path).map_err(|error| error.to_string())?)
}

/// Runs them, some at a time. One that panics is left out.
async fn in_turns<T: Send + 'static>(
    tasks: impl Iterator<Item = impl Future<Output = T> + Send + 'static>,
) -> Vec<T> {
    let (mut running, mut done) = (JoinSet::new(), Vec::new());
    for task in tasks {
        if running.len() >= AT_ONCE {
            done.extend(running.join_next().await.and_then(Result::ok));
        }
        running.spawn(task);
    }
    while let Some(ended) = running.join_next().await {
        done.extend(ended.ok());
    }
    done
}

/// As the agent takes it: what a page that is not there says of the ranks.
pub(super) fn sources_of(pages: &Pages, metrics_page: Option<&str>) -> Sources {
    match &pages.sources {
        Ok(Some(sources)) => Sources::Told(sources.clone()),
        Ok(None) | Err(crate::doctor::facts::Silence::Status(404 | 405)) => {
            let ranks = metrics_page.map_or(1, |page| parse_engine_page(page).len().max(1));
            Sources::NoPage { ranks: u16::try_from(ranks).unwrap_or(u16::MAX) }
        }
        Err(_) => Sources::Silent,
    }
}
