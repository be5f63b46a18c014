//! One rank's KV events.

use crate::doctor::{
    facts::{RankFacts, RankReadiness, ReplayFacts, ReplicaFacts, Silence, Stream},
    look::Seen,
    report::Judge,
};

/// How an engine is told to publish.
const FLAGS: &str = "vllm serve … --enable-prefix-caching --kv-events-config '{\"enable_kv_cache_events\": true, \
                     \"publisher\": \"zmq\", \"endpoint\": \"tcp://*:5557\", \"replay_endpoint\": \"tcp://*:6557\"}'";

pub(super) fn judge(
    replica: &ReplicaFacts,
    rank: &RankFacts,
    known: Option<&RankReadiness>,
    judge: &mut Judge<'_>,
) {
    if !endpoint(replica, rank, known, judge) {
        return;
    }
    if let Some(Stream::Heard(seen)) = &rank.stream {
        stream(seen, rank, judge);
    }
    if let Some(seen) = rank.seen() {
        block_size(replica, seen, judge);
    }
    replay(rank, judge);
    state(known, judge);
}

/// Whether there is anything to listen to.
fn endpoint(
    replica: &ReplicaFacts,
    rank: &RankFacts,
    known: Option<&RankReadiness>,
    judge: &mut Judge<'_>,
) -> bool {
    let configured = rank.rank.events.as_ref();
    let told = rank.told.as_ref();
    if let Some(told) = told {
        if !told.publishes() {
            judge.fail("events_on", "the engine publishes no KV events", FLAGS);
            return false;
        }
        if let Some(endpoint) = told.connects_to()
            && configured.is_none_or(|configured| !configured.listens())
        {
            judge.fail(
                "events_endpoint",
                format!("this endpoint connects, it does not listen: {endpoint}"),
                "put a * in place of its host (--kv-events-config '{\"endpoint\": \"tcp://*:5557\", …}'),\n\
                 or let the agent listen where it connects to: pool.events.listen = \"tcp://*:PORT\"",
            );
            return false;
        }
    }
    let Some(configured) = configured else {
        let why = match replica.pages.as_ref().map(|pages| &pages.sources) {
            Some(Err(Silence::NoAnswer(_) | Silence::Refused(_))) => {
                "the engine cannot be asked where they are"
            }
            _ => "no endpoint is known for them",
        };
        judge.fail("events_on", format!("no KV events: {why}"), FLAGS);
        return false;
    };
    if configured.listens() {
        match known.map(|known| (known.state.as_str(), known.applied_seq)) {
            Some((_, Some(seq))) => {
                judge.ok("events_endpoint", format!("heard where the agent listens ({configured}), batch {seq}"));
            }
            Some(_) => judge.warn(
                "events_endpoint",
                format!("the agent listens at {configured} and has heard nothing of this replica yet"),
                "the engine's `endpoint` must be this machine's address and port, and its `topic` one of its own",
            ),
            None => judge.warn(
                "events_endpoint",
                format!("only the running agent can listen at {configured}"),
                "start the agent and ask again",
            ),
        }
        return true;
    }
    let elsewhere = told
        .and_then(|told| told.endpoint())
        .map_or_else(String::new, |endpoint| format!("; the engine says that it publishes at {endpoint}"));
    let advice = "is the port right (leave `events` out, and the engine is asked), and open from here?";
    match &rank.stream {
        Some(Stream::Closed(why)) => {
            judge.fail(
                "events_endpoint",
                format!("nothing listens at {configured}: {why}{elsewhere}"),
                advice,
            );
            false
        }
        Some(Stream::NotZeromq) => {
            judge.fail(
                "events_endpoint",
                format!("what listens at {configured} is no ZeroMQ publisher{elsewhere}"),
                advice,
            );
            false
        }
        Some(Stream::Heard(_)) | None => {
            judge.ok("events_endpoint", format!("a publisher answers at {configured}"));
            true
        }
    }
}

fn stream(seen: &Seen, rank: &RankFacts, judge: &mut Judge<'_>) {
    let was_asked = rank.asked.as_ref().is_some_and(|asked| asked.failed.is_none());
    if seen.batches == 0 {
        if was_asked {
            judge.fail(
                "events_alive",
                "it computed a request, and no event came",
                "is prefix caching on (--enable-prefix-caching), and nothing between this machine and the port that drops \
                 what is sent?",
            );
        } else {
            judge.warn(
                "events_alive",
                "no event came while we listened",
                "without --passive a request is sent to see some",
            );
        }
        return;
    }
    let form = match seen.named_fields {
        Some(true) => "maps (vLLM 0.24 and newer)",
        Some(false) => "arrays (vLLM up to 0.23, SGLang)",
        None => "empty",
    };
    let topic = match seen.topics.iter().map(String::as_str).collect::<Vec<_>>().join(", ") {
        topic if topic.is_empty() => "no topic".to_owned(),
        topic => format!("topic {topic}"),
    };
    if seen.undecodable > 0 {
        judge.fail(
            "events_wire",
            format!("{} of {} batches are of no form that is known", seen.undecodable, seen.batches),
            "report it with `kvspoa bundle` and the engine's version",
        );
        return;
    }
    let last = seen.last_seq.unwrap_or_default();
    judge.ok(
        "events_alive",
        format!("{} batches heard up to {last}, {topic}, events as {form}", seen.batches),
    );
    if seen.has_gap {
        judge.warn(
            "events_sequence",
            "batches were left out on the way",
            "the network or this machine is too slow for the stream; the agent asks for them again (`kv_gaps_total`)",
        );
    }
    if seen.gpu_stores[1] > 0 && seen.gpu_stores[0] == 0 {
        judge.fail(
            "events_tokens",
            "the events name blocks without their tokens: no prompt can match",
            "the engine must publish token_ids with BlockStored",
        );
    }
    if seen.has_window_groups {
        judge.warn(
            "events_groups",
            "a hybrid model: a hit needs blocks of its sliding-window or recurrent layers too",
            "what is found cached is an upper bound (state degraded, window_groups)",
        );
    }
}

fn block_size(replica: &ReplicaFacts, seen: &Seen, judge: &mut Judge<'_>) {
    let metrics = replica.pages.as_ref().and_then(|pages| pages.metrics.as_ref().ok());
    let told: Option<u32> =
        metrics.and_then(|page| page.label("vllm:cache_config_info", "block_size")?.parse().ok());
    let sizes: Vec<u32> = seen.block_tokens.iter().copied().collect();
    match (sizes.as_slice(), told) {
        ([], _) => {}
        ([size], told) if told.is_none_or(|told| told == *size) => {
            judge.ok("block_size", format!("{size} tokens per block"));
        }
        ([size], told) => judge.fail(
            "block_size",
            format!("the events say {size} tokens per block, the engine's /metrics {}", told.unwrap_or_default()),
            "the agent goes by the events. If nothing matches: is another process's stream at this port, or a \
             --block-size set that the cache does not have?",
        ),
        (sizes, _) => judge.fail(
            "block_size",
            format!("the events have blocks of several sizes: {sizes:?} tokens"),
            "several engines publish at one endpoint: give each its own port",
        ),
    }
}

fn replay(rank: &RankFacts, judge: &mut Judge<'_>) {
    let Some(endpoint) = &rank.rank.replay else {
        judge.warn(
            "replay",
            "no replay endpoint is known: what was cached before the agent started is not known (state degraded)",
            "add \"replay_endpoint\": \"tcp://*:6557\" to --kv-events-config; one on the engine's loopback is of no use \
             to another machine",
        );
        return;
    };
    let advice =
        "the port of `replay_endpoint` must be open from here; without it each lost batch costs exactness";
    match &rank.replay {
        None => {}
        Some(ReplayFacts::Closed(why)) => {
            judge.fail("replay", format!("nothing listens at {endpoint}: {why}"), advice);
        }
        Some(ReplayFacts::Asked { is_ended: false, .. }) => {
            judge.fail("replay", format!("{endpoint} does not answer a request for a replay"), advice);
        }
        Some(ReplayFacts::Asked { has_batch: Some(false), .. }) => judge.fail(
            "replay",
            format!("{endpoint} has not the batch that was just heard: it is another engine's"),
            "each engine needs a replay port of its own; it must be the one of the same process",
        ),
        Some(ReplayFacts::Asked { has_batch: Some(true), .. }) => {
            judge.ok("replay", format!("{endpoint} brings the last batch again"));
        }
        Some(ReplayFacts::Asked { has_batch: None, .. }) => judge.ok("replay", format!("{endpoint} answers")),
    }
}

/// What the agent makes of the stream.
fn state(known: Option<&RankReadiness>, judge: &mut Judge<'_>) {
    let Some(known) = known else { return };
    let reason = known.reason.as_deref().unwrap_or_default();
    let advice = "what each reason means: ARCHITECTURE.md, \"What is true about a cache\"";
    match known.state.as_str() {
        "exact" => judge.ok("agent_state", "the agent knows its cache exactly"),
        "degraded" => {
            judge.warn("agent_state", format!("the agent follows it, but not exactly: {reason}"), advice)
        }
        state => {
            judge.fail("agent_state", format!("the agent cannot use its events: {state} {reason}"), advice)
        }
    }
}
