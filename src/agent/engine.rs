//! Asks one replica how it is, where its KV events are and what it serves, again and again, away from any request.

use super::{members::Members, rendering};
use crate::{
    config::{self, HttpAddr},
    metrics::ReportMetrics,
    replica::{EngineReport, Source, Sources, parse_engine_page, parse_models, parse_sources},
};
use bytes::Bytes;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    sync::Notify,
    time::{MissedTickBehavior, interval, sleep, timeout},
};

/// vLLM's page is some ten KiB a model and rank.
const MAX_PAGE_BYTES: usize = 4 << 20;

/// A page is made by the engine's own front end, which may be busy; later it would be out of date. An engine that hangs
/// must not hold up its replica's joining for longer.
const PAGE_TIMEOUT: Duration = Duration::from_secs(2);

/// What an engine serves changes when it is started anew, or by hand (adapters).
const INTERVAL: Duration = Duration::from_secs(30);

/// While an engine starts it does not answer.
const RETRY: Duration = Duration::from_secs(1);

/// One replica that is asked.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) members: Arc<Members>,
    pub(super) server: String,
    pub(super) http: HttpAddr,
    /// Whether its event endpoints are to be asked for.
    pub(super) ask_sources: bool,
    pub(super) pace: config::Engine,
    /// Told when it answers again after it did not.
    pub(super) came_back: Notify,
    /// Whether it was told already that our key is not accepted.
    pub(super) told_unauthorized: AtomicBool,
    /// The same of its publisher.
    pub(super) told_connects: AtomicBool,
}

impl Engine {
    pub(super) async fn follow(self) {
        tokio::join!(self.poll_load(), self.ask_again(), rendering::watch(&self));
    }

    async fn poll_load(&self) {
        let pool = self.members.pool();
        let metrics = ReportMetrics::register(&pool.backend, &self.server);
        // Not all replicas at the same moment.
        sleep(self.pace.poll.mul_f64(fastrand::f64())).await;
        let mut ticks = interval(self.pace.poll);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut was_silent = false;
        loop {
            ticks.tick().await;
            let (booked, heard) = (pool.booked(), pool.heard());
            // A replica that is down, or has no such page: a counter says so, a log would be flooded.
            let reports = self.reports().await.unwrap_or_default();
            if was_silent && !reports.is_empty() {
                self.came_back.notify_one();
            }
            was_silent = reports.is_empty();
            let now = Instant::now();
            let counter = if reports.is_empty() { &metrics.failures } else { &metrics.reports };
            counter.increment(1);
            pool.take_engines(&self.server, &reports, &booked, now);
            pool.see_engines(&self.server, &reports, now);
            pool.doubt_engines(&self.server, &reports, &heard);
        }
    }

    async fn ask_again(&self) {
        loop {
            let answered = self.ask().await;
            sleep(if answered { INTERVAL } else { RETRY }).await;
        }
    }

    /// Returns whether there was an answer.
    async fn ask(&self) -> bool {
        let sources = if self.ask_sources { self.sources().await } else { Sources::Told(Vec::new()) };
        let mut answered = sources != Sources::Silent;
        if self.ask_sources {
            self.complain_of_publisher(&sources);
            self.members.take_sources(&self.server, &self.http, sources);
        }
        match self.get("/v1/models").await {
            Some((200, list)) => self.members.pool().take_models(&self.server, &parse_models(&list)),
            Some(_) => {}
            None => answered = false,
        }
        answered
    }

    async fn sources(&self) -> Sources {
        let told = match self.get("/kv_event_sources").await {
            Some((200, page)) => parse_sources(&page),
            Some((404 | 405, _)) => None,
            // It is down or not ready, or something in between answers for it.
            Some(_) | None => return Sources::Silent,
        };
        if let Some(sources) = told {
            return Sources::Told(sources);
        }
        let ranks = self.reports().await.map_or(1, |reports| reports.len().max(1));
        Sources::NoPage { ranks: u16::try_from(ranks).unwrap_or(u16::MAX) }
    }

    async fn reports(&self) -> Option<Vec<EngineReport>> {
        let (status, page) = self.get("/metrics").await?;
        (status == 200).then(|| parse_engine_page(&String::from_utf8_lossy(&page)))
    }

    /// Once each: without an answer to these questions much is known less well, and nothing else would show it.
    fn complain_of(&self, status: u16) {
        let is_refused = matches!(status, 401 | 403);
        if is_refused && !self.told_unauthorized.swap(true, Ordering::Relaxed) {
            let pool = &self.members.pool().backend;
            let server = &self.server;
            tracing::warn!(
                pool,
                server,
                status,
                "the replica refuses our questions: is http.api_key_file its key?"
            );
        }
    }

    /// Nothing would ever be heard.
    fn complain_of_publisher(&self, sources: &Sources) {
        let Sources::Told(told) = sources else { return };
        let connects = told.iter().find_map(Source::connects_to).filter(|_| !self.members.listens());
        if let Some(endpoint) = connects
            && !self.told_connects.swap(true, Ordering::Relaxed)
        {
            let (pool, server) = (&self.members.pool().backend, &self.server);
            tracing::warn!(
                pool,
                server,
                endpoint,
                "the replica's KV event endpoint connects, it does not listen: put a * in place of its host, or set events.listen"
            );
        }
    }

    /// Status and body.
    async fn get(&self, target: &str) -> Option<(u16, Bytes)> {
        let access = self.members.access();
        let asked = access.get(&self.http, target, MAX_PAGE_BYTES);
        let answered = timeout(PAGE_TIMEOUT, asked).await.ok()?;
        match answered {
            Ok(answer) => {
                self.complain_of(answer.status);
                Some((answer.status, answer.body))
            }
            Err(error) => {
                tracing::debug!(server = self.server, http = %self.http, %error, "no answer");
                None
            }
        }
    }
}
