//! Messages that were read lately.
//!
//! Each turn of a conversation sends all messages again that came before. They are known by their JSON, so that of a
//! long body only what is new has to be read.

use super::body::BodyError;
use super::conversation::{self, Message};
use crate::recent::{CacheStats, Recent};
use std::sync::Arc;

/// Enough that threads rarely wait for each other, and that a message may be long.
const SHARDS: usize = 8;

/// The messages that were read lately, by their JSON; bounded in bytes.
#[derive(Debug)]
pub struct SeenMessages(Recent<Arc<Message>>);

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

    /// The message that is written as `json`.
    pub(super) fn read(&self, json: &[u8]) -> Result<Arc<Message>, BodyError> {
        let key = self.0.key(0, json);
        if let Some(message) = self.0.get(key) {
            return Ok(message);
        }
        let value = serde_json::from_slice(json).map_err(|_| BodyError::Malformed)?;
        let message = Arc::new(conversation::message(value)?);
        let bytes = message.memory_bytes();
        self.0.insert(key, Arc::clone(&message), bytes);
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::body::{Endpoint, PromptInput, parse, parse_seen};

    const TURN: &str = r#"{"role": "user", "content": "a\u00e9"}"#;

    #[test]
    fn a_message_is_read_once() {
        let seen = SeenMessages::new(1 << 20);
        let first = seen.read(TURN.as_bytes()).expect("a message");
        let again = seen.read(TURN.as_bytes()).expect("a message");
        assert!(Arc::ptr_eq(&first, &again));
        assert_eq!((seen.stats().hits, seen.stats().misses), (1, 1));
        assert!(seen.stats().bytes >= first.memory_bytes());
    }

    #[test]
    fn what_is_no_message_is_not_kept() {
        let seen = SeenMessages::new(1 << 20);
        assert_eq!(seen.read(b"{"), Err(BodyError::Malformed));
        assert_eq!(seen.read(b"{}"), Err(BodyError::Field("role")));
        assert_eq!(seen.stats().bytes, 0);
    }

    #[test]
    fn the_conversation_is_the_same_with_and_without() {
        let seen = SeenMessages::new(1 << 20);
        let call = r#"{"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
            "function": {"name": "f", "arguments": "{\"a\": 1e3}"}}]}"#;
        let media = r#"{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}"#;
        for body in [
            format!(r#"{{"model": "m", "messages": [{TURN}, {call}, {TURN}], "n": 1}}"#),
            format!(r#"{{"messages": [{call}], "messages": [{TURN}]}}"#),
            format!(r#"{{"m\u0065ssages": [{TURN}, {media}, {TURN}]}}"#),
            r#"{"messages": null}"#.to_owned(),
            r#"{"messages": []}"#.to_owned(),
            r#"{"messages": {}}"#.to_owned(),
            r#"{"messages": [1]}"#.to_owned(),
            r#"{"messages": [}"#.to_owned(),
            "[1]".to_owned(),
            "".to_owned(),
            format!(r#"{{"messages": [{TURN}], "chat_template": "x"}}"#),
            format!(r#"{{"messages": [{TURN}], "kv_transfer_params": {{"prompt_token_ids": [1, 2]}}}}"#),
        ] {
            for _ in 0..2 {
                let ask = parse_seen(Endpoint::ChatCompletions, body.as_bytes(), &seen);
                assert_eq!(ask, parse(Endpoint::ChatCompletions, body.as_bytes()), "{body}");
            }
        }
        let ask = parse_seen(Endpoint::Completions, br#"{"prompt": "x"}"#, &seen).expect("a body");
        assert!(matches!(ask.prompt, PromptInput::Text { .. }));
    }
}
