//! The token store that a replica of Ray Serve LLM keeps: prompts' tokens that were sent ahead of their requests.
//!
//! Limits and behaviour of Ray 2.60's `TokenReceiver`: a key is good once, the oldest entries go first, and what is
//! malformed is dropped.

use crate::units::TokenId;
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How much a store keeps, and for how long.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenLimits {
    /// Ray's `RAY_SERVE_LLM_KV_TOKEN_STAGING_TTL_S`.
    pub(super) time_to_live: Duration,
    /// Ray's `RAY_SERVE_LLM_KV_TOKEN_STAGING_MAX_ENTRIES`.
    pub(super) max_entries: usize,
    /// Ray's `RAY_SERVE_LLM_KV_TOKEN_STAGING_MAX_BYTES`.
    pub(super) max_bytes: usize,
}

/// Messages that may wait for the thread, as in Ray.
const RECEIVE_QUEUE: i32 = 1024;
/// How soon the thread notices that it is to end.
const STOP_POLL_MS: i32 = 100;

/// A receiver at work, and what it has received. The port is free again when this is dropped.
#[derive(Debug)]
pub(super) struct TokenStore {
    staged: Arc<Mutex<Staged>>,
    taken: AtomicU64,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    endpoint: String,
}

impl TokenStore {
    /// Binds the endpoint and starts the thread that receives.
    pub(super) fn start(endpoint: &str, limits: TokenLimits) -> zmq::Result<Self> {
        let socket = zmq::Context::new().socket(zmq::PULL)?;
        socket.set_linger(0)?;
        socket.set_rcvhwm(RECEIVE_QUEUE)?;
        socket.set_rcvtimeo(STOP_POLL_MS)?;
        socket.bind(endpoint)?;
        let bound = socket.get_last_endpoint()?.unwrap_or_else(|_| endpoint.to_owned());
        let staged = Arc::new(Mutex::new(Staged::new(limits)));
        let stop = Arc::new(AtomicBool::new(false));
        let (into, until) = (Arc::clone(&staged), Arc::clone(&stop));
        let receive = move || {
            while !until.load(Ordering::Relaxed) {
                let Ok(frames) = socket.recv_multipart(0) else { continue };
                into.lock().receive(&frames, Instant::now());
            }
        };
        let thread = std::thread::Builder::new().name("token-store".to_owned()).spawn(receive);
        let thread = thread.map_err(|_| zmq::Error::EAGAIN)?;
        Ok(Self { staged, taken: AtomicU64::new(0), stop, thread: Some(thread), endpoint: bound })
    }

    /// Where it listens, with the port that the system chose.
    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Takes the tokens of a key out of the store.
    pub(super) fn take(&self, key: &str) -> Option<Vec<TokenId>> {
        let tokens = self.staged.lock().take(key, Instant::now())?;
        self.taken.fetch_add(1, Ordering::Relaxed);
        Some(tokens)
    }

    /// How many prompts' tokens were taken.
    pub(super) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }
}

impl Drop for TokenStore {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // It ends within `STOP_POLL_MS`. If it panicked, there is nothing left to do about it here.
        let _panicked = self.thread.take().map(JoinHandle::join);
    }
}

/// What has been received and not been used.
#[derive(Debug)]
struct Staged {
    limits: TokenLimits,
    entries: HashMap<Vec<u8>, Entry>,
    /// The keys by age; an entry that was used or replaced leaves its line behind.
    by_age: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    received: Instant,
    ids: Vec<u8>,
}

impl Staged {
    fn new(limits: TokenLimits) -> Self {
        Self { limits, entries: HashMap::new(), by_age: VecDeque::new(), bytes: 0 }
    }

    fn receive(&mut self, frames: &[Vec<u8>], now: Instant) {
        let [key, ids] = frames else { return };
        if ids.len() > self.limits.max_bytes {
            return;
        }
        self.remove(key);
        self.bytes += ids.len();
        self.entries.insert(key.clone(), Entry { received: now, ids: ids.clone() });
        self.by_age.push_back((now, key.clone()));
        self.expire(now);
    }

    fn take(&mut self, key: &str, now: Instant) -> Option<Vec<TokenId>> {
        self.expire(now);
        let ids = self.remove(key.as_bytes())?.ids;
        let (words, []) = ids.as_chunks::<4>() else { return None };
        Some(words.iter().map(|word| TokenId(u32::from_le_bytes(*word))).collect())
    }

    fn remove(&mut self, key: &[u8]) -> Option<Entry> {
        let entry = self.entries.remove(key)?;
        self.bytes -= entry.ids.len();
        Some(entry)
    }

    fn expire(&mut self, now: Instant) {
        while let Some((received, key)) = self.by_age.front() {
            let is_current = self.entries.get(key).is_some_and(|entry| entry.received == *received);
            let is_due = now.duration_since(*received) > self.limits.time_to_live
                || self.entries.len() > self.limits.max_entries
                || self.bytes > self.limits.max_bytes;
            if is_current && !is_due {
                return;
            }
            let line = self.by_age.pop_front();
            if let (true, Some((_, key))) = (is_current, line) {
                self.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::ReplicaArgs;

    /// With Ray's limits, which are the defaults.
    fn staged() -> Staged {
        Staged::new(ReplicaArgs::default().token_limits())
    }

    fn message(key: &str, ids: &[u32]) -> [Vec<u8>; 2] {
        [key.as_bytes().to_vec(), ids.iter().flat_map(|id| id.to_le_bytes()).collect()]
    }

    #[test]
    fn a_key_is_good_once_and_for_a_minute() {
        let (mut staged, start) = (staged(), Instant::now());
        staged.receive(&message("a", &[7, 8]), start);
        staged.receive(&message("b", &[9]), start);
        assert_eq!(staged.take("a", start), Some(vec![TokenId(7), TokenId(8)]));
        assert_eq!(staged.take("a", start), None);
        assert_eq!(staged.take("b", start + Duration::from_secs(61)), None);
        assert_eq!((staged.bytes, staged.entries.len(), staged.by_age.len()), (0, 0, 0));
    }

    #[test]
    fn other_limits_than_rays_hold_too() {
        let limits = TokenLimits { time_to_live: Duration::from_secs(5), max_entries: 2, max_bytes: 12 };
        let (mut staged, start) = (Staged::new(limits), Instant::now());
        staged.receive(&message("large", &[1, 2, 3, 4]), start);
        assert_eq!(staged.take("large", start), None, "more than there may be");
        staged.receive(&message("a", &[1, 2]), start);
        staged.receive(&message("b", &[3, 4]), start);
        assert_eq!((staged.take("a", start), staged.bytes), (None, 8), "both are too many bytes");
        assert_eq!(staged.take("b", start + Duration::from_secs(6)), None);
    }

    #[test]
    fn a_key_sent_again_replaces_its_tokens() {
        let (mut staged, start) = (staged(), Instant::now());
        staged.receive(&message("a", &[1]), start);
        staged.receive(&message("a", &[2, 3]), start + Duration::from_secs(50));
        let later = start + Duration::from_secs(70);
        assert_eq!(staged.take("a", later), Some(vec![TokenId(2), TokenId(3)]));
        assert_eq!(staged.bytes, 0);
    }

    #[test]
    fn the_oldest_go_first_and_what_is_malformed_is_dropped() {
        let (mut staged, start) = (staged(), Instant::now());
        for n in 0..=8192 {
            staged.receive(&message(&n.to_string(), &[1]), start);
        }
        assert_eq!(staged.entries.len(), 8192);
        assert_eq!(staged.take("0", start), None);
        assert_eq!(staged.take("1", start), Some(vec![TokenId(1)]));
        staged.receive(&[b"odd".to_vec()], start);
        staged.receive(&[b"odd".to_vec(), vec![1, 2, 3]], start);
        assert_eq!(staged.take("odd", start), None);
    }
}
