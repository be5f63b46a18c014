//! The bounded pool of threads for prompts that are too long to tokenize where they arrive.

use std::{sync::Arc, time::Instant};
use tokio::sync::Semaphore;

/// Hands work to tokio's blocking threads: `threads` at a time, `queue` more waiting.
#[derive(Clone, Debug)]
pub struct Workers {
    places: Arc<Semaphore>,
    threads: Arc<Semaphore>,
    thread_count: usize,
}

fn limit(n: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(n.clamp(1, Semaphore::MAX_PERMITS)))
}

/// Why work was not done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotDone {
    /// Too many are waiting already.
    Full,
    /// The deadline passed before a thread was free.
    Late,
    /// The work panicked.
    Panicked,
}

impl Workers {
    /// A pool of this size.
    #[must_use]
    pub fn new(threads: usize, queue: usize) -> Self {
        Self { places: limit(threads.saturating_add(queue)), threads: limit(threads), thread_count: threads }
    }

    /// The same threads with another queue, in which what waits or works in the other is not counted.
    #[must_use]
    pub fn with_queue(&self, queue: usize) -> Self {
        Self { places: limit(self.thread_count.saturating_add(queue)), ..self.clone() }
    }

    /// Runs `work` on a thread of the pool. What waits past `deadline` is dropped, not started.
    ///
    /// # Errors
    /// [`NotDone`] says why the work has no result.
    pub async fn run<T: Send + 'static>(
        &self,
        deadline: Instant,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NotDone> {
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| NotDone::Full)?;
        let waiting = Arc::clone(&self.threads).acquire_owned();
        let thread = tokio::time::timeout_at(deadline.into(), waiting)
            .await
            .map_err(|_| NotDone::Late)?
            .map_err(|_| NotDone::Full)?;
        tokio::task::spawn_blocking(move || {
            // Held by the work and not by the caller: a caller that gave up does not free the thread.
            let _held = (place, thread);
            work()
        })
        .await
        .map_err(|_| NotDone::Panicked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::mpsc, time::Duration};

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    #[tokio::test]
    async fn work_runs_and_its_panic_is_contained() {
        let workers = Workers::new(1, 1);
        assert_eq!(workers.run(soon(), || 7).await, Ok(7));
        assert_eq!(
            workers.run(soon(), || panic!("on purpose")).await.map(|(): ()| ()),
            Err(NotDone::Panicked)
        );
        assert_eq!(workers.run(soon(), || 8).await, Ok(8));
    }

    #[tokio::test]
    async fn a_full_queue_refuses_and_a_late_place_is_not_started() {
        let workers = Workers::new(1, 1);
        let (release, wait) = mpsc::channel::<()>();
        let busy = tokio::spawn({
            let workers = workers.clone();
            async move { workers.run(soon(), move || wait.recv().is_ok()).await }
        });
        while workers.threads.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let late = workers.run(Instant::now(), || unreachable!("it has no thread"));
        assert_eq!(late.await.map(|(): ()| ()), Err(NotDone::Late));
        let waiting = workers.run(soon(), || 1);
        tokio::pin!(waiting);
        tokio::select! {
            biased;
            _ = &mut waiting => unreachable!("the only thread is busy"),
            () = tokio::task::yield_now() => {}
        }
        assert_eq!(workers.run(soon(), || 2).await, Err(NotDone::Full));
        release.send(()).expect("the work waits for it");
        assert_eq!(busy.await.expect("no panic"), Ok(true));
        assert_eq!(waiting.await, Ok(1));
    }
}
