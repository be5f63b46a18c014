//! The pools at work: they come and go with the configuration, while requests are decided.

use super::Pool;
use arc_swap::ArcSwap;
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

/// Names a pool for as long as the process lives: a pool that is taken away and comes back has another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PoolId(u32);

impl PoolId {
    /// One that no pool has had.
    pub(super) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// All pools, read without a lock by everyone who needs them.
#[derive(Debug, Default)]
pub struct Pools(ArcSwap<PoolTable>);

/// The pools at one moment.
#[derive(Debug, Default)]
pub struct PoolTable {
    pools: Vec<Arc<Pool>>,
    by_backend: HashMap<String, usize>,
    by_id: HashMap<PoolId, usize>,
}

impl Pools {
    /// These pools, in the order of the configuration.
    #[must_use]
    pub fn new(pools: Vec<Arc<Pool>>) -> Self {
        let table = Self::default();
        table.set(pools);
        table
    }

    /// The pools as they are now.
    #[must_use]
    pub fn table(&self) -> Arc<PoolTable> {
        self.0.load_full()
    }

    /// Others take their place. Who has a pool in hand keeps it for as long.
    pub fn set(&self, pools: Vec<Arc<Pool>>) {
        let by_backend = pools.iter().zip(0..).map(|(pool, at)| (pool.backend.clone(), at)).collect();
        let by_id = pools.iter().zip(0..).map(|(pool, at)| (pool.id, at)).collect();
        self.0.store(Arc::new(PoolTable { pools, by_backend, by_id }));
    }

    /// The pool of a backend.
    #[must_use]
    pub fn of_backend(&self, backend: &str) -> Option<Arc<Pool>> {
        self.0.load().of_backend(backend).cloned()
    }

    /// The pool of this id, unless it was taken away.
    pub(super) fn of_id(&self, id: PoolId) -> Option<Arc<Pool>> {
        let table = self.0.load();
        table.pools.get(*table.by_id.get(&id)?).cloned()
    }
}

impl PoolTable {
    /// The pools, in the order of the configuration.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Pool>> {
        self.pools.iter()
    }

    /// The pool of a backend.
    #[must_use]
    pub fn of_backend(&self, backend: &str) -> Option<&Arc<Pool>> {
        self.pools.get(*self.by_backend.get(backend)?)
    }

    /// The pool, where there is only one.
    #[must_use]
    pub fn only(&self) -> Option<&Arc<Pool>> {
        match &self.pools[..] {
            [pool] => Some(pool),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::testing;

    #[test]
    fn who_has_a_pool_in_hand_keeps_it_when_another_takes_its_place() {
        let (first, second) = (Arc::new(testing::pool(1, 1)), Arc::new(testing::pool(1, 1)));
        let pools = Pools::new(vec![Arc::clone(&first)]);
        let in_hand = pools.of_backend("be").expect("it is there");
        pools.set(vec![Arc::clone(&second)]);
        assert!(Arc::ptr_eq(&pools.of_backend("be").expect("of the same name"), &second));
        assert!(pools.of_id(in_hand.id).is_none(), "what comes for it comes to nothing");
        assert!(pools.of_id(second.id).is_some());
        assert!(pools.table().only().is_some_and(|only| Arc::ptr_eq(only, &second)));
        drop(first);
        assert_eq!(Arc::strong_count(&in_hand), 1, "and nobody else keeps it");
        pools.set(Vec::new());
        assert!(pools.of_backend("be").is_none() && pools.table().only().is_none());
    }
}
