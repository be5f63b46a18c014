//! The requests of one connection that wait for their handlers.

use super::actions::Actions;
use super::frame::FrameId;
use super::handler::Handler;
use super::session::Notify;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};

/// Handlers run as tasks: pipelined requests in parallel, panics apart, and all of them ended when this is dropped.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    tasks: JoinSet<Actions>,
    /// Requests that are not answered yet. A task that is not in here has missed its deadline or was aborted.
    waiting: HashMap<Id, (FrameId, AbortHandle)>,
    deadlines: VecDeque<(Instant, Id)>,
}

/// How a request came out.
#[derive(Debug)]
pub(super) enum Outcome {
    Answered(FrameId, Actions),
    Panicked(FrameId),
    /// Too late; was answered at its deadline.
    Dropped,
}

impl InFlight {
    /// Starts the handler of a request, to be answered within `deadline` of its first byte.
    pub(super) fn start<H: Handler>(&mut self, handler: &Arc<H>, notify: Notify, deadline: Duration) {
        let Notify { id, messages, received, ticket } = notify;
        let handler = Arc::clone(handler);
        let abort = self.tasks.spawn(async move {
            hand_over_io().await;
            let actions = handler.notify(messages, received).await;
            // The payload was dropped with the handler's future.
            drop(ticket);
            actions
        });
        self.deadlines.push_back((received + deadline, abort.id()));
        self.waiting.insert(abort.id(), (id, abort));
    }

    /// Waits for a handler to end; for ever, if none runs.
    pub(super) async fn ended(&mut self) -> Outcome {
        match self.tasks.join_next_with_id().await {
            Some(result) => self.outcome(result),
            None => std::future::pending().await,
        }
    }

    /// The same without waiting.
    pub(super) fn try_ended(&mut self) -> Option<Outcome> {
        let result = self.tasks.try_join_next_with_id()?;
        Some(self.outcome(result))
    }

    /// Takes out one request whose deadline has passed. The first come are the first due. What has ended in time, but was
    /// not seen yet, is not late.
    pub(super) fn take_late(&mut self, now: Instant) -> Option<FrameId> {
        loop {
            let (_, task) = self.deadlines.front().copied().filter(|(deadline, _)| *deadline <= now)?;
            self.deadlines.pop_front();
            if self.waiting.get(&task).is_some_and(|(_, task)| task.is_finished()) {
                continue;
            }
            if let Some((id, abort)) = self.waiting.remove(&task) {
                abort.abort();
                return Some(id);
            }
        }
    }

    /// When the next deadline passes.
    pub(super) fn next_deadline(&mut self) -> Option<Instant> {
        while let Some((deadline, task)) = self.deadlines.front() {
            if self.waiting.contains_key(task) {
                return Some(*deadline);
            }
            self.deadlines.pop_front();
        }
        None
    }

    /// Ends the handler of a request that HAProxy took back.
    pub(super) fn abort(&mut self, frame: FrameId) {
        self.waiting.retain(|_, (id, abort)| {
            if *id == frame {
                abort.abort();
            }
            *id != frame
        });
    }

    /// Whether every request was answered.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    fn outcome(&mut self, result: Result<(Id, Actions), JoinError>) -> Outcome {
        let task = result.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        match (self.waiting.remove(&task), result) {
            (Some((id, _)), Ok((_, actions))) => Outcome::Answered(id, actions),
            (Some((id, _)), Err(_)) => Outcome::Panicked(id),
            (None, _) => Outcome::Dropped,
        }
    }
}

/// Has another worker of the runtime watch sockets and timers while this one runs a handler.
///
/// A worker that wakes up for a single task does not wake another, so until that task is done nobody would see a new
/// connection or a passed deadline, idle workers or not. A task that wakes itself goes to the common end of the queue,
/// which does wake one.
async fn hand_over_io() {
    let mut queued = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut queued, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
