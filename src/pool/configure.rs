//! What a pool keeps to, apart from its model. All of it can change while the pool works: its caches, bookings and
//! replicas stay.

use super::Pool;
use crate::{
    config,
    select::{Policy, SchedulerConfig},
};
use std::{sync::atomic::Ordering, time::Duration};

/// What all pools keep to alike.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PoolSettings {
    /// How candidates are weighed.
    pub policy: Policy,
    /// The limits and constants of choices and bookings.
    pub scheduler: SchedulerConfig,
    /// The bound of the index, in bytes.
    pub index_max_bytes: usize,
    /// How often HAProxy is asked, by which its word counts as fresh.
    pub haproxy_poll: Duration,
    /// How often engines are asked, likewise.
    pub engine_poll: Duration,
}

impl Pool {
    /// Keeps to other settings from now on. An index above a lower limit shrinks with the events that come.
    pub fn set(&self, settings: &PoolSettings) {
        let PoolSettings { policy, scheduler, index_max_bytes, haproxy_poll, engine_poll } = *settings;
        self.follows_answers.store(scheduler.follow_answers, Ordering::Relaxed);
        self.scheduler.lock().configure(policy, scheduler);
        self.caches.write().index.set_max_bytes(index_max_bytes);
        self.live.set_polls(haproxy_poll, engine_poll);
    }

    /// The configuration says other things of this pool than `before`. What replicas have told stays as it was, but for
    /// what it now says itself.
    pub fn configure(&self, before: &config::Pool, now: &config::Pool) {
        self.adapters.configure(&now.adapters);
        self.mode.configure(now.mode);
        self.configured_context.store(now.max_model_len.unwrap_or_default(), Ordering::Relaxed);
        if before.model != now.model {
            self.served.lock().clone_from(&now.model);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{config, pool::testing};

    #[test]
    fn what_replicas_told_stays_when_the_configuration_says_something_else() {
        let pool = testing::pool(1, 1);
        let said = |names: &[&str], context| config::Pool {
            adapters: names.iter().map(|name| (*name).to_owned()).collect(),
            max_model_len: context,
            ..config::Pool::default()
        };
        pool.adapters.learn("told");
        pool.learn_context(4_096);
        pool.configure(&said(&[], None), &said(&["sql"], Some(8_192)));
        assert!(pool.adapters.contains("sql") && pool.adapters.contains("told"));
        assert_eq!(pool.context_tokens(), 8_192);
        pool.mode.set(config::Mode::SHADOW);
        pool.configure(&said(&["sql"], Some(8_192)), &said(&[], None));
        assert_eq!(pool.mode.get(), config::Mode::SHADOW, "the file says nothing new of it");
        assert!(!pool.adapters.contains("sql") && pool.adapters.contains("told"));
        assert_eq!(pool.context_tokens(), 4_096);
    }
}
