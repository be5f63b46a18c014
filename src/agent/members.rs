//! The replicas of one pool as they come and go: in the pool, at the events' thread, and as tasks that ask them.
//!
//! What a pool should have follows from what was told ([`Membership`]); every news changes what it has to that, in one
//! step and under one lock.

use super::{AgentError, engine::Engine, files::Room, listing};
use crate::{
    client::Access,
    config::{self, HttpAddr, Replica, ReplicaSource},
    events::{Endpoint, Feed, Subscriber},
    metrics::FeedLabels,
    pool::{FeedKey, Pool},
    replica::{Change, Membership, Server, Sources, changes},
};
use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::Mutex;
use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};
use tokio::sync::Notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// What the pools' members have in common.
#[derive(Clone, Debug)]
pub(super) struct Common {
    pub(super) subscriber: Arc<Subscriber<FeedKey>>,
    /// Ranks for which there are sockets, over all pools.
    pub(super) room: Arc<Room>,
    pub(super) tasks: TaskTracker,
    /// Ends the tasks.
    pub(super) stop: CancellationToken,
}

/// The replicas of one pool.
#[derive(Debug)]
pub(super) struct Members {
    pool: Arc<Pool>,
    access: ArcSwap<Access>,
    /// Where publishers can connect to us.
    listen: ArcSwapOption<Endpoint>,
    common: Common,
    /// Ends the tasks of this pool.
    stop: CancellationToken,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    membership: Membership,
    running: Vec<Replica>,
    /// Those who are asked, whether for their event endpoints too, and what ends it.
    followed: HashMap<(String, HttpAddr), (bool, CancellationToken)>,
    /// Those for whom there was no place: one warning each.
    refused: HashSet<String>,
    /// How each engine is asked.
    engine: config::Engine,
    /// The file that lists the replicas, and what ends following it.
    list: Option<(PathBuf, CancellationToken)>,
    /// Where publishers connected to us, and whether that is elsewhere now.
    listened: HashSet<String>,
    has_moved: bool,
    /// Whether the pool was taken away: nobody joins any more.
    is_over: bool,
}

impl Members {
    /// The members of a pool that has none yet. Those that the configuration names join; the error is that of the first
    /// which can't.
    pub(super) fn start(
        pool: Arc<Pool>,
        config: &config::Pool,
        access: Access,
        engine: config::Engine,
        common: Common,
    ) -> (Arc<Self>, Option<AgentError>) {
        let state = State {
            membership: Membership::new(config),
            running: Vec::new(),
            followed: HashMap::new(),
            refused: HashSet::new(),
            engine,
            list: None,
            listened: HashSet::new(),
            has_moved: false,
            is_over: false,
        };
        let members = Arc::new(Self {
            pool,
            access: ArcSwap::from_pointee(access),
            listen: ArcSwapOption::from_pointee(config.event_ports.listen.clone()),
            stop: common.stop.child_token(),
            common,
            state: Mutex::new(state),
        });
        let failed = members.change(|_| {});
        members.follow_list(&config.source);
        (members, failed)
    }

    /// The configuration says something else. Replicas of which it says the same stay as they are.
    pub(super) fn configure(
        self: &Arc<Self>,
        config: &config::Pool,
        access: Access,
        engine: config::Engine,
    ) -> Option<AgentError> {
        self.access.store(Arc::new(access));
        let listen = config.event_ports.listen.clone().map(Arc::new);
        let has_moved = self.listen.swap(listen.clone()) != listen;
        {
            let mut state = self.state.lock();
            state.has_moved |= has_moved;
            if state.engine != engine {
                state.engine = engine;
                // All are asked anew, at the new pace.
                state.followed.drain().for_each(|(_, (_, stop))| stop.cancel());
            }
            // Those who had no place may have one now.
            state.refused.clear();
        }
        let failed = self.change(|membership| membership.configure(config));
        self.follow_list(&config.source);
        failed
    }

    /// The pool was taken away: all leave, and whatever runs for them ends.
    pub(super) fn end(&self) {
        let mut state = self.state.lock();
        state.is_over = true;
        self.stop.cancel();
        let running: Vec<String> = state.running.iter().map(|replica| replica.server.clone()).collect();
        for server in running {
            self.leave(&server, &mut state);
        }
        state.has_moved = true;
    }

    /// Closes where publishers connected to us, if that is elsewhere now and nobody is heard there. To be called when all
    /// pools are as they should be: another one may have taken the place over.
    pub(super) fn stop_listening(&self) {
        let State { listened, has_moved, .. } = &mut *self.state.lock();
        if std::mem::take(has_moved) {
            listened.retain(|endpoint| !self.common.subscriber.stop_listening(endpoint));
        }
    }

    /// Follows the file that lists the replicas, where there is one, and no other.
    fn follow_list(self: &Arc<Self>, source: &ReplicaSource) {
        let mut state = self.state.lock();
        let path = match source {
            ReplicaSource::File(path) => Some(path),
            ReplicaSource::Listed | ReplicaSource::Haproxy => None,
        };
        if state.list.as_ref().map(|(path, _)| path) == path {
            return;
        }
        if let Some((_, stop)) = state.list.take() {
            stop.cancel();
        }
        if let Some(path) = path {
            let stop = self.stop.child_token();
            let following = listing::follow(Arc::clone(self), path.clone());
            self.common.tasks.spawn(stop.clone().run_until_cancelled_owned(following));
            state.list = Some((path.clone(), stop));
        }
    }

    pub(super) const fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Whether publishers can connect to us.
    pub(super) fn listens(&self) -> bool {
        self.listen.load().is_some()
    }

    /// How the replicas are reached.
    pub(super) fn access(&self) -> Arc<Access> {
        self.access.load_full()
    }

    /// HAProxy told of its servers.
    pub(super) fn take_servers(self: &Arc<Self>, servers: &[Server]) {
        self.change(|membership| membership.take_servers(servers));
    }

    /// The file lists other replicas.
    pub(super) fn take_list(self: &Arc<Self>, replicas: Vec<Replica>) {
        self.change(|membership| membership.take_list(replicas));
    }

    /// The replica at an address said where its KV events are.
    pub(super) fn take_sources(self: &Arc<Self>, server: &str, http: &HttpAddr, sources: Sources) {
        self.change(|membership| membership.take_sources(server, http, sources));
    }

    /// Takes in news and brings the pool to what follows from all that is known. Returns the first replica that could
    /// not join.
    fn change(self: &Arc<Self>, news: impl FnOnce(&mut Membership)) -> Option<AgentError> {
        let mut state = self.state.lock();
        if state.is_over {
            return None;
        }
        news(&mut state.membership);
        let mut failed = None;
        for change in changes(&state.running, &state.membership.desired()) {
            let result = match change {
                Change::Leave(server) => {
                    self.leave(&server, &mut state);
                    Ok(())
                }
                Change::Move(replica) => {
                    self.leave(&replica.server, &mut state);
                    self.join(replica, &mut state)
                }
                Change::Join(replica) => self.join(replica, &mut state),
            };
            failed = failed.or(result.err());
        }
        self.follow(&mut state);
        self.pool.is_settled.store(state.membership.is_settled(), Ordering::Relaxed);
        failed
    }

    fn join(&self, replica: Replica, state: &mut State) -> Result<(), AgentError> {
        let joined = self.try_join(&replica);
        match &joined {
            Ok(()) => {
                let Replica { server, http, ranks, .. } = &replica;
                let http = http.as_ref().map(ToString::to_string);
                tracing::info!(pool = self.pool.backend, server, http, ranks = ranks.len(), "replica joined");
                state.refused.remove(server);
                let shared =
                    ranks.iter().filter(|rank| rank.topic.is_some()).filter_map(|rank| rank.events.as_ref());
                state.listened.extend(shared.map(ToString::to_string));
                state.running.push(replica);
            }
            Err(error) if state.refused.insert(replica.server.clone()) => {
                let reason = std::error::Error::source(error).map(ToString::to_string);
                tracing::warn!(
                    pool = self.pool.backend,
                    server = replica.server,
                    reason,
                    "replica cannot join"
                );
            }
            Err(_) => {}
        }
        joined
    }

    fn try_join(&self, replica: &Replica) -> Result<(), AgentError> {
        let server = || replica.server.clone();
        let full = |source| AgentError::Full { pool: self.pool.backend.clone(), server: server(), source };
        let count = replica.ranks.len();
        let room = &self.common.room;
        room.take(count).map_err(|left| full(Box::new(NoSockets(left))))?;
        let ids = self.pool.join(replica, Instant::now()).map_err(|error| {
            room.give_back(count);
            full(Box::new(error))
        })?;
        for ((id, rank), number) in ids.into_iter().zip(&replica.ranks).zip(0..) {
            let Some(events) = &rank.events else { continue };
            let labels = FeedLabels { pool: self.pool.backend.clone(), server: server(), rank: number };
            let feed = Feed {
                key: FeedKey { pool: self.pool.id, rank: id },
                labels,
                events: events.to_string(),
                replay: rank.replay.as_ref().map(ToString::to_string),
                topic: rank.topic.clone(),
            };
            if let Err(source) = self.common.subscriber.add(feed) {
                self.take_out(replica, usize::from(number));
                return Err(AgentError::Events { pool: self.pool.backend.clone(), server: server(), source });
            }
        }
        Ok(())
    }

    fn leave(&self, server: &str, state: &mut State) {
        let Some(at) = state.running.iter().position(|replica| replica.server == server) else { return };
        let replica = state.running.swap_remove(at);
        self.take_out(&replica, replica.ranks.len());
        tracing::info!(pool = self.pool.backend, server, "replica left");
    }

    /// Takes a replica out of the pool, of whose ranks the first `subscribed` have been subscribed to where they have
    /// events.
    fn take_out(&self, replica: &Replica, subscribed: usize) {
        let ids = self.pool.leave(&replica.server);
        for ((id, rank), number) in ids.into_iter().zip(&replica.ranks).zip(0..) {
            if rank.events.is_some() && number < subscribed {
                // The events' thread releases the rank when its last event is through.
                self.common.subscriber.remove(FeedKey { pool: self.pool.id, rank: id });
            } else {
                self.pool.release(id);
            }
        }
        self.common.room.give_back(replica.ranks.len());
    }

    /// Asks those who can be asked, and no others.
    fn follow(self: &Arc<Self>, state: &mut State) {
        let State { membership, followed, engine, .. } = state;
        let asked: HashMap<(String, HttpAddr), bool> = membership
            .asked()
            .map(|(server, http, sources)| ((server.to_owned(), http.clone()), sources))
            .collect();
        followed.retain(|key, (asks_sources, stop)| {
            let is_asked = asked.get(key) == Some(asks_sources);
            if !is_asked {
                stop.cancel();
            }
            is_asked
        });
        for ((server, http), ask_sources) in asked {
            followed.entry((server.clone(), http.clone())).or_insert_with(|| {
                let stop = self.stop.child_token();
                let asking = Engine {
                    members: Arc::clone(self),
                    server,
                    http,
                    ask_sources,
                    pace: *engine,
                    came_back: Notify::new(),
                    told_unauthorized: AtomicBool::new(false),
                    told_connects: AtomicBool::new(false),
                };
                self.common.tasks.spawn(stop.clone().run_until_cancelled_owned(asking.follow()));
                (ask_sources, stop)
            });
        }
    }
}

/// The process may not open more sockets.
#[derive(Debug, thiserror::Error)]
#[error("no sockets for more ranks ({0} are left): raise the limit of open files (ulimit -n, LimitNOFILE)")]
struct NoSockets(usize);
