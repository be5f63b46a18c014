//! What stays the same of a conversation from its first turn to its last: stands for the session where a client names
//! none.

use super::{
    body::PromptInput,
    conversation::{Conversation, Part},
    harmony::{Harmony, Message},
};
use xxhash_rust::xxh3::Xxh3Default;

/// What counts of each text, bytes: users tell their conversations apart in less, and a long system prompt costs no more.
const TEXT_BYTES: usize = 1024;

/// The same of a prompt of token ids, in tokens.
const TOKENS: usize = 256;

/// Messages before the user's first one: a system prompt, and few others.
const MESSAGES: usize = 8;

impl PromptInput {
    /// A hash of what the conversation begins with: the messages up to the user's first one, of each text its first KiB. Of
    /// a prompt that is no conversation, its first KiB or 256 tokens.
    #[must_use]
    pub fn head(&self) -> u64 {
        let mut hash = Xxh3Default::new();
        self.add_head(&mut hash);
        hash.digest()
    }

    fn add_head(&self, hash: &mut Xxh3Default) {
        match self {
            Self::Chat(conversation) => chat(conversation, hash),
            Self::Harmony(conversation) => harmony(conversation, hash),
            Self::Text { text, .. } => add(text, hash),
            Self::Tokens(tokens) => {
                tokens.iter().take(TOKENS).for_each(|token| hash.update(&token.0.to_le_bytes()));
            }
            Self::Several(prompts) => prompts.first().into_iter().for_each(|first| first.add_head(hash)),
        }
    }
}

fn add(text: &str, hash: &mut Xxh3Default) {
    let bytes = text.as_bytes();
    let head = bytes.get(..TEXT_BYTES).unwrap_or(bytes);
    hash.update(head);
    // So that texts do not run into each other.
    hash.update(&head.len().to_le_bytes());
}

fn chat(conversation: &Conversation, hash: &mut Xxh3Default) {
    for message in conversation.messages.iter().take(MESSAGES) {
        add(&message.role, hash);
        for part in &message.content {
            match part {
                Part::Text { text, .. } => add(text, hash),
                Part::ToolReference(name) => add(name, hash),
            }
        }
        if message.role == "user" {
            break;
        }
    }
}

fn harmony(conversation: &Harmony, hash: &mut Xxh3Default) {
    conversation.instructions.iter().for_each(|text| add(text, hash));
    for message in conversation.messages.iter().take(MESSAGES) {
        match message {
            Message::User(texts) => {
                texts.iter().for_each(|text| add(text, hash));
                break;
            }
            Message::Developer(text) => add(text, hash),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::request::{Endpoint, body, harmony};
    use serde_json::{Value, json};

    fn head(endpoint: Endpoint, body: &Value) -> u64 {
        body::parse(endpoint, body.to_string().as_bytes()).expect("a body").prompt.head()
    }

    fn say(role: &str, content: &str) -> Value {
        json!({ "role": role, "content": content })
    }

    #[test]
    fn the_turns_of_a_conversation_have_one_head_and_other_conversations_another() {
        let system = "You answer briefly. ".repeat(300);
        let (system, first) = (say("system", &system), say("user", "Hello"));
        let rest = [say("assistant", "Hi."), say("user", "And then?")];
        let turns = [vec![&system, &first], vec![&system, &first, &rest[0], &rest[1]]];
        let [one, two] = turns.map(|messages| json!({ "messages": messages }));
        let other = json!({ "messages": [&system, say("user", "Good morning")] });
        let chat = |body| head(Endpoint::ChatCompletions, body);
        assert_eq!(chat(&one), chat(&two));
        assert_ne!(chat(&one), chat(&other));
        let harmony = |body: &Value| {
            let text = body.to_string();
            harmony::parse(Endpoint::ChatCompletions, text.as_bytes()).expect("a body").prompt.head()
        };
        assert_eq!(harmony(&one), harmony(&two));
        assert_ne!(harmony(&one), harmony(&other));
    }

    #[test]
    fn a_text_goes_by_its_first_kibibyte_and_ids_by_the_first_256() {
        let text = |text: String| head(Endpoint::Completions, &json!({ "prompt": text }));
        assert_eq!(text("a".repeat(2_000)), text("a".repeat(3_000)));
        assert_ne!(text("a".repeat(10)), text("a".repeat(11)));
        let ids =
            |count: u32| head(Endpoint::Completions, &json!({ "prompt": (1..count).collect::<Vec<_>>() }));
        assert_eq!(ids(300), ids(400));
        assert_ne!(ids(20), ids(30));
    }
}
