//! Metrics of the pools that follow from their state, brought up to date when they are read.

use super::Router;
use crate::{
    config::Mode,
    index::RankStats,
    metrics::{HealthMetrics, PoolMetrics},
    pool::{Feed, FeedFault, Pool, RankState, Ranks},
    replica::ServerState,
};
use std::time::Instant;

impl Router {
    /// Sets every gauge that follows from a pool's state. Called before the metrics are rendered, so that nothing of it
    /// is on the request path.
    pub fn refresh_gauges(&self) {
        let _alone = self.refreshing.lock();
        let now = Instant::now();
        for pool in self.pools().iter() {
            let metrics = &pool.metrics;
            let ranks = pool.ranks();
            refresh_servers(pool, &ranks, now);
            let (loads, histories, counts) = {
                let scheduler = pool.scheduler.lock();
                metrics.prefill_rate.set(scheduler.prefill_rate());
                let histories = scheduler.histories().collect::<Vec<_>>();
                (scheduler.loads().collect::<Vec<_>>(), histories, scheduler.counts())
            };
            for (rank, blocks) in histories {
                if let Some(gauges) = ranks.get(rank).map(|rank| &rank.metrics) {
                    gauges.history_blocks.set(blocks as f64);
                }
            }
            refresh_mode(pool, metrics);
            metrics.expired.absolute(counts.expired);
            metrics.lost.absolute(counts.lost);
            metrics.moved.absolute(counts.moved);
            metrics.ended_early.absolute(counts.ended_early);
            metrics.not_booked.absolute(counts.not_booked);
            for (rank, load) in loads {
                if let Some(gauges) = ranks.get(rank).map(|rank| &rank.metrics) {
                    gauges.requests.set(load.requests);
                    gauges.prefill_tokens.set(load.prefill_tokens as f64);
                    gauges.booked_blocks.set(load.booked_blocks as f64);
                }
            }
            let renderers = pool.renderers();
            let stats = renderers.cache_stats();
            metrics.token_cache_hits.absolute(stats.hits);
            metrics.token_cache_misses.absolute(stats.misses);
            metrics.token_cache_bytes.set(renderers.cache_bytes() as f64);
            metrics.model_context.set(f64::from(pool.context_tokens()));
            metrics.nothing_matches.set(f64::from(u8::from(pool.nothing_matches())));
            let caches = pool.caches.read();
            metrics.index_bytes.set(caches.index.stats().bytes as f64);
            for (id, rank) in ranks.iter() {
                let stats = caches.index.rank_stats(id).unwrap_or_default();
                for (gauge, blocks) in rank.metrics.blocks.iter().zip(stats.blocks) {
                    gauge.set(blocks as f64);
                }
                if let Some(feed) = caches.feeds.get(id.index()) {
                    set_health(&rank.metrics.health, feed, &stats);
                }
            }
        }
    }
}

fn refresh_mode(pool: &Pool, metrics: &PoolMetrics) {
    let mode = pool.mode.get();
    for (gauge, place) in metrics.modes.iter().zip(0..Mode::NAMES.len()) {
        gauge.set(f64::from(u8::from(place == mode.place())));
    }
    metrics.share.set(mode.routed_share());
    for (metrics, sum) in metrics.decided.iter().zip(pool.tally.get()) {
        metrics.requests.absolute(sum.requests);
        metrics.prompt_tokens.absolute(sum.prompt_tokens);
        metrics.matched_tokens.absolute(sum.matched_tokens);
    }
}

fn set_health(metrics: &HealthMetrics, feed: &Feed, stats: &RankStats) {
    let state = feed.rank_state(stats).as_str();
    for (gauge, name) in metrics.states.iter().zip(RankState::NAMES) {
        gauge.set(f64::from(u8::from(name == state)));
    }
    for (gauge, fault) in metrics.faults.iter().zip(FeedFault::ALL) {
        gauge.set(f64::from(u8::from(feed.fault() == Some(fault))));
    }
    metrics.waiting_blocks.set(stats.waiting as f64);
    metrics.unconfirmed_blocks.set(stats.unconfirmed as f64);
    metrics.orphans.absolute(stats.totals.orphaned);
    metrics.lag_seconds.set(feed.lag_seconds);
    metrics.block_tokens.set(feed.block_tokens.unwrap_or(0));
    metrics.block_size_changes.absolute(feed.size_changes);
}

/// What HAProxy and the engines last said; 0 where it is out of date.
fn refresh_servers(pool: &Pool, ranks: &Ranks, now: Instant) {
    let servers = pool.servers(now);
    for of_pool in ranks.servers() {
        let gauges = &of_pool.metrics;
        let server = of_pool.ids.first().and_then(|first| servers.get(*first)).copied();
        for (gauge, state) in gauges.states.iter().zip(ServerState::ALL) {
            let is_it = server.and_then(|server| server.state) == Some(state);
            gauge.set(f64::from(u8::from(is_it)));
        }
        let slots = server.map(|server| server.slots).unwrap_or_default();
        gauges.weight.set(server.map_or(0, |server| server.weight));
        gauges.in_flight.set(slots.in_flight);
        gauges.queued.set(slots.queued);
        gauges.limit.set(slots.limit.unwrap_or_default());
        gauges.connections.set(server.map_or(0, |server| server.connections));
    }
    for (_, rank) in ranks.iter() {
        let gauges = &rank.metrics;
        let report = pool.engine(rank, now).map(|engine| engine.report).unwrap_or_default();
        gauges.engine_running.set(report.running);
        gauges.engine_waiting.set(report.waiting);
        gauges.engine_kv_usage.set(report.kv_usage);
        gauges.engine_blocks.set(report.capacity_blocks.unwrap_or_default());
    }
}
