use super::*;
use crate::{
    config,
    events::{DegradedReason, Groups, SuspendReason},
    hash::HashKey,
    pool::{FeedFault, Lookup, RankState, Rendered, Watch, view::UNREACHABLE_AFTER},
    select::{Ask, Policy, Scheduler, SchedulerConfig},
    units::{RequestId, Revision, TokenId},
};
use serde_json::{Value, json};
use std::time::Duration;

const RANK: RankId = RankId(0);

/// A pool of one replica, and what its stream has told.
struct Scene {
    sink: EventSink,
    pool: Arc<Pool>,
    key: HashKey,
    groups: Groups,
    seq: u64,
}

impl Scene {
    fn connecting() -> Self {
        Self::with(SchedulerConfig::default())
    }

    fn with(config: SchedulerConfig) -> Self {
        let key = HashKey::from_seed(1);
        let rank = config::Rank {
            events: Some(crate::events::Endpoint::parse("tcp://127.0.0.1:5557").expect("an endpoint")),
            cache_blocks: Some(100),
            ..config::Rank::default()
        };
        let pool = config::Pool {
            backend: "be_llm".to_owned(),
            adapters: vec!["configured".to_owned()],
            ..config::Pool::default()
        };
        let replica =
            config::Replica { server: "s1".to_owned(), ranks: vec![rank], ..config::Replica::default() };
        let scheduler = Scheduler::new(Policy::LeastLoaded, config, 1);
        let pool = Arc::new(
            Pool::new(&pool, &key, 64 << 20, scheduler, Duration::from_secs(1), Duration::from_secs(1))
                .expect("a pool"),
        );
        pool.join(&replica, Instant::now()).expect("room");
        let sink = EventSink::new(Arc::new(Pools::new(vec![Arc::clone(&pool)])));
        Self { sink, pool, key, groups: Groups::default(), seq: 0 }
    }

    fn exact() -> Self {
        let mut scene = Self::connecting();
        scene.state(FeedState::Exact);
        scene
    }

    fn feed(&self) -> FeedKey {
        FeedKey { pool: self.pool.id, rank: RANK }
    }

    fn state(&mut self, state: FeedState) {
        let feed = self.feed();
        self.sink.state(feed, state, self.seq.checked_sub(1));
    }

    fn apply(&mut self, events: Value) -> Option<u64> {
        let payload = rmp_serde::to_vec(&(100.0, events, 0)).expect("encodes");
        let mut batch = Batch::new();
        batch.decode(&payload, &self.key, &mut self.groups).expect("decodes");
        self.seq += 1;
        let feed = self.feed();
        self.sink.apply(feed, self.seq - 1, &batch)
    }

    fn rank_state(&self) -> RankState {
        self.pool.streams(&self.pool.ranks())[0].state
    }

    fn matched(&self, tokens: &[u32], model: Option<&str>) -> u32 {
        let tokens: Vec<TokenId> = tokens.iter().copied().map(TokenId).collect();
        let root = self.pool.root(model, None);
        self.look_up(&tokens, root).candidates[0].gpu_blocks
    }

    fn look_up(&self, tokens: &[TokenId], root: SequenceHash) -> Lookup {
        let prompt_tokens = tokens.len() as u32;
        let tokens = &tokens.to_vec().into();
        let prompt = Rendered { revision: Revision(0), tokens, media: &[], root, prompt_tokens };
        self.pool.lookup(&[prompt], prompt_tokens, Instant::now())
    }

    /// Books [`PROMPT`].
    fn book(&self, id: RequestId) {
        let tokens = PROMPT.map(TokenId);
        let found = self.look_up(&tokens, self.key.plain_root());
        let ask = Ask { id, prompt: found.prompt, session: None };
        assert!(self.pool.scheduler.lock().book(&ask, &found.candidates, Instant::now()).booked);
    }

    fn fault(&self) -> Option<FeedFault> {
        self.pool.caches.read().feeds[0].fault()
    }
}

/// A prompt's blocks of `size` tokens, named from `name` on.
fn stored(name: u64, size: u32, tokens: &[u32]) -> Value {
    let count = tokens.len() as u64 / u64::from(size);
    json!({
        "type": "BlockStored", "block_hashes": (name..name + count).collect::<Vec<_>>(),
        "parent_block_hash": null, "token_ids": tokens, "block_size": size, "medium": "GPU",
    })
}

fn with(mut event: Value, changes: &Value) -> Value {
    for (name, value) in changes.as_object().expect("a map") {
        event[name] = value.clone();
    }
    event
}

const PROMPT: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

#[test]
fn a_model_with_window_groups_is_degraded_but_counts() {
    let mut scene = Scene::exact();
    scene.apply(json!([stored(1, 4, &PROMPT)]));
    assert_eq!(scene.rank_state(), RankState::Exact);
    scene
        .apply(json!([with(stored(9, 4, &PROMPT), &json!({"group_idx": 1, "kv_cache_spec_kind": "mamba"}))]));
    assert_eq!(scene.rank_state(), RankState::Degraded("window_groups"));
    assert_eq!(scene.matched(&PROMPT, None), 2);
}

#[test]
fn the_streams_own_reason_is_told_first_and_a_lost_connection_takes_all_credit() {
    let mut scene = Scene::exact();
    scene.apply(json!([stored(1, 4, &PROMPT)]));
    scene.state(FeedState::Degraded(DegradedReason::HistoryLost));
    assert_eq!(scene.rank_state(), RankState::Degraded("history_lost"));
    assert_eq!(scene.matched(&PROMPT, None), 2);
    scene.state(FeedState::Suspended(SuspendReason::Disconnected));
    assert_eq!(scene.rank_state(), RankState::LoadOnly("disconnected"));
    assert_eq!(scene.matched(&PROMPT, None), 0);
}

#[test]
fn the_block_size_is_learned_and_a_change_starts_the_index_anew() {
    let mut scene = Scene::exact();
    scene.apply(json!([stored(1, 4, &PROMPT)]));
    assert_eq!(scene.matched(&PROMPT, None), 2);
    // One block that is filled in part is no change.
    scene.apply(json!([stored(10, 2, &PROMPT[..2])]));
    scene.apply(json!([stored(20, 4, &[9, 9, 9, 9])]));
    assert_eq!((scene.matched(&PROMPT, None), scene.fault()), (2, None));
    for at in 0..8 {
        scene.apply(json!([stored(100 + 10 * at, 2, &PROMPT)]));
    }
    assert_eq!(scene.fault(), Some(FeedFault::BlockSizeChanged));
    assert_eq!(scene.rank_state(), RankState::Degraded("block_size_changed"));
    assert_eq!(scene.matched(&PROMPT, None), 4);
    assert_eq!(scene.pool.caches.read().feeds[0].size_changes, 1);
    scene.apply(json!([{"type": "AllBlocksCleared"}]));
    assert_eq!(scene.rank_state(), RankState::Exact, "a reset heals");
}

#[test]
fn an_engine_that_publishes_no_token_ids_is_load_only_and_says_so() {
    let mut scene = Scene::exact();
    for at in 0..16 {
        assert_eq!(scene.fault(), None);
        scene.apply(json!([with(stored(at, 4, &[]), &json!({"block_hashes": [at]}))]));
    }
    assert_eq!(scene.rank_state(), RankState::LoadOnly("no_token_ids"));
    scene.apply(json!([stored(50, 4, &PROMPT)]));
    assert_eq!(scene.rank_state(), RankState::Exact, "one with tokens is enough");
}

#[test]
fn lower_tiers_are_unconfirmed_after_a_reset_until_the_engine_shows_more() {
    let mut scene = Scene::exact();
    let cpu = |name: u64| with(stored(name, 4, &[]), &json!({"block_hashes": [name], "medium": "CPU"}));
    scene.apply(json!([stored(1, 4, &PROMPT)]));
    scene.apply(json!([cpu(1), cpu(2)]));
    scene.apply(json!([{"type": "AllBlocksCleared"}]));
    assert_eq!(scene.rank_state(), RankState::Degraded("lower_tiers_unconfirmed"));
    scene.apply(json!([{"type": "BlockRemoved", "block_hashes": [2], "medium": "CPU"}]));
    assert_eq!(scene.rank_state(), RankState::Exact);
}

#[test]
fn an_adapter_that_events_name_has_blocks_of_its_own() {
    let mut scene = Scene::exact();
    scene.apply(json!([stored(1, 4, &PROMPT)]));
    assert_eq!(scene.matched(&PROMPT, Some("configured")), 0, "never the base model's");
    scene.apply(json!([with(stored(11, 4, &PROMPT[..4]), &json!({"lora_name": "learned"}))]));
    assert_eq!(scene.matched(&PROMPT, Some("learned")), 1);
    assert_eq!(scene.matched(&PROMPT, Some("the-base-model")), 2);
    assert_eq!(scene.matched(&PROMPT, None), 2);
}

#[test]
fn a_degraded_rank_whose_blocks_have_turned_over_holds_only_what_was_told_since() {
    let removed = |hashes: &[u64]| json!({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"});
    let mut scene = Scene::exact();
    scene.apply(json!([stored(1, 4, &PROMPT)]));
    scene.state(FeedState::Degraded(DegradedReason::HistoryLost));
    // Block 2 went with a batch that was lost.
    assert_eq!(scene.apply(json!([stored(11, 4, &[9, 9, 9, 9])])), None);
    assert_eq!(scene.apply(json!([removed(&[1])])), None);
    assert_eq!(scene.apply(json!([removed(&[11]), stored(12, 4, &[7, 7, 7, 7])])), Some(0));
    assert_eq!(scene.pool.gpu_blocks(RANK), 1);
    assert_eq!(scene.matched(&[7, 7, 7, 7], None), 1);
}

#[test]
fn another_process_starts_from_nothing() {
    let mut scene = Scene::exact();
    scene.apply(json!([stored(1, 4, &PROMPT)]));
    let feed = scene.feed();
    scene.sink.reset(feed, ResetReason::SequenceWentBack);
    scene.apply(json!([stored(1, 2, &PROMPT)]));
    assert_eq!(scene.fault(), None, "another block size is no change of a new process");
    assert_eq!(scene.matched(&PROMPT, None), 4);
}

#[test]
fn what_a_process_left_is_cleaned_up_without_another_event() {
    let mut scene = Scene::exact();
    scene.apply(json!([stored(1, 4, &PROMPT)]));
    let feed = scene.feed();
    scene.sink.reset(feed, ResetReason::HistoryGone);
    let stats = || scene.pool.caches.read().index.stats();
    assert_eq!((stats().unswept, stats().runs), (1, 1));
    scene.sink.doubts();
    assert_eq!((stats().unswept, stats().runs, stats().bytes), (0, 0, 0));
}

#[test]
fn a_publisher_that_is_never_heard_is_unreachable_and_no_longer_waited_for() {
    let mut scene = Scene::connecting();
    let mut watch = Watch::default();
    assert!(scene.pool.streams(&scene.pool.ranks())[0].is_starting);
    assert_eq!(scene.rank_state(), RankState::LoadOnly("connecting"));
    watch.look(&scene.pool, Instant::now() + UNREACHABLE_AFTER);
    assert_eq!(scene.rank_state(), RankState::LoadOnly("unreachable"));
    assert!(!scene.pool.streams(&scene.pool.ranks())[0].is_starting);
    scene.state(FeedState::Exact);
    assert_eq!(scene.rank_state(), RankState::Exact);
    watch.look(&scene.pool, Instant::now() + 2 * UNREACHABLE_AFTER);
    assert_eq!(scene.fault(), None);
}

#[test]
fn nothing_matching_over_many_prompts_is_a_fault_only_where_blocks_are_published() {
    let mut scene = Scene::exact();
    for _ in 0..200 {
        scene.pool.matching.see(1000, 0);
        scene.pool.matching.see(3, 0);
    }
    assert!(!scene.pool.nothing_matches(), "nothing is published");
    scene.apply(json!([stored(1, 4, &PROMPT)]));
    assert!(scene.pool.nothing_matches());
    scene.pool.matching.see(1000, 16);
    assert!(!scene.pool.nothing_matches());
}

#[test]
fn the_lag_is_the_wall_clock_less_the_engines() {
    let scene = Scene::exact();
    let payload = rmp_serde::to_vec(&(100.0, json!([stored(1, 4, &PROMPT)]), 0)).expect("encodes");
    let mut batch = Batch::new();
    batch.decode(&payload, &scene.key, &mut Groups::default()).expect("decodes");
    scene.pool.apply(RANK, 0, &batch, 102.5);
    assert_eq!(scene.pool.caches.read().feeds[0].lag_seconds, 2.5);
    scene.pool.apply(RANK, 1, &batch, 99.0);
    assert_eq!(scene.pool.caches.read().feeds[0].lag_seconds, 0.0, "clocks differ");
}

#[test]
fn what_is_stored_behind_a_booked_prompt_is_its_answer() {
    let mut scene = Scene::with(SchedulerConfig { follow_answers: true, ..SchedulerConfig::default() });
    scene.state(FeedState::Exact);
    scene.apply(json!([stored(90, 4, &[9, 9, 9, 9])]));
    scene.book(RequestId(1));
    let load = |scene: &Scene| scene.pool.scheduler.lock().loads().next().expect("a rank").1;
    let behind = |parent: u64, name: u64, tokens: &[u32]| {
        with(stored(name, 4, tokens), &json!({ "parent_block_hash": parent }))
    };
    // In one batch with the prompt's end; then the next block, the same in another tier, and one of unknown place.
    scene.apply(json!([stored(1, 4, &PROMPT), behind(2, 3, &[20, 21, 22, 23])]));
    assert_eq!((load(&scene).context_tokens, load(&scene).decoding), (12, 1));
    let elsewhere = with(behind(4, 5, &[28, 29, 30, 31]), &json!({ "medium": "CPU" }));
    scene.apply(json!([behind(3, 4, &[24, 25, 26, 27]), elsewhere, behind(77, 6, &[1, 1, 1, 1])]));
    assert_eq!(load(&scene).context_tokens, 16);
}

#[test]
fn behind_missed_stores_a_booked_prompt_goes_on_and_so_does_its_answer() {
    let mut scene = Scene::with(SchedulerConfig { follow_answers: true, ..SchedulerConfig::default() });
    scene.state(FeedState::Exact);
    scene.apply(json!([stored(90, 1, &[9])]));
    scene.book(RequestId(1));
    let load = |scene: &Scene| scene.pool.scheduler.lock().loads().next().expect("a rank").1;
    let behind = |parent: u64, name: u64, tokens: &[u32]| {
        with(stored(name, 1, tokens), &json!({ "parent_block_hash": parent }))
    };
    scene.state(FeedState::Degraded(DegradedReason::NoReplay));
    scene.apply(json!([behind(77, 78, &[30])]));
    assert_eq!(load(&scene).prefill_tokens, 8, "of another prompt");
    scene.apply(json!([behind(5, 6, &[6])]));
    assert_eq!((load(&scene).prefill_tokens, scene.matched(&PROMPT, None)), (2, 6));
    scene.apply(json!([behind(6, 7, &[7, 8]), behind(8, 9, &[20])]));
    assert_eq!((load(&scene).decoding, load(&scene).context_tokens), (1, 9));
    let removed = |name: u64| json!([{ "type": "BlockRemoved", "block_hashes": [name], "medium": "GPU" }]);
    for name in (6..=9).rev() {
        scene.apply(removed(name));
    }
    assert_eq!(scene.matched(&PROMPT, None), 5, "they are evicted from the end");
    scene.apply(removed(5));
    assert_eq!(scene.matched(&PROMPT, None), 0, "of the others nobody will tell");
}

#[test]
fn what_was_sent_counts_only_where_events_do_not_tell_all_and_is_forgotten_with_the_cache() {
    let mut scene = Scene::connecting();
    let candidate = |scene: &Scene| {
        let tokens = PROMPT.map(TokenId);
        let found = scene.look_up(&tokens, scene.key.plain_root());
        let ask = Ask { id: RequestId(1), prompt: found.prompt, session: None };
        scene.pool.scheduler.lock().book(&ask, &found.candidates, Instant::now());
        scene.pool.scheduler.lock().end(RequestId(1), None, Instant::now());
        (found.candidates[0].trusted, found.candidates[0].history_blocks)
    };
    let blocks =
        |scene: &Scene| scene.pool.scheduler.lock().histories().map(|(_, blocks)| blocks).sum::<usize>();
    assert_eq!(candidate(&scene), (false, 100));
    scene.state(FeedState::Exact);
    scene.apply(json!([stored(1, 4, &PROMPT)]));
    assert_eq!(candidate(&scene), (true, 0));
    scene.state(FeedState::Degraded(DegradedReason::HistoryLost));
    assert_eq!(candidate(&scene), (true, 100));
    assert_eq!(blocks(&scene), 2);
    let feed = scene.feed();
    scene.sink.reset(feed, ResetReason::SequenceWentBack);
    assert_eq!(blocks(&scene), 0);
}
