//! One run: a workload through replicas and agents in virtual time.
//!
//! All that happens stands in one queue by its time; what happens at one time, in the order in which it was caused. So a
//! run depends on its setting and its seed alone, and takes as long as the machine needs to compute it.

use super::{
    agent::{Agent, Batch, Router},
    outcome::Record,
    workload::Workload,
};
use crate::{
    hash::HashKey,
    select::{Ask, PromptBlocks},
    sim::{Engine, EngineConfig, Job, JobError, Prompt},
    units::{RankId, RequestId},
};
use std::{
    collections::BTreeMap,
    rc::Rc,
    sync::Arc,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// The replicas and what lies between them and the agents.
#[derive(Clone, Debug, Default)]
pub(super) struct Fleet {
    /// One engine for each replica.
    pub(super) engines: Vec<EngineConfig>,
    /// From the end of a step until its events are seen.
    pub(super) event_lag: Duration,
    /// The share of batches of events that are lost for good.
    pub(super) event_loss: f64,
    /// Agents that HAProxy asks in turn.
    pub(super) agents: u16,
    /// After what time an agent's bookings and ends are known to the others; `None`: never.
    pub(super) sharing: Option<Duration>,
    /// How often engines are asked for their load, if they are.
    pub(super) poll: Option<Duration>,
    /// The share of what agents tell each other that is lost.
    pub(super) sharing_loss: f64,
    /// How many times a replica is started anew, at even intervals, by chance which.
    pub(super) restarts: u32,
    /// The same for how many times one loses its caches, but none of its requests: those that run start again.
    pub(super) resets: u32,
}

impl Fleet {
    /// Blocks of one replica's cache over all tiers.
    pub(super) fn cache_blocks(&self) -> u32 {
        self.engines.first().map_or(0, |engine| {
            // The engine sets one aside.
            let gpu = engine.blocks.saturating_sub(1);
            gpu.saturating_add(engine.offload.map_or(0, |offload| offload.blocks))
        })
    }
}

/// What one run brought.
#[derive(Debug)]
pub(super) struct Played {
    pub(super) records: Vec<Record>,
    /// How long each replica computed.
    pub(super) busy: Vec<Duration>,
}

enum Event {
    Arrives(usize),
    StepEnds { replica: usize, life: u32 },
    EventsSeen { agent: usize, replica: usize, life: u32, batch: Rc<Batch>, gap: bool },
    BookingSeen { agent: usize, ask: Ask, rank: RankId },
    EndSeen { agent: usize, id: RequestId, rank: RankId },
    Renewed { agent: usize, ids: Rc<Vec<RequestId>> },
    Polled,
    Second,
    Restarts,
    Resets,
}

struct Replica {
    engine: Engine,
    config: EngineConfig,
    life: u32,
    is_stepping: bool,
    busy: Duration,
    /// Whether a batch of events was lost behind the last one that was seen.
    gap: bool,
    /// Whether its caches are to be emptied as soon as they can be.
    reset_due: bool,
}

struct Run<'a> {
    fleet: &'a Fleet,
    workload: &'a Workload,
    arrivals: &'a [Duration],
    key: HashKey,
    queue: BTreeMap<(Duration, u64), Event>,
    caused: u64,
    seconds: u64,
    now: Duration,
    start: Instant,
    agents: Vec<Agent>,
    replicas: Vec<Replica>,
    records: Vec<Record>,
    /// Where each request is.
    places: Vec<Option<usize>>,
    open: usize,
    rng: fastrand::Rng,
    done: &'a AtomicU64,
}

/// The same for all runs: nobody outside chooses the tokens, and equal runs must be equal.
const KEY_SEED: u64 = 0x6b76_7370_6f61;

/// How often agents tell each other what they still have, as `agent::peers` does.
const RENEWAL_SECONDS: u64 = 10;

/// An engine that has only a copy to the CPU tier to wait for looks again after this long.
const SHORTEST_STEP: Duration = Duration::from_micros(100);

/// Plays the workload to its end. `done` counts the requests that are over.
///
/// # Errors
/// A request that no replica can ever run.
pub(super) fn play(
    fleet: &Fleet,
    workload: &Workload,
    arrivals: &[Duration],
    router: impl Fn(u64) -> Router,
    seed: u64,
    done: &AtomicU64,
) -> Result<Played, JobError> {
    let key = HashKey::from_seed(KEY_SEED);
    let start = Instant::now();
    let block_tokens = fleet.engines.first().map_or(1, |engine| engine.block_tokens);
    let agent = |at: u16| {
        let router = router(seed.wrapping_mul(0x1_0001).wrapping_add(at.into()));
        Agent::new(&key, fleet.engines.len() as u16, block_tokens, fleet.cache_blocks(), router, start)
    };
    let replica = |config: &EngineConfig| Replica {
        engine: Engine::new(config.clone()),
        config: config.clone(),
        life: 0,
        is_stepping: false,
        busy: Duration::ZERO,
        gap: false,
        reset_due: false,
    };
    let mut run = Run {
        agents: (0..fleet.agents.max(1)).map(agent).collect(),
        replicas: fleet.engines.iter().map(replica).collect(),
        records: arrivals.iter().map(|at| Record::new(*at)).collect(),
        places: vec![None; arrivals.len()],
        open: arrivals.len(),
        queue: BTreeMap::new(),
        caused: 0,
        seconds: 0,
        now: Duration::ZERO,
        rng: fastrand::Rng::with_seed(seed),
        fleet,
        workload,
        arrivals,
        key,
        start,
        done,
    };
    run.plan();
    while run.open > 0
        && let Some(((now, _), event)) = run.queue.pop_first()
    {
        run.now = now;
        run.happens(event)?;
    }
    Ok(Played { records: run.records, busy: run.replicas.iter().map(|replica| replica.busy).collect() })
}

impl Replica {
    /// Empties the caches, unless blocks are being loaded: then later.
    fn reset_if_due(&mut self) {
        self.reset_due = self.reset_due && !self.engine.reset_with_running(true);
    }
}

impl Run<'_> {
    fn plan(&mut self) {
        for (request, at) in self.arrivals.iter().enumerate() {
            self.caused += 1;
            self.queue.insert((*at, self.caused), Event::Arrives(request));
        }
        self.after(Duration::from_secs(1), Event::Second);
        self.poll_later();
        let last = self.arrivals.last().copied().unwrap_or_default();
        let evenly = |count: u32| (1..=count).map(move |at| f64::from(at) / (f64::from(count) + 1.0));
        for share in evenly(self.fleet.restarts) {
            self.after(last.mul_f64(share), Event::Restarts);
        }
        for share in evenly(self.fleet.resets) {
            self.after(last.mul_f64(share), Event::Resets);
        }
    }

    fn poll_later(&mut self) {
        if let Some(poll) = self.fleet.poll {
            self.after(poll, Event::Polled);
        }
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.caused += 1;
        self.queue.insert((self.now + delay, self.caused), event);
    }

    fn instant(&self) -> Instant {
        self.start + self.now
    }

    fn happens(&mut self, event: Event) -> Result<(), JobError> {
        let now = self.instant();
        match event {
            Event::Arrives(request) => self.arrives(request)?,
            Event::StepEnds { replica, life } => {
                if self.replicas[replica].life == life {
                    self.step_ends(replica);
                }
            }
            Event::EventsSeen { agent, replica, life, batch, gap } => {
                if self.replicas[replica].life == life {
                    self.agents[agent].apply(RankId(replica as u16), &batch, gap, now);
                }
            }
            Event::BookingSeen { agent, ask, rank } => self.agents[agent].mirror(&ask, rank, now),
            Event::EndSeen { agent, id, rank } => self.agents[agent].end(id, rank, now),
            Event::Polled => {
                for (rank, replica) in (0..).map(RankId).zip(&self.replicas) {
                    let stats = replica.engine.stats();
                    self.agents.iter_mut().for_each(|agent| agent.polled(rank, &stats));
                }
                self.poll_later();
            }
            Event::Second => {
                self.seconds += 1;
                self.agents.iter_mut().for_each(|agent| agent.tick(now));
                if self.seconds.is_multiple_of(RENEWAL_SECONDS) {
                    self.renew();
                }
                self.after(Duration::from_secs(1), Event::Second);
            }
            Event::Renewed { agent, ids } => self.agents[agent].renew(&ids, now),
            Event::Restarts => self.restarts()?,
            Event::Resets => {
                let at = self.rng.usize(..self.replicas.len());
                self.replicas[at].reset_due = true;
                if !self.replicas[at].is_stepping {
                    self.replicas[at].reset_if_due();
                }
            }
        }
        Ok(())
    }

    /// HAProxy asks an agent and sends the request where it says.
    fn arrives(&mut self, request: usize) -> Result<(), JobError> {
        let asked = &self.workload.requests[request];
        let mut tokens = self.workload.tokens(asked);
        let answer = tokens.split_off(asked.prompt_tokens as usize);
        let block_tokens = self.replicas.first().map_or(1, |replica| replica.config.block_tokens);
        let sequence = self.key.sequence(self.key.plain_root(), &tokens, block_tokens);
        let prompt = Arc::new(PromptBlocks::new(asked.prompt_tokens, [(block_tokens, sequence)]));
        let ask = Ask { id: RequestId(request as u128), prompt, session: None };
        let agent = request % self.agents.len();
        let now = self.instant();
        // Without an opinion, HAProxy's own balance serves the request.
        let anywhere = RankId(self.rng.u16(..self.replicas.len() as u16));
        let rank = self.agents[agent].choose(&ask, now).unwrap_or(anywhere);
        self.tell(agent, |other| Event::BookingSeen { agent: other, ask: ask.clone(), rank });
        let replica = rank.index();
        self.places[request] = Some(replica);
        let job = Job { id: request as u64, prompt: Prompt { tokens, ..Prompt::default() }, answer };
        self.replicas[replica].engine.submit(job)?;
        if !self.replicas[replica].is_stepping {
            self.step(replica);
        }
        Ok(())
    }

    fn step(&mut self, at: usize) {
        let replica = &mut self.replicas[at];
        let computes = replica.engine.begin_step();
        replica.busy += computes;
        replica.is_stepping = true;
        let life = replica.life;
        self.after(computes.max(SHORTEST_STEP), Event::StepEnds { replica: at, life });
    }

    fn step_ends(&mut self, at: usize) {
        let report = self.replicas[at].engine.end_step();
        let rank = RankId(at as u16);
        for output in report.outputs {
            let request = output.id as usize;
            let id = RequestId(request as u128);
            if self.records[request].token(self.now, output.cached) {
                self.agents.iter_mut().for_each(|agent| agent.first_token(id));
            }
            if output.is_last {
                self.ends(request, rank);
            }
        }
        if report.events.is_empty() {
        } else if self.rng.f64() < self.fleet.event_loss {
            // No agent sees it; by the next one they all notice.
            self.replicas[at].gap = true;
        } else {
            let batch = Rc::new(Batch::new(&self.key, self.fleet.event_lag, report.events));
            let life = self.replicas[at].life;
            let gap = std::mem::take(&mut self.replicas[at].gap);
            for agent in 0..self.agents.len() {
                let seen = Event::EventsSeen { agent, replica: at, life, batch: Rc::clone(&batch), gap };
                self.after(self.fleet.event_lag, seen);
            }
        }
        self.replicas[at].is_stepping = false;
        self.replicas[at].reset_if_due();
        if self.replicas[at].engine.has_work() {
            self.step(at);
        }
    }

    /// HAProxy's log line tells the agent that it asked; others hear of it from that one.
    fn ends(&mut self, request: usize, rank: RankId) {
        let id = RequestId(request as u128);
        self.places[request] = None;
        self.records[request].replica = rank.0;
        self.open -= 1;
        self.done.fetch_add(1, Ordering::Relaxed);
        let now = self.instant();
        let agent = request % self.agents.len();
        self.agents[agent].end(id, rank, now);
        self.tell(agent, |other| Event::EndSeen { agent: other, id, rank });
    }

    /// Every agent tells the others what it still has.
    fn renew(&mut self) {
        for agent in 0..self.agents.len() {
            let ids = Rc::new(self.agents[agent].own_bookings());
            self.tell(agent, |other| Event::Renewed { agent: other, ids: Rc::clone(&ids) });
        }
    }

    /// One agent tells all others.
    fn tell(&mut self, agent: usize, news: impl Fn(usize) -> Event) {
        let Some(delay) = self.fleet.sharing else { return };
        for other in (0..self.agents.len()).filter(|other| *other != agent) {
            if self.fleet.sharing_loss == 0.0 || self.rng.f64() >= self.fleet.sharing_loss {
                self.after(delay, news(other));
            }
        }
    }

    /// A replica loses its caches and its requests; HAProxy sends those anew.
    fn restarts(&mut self) -> Result<(), JobError> {
        let at = self.rng.usize(..self.replicas.len());
        let replica = &mut self.replicas[at];
        replica.engine = Engine::new(replica.config.clone());
        replica.life += 1;
        replica.is_stepping = false;
        replica.gap = false;
        replica.reset_due = false;
        let now = self.instant();
        self.agents.iter_mut().for_each(|agent| agent.restarted(RankId(at as u16), now));
        let lost: Vec<usize> =
            (0..self.places.len()).filter(|request| self.places[*request] == Some(at)).collect();
        lost.into_iter().try_for_each(|request| self.arrives(request))
    }
}

#[cfg(test)]
mod tests;
