//! Messages that were read lately.
//!
//! Each turn of a conversation sends all messages again that came before. They are known by their JSON, so that of a
//! long body only what is new has to be read.

use super::body::BodyError;
use super::conversation::Message;
use crate::recent::{CacheStats, Recent};
use smallvec::SmallVec;
use std::sync::Arc;

/// Enough that threads rarely wait for each other, and that a message may be long.
const SHARDS: usize = 8;

/// The messages that were read lately, by their JSON; bounded in bytes.
#[derive(Debug)]
pub struct SeenMessages(Recent<SmallVec<[Arc<Message>; 1]>>);

/// The API whose JSON it is: the same text may be another message in each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Api {
    Chat,
    Anthropic,
    Responses,
}

impl SeenMessages {
    /// At most `capacity_bytes` of messages.
    #[must_use]
    pub fn new(capacity_bytes: usize) -> Self {
        Self(Recent::new(capacity_bytes, SHARDS))
    }

    /// What is kept and how often it helped.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.0.stats()
    }

    /// Adds the messages that are written as `json`: those that `read` adds, unless they were read lately.
    pub(super) fn read(
        &self,
        api: Api,
        json: &[u8],
        messages: &mut Vec<Arc<Message>>,
        read: impl FnOnce(&mut Vec<Arc<Message>>) -> Result<(), BodyError>,
    ) -> Result<(), BodyError> {
        let key = self.0.key(api as u64, json);
        if let Some(seen) = self.0.get(key) {
            messages.extend(seen);
            return Ok(());
        }
        let before = messages.len();
        read(messages)?;
        let own: SmallVec<[Arc<Message>; 1]> = messages.iter().skip(before).cloned().collect();
        let bytes = own.iter().map(|message| message.memory_bytes() + size_of::<Arc<Message>>()).sum();
        self.0.insert(key, own, bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::body::{Endpoint, PromptInput, parse, parse_seen};
    use proptest::prelude::*;

    const TURN: &str = r#"{"role": "user", "content": "a\u00e9"}"#;

    fn chat(json: &str, seen: &SeenMessages) -> Result<Vec<Arc<Message>>, BodyError> {
        let body = format!(r#"{{"messages": [{json}]}}"#);
        match parse_seen(Endpoint::ChatCompletions, body.as_bytes(), seen)?.prompt {
            PromptInput::Chat(conversation) => Ok(conversation.messages),
            other => panic!("{other:?} is no conversation"),
        }
    }

    #[test]
    fn a_message_is_read_once_in_each_api() {
        let seen = SeenMessages::new(1 << 20);
        let first = chat(TURN, &seen).expect("a message");
        let again = chat(TURN, &seen).expect("a message");
        assert!(Arc::ptr_eq(&first[0], &again[0]));
        assert_eq!((seen.stats().hits, seen.stats().misses), (1, 1));
        assert!(seen.stats().bytes >= first[0].memory_bytes());
        for (endpoint, body, misses) in [
            (Endpoint::ChatBatch, format!(r#"{{"messages": [[{TURN}], [{TURN}]]}}"#), 1),
            (Endpoint::Messages, format!(r#"{{"messages": [{TURN}]}}"#), 2),
            (Endpoint::Responses, format!(r#"{{"input": [{TURN}]}}"#), 3),
        ] {
            for _ in 0..2 {
                parse_seen(endpoint, body.as_bytes(), &seen).expect("a body");
                assert_eq!(seen.stats().misses, misses, "{endpoint:?}");
            }
        }
    }

    #[test]
    fn what_is_no_message_is_not_kept() {
        let seen = SeenMessages::new(1 << 20);
        assert_eq!(chat("{]", &seen), Err(BodyError::Malformed));
        assert_eq!(chat("{}", &seen), Err(BodyError::Field("role")));
        assert_eq!(seen.stats().bytes, 0);
    }

    /// Entries of all kinds for each API that has a list of them.
    const ENTRIES: [(Endpoint, &str, &[&str]); 3] = [
        (
            Endpoint::ChatCompletions,
            "messages",
            &[
                TURN,
                r#"{"role": "system", "content": "x-anthropic-billing-header: 7\ns"}"#,
                r#"{"role": "assistant", "content": null, "reasoning": "r", "tool_calls": [{"id": "1", "type": "function",
                    "function": {"name": "f", "arguments": "{\"a\": 1e3}"}}]}"#,
                r#"{"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "t"}]}"#,
                r#"{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}"#,
                r#"{"content": "no role"}"#,
                "7",
                "null",
            ],
        ),
        (
            Endpoint::Messages,
            "messages",
            &[
                TURN,
                r#"{"role": "system", "content": "inline"}"#,
                r#"{"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]}"#,
                r#"{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "o"},
                    {"type": "text", "text": "and"}]}"#,
                r#"{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "o"},
                    {"type": "image", "source": {}}]}"#,
                r#"{"role": "user", "content": []}"#,
                r#"{"role": "user"}"#,
                "[]",
            ],
        ),
        (
            Endpoint::Responses,
            "input",
            &[
                TURN,
                r#"{"role": "assistant", "content": "a"}"#,
                r#"{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}"#,
                r#"{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}"#,
                r#"{"type": "message", "status": "incomplete", "role": "assistant", "content": "a"}"#,
                r#"{"type": null, "status": "incomplete", "role": "assistant", "content": "a"}"#,
                r#"{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}"#,
                r#"{"type": "function_call_output", "call_id": "1", "output": "o"}"#,
                r#"{"role": "user", "content": [{"type": "input_image"}]}"#,
                r#"{"type": "item_reference", "id": "x"}"#,
                "7",
            ],
        ),
    ];

    proptest! {
        #[test]
        fn a_conversation_is_the_same_with_and_without(
            api in 0..ENTRIES.len(),
            picks in prop::collection::vec(any::<prop::sample::Index>(), 0..7),
            seen_before in any::<prop::sample::Index>(),
        ) {
            let (endpoint, list, entries) = ENTRIES[api];
            let entries: Vec<&str> = picks.iter().map(|pick| entries[pick.index(entries.len())]).collect();
            let body = |entries: &[&str]| format!(r#"{{"model": "m", "{list}": [{}], "n": 1}}"#, entries.join(" ,\n"));
            let seen = SeenMessages::new(1 << 20);
            let _earlier = parse_seen(endpoint, body(&entries[..seen_before.index(entries.len() + 1)]).as_bytes(), &seen);
            let body = body(&entries);
            let whole = parse(endpoint, body.as_bytes());
            for _ in 0..2 {
                prop_assert_eq!(&parse_seen(endpoint, body.as_bytes(), &seen), &whole, "{}", body);
            }
        }
    }

    #[test]
    fn a_body_is_read_the_same_with_and_without() {
        let seen = SeenMessages::new(1 << 20);
        let nested = |levels: usize| format!(r#"{{"x": {}7{}}}"#, "[".repeat(levels), "]".repeat(levels));
        for (endpoint, body) in [
            (Endpoint::ChatCompletions, format!(r#"{{"messages": [7], "messages": [{TURN}]}}"#)),
            (Endpoint::ChatCompletions, format!(r#"{{"messages": [{TURN}], "messages": null}}"#)),
            (Endpoint::ChatCompletions, format!(r#"{{"m\u0065ssages": [{TURN}, {TURN}]}}"#)),
            (Endpoint::ChatCompletions, r#"{"messages": null}"#.to_owned()),
            (Endpoint::ChatCompletions, r#"{"messages": []}"#.to_owned()),
            (Endpoint::ChatCompletions, r#"{"messages": {}}"#.to_owned()),
            (Endpoint::ChatCompletions, r#"{"messages": [}"#.to_owned()),
            (Endpoint::ChatCompletions, "[1]".to_owned()),
            (Endpoint::ChatCompletions, String::new()),
            (Endpoint::ChatCompletions, format!(r#"{{"messages": [{TURN}], "chat_template": "x"}}"#)),
            (
                Endpoint::ChatCompletions,
                format!(r#"{{"messages": [{TURN}], "kv_transfer_params": {{"prompt_token_ids": [1, 2]}}}}"#),
            ),
            (Endpoint::ChatCompletions, format!(r#"{{"messages": [{TURN}, {}]}}"#, nested(123))),
            (Endpoint::ChatCompletions, format!(r#"{{"messages": [{TURN}, {}]}}"#, nested(124))),
            (Endpoint::ChatCompletions, format!(r#"{{"messages": [{TURN}, {}]}}"#, nested(125))),
            (Endpoint::ChatBatch, format!(r#"{{"messages": [[{TURN}], [{TURN}]]}}"#)),
            (Endpoint::ChatBatch, format!(r#"{{"messages": [[{TURN}], null]}}"#)),
            (Endpoint::ChatBatch, r#"{"messages": [7]}"#.to_owned()),
            (Endpoint::ChatBatch, r#"{"messages": []}"#.to_owned()),
            (Endpoint::Messages, format!(r#"{{"system": "s", "messages": [{TURN}]}}"#)),
            (Endpoint::Messages, r#"{"system": "s", "messages": []}"#.to_owned()),
            (Endpoint::Messages, r#"{"messages": "x"}"#.to_owned()),
            (Endpoint::Responses, r#"{"instructions": "s", "input": "x"}"#.to_owned()),
            (Endpoint::Responses, format!(r#"{{"instructions": "s", "input": [{TURN}]}}"#)),
            (Endpoint::Responses, r#"{"input": 7}"#.to_owned()),
            (Endpoint::Completions, r#"{"prompt": ["x"]}"#.to_owned()),
        ] {
            for _ in 0..2 {
                let ask = parse_seen(endpoint, body.as_bytes(), &seen);
                assert_eq!(ask, parse(endpoint, body.as_bytes()), "{body}");
            }
        }
    }
}
