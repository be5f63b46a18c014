//! Whether prompts become the same tokens here as in the engine.

use crate::{
    agent::parity::Verdict,
    doctor::{
        facts::{Asked, RankFacts, ReplicaFacts, Stream},
        report::Judge,
    },
};

/// The probe that no chat template has a part in.
const TEXT: &str = "text";

const TEMPLATE: &str = "model_dir's chat template must be the engine's: `kvspoa model fetch NAME` brings it;\n\
                        where the engine has --chat-template: pool.prompt.chat_template = \"FILE\"";

pub(super) fn judge(replica: &ReplicaFacts, judge: &mut Judge<'_>) {
    let verdicts = &replica.parity;
    let named = |is: fn(&Verdict) -> bool| {
        let found = verdicts.iter().filter(|(_, verdict)| is(verdict));
        found.map(|(name, _)| *name).collect::<Vec<_>>()
    };
    let different = named(Verdict::is_fault);
    let equal = named(|verdict| matches!(verdict, Verdict::Equal { .. }));
    if let Some((name, Verdict::NoAnswer(why))) = verdicts.last() {
        judge.warn(
            "tokens_equal",
            format!("its tokens could not be asked for ({name}): {why}"),
            "see the replica above",
        );
    }
    if different.is_empty() {
        if !equal.is_empty() {
            judge.ok(
                "tokens_equal",
                format!("{} conversations of {} have the engine's tokens", equal.len(), verdicts.len()),
            );
        } else if verdicts.iter().any(|(_, verdict)| matches!(verdict, Verdict::NotTold { .. })) {
            judge.warn(
                "tokens_equal",
                "the engine tells its tokens nowhere",
                "/tokenize is vLLM's; the /render endpoints come with --enable-scale-out. The events below tell too",
            );
        }
        let not_made = named(|verdict| matches!(verdict, Verdict::NotMade(_)));
        if !not_made.is_empty() {
            judge.warn(
                "tokens_made",
                format!("no tokens are made here of: {}", not_made.join(", ")),
                "such conversations are routed by load (docs/templates.md)",
            );
        }
        return;
    }
    let where_they_differ = verdicts.iter().find_map(|(name, verdict)| match verdict {
        Verdict::Different(parity) => {
            Some(format!("{name} from token {}", parity.differ_at.unwrap_or_default()))
        }
        _ => None,
    });
    let first = where_they_differ.unwrap_or_default();
    let (text_differs, chats_equal) =
        (different.contains(&TEXT), equal.iter().filter(|name| **name != TEXT).count());
    let count =
        format!("{} of {} conversations have other tokens ({first})", different.len(), verdicts.len());
    if text_differs {
        judge.fail(
            "tokens_equal",
            format!("another tokenizer than the engine's: {count}"),
            "model_dir must hold the engine's own tokenizer: `kvspoa model fetch NAME` brings it",
        );
    } else if chats_equal == 0 {
        judge.fail("tokens_equal", format!("another chat template than the engine's: {count}"), TEMPLATE);
    } else {
        judge.fail(
            "tokens_equal",
            format!("the renderer has drifted: {count}; different: {}", different.join(", ")),
            format!(
                "the engine's options or release render these otherwise: compare --chat-template-content-format,\n\
                 --default-chat-template-kwargs and the engine's version with pool.prompt.*; if they agree, report it with \
                 `kvspoa bundle`.\n{TEMPLATE}"
            ),
        );
    }
}

/// By what the engine computed of a real request.
pub(super) fn judge_rank(rank: &RankFacts, judge: &mut Judge<'_>) {
    let Some(asked) = &rank.asked else { return };
    if let Some(why) = &asked.failed {
        judge.fail(
            "request_answered",
            format!("a request of ours was not answered: {why}"),
            "the engine's log says why",
        );
        return;
    }
    if let Some(counted) = asked.counted.filter(|counted| *counted != asked.tokens) {
        judge.fail(
            "tokens_counted",
            format!("the engine counted {counted} prompt tokens, here they are {}", asked.tokens),
            TEMPLATE,
        );
    }
    if let Some(Stream::Heard(seen)) = &rank.stream
        && seen.batches > 0
    {
        stored(asked, judge);
    }
    match asked.in_agent {
        Some(held) if held * 2 >= asked.tokens as u64 => {
            judge.ok(
                "agent_index",
                format!("the agent finds {held} of the request's {} tokens there", asked.tokens),
            );
        }
        Some(held) => judge.fail(
            "agent_index",
            format!(
                "the agent finds {held} of the request's {} tokens there, although it was computed",
                asked.tokens
            ),
            "see the stream's state and the tokens above: one of both is the reason",
        ),
        None => {}
    }
}

fn stored(asked: &Asked, judge: &mut Judge<'_>) {
    let matched = asked.matched;
    match matched.differ_at {
        _ if matched.blocks == 0 => judge.warn(
            "tokens_stored",
            format!("the request's {} tokens fill no block, so that nothing tells of them", asked.tokens),
            "the engine's context is too short to prove more",
        ),
        None if matched.seen > 0 => judge.ok(
            "tokens_stored",
            format!(
                "the engine stored the request's blocks with our tokens ({} of {})",
                matched.seen, matched.blocks
            ),
        ),
        Some(block) => judge.fail(
            "tokens_stored",
            format!(
                "of the request's {} blocks, the engine stored other tokens from block {block} on",
                matched.blocks
            ),
            TEMPLATE,
        ),
        None if matched.others == 0 => judge.fail(
            "tokens_stored",
            "no block of the request was stored",
            "is prefix caching on (--enable-prefix-caching)?",
        ),
        None => judge.fail(
            "tokens_stored",
            format!("the engine stored {} blocks, none of them with the request's tokens", matched.others),
            TEMPLATE,
        ),
    }
}
