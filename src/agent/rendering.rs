//! Asks a replica, again and again at a low rate, whether it makes our tokens of the same conversations.
//!
//! Nothing else shows it before many requests have missed: an engine that was updated in place or started with another
//! option, a model folder that was exchanged.

use super::{
    engine::Engine,
    parity::{self, Verdict},
};
use crate::{metrics::ParityMetrics, prompt::Model};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::time::{sleep, timeout};

/// While an engine starts it does not answer.
const RETRY: Duration = Duration::from_secs(10);

/// Until its events' endpoints are known a replica is asked, but has not joined.
const JOIN: Duration = Duration::from_secs(1);

/// How soon it is noticed that our own renderer was exchanged, or that the replica has joined anew.
const LOOK: Duration = Duration::from_secs(5);

/// Whatever is configured: each round is a dozen requests.
const LEAST_PERIOD: Duration = Duration::from_secs(1);

/// What a round brought.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Round {
    /// It does not answer, or tells nothing of its tokens.
    Untold { answers: bool },
    /// All that it told are ours.
    Equal,
    /// These are not.
    Different(Vec<&'static str>),
}

/// Asks until it is cancelled; not at all where that is configured.
pub(super) async fn watch(engine: &Engine) {
    let Some(period) = engine.pace.parity_probe else { return };
    let period = period.max(LEAST_PERIOD);
    let pool = engine.members.pool();
    let metrics = ParityMetrics::register(&pool.backend, &engine.server);
    let mut known = None;
    // Not all replicas at the same moment.
    sleep(engine.pace.poll.mul_f64(fastrand::f64())).await;
    loop {
        let Some(model) = pool.model_of(&engine.server) else {
            sleep(JOIN).await;
            continue;
        };
        let mut round = ask(engine, &model).await;
        // A date in the template may have changed between the two. Twice it does not.
        if matches!(round, Round::Different(_)) {
            round = ask(engine, &model).await;
        }
        let (counter, pause) = match round {
            Round::Untold { answers: false } => (&metrics.untold, RETRY.min(period)),
            Round::Untold { answers: true } => (&metrics.untold, period),
            Round::Equal => (&metrics.equal, period),
            Round::Different(_) => (&metrics.different, period),
        };
        counter.increment(1);
        if !matches!(round, Round::Untold { .. }) && known.as_ref() != Some(&round) {
            tell(engine, &round, known.is_some());
            known = Some(round);
        }
        pause_for(engine, pause.mul_f64(0.75 + fastrand::f64() / 2.0), &model, known.as_ref()).await;
    }
}

/// Until it is time, the replica has come back, or what renders for it here is another.
async fn pause_for(engine: &Engine, pause: Duration, used: &Arc<Model>, known: Option<&Round>) {
    let pool = engine.members.pool();
    let until = Instant::now() + pause;
    loop {
        // It may have joined anew since it was asked.
        if let Some(known) = known {
            pool.take_parity(&engine.server, matches!(known, Round::Different(_)));
        }
        let left = until.saturating_duration_since(Instant::now());
        let came_back = timeout(left.min(LOOK), engine.came_back.notified()).await.is_ok();
        let is_same = pool.model_of(&engine.server).is_some_and(|model| Arc::ptr_eq(&model, used));
        if came_back || Instant::now() >= until || !is_same {
            return;
        }
    }
}

/// The pool warns of what is wrong; this says of which conversations.
fn tell(engine: &Engine, round: &Round, was_known: bool) {
    let (pool, server) = (&engine.members.pool().backend, &engine.server);
    match round {
        Round::Different(conversations) => {
            tracing::info!(
                pool,
                server,
                ?conversations,
                "the replica makes other tokens of these than we do"
            );
        }
        _ if was_known => tracing::info!(pool, server, "the replica makes our tokens again"),
        _ => tracing::debug!(pool, server, "the replica makes our tokens"),
    }
}

async fn ask(engine: &Engine, model: &Model) -> Round {
    let access = engine.members.access();
    let (mut different, mut is_told) = (Vec::new(), false);
    for probe in parity::probes() {
        match parity::ask(&access, &engine.http, model, &probe).await {
            Verdict::Equal { .. } => is_told = true,
            Verdict::Different(_) => different.push(probe.name),
            // What it said before it fell silent may be of another process than what it will say.
            Verdict::NoAnswer(_) => return Round::Untold { answers: false },
            Verdict::NotMade(_) | Verdict::Refused | Verdict::NotTold { .. } => {}
        }
    }
    match (different.is_empty(), is_told) {
        (false, _) => Round::Different(different),
        (true, true) => Round::Equal,
        (true, false) => Round::Untold { answers: true },
    }
}
