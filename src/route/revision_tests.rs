//! A fleet of which a part runs another template already.

use super::*;
use crate::{
    config::{self, Config, Overrides},
    events::{FeedState, KvEvent, Sink, Stored},
    hash::HashKey,
    pool::{EventSink, FeedKey},
    replica::parse_models,
    select::{Policy, Scheduler, SchedulerConfig},
    units::{EngineHash, RankId, Revision, Tier, TokenId},
};
use serde_json::{Value, json};
use std::path::Path;

const BLOCK_TOKENS: usize = 16;

struct Scene {
    pool: Arc<Pool>,
    router: Router,
    pools: Arc<Pools>,
    ids: u128,
    _templates: tempfile::TempDir,
}

impl Scene {
    /// Replicas `old` and `new`, whose prompts differ from the first token on.
    fn new() -> Self {
        let templates = tempfile::tempdir().expect("a directory");
        let template = |revision: &str| {
            let path = templates.path().join(revision);
            let text = format!("{revision}: {{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}");
            std::fs::write(&path, text).expect("a file");
            path
        };
        let text = format!(
            "[[pool]]\nbackend = \"be\"\nprompt.chat_template = {:?}\n\
             [[pool.revision]]\nname = \"next\"\nprompt.chat_template = {:?}\n\
             [[pool.replica]]\nserver = \"old\"\nevents = \"tcp://127.0.0.1:1\"\n\
             [[pool.replica]]\nserver = \"new\"\nevents = \"tcp://127.0.0.1:2\"\nrevision = \"next\"\n",
            template("one"),
            template("another"),
        );
        let config = Config::parse(&text, Path::new("test.toml"), &Overrides::default()).expect("valid");
        let scheduler = Scheduler::new(Policy::default(), SchedulerConfig::default(), 1);
        let (key, second) = (HashKey::from_seed(1), Duration::from_secs(1));
        let pool = Pool::new(&config.pools[0], &key, 1 << 20, scheduler, second, second).expect("a pool");
        let pool = Arc::new(pool);
        let pools = Arc::new(Pools::new(vec![Arc::clone(&pool)]));
        let limits =
            RouteLimits { workers: Workers::new(1, 1), inline_bytes: usize::MAX, deadline: 600 * second };
        let router = Router::new(Arc::clone(&pools), limits);
        let scene = Self { pool, router, pools, ids: 0, _templates: templates };
        config.pools[0].replicas.iter().for_each(|replica| scene.join(replica));
        scene
    }

    fn join(&self, replica: &config::Replica) {
        let ids = self.pool.join(replica, Instant::now()).expect("room");
        let mut sink = EventSink::new(Arc::clone(&self.pools));
        for rank in ids {
            sink.state(FeedKey { pool: self.pool.id, rank }, FeedState::Exact, Some(0));
        }
    }

    fn rank(&self, server: &str) -> RankId {
        self.pool.rank_of_server(server).expect("a server")
    }

    /// The rank stores all full blocks of a prompt.
    fn store(&self, server: &str, tokens: &[TokenId]) {
        let hashes: Vec<_> =
            tokens.chunks_exact(BLOCK_TOKENS).map(|block| self.pool.key.block(block)).collect();
        let names: Vec<_> = (1..).map(EngineHash).take(hashes.len()).collect();
        let stored = KvEvent::Stored(Stored {
            tier: Tier::Gpu,
            parent: None,
            root: self.pool.key.plain_root(),
            engine_hashes: &names,
            block_hashes: &hashes,
        });
        self.pool.caches.write().index.apply(self.rank(server), &stored);
    }

    async fn decide(&mut self, body: &Value) -> Decision {
        self.ids += 1;
        let request = RoutingRequest {
            id: Some(RequestId(self.ids)),
            pool: "be".to_owned(),
            method: "POST".to_owned(),
            path: "/v1/chat/completions".to_owned(),
            complete: true,
            body: Bytes::from(body.to_string()),
            ..RoutingRequest::default()
        };
        self.router.decide(request, Instant::now()).await
    }
}

fn chat(text: &str) -> Value {
    json!({ "messages": [{ "role": "user", "content": text.repeat(40) }] })
}

fn tokens(pool: &Pool, revision: u32, body: &Value) -> Vec<TokenId> {
    let renderers = pool.renderers();
    let model = renderers.of(Revision(revision)).expect("a renderer");
    let ask = model.read(Endpoint::ChatCompletions, body.to_string().as_bytes()).expect("a body");
    model.tokenize(&ask.prompt).expect("tokens")
}

#[tokio::test]
async fn each_replica_is_matched_by_the_prompt_that_its_own_renderer_makes() {
    let mut scene = Scene::new();
    for (server, revision, text) in [("old", 0, "Guten Tag! "), ("new", 1, "Good morning! ")] {
        let body = chat(text);
        let prompt = tokens(&scene.pool, revision, &body);
        assert_ne!(prompt, tokens(&scene.pool, 1 - revision, &body));
        scene.store(server, &prompt);
        let decision = scene.decide(&body).await;
        assert_eq!(decision.target().map(|rank| &*rank.server), Some(server));
        let cached = (prompt.len() - 1) / BLOCK_TOKENS * BLOCK_TOKENS;
        assert_eq!(decision.chosen.map(|chosen| chosen.matched_tokens as usize), Some(cached));
        assert_eq!((decision.state, decision.reason), (State::Exact, Reason::Overlap));
        assert_eq!(decision.tokens(), Some(&prompt.into()), "the record is of the prompt that is sent there");
    }
}

#[tokio::test]
async fn what_a_replica_stored_by_another_template_counts_for_nobody_else() {
    let mut scene = Scene::new();
    let body = chat("Guten Tag! ");
    scene.store("old", &tokens(&scene.pool, 1, &body));
    let decision = scene.decide(&body).await;
    assert_eq!((decision.state, decision.reason), (State::Exact, Reason::NoOverlap));
}

#[tokio::test]
async fn a_booked_prompt_is_present_and_advances_by_the_blocks_of_its_own_replica() {
    let mut scene = Scene::new();
    let body = chat("Good morning! ");
    scene.store("new", &tokens(&scene.pool, 1, &body)[..BLOCK_TOKENS]);
    let new = scene.rank("new");
    assert_eq!(scene.decide(&body).await.chosen.map(|chosen| chosen.rank), Some(new));
    let again = scene.decide(&body).await.choice.expect("a choice");
    let shared = again.terms.iter().find(|terms| terms.rank == new).map(|terms| terms.booked_tokens);
    assert!(shared > Some(0), "{shared:?}");
    scene.store("new", &tokens(&scene.pool, 1, &body));
    let mut scheduler = scene.pool.scheduler.lock();
    let before = scheduler.loads().find(|(rank, _)| *rank == new).expect("a rank").1;
    assert!(before.prefill_tokens > 0);
    let depth = |hashes: &[_]| scene.pool.caches.read().index.depth(new, hashes);
    scheduler.progress(new, depth, Instant::now());
    let after = scheduler.loads().find(|(rank, _)| *rank == new).expect("a rank").1;
    assert_eq!((after.prefill_tokens, after.decoding), (0, before.requests));
}

#[tokio::test]
async fn a_replica_of_a_revision_that_nobody_named_is_scored_by_load_and_the_decision_says_so() {
    let mut scene = Scene::new();
    let replica = config::Replica {
        server: "stray".to_owned(),
        ranks: vec![config::Rank::default()],
        revision: Some("gone".to_owned()),
        ..config::Replica::default()
    };
    scene.join(&replica);
    let body = chat("Guten Tag! ");
    scene.store("old", &tokens(&scene.pool, 0, &body));
    let decision = scene.decide(&body).await;
    assert_eq!(decision.target().map(|rank| &*rank.server), Some("old"));
    assert_eq!((decision.state, decision.reason), (State::Degraded, Reason::Overlap));
    scene.pool.leave("old");
    scene.pool.leave("new");
    let decision = scene.decide(&body).await;
    assert_eq!(decision.target().map(|rank| &*rank.server), Some("stray"));
    assert_eq!((decision.state, decision.reason), (State::LoadOnly, Reason::UnknownRevision));
}

#[tokio::test]
async fn a_pool_of_one_revision_renders_once() {
    let mut scene = Scene::new();
    scene.pool.leave("new");
    assert_eq!(scene.pool.ranks().revisions(), [Revision(0)]);
    let kept = |scene: &Scene| {
        let renderers = scene.pool.renderers();
        [0, 1].map(|revision| renderers.of(Revision(revision)).expect("a renderer").cache_bytes())
    };
    let before = kept(&scene);
    scene.decide(&chat("Guten Tag! ")).await;
    let after = kept(&scene);
    assert!(after[0] > before[0] && after[1] == before[1]);
}

#[tokio::test]
async fn what_no_replica_takes_is_routed_by_load_also_when_it_comes_again() {
    let mut scene = Scene::new();
    let body = json!({ "model": "chat", "messages": [{ "role": "user", "content": "Guten Tag!" }] });
    let served = |name: &str| {
        let list = json!({ "data": [{ "id": name, "owned_by": "vllm", "max_model_len": 4096 }] });
        parse_models(list.to_string().as_bytes())
    };
    let both_serve = |scene: &Scene, name: &str| {
        for server in ["old", "new"] {
            scene.pool.take_models(server, &served(name));
        }
    };
    both_serve(&scene, "chat");
    for is_repeat in [false, true] {
        let decision = scene.decide(&body).await;
        assert_eq!((decision.reason, decision.is_repeat), (Reason::NoOverlap, is_repeat));
    }
    both_serve(&scene, "another");
    let decision = scene.decide(&body).await;
    assert_eq!((decision.state, decision.reason), (State::LoadOnly, Reason::UnknownModel));
    both_serve(&scene, "chat");
    let of = |context| config::Pool { max_model_len: context, ..config::Pool::default() };
    scene.pool.configure(&of(None), &of(Some(4)));
    let decision = scene.decide(&body).await;
    assert_eq!((decision.state, decision.reason), (State::LoadOnly, Reason::Refused));
}
