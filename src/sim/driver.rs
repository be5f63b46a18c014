//! Runs an engine in real time: takes requests between steps, sleeps for as long as a step takes, hands out tokens.

use super::cache::Prompt;
use super::engine::Engine;
use super::job::{EngineStats, Job, JobId, Output};
use super::publisher::Publisher;
use crate::units::TokenId;
use hashbrown::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// On a machine that is too slow the engine becomes slower than its model, and does not make up for more than this.
const MAX_CATCH_UP: Duration = Duration::from_millis(20);

enum Command {
    Submit { job: Job, outputs: mpsc::UnboundedSender<Output> },
    Abort(JobId),
    Reset { external: bool, done: oneshot::Sender<bool> },
}

/// The way to a running engine.
#[derive(Clone, Debug)]
pub(super) struct EngineHandle {
    commands: mpsc::UnboundedSender<Command>,
    stats: watch::Receiver<EngineStats>,
    next_id: Arc<AtomicU64>,
}

impl EngineHandle {
    /// Submits the prompts, each with the answer that it will get. Their outputs come as one stream.
    pub(super) fn submit(&self, jobs: impl IntoIterator<Item = (Prompt, Vec<TokenId>)>) -> Answers {
        let (sender, outputs) = mpsc::unbounded_channel();
        let mut ids = Vec::new();
        for (prompt, answer) in jobs {
            let id = self.next_id.fetch_add(1, Ordering::Relaxed);
            ids.push(id);
            let job = Job { id, prompt, answer };
            // An engine that has stopped drops the sender: the answers then end at once.
            let _stopped = self.commands.send(Command::Submit { job, outputs: sender.clone() });
        }
        Answers { open: ids.len(), ids, outputs, commands: self.commands.clone() }
    }

    /// Clears the caches; false if blocks are in use, or the engine has stopped.
    pub(super) async fn reset_prefix_cache(&self, external: bool) -> bool {
        let (done, result) = oneshot::channel();
        let _stopped = self.commands.send(Command::Reset { external, done });
        result.await.unwrap_or(false)
    }

    /// The load after the last step.
    pub(super) fn stats(&self) -> EngineStats {
        *self.stats.borrow()
    }
}

/// The outputs of requests that were submitted together. Dropped before the last one it aborts them.
#[derive(Debug)]
pub(super) struct Answers {
    ids: Vec<JobId>,
    open: usize,
    outputs: mpsc::UnboundedReceiver<Output>,
    commands: mpsc::UnboundedSender<Command>,
}

impl Answers {
    /// The next token and the place of its request; `None` after the last.
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<(usize, Output)>> {
        if self.open == 0 {
            return Poll::Ready(None);
        }
        self.outputs.poll_recv(cx).map(|output| {
            let output = output?;
            self.open -= usize::from(output.is_last);
            let place = self.ids.iter().position(|id| *id == output.id)?;
            Some((place, output))
        })
    }

    /// The same, to be awaited.
    pub(super) async fn next(&mut self) -> Option<(usize, Output)> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        if self.open > 0 {
            for id in &self.ids {
                let _stopped = self.commands.send(Command::Abort(*id));
            }
        }
    }
}

/// Makes an engine's driver: the handle, and the future that runs it until `stop`.
pub(super) fn drive(
    engine: Engine,
    publisher: Option<Publisher>,
    stop: CancellationToken,
) -> (EngineHandle, impl Future<Output = ()>) {
    let (commands, inbox) = mpsc::unbounded_channel();
    let (stats_sender, stats) = watch::channel(engine.stats());
    let driver = Driver { engine, publisher, inbox, outputs: HashMap::new(), stats: stats_sender };
    let handle = EngineHandle { commands, stats, next_id: Arc::new(AtomicU64::new(0)) };
    (handle, async move {
        let run = driver.run();
        tokio::select! { () = run => {} () = stop.cancelled() => {} }
    })
}

struct Driver {
    engine: Engine,
    /// `None`: KV events are off.
    publisher: Option<Publisher>,
    inbox: mpsc::UnboundedReceiver<Command>,
    outputs: HashMap<JobId, mpsc::UnboundedSender<Output>>,
    stats: watch::Sender<EngineStats>,
}

impl Driver {
    async fn run(mut self) {
        // When the step under way ends. Timers are late by up to a millisecond: the next step starts when the last one
        // should have ended, so that many steps take no longer than they should.
        let mut due = Instant::now();
        loop {
            if !self.engine.has_work() {
                let Some(command) = self.inbox.recv().await else { return };
                self.obey(command);
                due = Instant::now();
            }
            // The stores of ended requests come first, so that what a client does after an answer comes after it here too.
            while self.engine.has_requests()
                && let Ok(command) = self.inbox.try_recv()
            {
                self.obey(command);
            }
            if !self.engine.has_work() {
                continue;
            }
            due = Instant::now().checked_sub(MAX_CATCH_UP).map_or(due, |earliest| due.max(earliest));
            due += self.engine.begin_step();
            self.stats.send_replace(self.engine.stats());
            tokio::time::sleep_until(due).await;
            let report = self.engine.end_step();
            self.stats.send_replace(self.engine.stats());
            if let (false, Some(publisher)) = (report.events.is_empty(), &self.publisher) {
                publisher.publish(report.events).await;
            }
            for output in report.outputs {
                self.hand_out(output);
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit { job, outputs } => {
                let id = job.id;
                match self.engine.submit(job) {
                    Ok(()) => drop(self.outputs.insert(id, outputs)),
                    // Its length was checked before; without it the answer ends at once.
                    Err(error) => tracing::warn!(%error, "a request was not taken"),
                }
            }
            Command::Abort(id) => {
                self.engine.abort(id);
                self.outputs.remove(&id);
            }
            Command::Reset { external, done } => {
                let _gone = done.send(self.engine.reset_prefix_cache(external));
            }
        }
        self.stats.send_replace(self.engine.stats());
    }

    fn hand_out(&mut self, output: Output) {
        // Who does not listen any more has aborted: that command is on its way.
        if let Some(outputs) = self.outputs.get(&output.id) {
            let _aborted = outputs.send(output);
        }
        if output.is_last {
            self.outputs.remove(&output.id);
        }
    }
}
