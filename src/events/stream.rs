//! What one rank's stream of batches proves about its cache: gaps, replays, restarts, disconnects.
//!
//! Batches are numbered from 0 by each publisher process, and nothing in them names the process (vLLM `kv_events`).
//! Whoever follows the stream must find out by itself that batches are missing and that the process is another one.
//! This machine does so without sockets or clocks: it is told what happened and says what to do.
//!
//! One move answers every doubt, the **catch-up**: ask the publisher's replay for its batches from the last one that
//! was applied (included) on, or from 0 if there is none. The first answer shows whether the publisher is the process
//! that we followed; what comes after it fills the gap. A catch-up runs at connect, after a reconnect, at a gap, once
//! when the stream falls idle, and when others have reason to doubt it. Live batches wait meanwhile, in order.

mod types;

use std::collections::VecDeque;
use std::ops::Deref;
use std::time::Instant;
pub use types::{Action, DegradedReason, Doubt, FeedState, ResetReason, StreamLimits, SuspendReason};
use xxhash_rust::xxh3::xxh3_64;

/// One rank's stream. `P` is a batch's bytes, however the owner holds them.
#[derive(Debug)]
pub struct Stream<P> {
    limits: StreamLimits,
    can_replay: bool,
    rng: fastrand::Rng,
    connected: bool,
    phase: Phase,
    reported: FeedState,
    /// Why batches are missing, and the first one applied after the hole.
    degraded: Option<(DegradedReason, u64)>,
    applied: Option<Applied>,
    /// The last number on the live connection: behind it, a lower one means another process.
    live_seq: Option<u64>,
    held: VecDeque<(u64, P)>,
    held_bytes: usize,
    catch_up: Option<CatchUp>,
    idle_at: Option<Instant>,
    /// Whether the replay endpoint has ever answered.
    answered: bool,
    /// Neither the live connection nor the replay endpoint says anything, though there should be something.
    silent: bool,
    gaps: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Before the end of the history.
    Connecting,
    /// The process is not known to be the same as before.
    Suspended(SuspendReason),
    Following,
}

/// The last batch applied: enough to know it again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Applied {
    seq: u64,
    fingerprint: u64,
}

#[derive(Debug)]
struct CatchUp {
    step: Step,
    /// When live batches stop waiting; runs from the first request that was sent.
    deadline: Option<Instant>,
    /// Requests in a row that brought nothing.
    barren: u32,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A request was made, and waits for its turn.
    Queued,
    /// Its answer comes in.
    Answering { last_heard: Instant, heard: bool, new: bool },
    /// The next request is made then.
    Pausing { until: Instant },
}

impl<P: Deref<Target = [u8]>> Stream<P> {
    /// A stream that is not connected yet. `can_replay` says whether it has a replay endpoint; `seed` sets its
    /// random waits.
    #[must_use]
    pub fn new(can_replay: bool, limits: StreamLimits, seed: u64) -> Self {
        Self {
            limits,
            can_replay,
            rng: fastrand::Rng::with_seed(seed),
            connected: false,
            phase: Phase::Connecting,
            reported: FeedState::Connecting,
            degraded: None,
            applied: None,
            live_seq: None,
            held: VecDeque::new(),
            held_bytes: 0,
            catch_up: None,
            idle_at: None,
            answered: false,
            silent: false,
            gaps: 0,
        }
    }

    /// How well the rank's cache is known.
    #[must_use]
    pub fn state(&self) -> FeedState {
        match (self.phase, self.degraded) {
            (Phase::Connecting, _) => FeedState::Connecting,
            (Phase::Suspended(reason), _) => FeedState::Suspended(reason),
            (Phase::Following, _) if self.silent => FeedState::Suspended(SuspendReason::Silent),
            (Phase::Following, None) => FeedState::Exact,
            (Phase::Following, Some((reason, _))) => FeedState::Degraded(reason),
        }
    }

    /// The number of the last batch that was applied.
    #[must_use]
    pub fn applied_seq(&self) -> Option<u64> {
        self.applied.map(|applied| applied.seq)
    }

    /// Holes found in the sequence numbers so far, in the live stream or within a replay.
    #[must_use]
    pub const fn gaps(&self) -> u64 {
        self.gaps
    }

    /// Live batches that wait for a replay.
    #[must_use]
    pub fn held_batches(&self) -> usize {
        self.held.len()
    }

    /// The live connection is up.
    pub fn on_connect(&mut self, now: Instant, actions: &mut Vec<Action<P>>) {
        self.connected = true;
        self.postpone_idle(now);
        if self.can_replay && self.catch_up.is_none() {
            self.begin_catch_up(actions);
        }
        self.report(actions);
    }

    /// The live connection is down. Its publisher may be gone.
    pub fn on_disconnect(&mut self, actions: &mut Vec<Action<P>>) {
        self.connected = false;
        self.live_seq = None;
        self.silent = false;
        self.idle_at = None;
        self.drop_held();
        self.cancel_catch_up(actions);
        if self.applied.is_some() || self.phase == Phase::Following {
            self.phase = Phase::Suspended(SuspendReason::Disconnected);
        }
        self.report(actions);
    }

    /// Others have reason to doubt a stream that is followed. It is asked for its last batches; what is known does not
    /// count until it has answered, or spoken by itself.
    pub fn on_doubt(&mut self, doubt: Doubt, actions: &mut Vec<Action<P>>) {
        match doubt {
            Doubt::Resync => return self.resync(actions),
            _ if !self.connected || self.phase != Phase::Following => return,
            // It has spoken after all.
            Doubt::Silent if !self.held.is_empty() => return,
            Doubt::Silent => self.silent = true,
            Doubt::HealthLost => {
                self.phase = Phase::Suspended(SuspendReason::HealthLost);
                // An answer under way may be the old process's.
                self.cancel_catch_up(actions);
            }
        }
        if self.can_replay && self.catch_up.is_none() {
            self.begin_catch_up(actions);
        }
        self.report(actions);
    }

    /// Forgets all, and has it told again. Without a replay endpoint nothing would tell it: then nothing is forgotten.
    fn resync(&mut self, actions: &mut Vec<Action<P>>) {
        if !self.can_replay {
            return;
        }
        self.silent = false;
        self.reset(ResetReason::Resync, actions);
        if self.connected {
            self.begin_catch_up(actions);
        }
        self.report(actions);
    }

    /// A batch came on the live connection.
    pub fn on_live(&mut self, seq: u64, payload: P, now: Instant, actions: &mut Vec<Action<P>>) {
        if !self.connected {
            // Left over from the connection that was lost, whose process may never have been proven.
            return;
        }
        self.silent = false;
        self.postpone_idle(now);
        if self.live_seq.is_some_and(|last| seq <= last) {
            self.reset(ResetReason::SequenceWentBack, actions);
        }
        let health_lost = Phase::Suspended(SuspendReason::HealthLost);
        if self.phase == health_lost && self.live_follows() && seq == self.next() {
            // The connection was never lost, and its numbers go on: the process is the same.
            self.cancel_catch_up(actions);
            self.phase = Phase::Following;
        }
        self.live_seq = Some(seq);
        if seq == 0 && self.applied.is_none() {
            // The beginning itself: nothing to catch up with.
            self.cancel_catch_up(actions);
            self.phase = Phase::Following;
            self.apply(seq, payload, actions);
        } else if let Some(catch_up) = &self.catch_up {
            // Until the first request is sent, whatever comes will be in its answer.
            if catch_up.deadline.is_some() {
                self.hold(seq, payload, actions);
            }
        } else {
            self.follow(seq, payload, actions);
        }
        self.report(actions);
    }

    /// The request made last was sent.
    pub fn on_replay_sent(&mut self, now: Instant) {
        if let Some(catch_up) = &mut self.catch_up {
            catch_up.step = Step::Answering { last_heard: now, heard: false, new: false };
            catch_up.deadline.get_or_insert(now + self.limits.catch_up);
        }
    }

    /// A batch came in answer to the request sent last.
    pub fn on_replay(&mut self, seq: u64, payload: P, now: Instant, actions: &mut Vec<Action<P>>) {
        let (wanted, next) = (self.wanted(), self.next());
        let Some(CatchUp { step: Step::Answering { last_heard, heard, new }, .. }) = &mut self.catch_up
        else {
            return;
        };
        *last_heard = now;
        self.answered = true;
        if seq < wanted {
            return;
        }
        let first = !std::mem::replace(heard, true);
        if seq == wanted && self.applied.is_some() {
            if first && self.applied != Some(Applied::new(seq, &payload)) {
                self.reset(ResetReason::HistoryDiffers, actions);
                self.begin_catch_up(actions);
            } else if self.is_suspended() {
                self.phase = Phase::Connecting;
            }
        } else if seq > next && !first {
            // A router drops what its queue cannot take, so an answer may have holes (seen with vLLM). The rest of
            // this answer is of no use: it is asked again from the hole.
            let new = *new;
            self.gaps += 1;
            actions.push(Action::CancelReplay);
            self.pause(new, DegradedReason::ReplayIncomplete, now, actions);
        } else {
            *new = true;
            if self.is_suspended() {
                self.forget(ResetReason::Unproven, actions);
            }
            if seq > self.next() {
                // Nothing is dropped at the head of an answer: older batches are no longer there.
                self.degrade(DegradedReason::HistoryLost, seq);
            }
            self.apply(seq, payload, actions);
            self.drop_held_up_to(seq);
        }
        self.report(actions);
    }

    /// The answer to the request sent last is at its end. The end proves nothing by itself: an answer counts as whole
    /// when it brings nothing new, or when the last live batch is the last one applied.
    pub fn on_replay_end(&mut self, now: Instant, actions: &mut Vec<Action<P>>) {
        let Some(CatchUp { step: Step::Answering { heard, new, .. }, .. }) = self.catch_up else { return };
        self.answered = true;
        if !heard && self.applied.is_some() {
            self.reset(ResetReason::HistoryGone, actions);
            self.begin_catch_up(actions);
        } else if self.drain_held(actions) && (self.live_follows() || !new && !self.live_is_ahead()) {
            self.catch_up = None;
            self.phase = Phase::Following;
            self.silent = false;
        } else if new {
            self.request(actions);
        } else {
            self.pause(new, DegradedReason::ReplayIncomplete, now, actions);
        }
        self.report(actions);
    }

    /// Time has passed: to be called every 100 ms or so.
    pub fn on_tick(&mut self, now: Instant, actions: &mut Vec<Action<P>>) {
        match &self.catch_up {
            Some(CatchUp { step: Step::Answering { last_heard, heard, new }, deadline, .. }) => {
                let late = deadline.is_some_and(|deadline| now >= deadline) && !self.held.is_empty();
                let patience = if *heard { self.limits.replay_stall } else { self.limits.replay_silence };
                if late || now.saturating_duration_since(*last_heard) >= patience {
                    let new = *new;
                    actions.push(Action::CancelReplay);
                    self.pause(new, DegradedReason::ReplayTimeout, now, actions);
                }
            }
            Some(CatchUp { step: Step::Pausing { until }, .. }) if now >= *until => self.request(actions),
            Some(_) => {}
            None if self.idle_at.is_some_and(|at| now >= at) => {
                self.idle_at = None;
                self.begin_catch_up(actions);
            }
            None => {}
        }
        self.report(actions);
    }

    /// The batch `seq` told that the cache was reset: what was missed before it no longer matters.
    pub fn on_cleared(&mut self, seq: u64, actions: &mut Vec<Action<P>>) {
        if self.degraded.is_some_and(|(_, since)| since <= seq) {
            self.degraded = None;
        }
        self.report(actions);
    }

    /// All that is known was told in batches after `since`: what was missed before no longer matters.
    pub fn on_turned_over(&mut self, since: u64, actions: &mut Vec<Action<P>>) {
        if self.degraded.is_some_and(|(_, first)| first <= since.saturating_add(1)) {
            self.degraded = None;
        }
        self.report(actions);
    }

    /// The batch `seq` could not be decoded, or an event of it that concerns us.
    pub fn on_undecodable(&mut self, seq: u64, actions: &mut Vec<Action<P>>) {
        self.degrade(DegradedReason::Undecodable, seq.saturating_add(1));
        self.report(actions);
    }

    /// Takes a live batch while nothing is being caught up with.
    fn follow(&mut self, seq: u64, payload: P, actions: &mut Vec<Action<P>>) {
        if seq < self.next() {
            if !self.is_known(seq, &payload) {
                self.reset(ResetReason::SequenceWentBack, actions);
                self.follow(seq, payload, actions);
            }
        } else if seq > self.next() && self.can_replay {
            self.gaps += 1;
            self.begin_catch_up(actions);
            self.hold(seq, payload, actions);
        } else {
            if seq > self.next() {
                if self.is_suspended() {
                    self.forget(ResetReason::Unproven, actions);
                }
                self.gaps += 1;
                self.degrade(DegradedReason::NoReplay, seq);
            }
            self.phase = Phase::Following;
            self.apply(seq, payload, actions);
        }
    }

    /// Whether a live batch below the next number is one that a replay brought before. The last one's bytes tell; an
    /// older one is taken for it, as the process was the same a moment ago.
    fn is_known(&self, seq: u64, payload: &[u8]) -> bool {
        self.applied.is_some_and(|applied| {
            if seq == applied.seq { applied == Applied::new(seq, payload) } else { self.can_replay }
        })
    }

    const fn is_suspended(&self) -> bool {
        matches!(self.phase, Phase::Suspended(_))
    }

    /// Where a request starts: with the last batch applied, which is how the process is recognised.
    fn wanted(&self) -> u64 {
        self.applied.map_or(0, |applied| applied.seq)
    }

    fn next(&self) -> u64 {
        self.applied.map_or(0, |applied| applied.seq.saturating_add(1))
    }

    fn live_follows(&self) -> bool {
        self.live_seq.is_some() && self.live_seq == self.applied_seq()
    }

    fn live_is_ahead(&self) -> bool {
        self.live_seq > self.applied_seq()
    }

    fn apply(&mut self, seq: u64, payload: P, actions: &mut Vec<Action<P>>) {
        self.applied = Some(Applied::new(seq, &payload));
        actions.push(Action::Apply { seq, payload });
    }

    /// Keeps a live batch until the catch-up has come to it. What cannot be kept is dropped: the publisher has it,
    /// and is asked again as long as something is missing.
    fn hold(&mut self, seq: u64, payload: P, actions: &mut Vec<Action<P>>) {
        self.held_bytes += payload.len();
        self.held.push_back((seq, payload));
        let barren = self.catch_up.as_ref().map_or(0, |catch_up| catch_up.barren);
        if self.held.len() > self.limits.held_batches || self.held_bytes > self.limits.held_bytes {
            self.drop_held();
        } else if barren >= self.limits.barren_requests {
            self.give_up(DegradedReason::ReplayTimeout, actions);
        }
    }

    fn pop_held(&mut self) -> Option<(u64, P)> {
        let (seq, payload) = self.held.pop_front()?;
        self.held_bytes = self.held_bytes.saturating_sub(payload.len());
        Some((seq, payload))
    }

    fn drop_held(&mut self) {
        self.held = VecDeque::new();
        self.held_bytes = 0;
    }

    fn drop_held_up_to(&mut self, applied: u64) {
        while self.held.front().is_some_and(|(seq, _)| *seq <= applied) {
            self.pop_held();
        }
    }

    /// Applies the waiting batches that follow. `false` if some are left behind a gap.
    fn drain_held(&mut self, actions: &mut Vec<Action<P>>) -> bool {
        while self.held.front().is_some_and(|(seq, _)| *seq <= self.next()) {
            if let Some((seq, payload)) = self.pop_held()
                && seq == self.next()
            {
                self.apply(seq, payload, actions);
            }
        }
        self.held.is_empty()
    }

    fn begin_catch_up(&mut self, actions: &mut Vec<Action<P>>) {
        self.catch_up = Some(CatchUp { step: Step::Queued, deadline: None, barren: 0 });
        self.request(actions);
    }

    fn request(&mut self, actions: &mut Vec<Action<P>>) {
        if let Some(catch_up) = &mut self.catch_up {
            catch_up.step = Step::Queued;
            actions.push(Action::RequestReplay { from: self.wanted() });
        }
    }

    fn cancel_catch_up(&mut self, actions: &mut Vec<Action<P>>) {
        if let Some(CatchUp { step: Step::Queued | Step::Answering { .. }, .. }) = self.catch_up.take() {
            actions.push(Action::CancelReplay);
        }
    }

    /// The request brought not all that was wanted: repeats it later, or lets the waiting live batches through.
    fn pause(&mut self, progress: bool, reason: DegradedReason, now: Instant, actions: &mut Vec<Action<P>>) {
        let Some(catch_up) = &mut self.catch_up else { return };
        catch_up.barren = if progress { 0 } else { catch_up.barren.saturating_add(1) };
        let late = catch_up.deadline.is_some_and(|deadline| now >= deadline);
        if (late || catch_up.barren >= self.limits.barren_requests) && !self.held.is_empty() {
            catch_up.step = Step::Pausing { until: now };
            self.give_up(reason, actions);
            return;
        }
        // An endpoint that has never answered says nothing about the process by its silence.
        self.silent |= self.answered && catch_up.barren >= self.limits.barren_requests;
        let wait = self.limits.backoff.saturating_mul(1 << catch_up.barren.min(16));
        let wait = wait.min(self.limits.backoff_max).mul_f64(0.5 + self.rng.f64());
        catch_up.step = Step::Pausing { until: now + wait };
    }

    /// Ends the catch-up without its goal and goes on with what is there.
    fn give_up(&mut self, reason: DegradedReason, actions: &mut Vec<Action<P>>) {
        self.cancel_catch_up(actions);
        if self.is_suspended() {
            self.forget(ResetReason::Unproven, actions);
        }
        self.phase = Phase::Following;
        while let Some((seq, payload)) = self.pop_held() {
            if seq < self.next() {
                continue;
            }
            if seq > self.next() {
                self.degrade(reason, seq);
            }
            self.apply(seq, payload, actions);
        }
    }

    /// Another process publishes: nothing known holds, and nothing that waits can be told from the old one's.
    fn reset(&mut self, reason: ResetReason, actions: &mut Vec<Action<P>>) {
        self.cancel_catch_up(actions);
        self.drop_held();
        self.live_seq = None;
        self.forget(reason, actions);
    }

    fn forget(&mut self, reason: ResetReason, actions: &mut Vec<Action<P>>) {
        self.phase = Phase::Connecting;
        self.degraded = None;
        if self.applied.take().is_some() {
            actions.push(Action::Reset(reason));
        }
    }

    /// Notes that batches before `since` are missing. The first reason stays; the last hole counts.
    fn degrade(&mut self, reason: DegradedReason, since: u64) {
        let reason = self.degraded.map_or(reason, |(first, _)| first);
        self.degraded = Some((reason, since));
    }

    fn postpone_idle(&mut self, now: Instant) {
        self.idle_at = self.can_replay.then(|| now + self.limits.idle.mul_f64(1.0 + self.rng.f64()));
    }

    fn report(&mut self, actions: &mut Vec<Action<P>>) {
        let state = self.state();
        if state != self.reported {
            self.reported = state;
            actions.push(Action::State(state));
        }
    }
}

impl Applied {
    fn new(seq: u64, payload: &[u8]) -> Self {
        Self { seq, fingerprint: xxh3_64(payload) }
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
