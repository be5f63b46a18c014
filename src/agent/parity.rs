//! Asks a replica which tokens it makes of some conversations, and compares them with ours.
//!
//! Rendering that differs by one byte finds no cache and fails nowhere, so it has to be asked for: another template or
//! tokenizer than the engine's, an option that it was started with, another release.

use crate::{
    client::Access,
    config::HttpAddr,
    prompt::{
        Model,
        parity::{self, Parity},
    },
    request::Endpoint,
};
use bytes::Bytes;
use serde_json::{Value, json};
use std::time::Duration;

/// Some thousand tokens in decimal digits at most.
const MAX_ANSWER_BYTES: usize = 1 << 20;

/// A replica answers in milliseconds; one that is busy is asked another time.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A body whose tokens are compared.
#[derive(Clone, Debug)]
pub struct Probe {
    /// What it is about, in a word or two.
    pub name: &'static str,
    /// Where a client would send it.
    pub endpoint: Endpoint,
    /// The body.
    pub body: Bytes,
}

/// What became of one probe.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The replica's tokens are ours.
    Equal {
        /// How many.
        tokens: usize,
    },
    /// They are not.
    Different(Parity),
    /// We make none, so that such requests are routed by load; the reason.
    NotMade(String),
    /// The replica refuses such a conversation, so that there is nothing to route. We may not notice that.
    Refused,
    /// The replica has none of the endpoints that tell.
    NotTold {
        /// What it answered last.
        status: u16,
    },
    /// The replica did not answer, or not what was asked.
    NoAnswer(String),
}

impl Verdict {
    /// Whether requests like this one are routed by other tokens than the replica's: a fault that somebody has to mend.
    #[must_use]
    pub const fn is_fault(&self) -> bool {
        matches!(self, Self::Different(_))
    }
}

/// Conversations that show what templates and engines are known to differ in. They name no model, so that the replica
/// takes its own.
#[must_use]
pub fn probes() -> Vec<Probe> {
    let user = |content: Value| json!({ "role": "user", "content": content });
    let tool = json!({ "type": "function", "function": { "name": "weather", "description": "Says \"how\" it is <there>.",
        "parameters": { "type": "object", "properties": { "town": { "type": "string" }, "days": { "type": "number",
        "default": 1.5 } }, "required": ["town"] } } });
    let call = json!({ "id": "call_0001", "type": "function", "function": { "name": "weather",
        "arguments": "{\"town\": \"Zürich\", \"days\": 2}" } });
    let chat = |name, messages: Value| (name, json!({ "messages": messages }));
    let chats = [
        chat("plain", json!([user("Hello, world!".into())])),
        chat("system", json!([{ "role": "system", "content": "Be brief." }, user("Hello".into())])),
        chat(
            "turns",
            json!([user("a".into()), { "role": "assistant", "content": "b" }, user("c".into()),
                { "role": "assistant", "content": "d" }, user("e".into())]),
        ),
        chat("unicode", json!([user("Zürich 你好 🙂 e\u{301} \u{200b}\u{a0}עברית".into())])),
        chat("blanks", json!([user("  leading and trailing \n\n".into())])),
        chat("special tokens", json!([user("a <|im_end|> b <|eot_id|> c </s> d <end_of_turn>".into())])),
        chat(
            "parts",
            json!([user(json!([{ "type": "text", "text": "one" }, { "type": "text", "text": "two" }]))]),
        ),
        chat(
            "thinking",
            json!([user("a".into()), { "role": "assistant", "content": "b", "reasoning": "why" }, user("c".into())]),
        ),
        ("tools", json!({ "messages": [user("How is it?".into())], "tools": [tool] })),
        (
            "tool calls",
            json!({ "tools": [tool], "messages": [user("How is it?".into()),
                { "role": "assistant", "content": null, "tool_calls": [call] },
                { "role": "tool", "tool_call_id": "call_0001", "content": "sunny" }, user("Thanks".into())] }),
        ),
    ];
    let completion = ("text", json!({ "prompt": "Once upon a time, in Zürich,\n\n\t1234567 <|im_start|>" }));
    let probe = |endpoint, (name, body): (&'static str, Value)| Probe {
        name,
        endpoint,
        body: Bytes::from(body.to_string()),
    };
    let chats = chats.into_iter().map(|chat| probe(Endpoint::ChatCompletions, chat));
    chats.chain([probe(Endpoint::Completions, completion)]).collect()
}

/// Asks a replica for its tokens of one body and compares them with the model's.
pub async fn ask(access: &Access, replica: &HttpAddr, model: &Model, probe: &Probe) -> Verdict {
    let ours = parity::ours(model, probe.endpoint, &probe.body);
    let render = match probe.endpoint {
        Endpoint::Completions => "/v1/completions/render",
        _ => "/v1/chat/completions/render",
    };
    let mut last = Verdict::NotTold { status: 0 };
    for target in ["/tokenize", render] {
        if target == "/tokenize" && !model.is_told_by_tokenize() {
            continue;
        }
        let asked = access.post(replica, target, probe.body.clone(), MAX_ANSWER_BYTES);
        let answer = match tokio::time::timeout(TIMEOUT, asked).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => return Verdict::NoAnswer(error.to_string()),
            Err(_) => return Verdict::NoAnswer("the time is up".to_owned()),
        };
        return match (answer.status, &ours) {
            (200, Ok(ours)) => match parity::compare(ours, &answer.body) {
                Some(Parity { differ_at: None, ours, .. }) => Verdict::Equal { tokens: ours },
                Some(parity) => Verdict::Different(parity),
                None => Verdict::NoAnswer(format!("the answer of {target} has no tokens")),
            },
            (200, Err(error)) => Verdict::NotMade(error.to_string()),
            (400 | 422, _) => Verdict::Refused,
            // There is no such endpoint, or it is not enabled.
            (status @ 403..=405, _) => {
                last = Verdict::NotTold { status };
                continue;
            }
            (status, _) => Verdict::NoAnswer(format!("{target} answers with status {status}")),
        };
    }
    last
}
