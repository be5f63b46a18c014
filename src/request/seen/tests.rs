use super::*;
use crate::request::body::{Endpoint, PromptInput, parse, parse_seen};
use proptest::prelude::*;

const TURN: &str = r#"{"role": "user", "content": "a\u00e9"}"#;

/// Two that begin alike.
const LONG: &str =
    r#"{"role": "user", "content": "one after the other, and all that came before them: \"{\" \\"}"#;
const LONGER: &str = r#"{"role": "user", "content": "one after the other, and all that came before them: \"{\" \\, and what came then"}"#;

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
    let before = seen.stats().bytes;
    assert_eq!(chat("{]", &seen), Err(BodyError::Malformed));
    assert_eq!(chat("{}", &seen), Err(BodyError::Field("role")));
    assert_eq!(seen.stats().bytes, before);
}

/// Entries of all kinds for each API that has a list of them.
const ENTRIES: [(Endpoint, &str, &[&str]); 3] = [
    (
        Endpoint::ChatCompletions,
        "messages",
        &[
            TURN,
            LONG,
            LONGER,
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
            LONG,
            LONGER,
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
            LONG,
            LONGER,
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

/// What can happen to some bytes of a body.
#[derive(Clone, Copy, Debug)]
enum Change {
    Other(u8),
    Without(usize),
    Twice(usize),
}

fn changes() -> impl Strategy<Value = Vec<(prop::sample::Index, Change)>> {
    let structural = prop::sample::select(b"{}[],:\"\\ \n0-e".to_vec());
    let change = prop_oneof![
        any::<u8>().prop_map(Change::Other),
        structural.prop_map(Change::Other),
        (1..40_usize).prop_map(Change::Without),
        (1..90_usize).prop_map(Change::Twice),
    ];
    prop::collection::vec((any::<prop::sample::Index>(), change), 0..4)
}

fn changed(body: &str, changes: &[(prop::sample::Index, Change)]) -> Vec<u8> {
    let mut bytes = body.as_bytes().to_vec();
    for (at, change) in changes {
        let at = at.index(bytes.len());
        match *change {
            Change::Other(byte) => bytes[at] = byte,
            Change::Without(length) if length < bytes.len() - at => drop(bytes.drain(at..at + length)),
            Change::Without(_) => bytes.truncate(at.max(1)),
            Change::Twice(length) => {
                let again = bytes[at..bytes.len().min(at + length)].to_vec();
                drop(bytes.splice(at..at, again));
            }
        }
    }
    bytes
}

/// A list of entries and other fields, the list where `place` says: first, last, in the middle, alone or twice.
fn body_of(list: &str, entries: &[&str], place: usize) -> String {
    let list = format!(r#""{list}": [{}]"#, entries.join(" ,\n"));
    match place {
        0 => format!(r#"{{"model": "m", {list}, "n": 1}}"#),
        1 => format!(r#"{{{list}, "model": "m", "stream": true}}"#),
        2 => format!(r#" {{ "model" : "m" , {list} }} "#),
        3 => format!("{{{list}}}"),
        _ => format!("{{{list}, {list}}}"),
    }
}

proptest! {
    #[test]
    fn a_body_is_read_the_same_whatever_was_seen_before(
        api in 0..ENTRIES.len(),
        bodies in prop::collection::vec(
            (prop::collection::vec(any::<prop::sample::Index>(), 0..7), 0..5_usize, changes()),
            1..5,
        ),
    ) {
        let (endpoint, list, entries) = ENTRIES[api];
        let seen = SeenMessages::new(1 << 20);
        for (picks, place, changes) in bodies {
            let entries: Vec<&str> = picks.iter().map(|pick| entries[pick.index(entries.len())]).collect();
            let body = body_of(list, &entries, place);
            // As in the next turn, most of it came before.
            for entries in [&entries[..entries.len() / 2], &entries] {
                let earlier = body_of(list, entries, place);
                let ask = parse_seen(endpoint, earlier.as_bytes(), &seen);
                prop_assert_eq!(ask, parse(endpoint, earlier.as_bytes()), "{}", earlier);
            }
            let body = changed(&body, &changes);
            let cold = parse_seen(endpoint, &body, &SeenMessages::new(0));
            let text = String::from_utf8_lossy(&body);
            for _ in 0..2 {
                prop_assert_eq!(&parse_seen(endpoint, &body, &seen), &cold, "{}", text);
            }
            // Of what is no JSON another fault may be found first, and nothing is behind the first message with media.
            let whole = parse(endpoint, &body);
            let is_no_json = matches!(whole, Err(BodyError::Malformed | BodyError::Cut));
            let is_whole = cold.as_ref().is_ok_and(|ask| ask.is_whole);
            prop_assert!(cold == whole || is_no_json && !is_whole, "{}", text);
        }
    }
}

/// Of entries that are known the end is not looked for, and what stands behind them is read all the same.
#[test]
fn what_follows_a_known_entry_is_not_taken_for_it() {
    for after in ["x", "}", "{}", "\"", ":1", " 7", "]", ",", ",]", &format!(" {LONG}"), "\u{a0}"] {
        for known in [TURN, LONG] {
            let seen = SeenMessages::new(1 << 20);
            chat(known, &seen).expect("a message");
            let wrong = format!("{known}{after}");
            assert_eq!(chat(&wrong, &seen), Err(BodyError::Malformed), "{wrong}");
            let hits = seen.stats().hits;
            chat(&format!("{known},{LONGER}"), &seen).expect("messages");
            assert!(seen.stats().hits > hits);
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
        (Endpoint::ChatCompletions, format!("{{\"a\nb\": 7, \"messages\": [{TURN}]}}")),
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
