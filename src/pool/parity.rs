//! Whether the replicas make our tokens of the same conversations.

use super::Pool;
use crate::{prompt::Model, units::RankId};
use std::sync::Arc;

impl Pool {
    /// Renders and tokenizes as this server's replica is to do; `None` where it has not joined, or is of a revision that is
    /// not known.
    #[must_use]
    pub fn model_of(&self, server: &str) -> Option<Arc<Model>> {
        let ranks = self.ranks();
        let rank = ranks.get(*ranks.of_server(server).first()?)?;
        self.renderers().of(rank.revision).cloned()
    }

    /// A replica was asked for its tokens of some conversations; whether some of them are not ours. Its blocks then count as
    /// the least that it holds, and what was sent to it stands in for the rest.
    pub fn take_parity(&self, server: &str, differs: bool) {
        let ranks = self.ranks();
        let ids = ranks.of_server(server);
        let is_news = {
            let caches = self.caches.read();
            let of = |id: &RankId| caches.feeds.get(id.index());
            ids.iter().any(|id| of(id).is_some_and(|feed| feed.renderer_differs != differs))
        };
        // Said again and again: readers must not wait for it.
        if is_news {
            let mut caches = self.caches.write();
            for id in ids {
                if let Some(feed) = caches.feeds.get_mut(id.index()) {
                    feed.renderer_differs = differs;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        config,
        events::{Endpoint, FeedState},
        pool::{CacheView, FeedFault, RankState, testing},
    };
    use std::time::Instant;

    #[test]
    fn a_replica_that_renders_otherwise_is_followed_and_what_was_sent_to_it_counts_too() {
        let (pool, now) = (testing::pool(1, 1), Instant::now());
        let events = Endpoint::parse("tcp://h:5557").expect("an endpoint");
        let rank = config::Rank { events: Some(events), ..config::Rank::default() };
        let replica =
            config::Replica { server: "s2".to_owned(), ranks: vec![rank], ..config::Replica::default() };
        let id = pool.join(&replica, now).expect("room")[0];
        CacheView::set_state(&pool.caches, id, FeedState::Exact, Some(1), now);
        let stream = || {
            let streams = pool.streams(&pool.ranks());
            *streams.iter().find(|stream| stream.rank == id).expect("the rank")
        };
        let fault = || pool.caches.read().feeds[id.index()].fault();
        assert_eq!((stream().state, stream().misses_events), (RankState::Exact, false));

        pool.take_parity("s1", true);
        assert_eq!(stream().state, RankState::Exact, "it was another one");
        pool.take_parity("s2", true);
        assert_eq!(stream().state, RankState::Degraded("renderer_differs"));
        assert!(stream().state.is_trusted() && stream().misses_events);
        assert_eq!(fault(), Some(FeedFault::RendererDiffers));

        pool.caches.write().feeds[id.index()].reset();
        assert_eq!(fault(), Some(FeedFault::RendererDiffers), "until it is asked again");
        pool.take_parity("s2", false);
        assert_eq!((stream().state, fault()), (RankState::Exact, None));
    }
}
