//! The thread that listens to all replicas: sockets in, decoded batches out.
//!
//! One thread owns every socket (a ZMQ socket must stay on its thread), decodes and applies, so that batches are
//! never copied or queued between threads. This module and those below it are the only users of the `zmq` crate here, beside
//! [`super::probe`].

mod replays;
mod socket;
mod worker;

use super::endpoint::{Endpoint, EndpointError};
use super::sink::Sink;
use super::stream::StreamLimits;
use crate::hash::HashKey;
use crate::metrics::FeedLabels;
use parking_lot::Mutex;
pub(super) use socket::{Link, LiveSocket, Received, Replayer, SocketLimits};
use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::mpsc;
use std::thread::JoinHandle;
use worker::{Command, Live, Worker};

/// How the subscriber works. The defaults suit vLLM.
#[derive(Clone, Debug)]
pub struct SubscriberConfig {
    /// The key of all hashes.
    pub hash_key: HashKey,
    /// The limits of each feed's stream.
    pub stream: StreamLimits,
    /// Replays that may run at once over all feeds; further ones wait. Default 8: after a restart of the agent every
    /// engine is asked for its whole history, and live publishing stops while it answers.
    pub replays_in_flight: usize,
    /// Messages that one socket queues before TCP holds the publisher back. Default 1000, in number.
    pub receive_queue: i32,
    /// The largest message taken; a larger one ends the connection. Default 64 MiB: some ten million tokens.
    pub message_bytes: i64,
    /// Sets the random waits of the streams.
    pub seed: u64,
}

impl SubscriberConfig {
    /// The defaults.
    #[must_use]
    pub fn new(hash_key: HashKey) -> Self {
        Self {
            hash_key,
            stream: StreamLimits::default(),
            replays_in_flight: 8,
            receive_queue: 1000,
            message_bytes: 64 << 20,
            seed: fastrand::u64(..),
        }
    }
}

/// One rank's stream of events.
#[derive(Clone, Debug)]
pub struct Feed<K> {
    /// The rank, as the sink knows it.
    pub key: K,
    /// The rank, as the metrics name it.
    pub labels: FeedLabels,
    /// Where the engine publishes (see [`Endpoint`]).
    pub events: String,
    /// Where it replays, if it does.
    pub replay: Option<String>,
    /// Under which topic it publishes, where `events` is an address to listen at to which several publishers connect:
    /// nothing else tells them apart.
    pub topic: Option<String>,
}

/// Why a feed could not be added.
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    /// An address is not one.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// The replay endpoint is one to listen at: only publishers ever connect to us.
    #[error("endpoint {0:?}: a replay endpoint cannot be listened at")]
    ReplayListens(String),
    /// Only publishers that connect to us are told apart by their topics.
    #[error("endpoint {0:?}: a topic needs an endpoint to listen at")]
    TopicConnects(String),
    /// Another feed is heard there under this topic.
    #[error("topic {0:?}: another replica's already")]
    TopicTaken(String),
    /// A feed of this key is there already.
    #[error("this feed is there already")]
    Duplicate,
    /// The socket could not be made, or could not listen.
    #[error("endpoint {endpoint:?}: {source}")]
    Socket {
        /// The address.
        endpoint: String,
        /// What ZMQ says.
        source: SocketError,
    },
    /// The thread is gone.
    #[error("the subscriber has stopped")]
    Stopped,
}

/// An error of the ZMQ library.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("{}", .0.message())]
pub struct SocketError(pub(super) zmq::Error);

/// The handle of the thread. Dropping it ends the thread.
pub struct Subscriber<K> {
    shared: Mutex<Shared<K>>,
    socket_limits: SocketLimits,
    thread: Option<JoinHandle<()>>,
}

struct Shared<K> {
    commands: mpsc::Sender<Command<K>>,
    wake: zmq::Socket,
    contexts: Contexts,
    /// The context of each feed.
    feeds: HashMap<K, usize>,
    /// The endpoints that are listened at for several publishers, with their contexts. They stay until
    /// [`Subscriber::stop_listening`]: closing one would not free its port at once for the next replica.
    listeners: HashMap<String, usize>,
    /// Who is heard where under which topic.
    topics: HashMap<(String, String), K>,
}

impl<K: Copy + Eq + Hash + Send + fmt::Debug + 'static> Subscriber<K> {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// If the system gives no thread or socket.
    pub fn spawn<S: Sink<Key = K>>(config: SubscriberConfig, sink: S) -> std::io::Result<Self> {
        let contexts = Contexts::new();
        let (wake, woken) = socket::wake_pair(contexts.first()).map_err(std::io::Error::other)?;
        let (commands, received) = mpsc::channel();
        let socket_limits =
            SocketLimits { receive_queue: config.receive_queue, message_bytes: config.message_bytes };
        let thread = std::thread::Builder::new()
            .name("kv-events".to_owned())
            .spawn(move || Worker::new(config, sink, received, woken).run())?;
        let shared = Shared {
            commands,
            wake,
            contexts,
            feeds: HashMap::new(),
            listeners: HashMap::new(),
            topics: HashMap::new(),
        };
        Ok(Self { shared: Mutex::new(shared), socket_limits, thread: Some(thread) })
    }

    /// Adds a feed. Its publisher need not be there yet.
    ///
    /// # Errors
    ///
    /// If the feed is wrong, or its socket cannot be made; nothing is added then.
    pub fn add(&self, feed: Feed<K>) -> Result<(), AddError> {
        let events = Endpoint::parse(&feed.events)?;
        let replay = feed.replay.as_deref().map(Endpoint::parse).transpose()?;
        if let Some(replay) = replay.as_ref().filter(|replay| replay.listens()) {
            return Err(AddError::ReplayListens(replay.to_string()));
        }
        let mut shared = self.shared.lock();
        if shared.feeds.contains_key(&feed.key) {
            return Err(AddError::Duplicate);
        }
        let open = |context: &zmq::Context| {
            LiveSocket::open(context, &events, &self.socket_limits).map_err(|source| AddError::Socket {
                endpoint: feed.events.clone(),
                source: SocketError(source),
            })
        };
        let (context, live) = match feed.topic {
            None => {
                let context = shared.contexts.with_room();
                (context, Live::Own(open(shared.contexts.get(context))?))
            }
            Some(topic) => {
                if !events.listens() {
                    return Err(AddError::TopicConnects(feed.events));
                }
                let place = (feed.events.clone(), topic.clone());
                if shared.topics.contains_key(&place) {
                    return Err(AddError::TopicTaken(topic));
                }
                let context = match shared.listeners.get(&feed.events) {
                    Some(context) => *context,
                    None => {
                        let context = shared.contexts.with_room();
                        let live = open(shared.contexts.get(context))?;
                        shared.contexts.used[context].1 += 1;
                        shared.listeners.insert(feed.events.clone(), context);
                        shared.send(Command::Listen { endpoint: feed.events.clone(), live })?;
                        context
                    }
                };
                let replayer = Replayer::new(shared.contexts.get(context), &self.socket_limits);
                shared.topics.insert(place, feed.key);
                (context, Live::Shared { endpoint: feed.events, topic: topic.into_bytes().into(), replayer })
            }
        };
        shared.contexts.used[context].1 += 1;
        shared.feeds.insert(feed.key, context);
        shared.send(Command::Add { key: feed.key, labels: feed.labels, live, replay })
    }

    /// Removes a feed, if it is there. [`Sink::removed`] tells when it is done.
    pub fn remove(&self, key: K) {
        let mut shared = self.shared.lock();
        if let Some(context) = shared.feeds.remove(&key) {
            shared.contexts.used[context].1 -= 1;
            shared.topics.retain(|_, of| *of != key);
            // A thread that is gone has no feeds.
            let _ = shared.send(Command::Remove { key });
        }
    }

    /// Closes an endpoint that was listened at for several publishers, unless a feed is heard there still. Returns whether it
    /// is not listened at any more; the port is free some time later.
    pub fn stop_listening(&self, endpoint: &str) -> bool {
        let mut shared = self.shared.lock();
        if shared.topics.keys().any(|(heard, _)| heard == endpoint) {
            return false;
        }
        if let Some(context) = shared.listeners.remove(endpoint) {
            shared.contexts.used[context].1 -= 1;
            // A thread that is gone listens to nobody.
            let _ = shared.send(Command::StopListening { endpoint: endpoint.to_owned() });
        }
        true
    }

    /// Ends the thread and waits for it. No call of the sink comes after this.
    pub fn stop(mut self) {
        self.end();
    }
}

impl<K> Subscriber<K> {
    fn end(&mut self) {
        // A thread that is gone needs no telling.
        let _ = self.shared.lock().send(Command::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the KV events had panicked");
        }
    }
}

impl<K> Drop for Subscriber<K> {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.end();
        }
    }
}

impl<K> fmt::Debug for Subscriber<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscriber").finish_non_exhaustive()
    }
}

impl<K> Shared<K> {
    fn send(&self, command: Command<K>) -> Result<(), AddError> {
        self.commands.send(command).map_err(|_| AddError::Stopped)?;
        // A full queue of wake-ups wakes as well.
        let _ = self.wake.send(zmq::Message::new(), zmq::DONTWAIT);
        Ok(())
    }
}

/// The ZMQ contexts in use. Each takes 1,023 sockets (libzmq's `ZMQ_MAX_SOCKETS`), of which a feed needs three: its
/// own and the two ends of its monitor.
struct Contexts {
    /// Each context, and its number of feeds.
    used: Vec<(zmq::Context, usize)>,
}

const FEEDS_PER_CONTEXT: usize = 256;

impl Contexts {
    fn new() -> Self {
        Self { used: vec![(zmq::Context::new(), 0)] }
    }

    fn first(&self) -> &zmq::Context {
        &self.used[0].0
    }

    fn get(&self, index: usize) -> &zmq::Context {
        &self.used[index].0
    }

    fn with_room(&mut self) -> usize {
        let room = self.used.iter().position(|(_, feeds)| *feeds < FEEDS_PER_CONTEXT);
        room.unwrap_or_else(|| {
            self.used.push((zmq::Context::new(), 0));
            self.used.len() - 1
        })
    }
}
