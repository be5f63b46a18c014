//! Chats of several users at once: the workloads by which ways of routing are compared.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use serde_json::{Value, json};

use super::http;

/// Users who each hold a conversation over one of a few system prompts, twelve of them at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chats {
    pub(crate) name: &'static str,
    users: usize,
    turns: usize,
    system_prompts: usize,
}

/// What two caches of 160 blocks of 32 tokens can just about hold, and twice that.
pub(crate) const A: Chats = Chats { name: "A", users: 12, turns: 6, system_prompts: 3 };
pub(crate) const B: Chats = Chats { name: "B", users: 24, turns: 5, system_prompts: 4 };
pub(crate) const C: Chats = Chats { name: "C", users: 48, turns: 3, system_prompts: 6 };

/// Users whose conversations are open at once.
const OPEN: usize = 12;
/// The tiny model makes two tokens of a word, where large ones make four of three: these are their 150, 250 and 350 words
/// of system prompt, and 30 to 80 of a turn.
const SYSTEM_WORDS: [usize; 3] = [95, 160, 225];
const TURN_WORDS: std::ops::RangeInclusive<usize> = 19..=51;
/// About as many tokens as are asked for.
const REPLY_WORDS: usize = 8;
const ANSWER_TOKENS: u32 = 16;

/// How requests follow each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) in_flight: usize,
    /// Between an answer and the next request.
    pub(crate) pause: Duration,
}

/// What became of a workload.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    /// By server: requests, and prompt tokens that it had to compute.
    pub(crate) servers: BTreeMap<String, (u64, u64)>,
}

impl Outcome {
    /// Prompt tokens that a cache served, of all.
    pub(crate) fn cached_share(&self) -> f64 {
        self.cached_tokens as f64 / self.prompt_tokens as f64
    }

    /// The busier server's share of the prompt tokens that were computed.
    pub(crate) fn greatest_share(&self) -> f64 {
        let computed = || self.servers.values().map(|(_, computed)| *computed);
        computed().max().unwrap_or_default() as f64 / computed().sum::<u64>() as f64
    }

    pub(crate) fn requests(&self) -> u64 {
        self.servers.values().map(|(requests, _)| requests).sum()
    }
}

/// The conversations so far, and who may go on.
struct Talk {
    random: fastrand::Rng,
    /// Users who have not begun, last first.
    to_come: Vec<usize>,
    /// Users whose answer has come, and the turns that they have left.
    idle: Vec<(usize, usize)>,
    /// Users who wait for an answer.
    busy: usize,
    messages: Vec<Vec<Value>>,
    outcome: Outcome,
}

/// Plays a workload against HAProxy. The same seed makes the same texts, and with one request in flight the same order.
pub(crate) fn play(address: SocketAddr, chats: Chats, pace: Pace, seed: u64, sessions: bool) -> Outcome {
    let talk = Mutex::new(Talk::new(chats, seed));
    std::thread::scope(|scope| {
        for _ in 0..pace.in_flight {
            scope.spawn(|| {
                loop {
                    let turn = talk.lock().expect("no panic").next(chats);
                    match turn {
                        Turn::Ask(user, left, body) => {
                            let session = format!("user-{seed}-{user}");
                            let headers = [("x-session-id", session.as_str())];
                            let headers = if sessions { &headers[..] } else { &[] };
                            let request =
                                http::request("POST", "/v1/chat/completions", headers, body.as_bytes());
                            let answer = http::send(address, &request);
                            talk.lock().expect("no panic").take(user, left, &answer);
                            std::thread::sleep(pace.pause);
                        }
                        Turn::Wait => std::thread::sleep(Duration::from_millis(1)),
                        Turn::End => break,
                    }
                }
            });
        }
    });
    talk.into_inner().expect("no panic").outcome
}

/// What a client does next.
enum Turn {
    /// The user, the turns left after this one, and the body.
    Ask(usize, usize, String),
    /// Everybody waits for an answer.
    Wait,
    End,
}

impl Talk {
    fn new(chats: Chats, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let heads: Vec<String> =
            (0..chats.system_prompts).map(|at| words(&mut random, SYSTEM_WORDS[at % 3])).collect();
        let system = |user: usize| json!({ "role": "system", "content": heads[user % heads.len()] });
        Self {
            random,
            to_come: (0..chats.users).rev().collect(),
            idle: Vec::new(),
            busy: 0,
            messages: (0..chats.users).map(|user| vec![system(user)]).collect(),
            outcome: Outcome::default(),
        }
    }

    fn next(&mut self, chats: Chats) -> Turn {
        while self.idle.len() + self.busy < OPEN
            && let Some(user) = self.to_come.pop()
        {
            self.idle.push((user, chats.turns));
        }
        if self.idle.is_empty() {
            return if self.busy > 0 { Turn::Wait } else { Turn::End };
        }
        let at = self.random.usize(..self.idle.len());
        let (user, left) = self.idle.swap_remove(at);
        self.busy += 1;
        let length = self.random.usize(TURN_WORDS);
        let text = words(&mut self.random, length);
        self.messages[user].push(json!({ "role": "user", "content": text }));
        let body = json!({ "messages": self.messages[user], "max_tokens": ANSWER_TOKENS });
        Turn::Ask(user, left - 1, body.to_string())
    }

    /// Takes an answer in. The conversation goes on with a text of its own, so that all ways of routing see the same.
    fn take(&mut self, user: usize, left: usize, answer: &http::Message) {
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let json: Value = serde_json::from_slice(&answer.body).expect("JSON");
        let count = |pointer| json.pointer(pointer).and_then(Value::as_u64).unwrap_or_default();
        let (prompt, cached) =
            (count("/usage/prompt_tokens"), count("/usage/prompt_tokens_details/cached_tokens"));
        let served = answer.header("x-served-by").expect("set by HAProxy").to_owned();
        self.outcome.prompt_tokens += prompt;
        self.outcome.cached_tokens += cached;
        let server = self.outcome.servers.entry(served).or_default();
        *server = (server.0 + 1, server.1 + prompt - cached);
        let reply = words(&mut self.random, REPLY_WORDS);
        self.messages[user].push(json!({ "role": "assistant", "content": reply }));
        self.busy -= 1;
        if left > 0 {
            self.idle.push((user, left));
        }
    }
}

fn words(random: &mut fastrand::Rng, count: usize) -> String {
    const WORDS: &[&str] = &[
        "the", "request", "goes", "to", "a", "server", "that", "holds", "its", "prefix", "and", "every",
        "answer", "comes", "back", "as", "stream", "of", "tokens", "while", "other", "users", "wait", "for",
        "their", "turn", "in", "queue", "with", "long", "prompts", "about", "ships", "harbours", "rain",
        "cargo", "letters", "weather", "numbers", "maps", "engines", "copper", "paper", "winter", "because",
        "nothing", "is", "lost", "when", "we", "share", "memory", "between", "turns", "please", "explain",
        "how", "this", "works", "today",
    ];
    let picked: Vec<&str> = (0..count).map(|_| WORDS[random.usize(..WORDS.len())]).collect();
    picked.join(" ")
}
