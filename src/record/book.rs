//! Decisions wait for the ends of their requests; then they are lines.

use super::{
    Decided, FORM, Line, Over,
    names::{BYTES_PER_NAME, Names},
};
use crate::units::RequestId;
use hashbrown::HashMap;
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

/// Requests under way. Where their ends are lost, the oldest become lines without them.
const MAX_WAITING: usize = 8_192;

/// Sessions that are told apart.
const MAX_SESSIONS: usize = 1 << 16;

/// A line beside its text.
const BYTES_PER_LINE: usize = 64;

/// What is kept.
#[derive(Debug)]
pub(super) struct Book {
    blocks: Names,
    sessions: Names,
    waiting: HashMap<RequestId, Waiting>,
    order: VecDeque<(RequestId, u64)>,
    turn: u64,
    kept: VecDeque<Kept>,
    bytes: usize,
    max_bytes: usize,
}

#[derive(Debug)]
struct Waiting {
    turn: u64,
    line: Line,
    held: Vec<(String, u32)>,
}

#[derive(Debug)]
struct Kept {
    at_ms: u64,
    pool: Box<str>,
    text: Arc<str>,
}

impl Book {
    /// Half of `max_bytes` is for the numbers of blocks, half for lines. With 0 no line is kept; the file may have them.
    pub(super) fn new(max_bytes: usize) -> Self {
        let half = max_bytes / 2;
        // A file alone has numbers too.
        const LEAST_NAMES: usize = 1 << 20;
        let names = if max_bytes == 0 { LEAST_NAMES } else { half / BYTES_PER_NAME };
        Self {
            blocks: Names::new(names),
            sessions: Names::new(MAX_SESSIONS),
            waiting: HashMap::new(),
            order: VecDeque::new(),
            turn: 0,
            kept: VecDeque::new(),
            bytes: 0,
            max_bytes: half,
        }
    }

    /// Bytes of the lines kept.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes a decision in. Returns the line of another one that has waited for too long.
    pub(super) fn decided(&mut self, decided: Decided) -> Option<String> {
        let held: Vec<(String, u32)> =
            decided.held.iter().map(|(server, tokens)| (server.to_string(), *tokens)).collect();
        let of = |server: Option<&str>| cached(&held, server);
        let line = Line {
            kvspoa: FORM,
            at_ms: millis(decided.at.duration_since(UNIX_EPOCH).unwrap_or_default()),
            mode: decided.mode.to_owned(),
            session: decided.session.map(|session| self.sessions.of(session)),
            prompt_tokens: decided.prompt.tokens(decided.key),
            block_tokens: decided.key.block_tokens,
            blocks: self.blocks.runs(decided.prompt.sequence(decided.key).iter().map(|hash| hash.0)),
            chosen: decided.chosen.as_deref().map(str::to_owned),
            chosen_cached: of(decided.chosen.as_deref()),
            served: None,
            served_cached: 0,
            response_ms: None,
            total_ms: None,
            normal: false,
            pool: decided.pool,
        };
        self.turn += 1;
        self.waiting.insert(decided.request, Waiting { turn: self.turn, line, held });
        self.order.push_back((decided.request, self.turn));
        self.overdue()
    }

    /// Takes in that a request is over. Returns its line, if there is one.
    pub(super) fn over(&mut self, over: &Over) -> Option<String> {
        let Waiting { mut line, held, .. } = self.waiting.remove(&over.request)?;
        line.served_cached = cached(&held, over.served.as_deref());
        line.served.clone_from(&over.served);
        line.response_ms = over.response.map(millis);
        line.total_ms = over.total.map(millis);
        line.normal = over.is_normal;
        self.keep(&line)
    }

    /// The lines of a pool from a moment on, shared: they may be many megabytes.
    pub(super) fn lines(&self, pool: &str, since_ms: u64) -> Vec<Arc<str>> {
        let wanted = self.kept.iter().filter(|kept| *kept.pool == *pool && kept.at_ms >= since_ms);
        wanted.map(|kept| Arc::clone(&kept.text)).collect()
    }

    fn overdue(&mut self) -> Option<String> {
        while self
            .order
            .front()
            .is_some_and(|(id, turn)| self.waiting.get(id).is_none_or(|waiting| waiting.turn != *turn))
        {
            self.order.pop_front();
        }
        if self.waiting.len() <= MAX_WAITING && self.order.len() <= 2 * MAX_WAITING {
            return None;
        }
        let (oldest, _) = self.order.pop_front()?;
        let Waiting { line, .. } = self.waiting.remove(&oldest)?;
        self.keep(&line)
    }

    fn keep(&mut self, line: &Line) -> Option<String> {
        let text = serde_json::to_string(line).ok()?;
        if self.max_bytes > 0 {
            self.bytes += text.len() + BYTES_PER_LINE;
            let pool = line.pool.as_str().into();
            self.kept.push_back(Kept { at_ms: line.at_ms, pool, text: text.as_str().into() });
            while self.bytes > self.max_bytes
                && let Some(oldest) = self.kept.pop_front()
            {
                self.bytes -= oldest.text.len() + BYTES_PER_LINE;
            }
        }
        Some(text)
    }
}

fn cached(held: &[(String, u32)], server: Option<&str>) -> u32 {
    held.iter().find(|(name, _)| Some(name.as_str()) == server).map_or(0, |(_, tokens)| *tokens)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
