//! One connection: its socket, its session and the requests that wait for their handlers, in one task.

use super::actions::Actions;
use super::admission::Refusal;
use super::frame::FrameId;
use super::handler::{Handler, Unanswered};
use super::in_flight::{InFlight, Outcome};
use super::listen::Stream;
use super::server::Shared;
use super::session::{Close, Event, Session};
use super::status::Status;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;

/// While so much output waits for HAProxy to read it, nothing more is read from it.
const MAX_OUTPUT_BYTES: usize = 64 * 1024;
/// How long the last bytes may take on their way, and how long we go on reading so that no reset overtakes them.
const LINGER: Duration = Duration::from_millis(500);

pub(super) struct Connection<H> {
    stream: Stream,
    session: Session,
    in_flight: InFlight,
    shared: Arc<Shared<H>>,
    /// Set at shutdown: until when requests in flight are waited for.
    drain_until: Option<Instant>,
    /// Since when HAProxy has not read what we wrote.
    unwritten_since: Option<Instant>,
    /// Whether HAProxy's HELLO was seen.
    is_agreed: bool,
}

impl<H: Handler> Connection<H> {
    pub(super) fn new(stream: Stream, shared: Arc<Shared<H>>) -> Self {
        let own = shared.config().max_frame_size;
        Self {
            stream,
            session: Session::new(own, Arc::clone(&shared.admission), Instant::now()),
            in_flight: InFlight::default(),
            shared,
            drain_until: None,
            unwritten_since: None,
            is_agreed: false,
        }
    }

    /// Serves the connection to its end.
    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        // An error of the socket needs no word: HAProxy was restarted, reloaded, or gave up on us.
        if let Err(error) = self.serve(shutdown).await {
            tracing::debug!(peer = %self.stream, %error, "SPOP connection lost");
            return;
        }
        // Answers that nobody waits for any more.
        self.in_flight = InFlight::default();
        let _ = tokio::time::timeout(LINGER, self.linger()).await;
    }

    /// Until the session is closed or HAProxy hung up.
    async fn serve(&mut self, shutdown: CancellationToken) -> io::Result<()> {
        let mut shutdown = pin!(shutdown.cancelled());
        loop {
            while let Some(outcome) = self.in_flight.try_ended() {
                self.settle(outcome);
            }
            if self.drain_until.is_some()
                && self.in_flight.is_empty()
                && self.session.unfinished_since().is_none()
            {
                self.session.disconnect();
            }
            self.write()?;
            if self.session.is_closed() {
                return Ok(());
            }
            let timer = self.next_timer();
            tokio::select! {
                biased;
                () = &mut shutdown, if self.drain_until.is_none() => {
                    self.drain_until = Some(Instant::now() + self.shared.config().drain);
                    // What HAProxy sent before it could know is answered.
                    if self.read()? == Some(0) {
                        return Ok(());
                    }
                }
                () = sleep_until(timer.unwrap_or_else(Instant::now).into()), if timer.is_some() => self.on_timer(),
                outcome = self.in_flight.ended() => self.settle(outcome),
                ready = self.stream.writable(), if !self.session.output().is_empty() => ready?,
                ready = self.stream.readable(), if self.session.output().len() < MAX_OUTPUT_BYTES => {
                    ready?;
                    if self.read()? == Some(0) {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Reads once and handles what that brought. 0 bytes are the end of the stream, `None` is nothing to read.
    fn read(&mut self) -> io::Result<Option<usize>> {
        let bytes = match self.stream.try_read_buf(&mut self.session.space()) {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => return Err(error),
        };
        let now = Instant::now();
        while let Some(event) = self.session.next_event(now) {
            self.handle(event);
        }
        if !self.is_agreed
            && let Some(bytes) = self.session.peer_max_frame_size()
        {
            self.is_agreed = true;
            self.shared.metrics.haproxy_frame_bytes.set(bytes as f64);
        }
        Ok(bytes)
    }

    /// Writes all that is there in one go, as far as the socket takes it.
    fn write(&mut self) -> io::Result<()> {
        while !self.session.output().is_empty() {
            match self.stream.try_write(self.session.output()) {
                Ok(bytes) => self.session.written(bytes),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.unwritten_since.get_or_insert_with(Instant::now);
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        self.unwritten_since = None;
        Ok(())
    }

    fn handle(&mut self, event: Event) {
        let metrics = &self.shared.metrics;
        match event {
            Event::Notify(notify) if self.drain_until.is_some() => {
                metrics.shed_draining.increment(1);
                self.ack(notify.id, &Actions::none());
            }
            Event::Notify(notify) => {
                metrics.notifies.increment(1);
                self.in_flight.start(&self.shared.handler, notify, self.shared.config().deadline);
            }
            Event::Shed(Refusal::Requests) => metrics.shed_requests.increment(1),
            Event::Shed(Refusal::Bytes) => metrics.shed_bytes.increment(1),
            Event::Shed(Refusal::Payload) => metrics.shed_payload.increment(1),
            Event::Aborted(id) => {
                metrics.aborted.increment(1);
                self.in_flight.abort(id);
            }
            Event::Closed(close) => self.closed(close),
        }
    }

    fn closed(&self, close: Close) {
        let metrics = &self.shared.metrics;
        match close {
            Close::HealthCheck => metrics.health_checks.increment(1),
            // HAProxy calls it a time-out when it closes an idle connection.
            Close::Peer(Status::Normal | Status::Timeout) => {}
            Close::Peer(status) => {
                metrics.protocol_errors.increment(1);
                if let Some(suppressed) = self.shared.log_limit.allow(Instant::now()) {
                    let peer = &self.stream;
                    tracing::warn!(%peer, %status, suppressed, "HAProxy closed an SPOP connection with an error");
                }
            }
            Close::Error(error) => {
                metrics.protocol_errors.increment(1);
                if let Some(suppressed) = self.shared.log_limit.allow(Instant::now()) {
                    let peer = &self.stream;
                    tracing::warn!(%peer, %error, suppressed, "closing an SPOP connection after a protocol error");
                }
            }
        }
    }

    fn settle(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Answered(id, actions) => self.ack(id, &actions),
            Outcome::Panicked(id) => {
                self.shared.metrics.panics.increment(1);
                self.shared.handler.unanswered(Unanswered::Panicked);
                self.ack(id, &Actions::none());
            }
            Outcome::Dropped => {}
        }
    }

    fn ack(&mut self, id: FrameId, actions: &Actions) {
        if !self.session.ack(id, actions) {
            self.shared.metrics.cut_acks.increment(1);
        }
    }

    fn next_timer(&mut self) -> Option<Instant> {
        let stall = self.session.unfinished_since().into_iter().chain(self.unwritten_since).min();
        let stall = stall.map(|since| since + self.shared.config().stall);
        [self.in_flight.next_deadline(), stall, self.drain_until].into_iter().flatten().min()
    }

    fn on_timer(&mut self) {
        let now = Instant::now();
        while let Some(id) = self.in_flight.take_late(now) {
            self.shared.metrics.late.increment(1);
            self.shared.handler.unanswered(Unanswered::Late);
            self.ack(id, &Actions::none());
        }
        let stalled =
            |since: Option<Instant>| since.is_some_and(|since| since + self.shared.config().stall <= now);
        if (stalled(self.session.unfinished_since()) || stalled(self.unwritten_since))
            && let Some(event) = self.session.stalled()
        {
            self.handle(event);
        }
        if self.drain_until.is_some_and(|until| until <= now) {
            self.session.disconnect();
        }
    }

    /// Writes the last bytes, says that they were the last, and reads until HAProxy has seen it: closing a socket with
    /// unread input would send a reset, which can overtake what was written.
    async fn linger(&mut self) -> io::Result<()> {
        loop {
            self.write()?;
            if self.session.output().is_empty() {
                break;
            }
            self.stream.writable().await?;
        }
        self.stream.shutdown().await?;
        loop {
            self.stream.readable().await?;
            if self.read()? == Some(0) {
                return Ok(());
            }
        }
    }
}
