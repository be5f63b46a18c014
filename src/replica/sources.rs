//! What a replica says of its KV events (vLLM `GET /kv_event_sources`), and what its address makes of it.

use crate::{
    config::{Rank, is_loopback},
    events::Endpoint,
};
use serde::Deserialize;
use std::collections::BTreeMap;

/// What a replica said of its KV events when it was asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Sources {
    /// One entry for each data-parallel rank.
    Told(Vec<Source>),
    /// It answers, but has no such page: vLLM before it, or another engine. With how many ranks it has otherwise.
    NoPage {
        /// The engines on its `/metrics` page; at least 1.
        ranks: u16,
    },
    /// It did not answer.
    Silent,
}

/// The KV events of one rank, as its engine is configured.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct Source {
    #[serde(rename = "enable_kv_cache_events", default)]
    is_on: bool,
    #[serde(default)]
    publisher: Option<String>,
    #[serde(default)]
    endpoint: Option<String>,
    #[serde(default)]
    replay_endpoint: Option<String>,
    #[serde(default)]
    topic: Option<String>,
}

/// More ranks behind one page than there can be.
const MAX_SOURCES: usize = 1024;

/// Reads the page. `None`: it is something else.
#[must_use]
pub fn parse_sources(page: &[u8]) -> Option<Vec<Source>> {
    let by_rank: BTreeMap<String, Source> = serde_json::from_slice(page).ok()?;
    let mut by_rank = by_rank
        .into_iter()
        .map(|(rank, source)| Some((rank.parse::<u16>().ok()?, source)))
        .collect::<Option<Vec<_>>>()?;
    by_rank.sort_unstable_by_key(|(rank, _)| *rank);
    by_rank.truncate(MAX_SOURCES);
    Some(by_rank.into_iter().map(|(_, source)| source).collect())
}

impl Source {
    /// Where to subscribe, for an engine at `host`. One whose publisher connects is heard where we `listen`, by its topic.
    #[must_use]
    pub fn rank(&self, host: &str, listen: Option<&Endpoint>) -> Rank {
        if !self.publishes() {
            return Rank::default();
        }
        let replay = self.replay_endpoint.as_deref().and_then(|endpoint| reach(endpoint, host, true));
        let topic = Some(self.topic()).filter(|topic| !topic.is_empty()).map(str::to_owned);
        if let (false, Some(listen), Some(topic)) = (self.binds(), listen, topic) {
            return Rank { events: Some(listen.clone()), replay, topic: Some(topic), ..Rank::default() };
        }
        let events = self.endpoint.as_deref().and_then(|endpoint| reach(endpoint, host, self.binds()));
        Rank { replay: replay.filter(|_| events.is_some()), events, ..Rank::default() }
    }

    /// Whether it publishes events by ZeroMQ.
    #[must_use]
    pub fn publishes(&self) -> bool {
        self.is_on && self.publisher.as_deref().is_none_or(|publisher| publisher == "zmq")
    }

    /// Its PUB endpoint as the engine is configured.
    #[must_use]
    pub fn endpoint(&self) -> Option<&str> {
        self.endpoint.as_deref()
    }

    /// Its replay endpoint as the engine is configured.
    #[must_use]
    pub fn replay_endpoint(&self) -> Option<&str> {
        self.replay_endpoint.as_deref().filter(|endpoint| !endpoint.is_empty())
    }

    /// The topic under which it publishes.
    #[must_use]
    pub fn topic(&self) -> &str {
        self.topic.as_deref().unwrap_or_default()
    }

    /// Where its publisher connects to, if it does.
    #[must_use]
    pub fn connects_to(&self) -> Option<&str> {
        self.endpoint.as_deref().filter(|_| self.is_on && !self.binds())
    }

    /// Whether its PUB socket listens; otherwise it connects to a subscriber that does.
    #[must_use]
    pub fn binds(&self) -> bool {
        // vLLM `ZmqEventPublisher`: by these very characters.
        self.endpoint.as_deref().is_some_and(|endpoint| {
            endpoint.contains(['*']) || endpoint.contains("::") || endpoint.starts_with("ipc://")
        })
    }
}

/// An endpoint of an engine as seen from here. What listens on the engine's own loopback, or at a path of its own, can
/// be reached on the same machine alone.
fn reach(endpoint: &str, host: &str, listens: bool) -> Option<Endpoint> {
    if !listens {
        return None;
    }
    let is_local = is_loopback(host.trim_matches(['[', ']']));
    if endpoint.starts_with("ipc://") {
        return Endpoint::parse(endpoint).ok().filter(|_| is_local);
    }
    let (bound, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    let port = port.parse().ok()?;
    match bound.trim_matches(['[', ']']) {
        "*" | "0.0.0.0" | "::" => Endpoint::at(host, port).ok(),
        bound if is_loopback(bound) && !is_local => None,
        bound => Endpoint::at(bound, port).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As vLLM 0.32.0 answered, two ranks behind one front end.
    const PAGE: &str = r#"{
        "0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5606",
              "replay_endpoint": "tcp://127.0.0.1:6606", "buffer_steps": 10000, "hwm": 100000,
              "max_queue_size": 100000, "topic": "kv@d@tiny-qwen3"},
        "1": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5607",
              "replay_endpoint": "tcp://127.0.0.1:6607", "topic": "kv@d@tiny-qwen3"}}"#;

    fn seen_from(page: &str, host: &str) -> Vec<(String, String)> {
        let text = |endpoint: Option<Endpoint>| endpoint.map_or_else(String::new, |at| at.to_string());
        let ranks =
            parse_sources(page.as_bytes()).expect("a page").into_iter().map(|source| source.rank(host, None));
        ranks.map(|rank| (text(rank.events), text(rank.replay))).collect()
    }

    fn one(endpoint: &str, replay: &str, host: &str) -> (String, String) {
        let page = format!(
            r#"{{"0": {{"enable_kv_cache_events": true, "endpoint": "{endpoint}", "replay_endpoint": "{replay}"}}}}"#
        );
        seen_from(&page, host).remove(0)
    }

    fn pair(events: &str, replay: &str) -> (String, String) {
        (events.to_owned(), replay.to_owned())
    }

    #[test]
    fn a_wildcard_is_the_replicas_own_address() {
        let expected = |rank: u16| pair(&format!("tcp://10.0.0.7:{}", 5606 + rank), "");
        assert_eq!(seen_from(PAGE, "10.0.0.7"), [expected(0), expected(1)], "its replay is on its loopback");
        let local = |rank: u16| {
            pair(&format!("tcp://127.0.0.1:{}", 5606 + rank), &format!("tcp://127.0.0.1:{}", 6606 + rank))
        };
        assert_eq!(seen_from(PAGE, "127.0.0.1"), [local(0), local(1)]);
        assert_eq!(
            one("tcp://[::]:1", "tcp://*:2", "fd00::7"),
            pair("tcp://[fd00::7]:1", "tcp://[fd00::7]:2")
        );
    }

    #[test]
    fn ranks_are_in_the_order_of_their_numbers() {
        let entry = |rank: u16| {
            format!(r#""{rank}": {{"enable_kv_cache_events": true, "endpoint": "tcp://*:{}"}}"#, 5000 + rank)
        };
        let page = format!("{{{}}}", [10, 9, 2].map(entry).join(","));
        let ports = [5002, 5009, 5010].map(|port| pair(&format!("tcp://h:{port}"), ""));
        assert_eq!(seen_from(&page, "h"), ports);
    }

    #[test]
    fn a_publisher_that_connects_or_listens_elsewhere_is_not_subscribed_to() {
        assert_eq!(one("tcp://10.0.0.1:5557", "tcp://*:6557", "10.0.0.7"), pair("", ""), "it connects");
        assert_eq!(one("ipc:///run/kv", "tcp://*:6557", "10.0.0.7"), pair("", ""), "another machine's path");
        assert_eq!(
            one("ipc:///run/kv", "ipc:///run/kr", "127.0.0.1"),
            pair("ipc:///run/kv", "ipc:///run/kr")
        );
        assert_eq!(
            one("tcp://*:5557", "tcp://10.9.9.9:6557", "h"),
            pair("tcp://h:5557", "tcp://10.9.9.9:6557")
        );
    }

    #[test]
    fn a_publisher_that_connects_is_heard_where_we_listen_by_its_topic() {
        let listen = Endpoint::parse("@tcp://*:5557").expect("an endpoint");
        let page = |topic: &str| {
            format!(
                r#"{{"0": {{"enable_kv_cache_events": true, "endpoint": "tcp://10.0.0.1:5557",
                    "replay_endpoint": "tcp://127.0.0.1:6557", "topic": "{topic}"}}}}"#
            )
        };
        let rank = |topic: &str, host: &str| {
            parse_sources(page(topic).as_bytes()).expect("a page").remove(0).rank(host, Some(&listen))
        };
        let heard = rank("kv@a", "10.0.0.7");
        assert_eq!((heard.events.as_ref(), heard.topic.as_deref()), (Some(&listen), Some("kv@a")));
        assert_eq!(heard.replay, None, "its own loopback: no_replay");
        assert!(rank("kv@a", "127.0.0.1").replay.is_some());
        assert_eq!(rank("", "10.0.0.7"), Rank::default(), "nothing tells it from others");
        let told = parse_sources(page("kv@a").as_bytes()).expect("a page");
        assert_eq!(told[0].connects_to(), Some("tcp://10.0.0.1:5557"));
        assert!(
            parse_sources(PAGE.as_bytes()).expect("a page").iter().all(|told| told.connects_to().is_none())
        );
    }

    #[test]
    fn engines_without_events_and_other_pages_have_none() {
        for page in [
            r#"{"0": {"enable_kv_cache_events": false, "endpoint": "tcp://*:5557"}}"#,
            r#"{"0": {"enable_kv_cache_events": true, "publisher": "null", "endpoint": "tcp://*:5557"}}"#,
            r#"{"0": {}}"#,
        ] {
            assert_eq!(seen_from(page, "h"), [pair("", "")], "{page}");
        }
        assert_eq!(seen_from("{}", "h"), []);
        for page in ["", "[]", r#"{"zero": {}}"#, r#"{"0": 7}"#, r#"{"detail": "Not Found"}"#] {
            assert_eq!(parse_sources(page.as_bytes()), None, "{page}");
        }
    }
}
