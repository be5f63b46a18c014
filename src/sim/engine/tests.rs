use super::*;
use crate::sim::events::{Event, Medium, Stored};
use crate::sim::{ExtraKeys, Prompt};
use crate::units::{EngineHash, TokenId};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const BLOCK: usize = 4;

fn config() -> EngineConfig {
    EngineConfig {
        block_tokens: BLOCK as u32,
        blocks: 1 + 20,
        offload: None,
        step_tokens: 64,
        sequences: 8,
        timing: Timing::INSTANT,
    }
}

fn job(id: JobId, prompt: impl IntoIterator<Item = u32>, answer: usize) -> Job {
    let tokens = prompt.into_iter().map(TokenId).collect();
    let answer = (0..answer).map(|at| TokenId(10_000 * (id as u32 + 1) + at as u32)).collect();
    Job { id, prompt: Prompt { tokens, ..Prompt::default() }, answer }
}

fn submit(engine: &mut Engine, job: Job) {
    engine.submit(job).expect("it fits");
}

fn step(engine: &mut Engine) -> StepReport {
    engine.begin_step();
    engine.end_step()
}

fn run(engine: &mut Engine) -> StepReport {
    let mut all = StepReport::default();
    while engine.has_work() {
        let report = step(engine);
        all.outputs.extend(report.outputs);
        all.events.extend(report.events);
    }
    all
}

/// One request alone: what the caches served of it.
fn cached(engine: &mut Engine, job: Job) -> Cached {
    submit(engine, job);
    run(engine).outputs.first().expect("an answer").cached
}

fn stored(event: &Event) -> Option<&Stored> {
    if let Event::Stored(stored) = event { Some(stored) } else { None }
}

#[test]
fn a_long_prompt_is_computed_in_chunks_each_stored_by_its_own_step() {
    let mut engine = Engine::new(EngineConfig { step_tokens: 10, ..config() });
    submit(&mut engine, job(0, 0..25, 1));
    let steps: Vec<StepReport> = (0..3).map(|_| step(&mut engine)).collect();
    let blocks: Vec<usize> = steps
        .iter()
        .map(|step| step.events.iter().filter_map(stored).map(|s| s.block_hashes.len()).sum())
        .collect();
    assert_eq!(blocks, [2, 3, 1], "10, 20 and 25 tokens");
    assert_eq!(steps.iter().map(|step| step.outputs.len()).collect::<Vec<_>>(), [0, 0, 1]);
    assert!(!engine.has_work());
}

#[test]
fn running_requests_decode_before_others_are_admitted() {
    let mut engine = Engine::new(EngineConfig { step_tokens: 9, ..config() });
    submit(&mut engine, job(0, 0..8, 3));
    step(&mut engine);
    submit(&mut engine, job(1, 100..120, 1));
    let decoded: Vec<Vec<JobId>> =
        (0..3).map(|_| step(&mut engine).outputs.iter().map(|output| output.id).collect()).collect();
    assert_eq!(
        decoded,
        [vec![0], vec![0], vec![1]],
        "8 and 8 of 20 tokens, beside the decodes; then the rest"
    );
}

#[test]
fn no_more_requests_run_than_may() {
    let mut engine = Engine::new(EngineConfig { sequences: 2, ..config() });
    for id in 0..3 {
        submit(&mut engine, job(id, [id as u32; 4], 5));
    }
    step(&mut engine);
    assert_eq!((engine.stats().running, engine.stats().waiting), (2, 1));
}

#[test]
fn a_request_waits_until_its_whole_prompt_fits_and_nobody_overtakes_it() {
    let mut engine = Engine::new(config());
    submit(&mut engine, job(0, 0..40, 5));
    submit(&mut engine, job(1, 100..150, 1));
    submit(&mut engine, job(2, 200..204, 1));
    step(&mut engine);
    assert_eq!((engine.stats().running, engine.stats().waiting), (1, 2));
    let order: Vec<JobId> = run(&mut engine).outputs.iter().filter(|o| o.is_last).map(|o| o.id).collect();
    assert_eq!(order, [0, 1, 2]);
}

#[test]
fn the_youngest_request_is_preempted_when_decoding_runs_out_of_blocks_and_starts_again() {
    let mut engine = Engine::new(EngineConfig { blocks: 1 + 6, ..config() });
    submit(&mut engine, job(0, 0..8, 10));
    submit(&mut engine, job(1, 100..108, 10));
    let outputs = run(&mut engine).outputs;
    assert_eq!(engine.stats().preemptions, 1);
    for id in 0..2 {
        let tokens: Vec<u32> = outputs.iter().filter(|o| o.id == id).map(|o| o.token.0).collect();
        let first = 10_000 * (id as u32 + 1);
        assert_eq!(tokens, (first..first + 10).collect::<Vec<_>>(), "each token once and in order");
    }
    assert!(engine.stats().usage.abs() < 1e-9);
}

#[test]
fn a_request_longer_than_the_cache_is_refused() {
    let mut engine = Engine::new(config());
    let error = JobError::TooLong { needed_tokens: 81, capacity_tokens: 80 };
    assert_eq!(engine.submit(job(0, 0..80, 1)), Err(error));
    assert_eq!(engine.submit(job(0, 0..79, 1)), Ok(()));
    assert_eq!(engine.submit(job(1, [], 1)), Err(JobError::Empty));
    assert_eq!(engine.submit(job(1, [1], 0)), Err(JobError::Empty));
}

#[test]
fn a_prompt_of_whole_blocks_has_its_last_block_computed_and_stored_again() {
    let mut engine = Engine::new(config());
    submit(&mut engine, job(0, 0..12, 1));
    run(&mut engine);
    submit(&mut engine, job(1, 0..12, 1));
    let report = run(&mut engine);
    assert_eq!(report.outputs[0].cached.device_tokens, 8);
    let again = stored(&report.events[0]).expect("a store");
    assert_eq!(again.block_hashes.len(), 1);
    assert_eq!(again.tokens, (8..12).map(TokenId).collect::<Vec<_>>());
}

#[test]
fn an_aborted_request_leaves_its_prefix_and_no_block_in_use() {
    let mut engine = Engine::new(config());
    submit(&mut engine, job(0, 0..10, 50));
    submit(&mut engine, job(1, 100..105, 50));
    step(&mut engine);
    engine.abort(0);
    engine.abort(1);
    engine.abort(7);
    assert!(!engine.has_requests());
    assert!(engine.stats().usage.abs() < 1e-9);
    assert_eq!(cached(&mut engine, job(2, 0..10, 1)).device_tokens, 8);
}

#[test]
fn the_cpu_tier_serves_whole_chunks_only() {
    let offload = OffloadConfig { blocks: 40, chunk_blocks: 2, describes: true };
    let mut engine = Engine::new(EngineConfig { offload: Some(offload), ..config() });
    // Seven blocks and a token, of which the seventh is the first half of a chunk that a longer prompt has.
    cached(&mut engine, job(0, (0..28).chain([50, 51, 52, 53, 54]), 1));
    let cpu: Vec<usize> = {
        cached(&mut engine, job(1, 500..577, 1));
        engine.reset_prefix_cache(false);
        run(&mut engine).events.iter().filter_map(stored).map(|s| s.block_hashes.len()).collect()
    };
    assert!(cpu.is_empty(), "nothing is stored without a request");
    let served = cached(&mut engine, job(2, (0..28).chain([90]), 1));
    assert_eq!((served.device_tokens, served.host_tokens), (0, 24), "six of seven blocks");
}

#[test]
fn cpu_stores_come_one_step_after_the_gpu_stores() {
    let offload = OffloadConfig { blocks: 40, chunk_blocks: 1, describes: true };
    let mut engine = Engine::new(EngineConfig { offload: Some(offload), ..config() });
    submit(&mut engine, job(0, 0..9, 1));
    let media =
        |report: StepReport| report.events.iter().filter_map(stored).map(|s| s.medium).collect::<Vec<_>>();
    assert_eq!(media(step(&mut engine)), [Medium::Gpu]);
    assert!(!engine.has_requests() && engine.has_work());
    assert_eq!(media(step(&mut engine)), [Medium::Cpu, Medium::Cpu]);
    assert!(!engine.has_work());
}

#[test]
fn an_external_reset_empties_the_cpu_tier_too_and_says_so_once() {
    let offload = OffloadConfig { blocks: 40, chunk_blocks: 1, describes: true };
    let mut engine = Engine::new(EngineConfig { offload: Some(offload), ..config() });
    cached(&mut engine, job(0, 0..9, 1));
    assert!(engine.reset_prefix_cache(false));
    assert_eq!(cached(&mut engine, job(1, 0..9, 1)).host_tokens, 8);
    assert!(engine.reset_prefix_cache(true));
    submit(&mut engine, job(2, 0..9, 1));
    let report = run(&mut engine);
    assert_eq!(report.outputs[0].cached.tokens(), 0);
    assert_eq!(report.events[0], Event::Cleared);
    assert_eq!(report.events.iter().filter(|event| **event == Event::Cleared).count(), 1);
}

#[test]
fn a_load_from_the_cpu_tier_takes_its_time_and_others_go_on_meanwhile() {
    let timing = Timing { load_seconds: 1.0, step: Duration::from_millis(10), ..Timing::INSTANT };
    let offload = OffloadConfig { blocks: 40, chunk_blocks: 1, describes: true };
    let mut engine = Engine::new(EngineConfig { offload: Some(offload), timing, ..config() });
    cached(&mut engine, job(0, 0..9, 1));
    engine.reset_prefix_cache(false);
    submit(&mut engine, job(1, 0..9, 1));
    submit(&mut engine, job(2, 100..109, 2));
    assert_eq!(engine.begin_step(), Duration::from_millis(10));
    assert_eq!(engine.end_step().outputs.len(), 1, "the other one has its first token");
    assert_eq!(engine.begin_step(), Duration::from_millis(10));
    assert_eq!(engine.end_step().outputs.len(), 1);
    assert_eq!(engine.begin_step(), Duration::from_millis(980), "then the load is all there is to wait for");
    assert!(engine.end_step().outputs.is_empty());
    engine.begin_step();
    let served = engine.end_step().outputs[0].cached;
    assert_eq!((served.device_tokens, served.host_tokens), (0, 8));
}

#[test]
fn a_salt_and_an_adapter_name_themselves_in_the_events() {
    let mut engine = Engine::new(config());
    let mut asked = job(0, 0..9, 1);
    asked.prompt.lora = Some(crate::sim::Lora { id: 1, name: "adapter".into() });
    asked.prompt.cache_salt = Some("salt".into());
    submit(&mut engine, asked);
    let events = run(&mut engine).events;
    let keys: &[ExtraKeys] = stored(&events[0]).expect("a store").extra_keys.as_deref().expect("keys");
    assert_eq!(keys, [vec!["adapter".into(), "salt".into()], vec!["adapter".into()]]);
}

/// The caches as a subscriber knows them.
#[derive(Default)]
struct Subscriber {
    device: BTreeMap<EngineHash, u32>,
    host: BTreeSet<EngineHash>,
    /// Of each block its parent and its tokens, from the stores of either tier.
    blocks: BTreeMap<(Option<EngineHash>, Vec<TokenId>), EngineHash>,
}

impl Subscriber {
    fn hear(&mut self, events: &[Event], host_capacity: usize) {
        for event in events {
            match event {
                Event::Cleared => self.device.clear(),
                Event::Removed { block_hashes, medium: Medium::Gpu } => {
                    for hash in block_hashes {
                        let count = self.device.get_mut(hash).expect("what is removed was stored");
                        *count -= 1;
                        if *count == 0 {
                            self.device.remove(hash);
                        }
                    }
                }
                Event::Removed { block_hashes, medium: Medium::Cpu } => {
                    for hash in block_hashes {
                        assert!(self.host.remove(hash), "what is removed was stored");
                    }
                }
                Event::Stored(stored) => {
                    let mut parent = stored.parent;
                    for (hash, tokens) in stored.block_hashes.iter().zip(stored.tokens.chunks(BLOCK)) {
                        self.blocks.insert((parent, tokens.to_vec()), *hash);
                        parent = Some(*hash);
                        match stored.medium {
                            Medium::Gpu => *self.device.entry(*hash).or_default() += 1,
                            Medium::Cpu => assert!(self.host.insert(*hash), "stored once"),
                        }
                    }
                    assert!(self.host.len() <= host_capacity);
                }
            }
        }
    }

    /// What the caches should serve of a prompt: first device, then host.
    fn predict(&self, prompt: &[TokenId]) -> (usize, usize) {
        let mut parent = None;
        let chain: Vec<EngineHash> = prompt
            .chunks_exact(BLOCK)
            .map_while(|tokens| {
                parent = self.blocks.get(&(parent, tokens.to_vec())).copied();
                parent
            })
            .collect();
        let most = (prompt.len() - 1) / BLOCK;
        let device = chain.iter().take(most).take_while(|hash| self.device.contains_key(hash)).count();
        let host = chain[device..].iter().take_while(|hash| self.host.contains(hash)).count();
        (device * BLOCK, host * BLOCK)
    }
}

#[derive(Clone, Debug)]
enum Action {
    Ask {
        family: u32,
        length: usize,
        answer: usize,
    },
    AbortFirst,
    Steps(usize),
    /// Until nothing is left to do.
    Rest,
    Reset,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => (0u32..4, 1usize..50, 1usize..12)
            .prop_map(|(family, length, answer)| Action::Ask { family, length, answer }),
        1 => Just(Action::AbortFirst),
        3 => (1usize..6).prop_map(Action::Steps),
        3 => Just(Action::Rest),
        1 => Just(Action::Reset),
    ]
}

proptest! {
    /// Whatever happens, the events tell exactly what the caches serve, every answer is whole, and no block is lost.
    #[test]
    fn events_tell_what_the_caches_serve(
        actions in prop::collection::vec(action(), 1..60),
        host_blocks in prop_oneof![Just(0usize), 4usize..60],
    ) {
        let offload =
            OffloadConfig { blocks: host_blocks as u32, chunk_blocks: 1, describes: true };
        let mut engine =
            Engine::new(EngineConfig { offload: (host_blocks > 0).then_some(offload), step_tokens: 16, ..config() });
        let mut subscriber = Subscriber::default();
        let mut owed: BTreeMap<JobId, usize> = BTreeMap::new();
        let mut predicted: BTreeMap<JobId, (usize, usize)> = BTreeMap::new();
        for (id, action) in (0..).zip(actions.into_iter().chain([Action::Rest])) {
            let steps = match action {
                Action::Ask { family, length, answer } => {
                    // Prompts of a family share their first tokens, up to where one of them ends.
                    let prompt: Vec<u32> = (0..length as u32).map(|at| family * 100 + at).collect();
                    let asked = job(id, prompt, answer);
                    if !engine.has_work() {
                        predicted.insert(id, subscriber.predict(&asked.prompt.tokens));
                    }
                    submit(&mut engine, asked);
                    owed.insert(id, answer);
                    0
                }
                Action::AbortFirst => {
                    if let Some((id, _)) = owed.pop_first() {
                        engine.abort(id);
                    }
                    0
                }
                Action::Steps(steps) => steps,
                Action::Rest => 10_000,
                Action::Reset => {
                    if !engine.has_work() {
                        // It is told with the next step; nothing can be asked before.
                        prop_assert!(engine.reset_prefix_cache(false));
                        subscriber.device.clear();
                    }
                    0
                }
            };
            for _ in 0..steps {
                if !engine.has_work() {
                    break;
                }
                let report = step(&mut engine);
                subscriber.hear(&report.events, host_blocks);
                prop_assert!(subscriber.device.values().sum::<u32>() <= 20);
                for output in report.outputs {
                    if let Some((device, host)) = predicted.remove(&output.id) {
                        prop_assert_eq!((output.cached.device_tokens, output.cached.host_tokens), (device, host));
                    }
                    let left = owed.get_mut(&output.id).expect("an open request");
                    *left -= 1;
                    prop_assert_eq!(output.is_last, *left == 0);
                    if output.is_last {
                        owed.remove(&output.id);
                    }
                }
            }
        }
        prop_assert!(!engine.has_work(), "everything ends");
        prop_assert!(owed.is_empty());
        prop_assert!(engine.stats().usage.abs() < 1e-9);
    }
}
