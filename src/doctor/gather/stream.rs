//! The KV events of a replica's ranks, listened to while each computes one request.

use super::{Means, question::Question};
use crate::{
    client::{self, Request},
    config::{HttpAddr, Rank, Replica},
    doctor::{
        facts::{Asked, Pages, RankFacts, ReplayFacts, Stream},
        look::{Look, Matched},
    },
    events::{
        Endpoint,
        probe::{self, Message, Probe},
    },
    hash::HashKey,
};
use hyper::{
    Method,
    header::{HeaderName, HeaderValue},
};
use serde_json::Value;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{net::TcpStream, task::spawn_blocking, time::timeout};

/// For a connection on a network that works.
const CONNECT: Duration = Duration::from_secs(3);

/// How long a publisher that speaks is given to know of the subscription. ZeroMQ has no word for it; without the pause
/// the first batch could pass by, and the replay would have to prove it.
const SUBSCRIBED: Duration = Duration::from_millis(200);

/// A busy engine may have the request wait.
const ANSWER: Duration = Duration::from_secs(60);

/// After the answer, events come with the engine's next steps.
const EVENTS: Duration = Duration::from_secs(3);

/// What follows the prompt's blocks: those of lower tiers, told of one step later.
const AFTERWARDS: Duration = Duration::from_millis(500);

/// How long the agent is given to have what was heard here.
const AGENT: Duration = Duration::from_secs(3);

/// vLLM looks for replay requests every 100 ms.
const REPLAY: Duration = Duration::from_secs(5);

const MAX_ANSWER_BYTES: usize = 1 << 20;

pub(super) async fn ranks(
    means: &Means,
    replica: &Replica,
    pages: Option<&Pages>,
    applied: &[Option<u64>],
) -> Vec<RankFacts> {
    let told = pages.and_then(|pages| pages.sources.as_ref().ok()?.as_ref());
    let mut facts = Vec::new();
    for (number, rank) in (0u16..).zip(&replica.ranks) {
        let told = told.and_then(|told| told.get(usize::from(number))).cloned();
        let applied = applied.get(usize::from(number)).copied().flatten();
        let subject = Subject { means, replica, number, pages };
        facts.push(RankFacts { told, ..subject.facts(rank, applied).await });
    }
    facts
}

/// The rank that is looked at.
struct Subject<'a> {
    means: &'a Means,
    replica: &'a Replica,
    number: u16,
    pages: Option<&'a Pages>,
}

impl Subject<'_> {
    async fn facts(&self, rank: &Rank, applied: Option<u64>) -> RankFacts {
        let question = self.question();
        let (stream, asked) = match rank.events.as_ref().filter(|events| !events.listens()) {
            None => (None, self.ask(question.as_ref(), None).await),
            Some(events) => match connect(events).await {
                Err(stream) => (Some(stream), self.ask(question.as_ref(), None).await),
                Ok(probe) => {
                    let listening = Listening::start(probe, question.clone());
                    tokio::time::sleep(SUBSCRIBED).await;
                    let asked = self.ask(question.as_ref(), Some(&listening)).await;
                    let look = listening.end().await;
                    let matched = question.as_ref().map(|question| look.matched(&question.tokens));
                    let asked = asked.map(|asked| Asked { matched: matched.unwrap_or_default(), ..asked });
                    (Some(Stream::Heard(look.seen)), asked)
                }
            },
        };
        let last = match &stream {
            Some(Stream::Heard(seen)) => seen.last_seq.or(applied),
            _ => applied,
        };
        let (replay, batches) = match &rank.replay {
            Some(replay) => replayed(replay, last).await,
            None => (None, Vec::new()),
        };
        let mut look = Look::new(&HashKey::random());
        batches.iter().for_each(|batch| look.see(batch));
        let asked = match asked {
            Some(asked) => Some(Asked { in_agent: self.in_agent(question.as_ref(), &asked).await, ..asked }),
            None => None,
        };
        let replayed = (!batches.is_empty()).then_some(look.seen);
        RankFacts { rank: rank.clone(), told: None, stream, replay, replayed, asked }
    }

    fn question(&self) -> Option<Question> {
        if !self.means.asks || self.replica.http.is_none() {
            return None;
        }
        let metrics = self.pages.and_then(|pages| pages.metrics.as_ref().ok());
        let size = metrics.and_then(|page| page.label("vllm:cache_config_info", "block_size")?.parse().ok());
        let models = self.pages.and_then(|pages| pages.models.as_ref().ok());
        let context = models.and_then(|models| models.iter().find_map(|model| model.max_model_len));
        Question::new(self.means.model(self.replica.revision.as_ref())?, size, context)
    }

    /// Sends the question and waits until what was heard is enough.
    async fn ask(&self, question: Option<&Question>, listening: Option<&Listening>) -> Option<Asked> {
        let (question, http) = (question?, self.replica.http.as_ref()?);
        let answer = timeout(ANSWER, self.post(http, question)).await;
        let answer = answer.unwrap_or_else(|_| Err("no answer in a minute".to_owned()));
        if let (Ok(_), Some(listening)) = (&answer, listening) {
            listening.wait().await;
        }
        let counted = answer.as_ref().ok().and_then(|answer| answer["usage"]["prompt_tokens"].as_u64());
        Some(Asked {
            failed: answer.err(),
            tokens: question.tokens.len(),
            counted: counted.and_then(|tokens| usize::try_from(tokens).ok()),
            matched: Matched::default(),
            in_agent: None,
        })
    }

    async fn post(&self, http: &HttpAddr, question: &Question) -> Result<Value, String> {
        let body = question.body.clone();
        let mut request = Request { method: Method::POST, body, ..Request::get(question.path) };
        if self.replica.ranks.len() > 1 {
            let rank = HeaderValue::from(self.number);
            request.headers.push((HeaderName::from_static("x-data-parallel-rank"), rank));
        }
        let answer = self.means.access.send(http, request, MAX_ANSWER_BYTES).await;
        let answer = answer.map_err(|error| error.to_string())?;
        match answer.status {
            200 => serde_json::from_slice(&answer.body).map_err(|_| "the answer is not JSON".to_owned()),
            status => Err(format!("{} answers with status {status}", question.path)),
        }
    }

    /// How many tokens of the question the agent knows to be on this rank.
    async fn in_agent(&self, question: Option<&Question>, asked: &Asked) -> Option<u64> {
        let (question, admin) = (question?, self.means.admin.as_ref()?);
        if asked.failed.is_some() {
            return None;
        }
        let target = format!("/explain?pool={}&path={}", self.means.pool.backend, question.path);
        let until = Instant::now() + AGENT;
        loop {
            let answer = client::post(admin, &target, question.body.clone()).await.ok()?;
            let json: Value = serde_json::from_slice(&answer.body).ok()?;
            let of_rank = json["replicas"]
                .as_array()?
                .iter()
                .find(|found| found["server"] == *self.replica.server && found["rank"] == self.number);
            let held = of_rank.and_then(|found| found["gpu_tokens"].as_u64()).unwrap_or_default();
            // More than what every prompt begins with.
            if held * 2 >= asked.tokens as u64 || Instant::now() > until {
                return Some(held);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Whether a publisher is at an endpoint.
async fn connect(events: &Endpoint) -> Result<Probe, Stream> {
    reach(events).await.map_err(Stream::Closed)?;
    let events = events.clone();
    let probe = spawn_blocking(move || {
        let mut probe = Probe::open(&events).map_err(|error| Stream::Closed(error.to_string()))?;
        if probe.is_connected(CONNECT) { Ok(probe) } else { Err(Stream::NotZeromq) }
    });
    probe.await.unwrap_or(Err(Stream::NotZeromq))
}

/// Whether anything listens at an endpoint.
async fn reach(endpoint: &Endpoint) -> Result<(), String> {
    let Some(addr) = endpoint.address().strip_prefix("tcp://") else { return Ok(()) };
    match timeout(CONNECT, TcpStream::connect(addr)).await {
        Ok(connected) => connected.map(drop).map_err(|error| error.to_string()),
        Err(_) => Err("no answer in time".to_owned()),
    }
}

/// Asks for the batch heard last; where none was, for none.
async fn replayed(replay: &Endpoint, last: Option<u64>) -> (Option<ReplayFacts>, Vec<Message>) {
    if let Err(why) = reach(replay).await {
        return (Some(ReplayFacts::Closed(why)), Vec::new());
    }
    let replay = replay.clone();
    let from = last.unwrap_or(u64::MAX - 1);
    let asked = spawn_blocking(move || probe::replay(&replay, from, REPLAY)).await;
    let facts = match &asked {
        Ok(Ok(replayed)) => ReplayFacts::Asked {
            is_ended: replayed.is_ended,
            has_batch: last.map(|last| replayed.batches.iter().any(|batch| batch.seq == last)),
        },
        Ok(Err(error)) => ReplayFacts::Closed(error.to_string()),
        Err(_) => ReplayFacts::Asked { is_ended: false, has_batch: None },
    };
    let batches = asked.ok().and_then(Result::ok).map(|replayed| replayed.batches);
    (Some(facts), batches.unwrap_or_default())
}

/// A thread that listens until it is told to end.
struct Listening {
    state: Arc<State>,
    thread: tokio::task::JoinHandle<Look>,
}

#[derive(Default)]
struct State {
    has_all: AtomicBool,
    is_over: AtomicBool,
}

impl Listening {
    fn start(mut probe: Probe, question: Option<Question>) -> Self {
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        let thread = spawn_blocking(move || {
            let mut look = Look::new(&HashKey::random());
            while !shared.is_over.load(Ordering::Acquire) {
                let Some(message) = probe.next(Duration::from_millis(50)) else { continue };
                look.see(&message);
                if let Some(question) = &question {
                    let matched = look.matched(&question.tokens);
                    let has_all = matched.seen > 0 && matched.differ_at.is_none();
                    shared.has_all.store(has_all, Ordering::Release);
                }
            }
            look
        });
        Self { state, thread }
    }

    /// Waits until the question's blocks were heard, and a little longer.
    async fn wait(&self) {
        let until = Instant::now() + EVENTS;
        while !self.state.has_all.load(Ordering::Acquire) && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        tokio::time::sleep(AFTERWARDS).await;
    }

    async fn end(self) -> Look {
        self.state.is_over.store(true, Ordering::Release);
        // A thread that panicked has heard nothing.
        self.thread.await.unwrap_or_else(|_| Look::new(&HashKey::random()))
    }
}
