//! Which replicas a pool should have, and what changes to have them.
//!
//! A replica is one name at one address: another address under the same name is another cache.

use super::{Server, ServerState, Sources};
use crate::{
    config::{self, EventPorts, HttpAddr, NodeRank, Rank, Replica, ReplicaSource},
    events::Endpoint,
};
use std::collections::{HashMap, HashSet};

/// One step from the replicas that run to those that should.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// It is not wanted any more.
    Leave(String),
    /// Its address or its event endpoints are others now: it leaves, and joins as one that holds nothing.
    Move(Replica),
    /// It is new.
    Join(Replica),
}

/// The steps from `running` to `desired`, those first that make room. Names are unique in each of the two.
#[must_use]
pub fn changes(running: &[Replica], desired: &[Replica]) -> Vec<Change> {
    let names: HashSet<&str> = desired.iter().map(|replica| replica.server.as_str()).collect();
    let before: HashMap<&str, &Replica> =
        running.iter().map(|replica| (replica.server.as_str(), replica)).collect();
    let left = running.iter().filter(|replica| !names.contains(replica.server.as_str()));
    let leaves = left.map(|replica| Change::Leave(replica.server.clone()));
    let of_desired = |replica: &Replica| match before.get(replica.server.as_str()) {
        None => Some(Change::Join(replica.clone())),
        Some(before) if *before != replica => Some(Change::Move(replica.clone())),
        Some(_) => None,
    };
    let mut changes: Vec<Change> = leaves.chain(desired.iter().filter_map(of_desired)).collect();
    changes.sort_by_key(|change| matches!(change, Change::Join(_)));
    changes
}

/// All that is known of a pool's replicas.
#[derive(Debug)]
pub struct Membership {
    source: ReplicaSource,
    ports: EventPorts,
    /// With [`ReplicaSource::Listed`] the replicas, otherwise what is known better of some of them.
    configured: Vec<Replica>,
    /// Whether HAProxy, or the file, has told anything yet.
    told: bool,
    /// What was told last, without what the configuration knows better.
    listed: Vec<Replica>,
    known: Vec<Known>,
}

/// A replica of which the name is known.
#[derive(Clone, Debug)]
struct Known {
    replica: Replica,
    /// What it said when it was asked; `None`: nobody knows yet.
    sources: Option<Sources>,
}

impl Membership {
    /// Of the pool as configured.
    #[must_use]
    pub fn new(pool: &config::Pool) -> Self {
        let mut membership = Self {
            source: pool.source.clone(),
            ports: pool.event_ports.clone(),
            configured: pool.replicas.clone(),
            told: false,
            listed: Vec::new(),
            known: Vec::new(),
        };
        if membership.source == ReplicaSource::Listed {
            membership.take(pool.replicas.clone());
        }
        membership
    }

    /// Takes in what the configuration now says of the pool. Where the replicas are to come from elsewhere than before,
    /// those that are known stay until that tells of others.
    pub fn configure(&mut self, pool: &config::Pool) {
        let is_same_source = self.source == pool.source;
        self.source.clone_from(&pool.source);
        self.ports.clone_from(&pool.event_ports);
        self.configured.clone_from(&pool.replicas);
        match self.source {
            ReplicaSource::Listed => self.take(pool.replicas.clone()),
            _ if is_same_source && self.told => {
                let listed = std::mem::take(&mut self.listed);
                self.take(listed);
            }
            _ => self.told &= is_same_source,
        }
    }

    /// Takes in the servers of HAProxy's backend.
    pub fn take_servers(&mut self, servers: &[Server]) {
        if self.source != ReplicaSource::Haproxy {
            return;
        }
        let known: HashMap<&str, Option<&HttpAddr>> = self
            .known
            .iter()
            .map(|known| (known.replica.server.as_str(), known.replica.http.as_ref()))
            .collect();
        let replica = |server: &Server| {
            let http = server.http()?;
            // A slot that waits for its next replica is in maintenance; one that has one already may be for a while.
            let is_known = known.get(server.name.as_str()) == Some(&Some(&http));
            let is_used = server.state != ServerState::Maint || is_known;
            is_used.then(|| Replica { server: server.name.clone(), http: Some(http), ..Replica::default() })
        };
        let replicas = servers.iter().filter_map(replica).collect();
        self.take(replicas);
    }

    /// Takes in the list of the file.
    pub fn take_list(&mut self, replicas: Vec<Replica>) {
        // The last word of one that is followed no longer.
        if matches!(self.source, ReplicaSource::File(_)) {
            self.take(replicas);
        }
    }

    fn take(&mut self, replicas: Vec<Replica>) {
        self.listed.clone_from(&replicas);
        let with_override = |replica: Replica| match &self.source {
            ReplicaSource::Listed => replica,
            _ => match self.configured.iter().find(|configured| configured.server == replica.server) {
                None => replica,
                Some(known) => Replica {
                    id: known.id.clone().or(replica.id),
                    http: known.http.clone().or(replica.http),
                    ranks: if known.ranks.is_empty() { replica.ranks } else { known.ranks.clone() },
                    cache_blocks: known.cache_blocks,
                    topic: known.topic.clone(),
                    revision: known.revision.clone().or(replica.revision),
                    server: replica.server,
                },
            },
        };
        let before = std::mem::take(&mut self.known).into_iter();
        let mut before: HashMap<String, Known> =
            before.map(|known| (known.replica.server.clone(), known)).collect();
        let mut known = |replica: Replica| {
            let same = before.remove(&replica.server).filter(|known| known.replica == replica);
            same.unwrap_or(Known { replica, sources: None })
        };
        self.known = replicas.into_iter().map(with_override).map(&mut known).collect();
        self.told = true;
    }

    /// Takes in what the replica at this address said. One that is silent for a while has not changed.
    pub fn take_sources(&mut self, server: &str, http: &HttpAddr, sources: Sources) {
        let found = self
            .known
            .iter_mut()
            .find(|known| known.replica.server == server && known.replica.http.as_ref() == Some(http));
        if let Some(known) = found
            && (sources != Sources::Silent || known.sources.is_none())
        {
            known.sources = Some(sources);
        }
    }

    /// The replicas that can be asked, by name and address, and whether to ask for their event endpoints.
    pub fn asked(&self) -> impl Iterator<Item = (&str, &HttpAddr, bool)> {
        self.known.iter().filter_map(|Known { replica, .. }| {
            Some((replica.server.as_str(), replica.http.as_ref()?, replica.ranks.is_empty()))
        })
    }

    /// Whether the pool's replicas are known, and all have been asked that can be.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.told && self.known.iter().all(|known| known.sources.is_some() || known.is_told())
    }

    /// The replicas that the pool should have: those of which the event endpoints are known or can't be known, each with
    /// one rank at least.
    #[must_use]
    pub fn desired(&self) -> Vec<Replica> {
        let ports = &self.ports;
        let mut on_host: HashMap<&str, u16> = HashMap::new();
        let mut takers_on_host: HashMap<&str, u16> = HashMap::new();
        let mut desired = Vec::new();
        for known in &self.known {
            let Known { replica, sources } = known;
            let first_of = |next: &mut u16, ranks: u16| {
                let first = match ports.node_rank {
                    NodeRank::Order => *next,
                    NodeRank::Name => trailing_number(&replica.server),
                };
                *next = next.saturating_add(ranks);
                first
            };
            // Counted before it is known whether they have joined: a port must not change when another replica does.
            let first_taker = ports.tokens.zip(replica.http.as_ref()).map(|(base, http)| {
                let next = takers_on_host.entry(http.host()).or_default();
                (base.saturating_add(first_of(next, known.count_ranks())), http.host())
            });
            let ranks = match (&replica.http, sources) {
                _ if known.is_told() => replica.ranks.clone(),
                (Some(http), Some(Sources::Told(sources))) => {
                    let listen = |rank| ports.listen.as_ref().and_then(|listen| listen.plus(rank));
                    let ranks = (0..).zip(sources);
                    ranks.map(|(rank, source)| source.rank(http.host(), listen(rank).as_ref())).collect()
                }
                (Some(_), Some(Sources::NoPage { ranks }))
                    if ports.listen.is_some() && replica.topic.is_some() =>
                {
                    let listen = |rank| ports.listen.as_ref().and_then(|listen| listen.plus(rank));
                    (0..*ranks).map(|rank| Rank { events: listen(rank), ..Rank::default() }).collect()
                }
                (Some(http), Some(Sources::NoPage { ranks })) => {
                    let first = first_of(on_host.entry(http.host()).or_default(), *ranks);
                    (0..*ranks)
                        .map(|rank| by_convention(ports, http.host(), first.saturating_add(rank)))
                        .collect()
                }
                (Some(_), None) => continue,
                (None, _) | (_, Some(Sources::Silent)) => Vec::new(),
            };
            let mut ranks = if ranks.is_empty() { vec![Rank::default()] } else { ranks };
            for rank in &mut ranks {
                rank.cache_blocks = replica.cache_blocks;
                let listens = rank.events.as_ref().is_some_and(Endpoint::listens);
                rank.topic = replica.topic.clone().or(rank.topic.take()).filter(|_| listens);
            }
            if let Some((first, host)) = first_taker {
                for (rank, port) in ranks.iter_mut().zip(first..) {
                    rank.tokens = rank.tokens.take().or_else(|| Endpoint::at(host, port).ok());
                }
            }
            desired.push(Replica { ranks, ..replica.clone() });
        }
        desired
    }
}

impl Known {
    /// Whether the configuration tells the event endpoints, or there is nobody to ask.
    const fn is_told(&self) -> bool {
        !self.replica.ranks.is_empty() || self.replica.http.is_none()
    }

    /// As far as is known; at least one.
    fn count_ranks(&self) -> u16 {
        let told = match &self.sources {
            Some(Sources::Told(sources)) => sources.len(),
            Some(Sources::NoPage { ranks }) => usize::from(*ranks),
            Some(Sources::Silent) | None => 0,
        };
        u16::try_from(self.replica.ranks.len().max(told).max(1)).unwrap_or(u16::MAX)
    }
}

fn by_convention(ports: &EventPorts, host: &str, rank: u16) -> Rank {
    let events = ports.base.checked_add(rank);
    let replay = events.and_then(|port| port.checked_add(ports.replay_offset));
    let endpoint = |port: Option<u16>| Endpoint::at(host, port?).ok();
    Rank { events: endpoint(events), replay: endpoint(replay), ..Rank::default() }
}

/// The number at the end of a name; 0 where there is none.
fn trailing_number(name: &str) -> u16 {
    let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    name.get(name.len() - digits..).and_then(|digits| digits.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests;
