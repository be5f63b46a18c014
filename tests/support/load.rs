//! Chats in the background, and what became of each of them.

use super::eventually;
use super::http;
use serde_json::json;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

const CHAT: &str = "/v1/chat/completions";

/// Chats that go on for as long as the value lives.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    outcomes: Arc<Mutex<Vec<Outcome>>>,
    clients: Vec<std::thread::JoinHandle<()>>,
}

#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) began: Instant,
    pub(crate) status: u16,
    pub(crate) served: String,
}

impl Load {
    pub(crate) fn start(http: SocketAddr) -> Self {
        let (stop, outcomes) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let client = |number: usize| {
            let (stop, outcomes) = (Arc::clone(&stop), Arc::clone(&outcomes));
            std::thread::spawn(move || {
                for turn in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let text = format!("{number} asks {} of this ", turn % 5).repeat(30);
                    let body = json!({ "messages": [{ "role": "user", "content": text }], "max_tokens": 4 });
                    let began = Instant::now();
                    let answer =
                        http::send(http, &http::request("POST", CHAT, &[], body.to_string().as_bytes()));
                    let served = answer.header("x-served-by").unwrap_or_default().to_owned();
                    outcomes.lock().expect("no panic").push(Outcome {
                        began,
                        status: answer.status(),
                        served,
                    });
                }
            })
        };
        let clients = (0..4).map(client).collect();
        Self { stop, outcomes, clients }
    }

    /// Requests that began after a moment, by the server that served them.
    pub(crate) fn since(&self, moment: Instant) -> BTreeMap<String, usize> {
        let mut served = BTreeMap::new();
        for outcome in self.outcomes.lock().expect("no panic").iter().filter(|outcome| outcome.began > moment)
        {
            *served.entry(outcome.served.clone()).or_default() += 1;
        }
        served
    }

    /// Waits until a server has served a request that began from now on.
    pub(crate) fn wait_for(&self, server: &str) {
        let now = Instant::now();
        eventually(&format!("{server} serves"), || self.since(now).contains_key(server).then_some(()));
    }

    pub(crate) fn wait_for_requests(&self, count: usize) -> BTreeMap<String, usize> {
        let now = Instant::now();
        eventually("requests go on", || {
            let since = self.since(now);
            (since.values().sum::<usize>() >= count).then_some(since)
        })
    }

    pub(crate) fn end(self) -> Vec<Outcome> {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.join().expect("no panic");
        }
        Arc::into_inner(self.outcomes).expect("all clients have ended").into_inner().expect("no panic")
    }
}
