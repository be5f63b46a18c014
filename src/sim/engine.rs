//! The simulated engine: which requests compute which tokens in which step, and what that does to the caches.
//!
//! Semantics of vLLM's scheduler without asynchronous scheduling: running requests first, in the order in which they
//! were admitted; then requests whose CPU load has ended; then waiting ones, first come first served, each only if its
//! whole prompt fits. No clock: a step says how long it takes, and whoever drives the engine waits or does not.

use super::cache::{KvCache, Room, Sequence};
use super::job::{Cached, EngineStats, Job, JobError, JobId, Output, StepReport};
use super::offload::{Offload, OffloadConfig, Progress};
use super::timing::{StepLoad, Timing};
use crate::units::TokenId;
use std::collections::VecDeque;
use std::time::Duration;

/// What the engine is built of.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Tokens a block.
    pub block_tokens: u32,
    /// Blocks of device memory, of which one is set aside (vLLM's `num_gpu_blocks`).
    pub blocks: u32,
    /// The CPU tier, if there is one.
    pub offload: Option<OffloadConfig>,
    /// Tokens that one step computes at most.
    pub step_tokens: usize,
    /// Requests that run at once at most.
    pub sequences: usize,
    /// How long steps take.
    pub timing: Timing,
}

struct Request {
    id: JobId,
    sequence: Sequence,
    /// The tokens still to be generated, next first.
    answer: VecDeque<TokenId>,
    computed: usize,
    /// Tokens that the step under way computes.
    scheduled: usize,
    cached: Cached,
    was_preempted: bool,
    progress: Progress,
    loaded_at: Option<Duration>,
}

impl Request {
    /// Blocks that the rest of its prompt needs.
    fn missing_blocks(&self, block_tokens: usize) -> usize {
        self.sequence.len().div_ceil(block_tokens).saturating_sub(self.sequence.blocks())
    }
}

/// The engine of one rank.
pub struct Engine {
    config: EngineConfig,
    cache: KvCache,
    offload: Option<Offload>,
    waiting: VecDeque<Request>,
    /// Requests that wait for a load from the CPU tier, and hold their blocks.
    loading: VecDeque<Request>,
    running: Vec<Request>,
    /// Requests that ended since the last step began; the CPU tier hears of them in the next.
    ended: Vec<Request>,
    /// The time that all steps so far took.
    clock: Duration,
    loader_free_at: Duration,
    stats: EngineStats,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("config", &self.config)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// An idle engine with empty caches.
    #[must_use]
    pub fn new(config: EngineConfig) -> Self {
        let cache = KvCache::new(config.block_tokens, config.blocks);
        let offload = config.offload.map(|offload| Offload::new(offload, cache.block_tokens()));
        Self {
            config,
            cache,
            offload,
            waiting: VecDeque::new(),
            loading: VecDeque::new(),
            running: Vec::new(),
            ended: Vec::new(),
            clock: Duration::ZERO,
            loader_free_at: Duration::ZERO,
            stats: EngineStats::default(),
        }
    }

    /// Prompt and answer together can be no longer than this, in tokens.
    #[must_use]
    pub fn capacity_tokens(&self) -> usize {
        self.cache.capacity_tokens()
    }

    /// Adds a request behind the others.
    ///
    /// # Errors
    /// If the request can never run.
    pub fn submit(&mut self, job: Job) -> Result<(), JobError> {
        if job.prompt.tokens.is_empty() || job.answer.is_empty() {
            return Err(JobError::Empty);
        }
        let needed_tokens = job.prompt.tokens.len() + job.answer.len();
        let capacity_tokens = self.capacity_tokens();
        if needed_tokens > capacity_tokens {
            return Err(JobError::TooLong { needed_tokens, capacity_tokens });
        }
        self.stats.prompt_tokens += job.prompt.tokens.len() as u64;
        self.waiting.push_back(Request {
            id: job.id,
            sequence: self.cache.sequence(job.prompt),
            answer: job.answer.into(),
            computed: 0,
            scheduled: 0,
            cached: Cached::default(),
            was_preempted: false,
            progress: Progress::default(),
            loaded_at: None,
        });
        Ok(())
    }

    /// Ends a request before its time; nothing if there is none of that number. Not to be called within a step.
    pub fn abort(&mut self, id: JobId) {
        let at = |queue: &VecDeque<Request>| queue.iter().position(|request| request.id == id);
        let request = if let Some(at) = self.running.iter().position(|request| request.id == id) {
            Some(self.running.remove(at))
        } else if let Some(at) = at(&self.waiting) {
            self.waiting.remove(at)
        } else {
            at(&self.loading).and_then(|at| self.loading.remove(at))
        };
        if let Some(request) = request {
            self.end(request);
        }
    }

    /// Clears the prefix cache, and the CPU tier if `external`; false if the former has blocks in use. The event comes
    /// with the next step.
    pub fn reset_prefix_cache(&mut self, external: bool) -> bool {
        self.reset(external)
    }

    /// The same as with vLLM's `reset_running_requests`: who is running lets go of its blocks and starts again. False
    /// while blocks are loaded from the CPU tier.
    pub fn reset_with_running(&mut self, external: bool) -> bool {
        // The first shall be the first again.
        while let Some(request) = self.running.pop() {
            self.preempt(request);
        }
        self.reset(external)
    }

    fn reset(&mut self, external: bool) -> bool {
        let is_reset = self.cache.reset();
        if external && let Some(offload) = &mut self.offload {
            offload.reset();
            self.ended.clear();
            for request in self.running.iter_mut().chain(&mut self.waiting).chain(&mut self.loading) {
                request.progress.restart();
            }
        }
        is_reset
    }

    /// Whether there are requests that have not ended.
    #[must_use]
    pub fn has_requests(&self) -> bool {
        !self.running.is_empty() || !self.waiting.is_empty() || !self.loading.is_empty()
    }

    /// Whether another step would do anything: for requests, or for the CPU tier after they ended.
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.has_requests() || !self.ended.is_empty() || self.offload.as_ref().is_some_and(Offload::has_work)
    }

    /// The load now.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.running.len(),
            waiting: self.waiting.len() + self.loading.len(),
            usage: self.cache.usage(),
            ..self.stats
        }
    }

    /// Decides what the next step computes; returns how long it takes. [`Self::end_step`] must follow.
    pub fn begin_step(&mut self) -> Duration {
        if let Some(offload) = &mut self.offload {
            offload.begin_step();
        }
        let mut load = StepLoad::default();
        let mut budget = self.config.step_tokens;
        let everybody_fits = self.schedule_running(&mut budget, &mut load);
        if everybody_fits {
            self.admit(&mut budget, &mut load);
        }
        self.plan_stores();
        let step = self.config.timing.step(load);
        let is_idle = load == StepLoad::default();
        let wait = self.loading.iter().filter_map(|request| request.loaded_at).min().filter(|_| is_idle);
        let duration = wait.map_or(step, |at| at.saturating_sub(self.clock));
        self.clock += duration;
        duration
    }

    /// The step that was begun has run.
    pub fn end_step(&mut self) -> StepReport {
        let mut outputs = Vec::new();
        let mut at = 0;
        while let Some(request) = self.running.get_mut(at) {
            at += 1;
            let has_run = std::mem::take(&mut request.scheduled) > 0;
            if !has_run || request.computed < request.sequence.len() {
                continue;
            }
            let Some(token) = request.answer.pop_front() else { continue };
            self.stats.generated_tokens += 1;
            if request.sequence.len() == request.sequence.prompt_tokens() {
                let cached_now = request.sequence.named() * self.cache.block_tokens();
                request.cached.created_tokens = cached_now.saturating_sub(request.cached.tokens());
                let computed = request.sequence.prompt_tokens().saturating_sub(request.cached.tokens());
                self.stats.first_tokens += 1;
                self.stats.computed_tokens += computed as u64;
            }
            self.cache.push(&mut request.sequence, token);
            let is_last = request.answer.is_empty();
            outputs.push(Output { id: request.id, token, cached: request.cached, is_last });
            if is_last {
                at -= 1;
                let request = self.running.remove(at);
                self.end(request);
            }
        }
        let mut events = self.cache.take_events();
        if let Some(offload) = &mut self.offload {
            events.extend(offload.end_step());
            for request in
                self.loading.iter_mut().filter(|request| request.loaded_at.is_some_and(|at| at <= self.clock))
            {
                request.loaded_at = None;
                offload.end_load(&mut request.progress);
            }
        }
        StepReport { outputs, events }
    }

    /// Gives the running requests their tokens; false if one had to be preempted for that.
    fn schedule_running(&mut self, budget: &mut usize, load: &mut StepLoad) -> bool {
        let mut everybody_fits = true;
        let mut at = 0;
        while *budget > 0 {
            let Some(request) = self.running.get_mut(at) else { break };
            let tokens = (request.sequence.len() - request.computed).min(*budget);
            if self.cache.allocate(&mut request.sequence, &[], Room::plain(request.computed + tokens)) {
                self.cache.name_full_blocks(&mut request.sequence, request.computed + tokens);
                schedule(request, tokens, budget, load);
                at += 1;
                continue;
            }
            everybody_fits = false;
            if let Some(youngest) = self.running.pop() {
                self.preempt(youngest);
            }
        }
        everybody_fits
    }

    /// Starts waiting requests while there is room for them.
    fn admit(&mut self, budget: &mut usize, load: &mut StepLoad) {
        let mut not_loaded = VecDeque::new();
        let mut put_off = VecDeque::new();
        while *budget > 0 && self.running.len() < self.config.sequences {
            let from_loading = !self.loading.is_empty();
            let queue = if from_loading { &mut self.loading } else { &mut self.waiting };
            let Some(mut request) = queue.pop_front() else { break };
            let reserved_blocks = self.missing_blocks(&not_loaded);
            match self.try_admit(&mut request, *budget, reserved_blocks) {
                Admission::Runs { tokens } => {
                    schedule(&mut request, tokens, budget, load);
                    self.running.push(request);
                }
                Admission::Loads => not_loaded.push_back(request),
                Admission::PutOff => put_off.push_back(request),
                Admission::NoRoom => {
                    let queue = if from_loading { &mut self.loading } else { &mut self.waiting };
                    queue.push_front(request);
                    break;
                }
            }
        }
        for request in not_loaded.into_iter().rev() {
            self.loading.push_front(request);
        }
        for request in put_off.into_iter().rev() {
            self.waiting.push_front(request);
        }
    }

    /// `reserved_blocks` are those that requests under way still need: a load, which cannot be preempted, leaves them.
    fn try_admit(&mut self, request: &mut Request, budget: usize, reserved_blocks: usize) -> Admission {
        if request.loaded_at.is_some() {
            return Admission::Loads;
        }
        let length = request.sequence.len();
        if request.computed > 0 {
            return self.admit_loaded(request, budget);
        }
        let hits = self.cache.lookup(&request.sequence);
        let device_tokens = hits.len() * self.cache.block_tokens();
        let found =
            self.offload.as_ref().map_or(Some(0), |offload| offload.lookup(&request.sequence, device_tokens));
        let Some(host_tokens) = found else { return Admission::PutOff };
        if !request.was_preempted {
            request.cached = Cached { device_tokens, host_tokens, created_tokens: 0 };
        }
        let computed = device_tokens + host_tokens;
        let is_loading = host_tokens > 0;
        let tokens = if is_loading { 0 } else { (length - computed).min(budget) };
        let reserved_blocks = if is_loading { reserved_blocks } else { 0 };
        let room = Room { tokens: computed + tokens, must_fit_tokens: length, reserved_blocks };
        if !self.cache.allocate(&mut request.sequence, &hits, room) {
            return Admission::NoRoom;
        }
        self.stats.queried_tokens += length as u64;
        self.stats.hit_tokens += device_tokens as u64;
        if self.offload.is_some() {
            self.stats.host_queried_tokens += (length - device_tokens) as u64;
            self.stats.host_hit_tokens += host_tokens as u64;
        }
        request.computed = computed;
        if is_loading && let Some(offload) = &mut self.offload {
            offload.begin_load(&request.sequence, &mut request.progress, device_tokens, host_tokens);
            let starts_at = self.loader_free_at.max(self.clock);
            self.loader_free_at = starts_at + self.config.timing.load(host_tokens);
            request.loaded_at = Some(self.loader_free_at);
            return Admission::Loads;
        }
        self.cache.name_full_blocks(&mut request.sequence, computed + tokens);
        Admission::Runs { tokens }
    }

    /// A request whose load has ended goes on where the load left it.
    fn admit_loaded(&mut self, request: &mut Request, budget: usize) -> Admission {
        self.cache.name_full_blocks(&mut request.sequence, request.computed);
        let length = request.sequence.len();
        // The last token is computed in any case, for its logits.
        request.computed = request.computed.min(length - 1);
        let tokens = (length - request.computed).min(budget);
        let room = Room { tokens: request.computed + tokens, must_fit_tokens: length, reserved_blocks: 0 };
        if !self.cache.allocate(&mut request.sequence, &[], room) {
            return Admission::NoRoom;
        }
        self.cache.name_full_blocks(&mut request.sequence, request.computed + tokens);
        Admission::Runs { tokens }
    }

    fn missing_blocks(&self, not_loaded: &VecDeque<Request>) -> usize {
        if self.offload.is_none() {
            return 0;
        }
        let block_tokens = self.cache.block_tokens();
        let under_way = self.running.iter().chain(&self.loading).chain(not_loaded);
        under_way.map(|request| request.missing_blocks(block_tokens)).sum()
    }

    fn preempt(&mut self, mut request: Request) {
        self.cache.release(&mut request.sequence);
        request.computed = 0;
        request.scheduled = 0;
        request.was_preempted = true;
        self.stats.preemptions += 1;
        self.waiting.push_front(request);
    }

    fn end(&mut self, mut request: Request) {
        self.cache.release(&mut request.sequence);
        if self.offload.is_some() {
            self.ended.push(request);
        }
    }

    /// Offers the CPU tier what this step computes, and tells it of the requests that ended.
    fn plan_stores(&mut self) {
        let ended = std::mem::take(&mut self.ended);
        let Some(offload) = &mut self.offload else { return };
        for request in self.running.iter_mut().filter(|request| request.scheduled > 0) {
            offload.plan(&request.sequence, &mut request.progress, request.computed);
        }
        for mut request in ended {
            offload.end_load(&mut request.progress);
            offload.plan(&request.sequence, &mut request.progress, request.computed);
            offload.end_request(&request.progress);
        }
    }
}

enum Admission {
    Runs {
        tokens: usize,
    },
    /// Waits for a load from the CPU tier.
    Loads,
    /// Its turn comes again in the next step; others go first.
    PutOff,
    NoRoom,
}

/// Enters `tokens` tokens of the request into the step. They count as computed from now on, as in vLLM.
fn schedule(request: &mut Request, tokens: usize, budget: &mut usize, load: &mut StepLoad) {
    let before = request.computed as u64;
    let count = tokens as u64;
    let is_decode = tokens == 1 && request.computed >= request.sequence.prompt_tokens();
    if is_decode {
        load.decodes += 1;
        load.decode_context_tokens += before + 1;
    } else {
        load.prefill_tokens += count;
        load.prefill_context_tokens += count * before + count * count / 2;
    }
    request.computed += tokens;
    request.scheduled = tokens;
    *budget -= tokens;
}

#[cfg(test)]
mod tests;
