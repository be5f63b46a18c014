//! A body that was cut off → as much of its prompt as is certain.
//!
//! HAProxy hands over what fits its buffer. A prompt grows at its end, so the beginning is what a cache holds. The JSON
//! is closed where it ends and read as any other; what was open at the cut tells where the prompt's known part ends.

use super::body::{self, Ask, BodyError, Endpoint, PromptInput};
use super::conversation::Cut;
use super::json::Object;
use super::scan::end_of_string;
use serde_json::Value;

/// As deep as the reader of whole bodies goes.
const MOST_LEVELS: usize = 128;

/// Fields that change how a prompt starts, or which cache it belongs to. Only if all of them were seen before the cut,
/// what follows cannot change the known part.
const CHAT_IDENTITY: &[&str] = &[
    "model",
    "cache_salt",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "reasoning_effort",
    "documents",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "kv_transfer_params",
];
const COMPLETIONS_IDENTITY: &[&str] =
    &["model", "cache_salt", "add_special_tokens", "truncate_prompt_tokens"];
const MESSAGES_IDENTITY: &[&str] = &[
    "model",
    "cache_salt",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "system",
    "thinking",
    "output_config",
    "kv_transfer_params",
];
const GENERATE_IDENTITY: &[&str] = &["model", "cache_salt", "features", "content_parts"];
const RESPONSES_IDENTITY: &[&str] = &[
    "model",
    "cache_salt",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "instructions",
    "reasoning",
    "truncation",
    "previous_response_id",
    "prompt",
    "kv_transfer_params",
];

/// Reads the beginning of a body.
///
/// # Errors
/// [`BodyError::Cut`] where nothing of the prompt is certain, else as [`body::parse`].
pub fn parse(endpoint: Endpoint, beginning: &[u8]) -> Result<Ask, BodyError> {
    let Closed { json, place, in_text } = close(beginning).ok_or(BodyError::Malformed)?;
    let Ok(Value::Object(mut fields)) = serde_json::from_slice(&json) else {
        return Err(BodyError::Malformed);
    };
    let (prompt_field, identity) = match endpoint {
        Endpoint::ChatCompletions => ("messages", CHAT_IDENTITY),
        Endpoint::Messages => ("messages", MESSAGES_IDENTITY),
        Endpoint::Completions => ("prompt", COMPLETIONS_IDENTITY),
        Endpoint::Responses => ("input", RESPONSES_IDENTITY),
        Endpoint::Generate => ("token_ids", GENERATE_IDENTITY),
        Endpoint::ChatBatch => return Err(BodyError::Cut),
    };
    if endpoint == Endpoint::Generate && !media_was_seen(&fields, &place) {
        return Err(BodyError::Cut);
    }
    let mut cut = Cut::AfterMessage;
    match place.first() {
        Some(Place::Field(name)) if name == prompt_field => {
            cut = open_prompt(endpoint, &mut fields, prompt_field, &place, in_text)?;
        }
        // The items' own data, which make such bodies long, follow their names and places.
        Some(Place::Field(name)) if endpoint == Endpoint::Generate && name == "features" => {}
        // Of another field nothing is of use but its whole.
        Some(Place::Field(name)) => drop(fields.shift_remove(name)),
        _ => {}
    }
    let identity_was_seen = identity.iter().all(|name| fields.contains_key(*name));
    let mut ask = body::read(endpoint, fields)?;
    match &mut ask.prompt {
        PromptInput::Several(_) => return Err(BodyError::Cut),
        PromptInput::Chat(conversation) => {
            // A conversation that ends before media ends there, wherever the body was cut.
            conversation.cut.get_or_insert(cut);
        }
        PromptInput::Text { .. } | PromptInput::Tokens(_) | PromptInput::Harmony(_) => {}
    }
    ask.identity_is_known &= identity_was_seen;
    ask.takes_tokens = false;
    ask.is_whole = false;
    Ok(ask)
}

/// Whether the media of a prompt of token ids are known, or known not to be there.
fn media_was_seen(fields: &Object, place: &[Place]) -> bool {
    match place {
        [Place::Field(field), inside @ ..] if field == "features" => {
            matches!(inside, [Place::Field(data), ..] if data == "kwargs_data" || data == "mm_metadata")
        }
        _ => fields.contains_key("features"),
    }
}

/// Removes what of the prompt is not usable, and says how it ends then.
fn open_prompt(
    endpoint: Endpoint,
    fields: &mut Object,
    prompt_field: &str,
    place: &[Place],
    in_text: bool,
) -> Result<Cut, BodyError> {
    let field = |place: &Place, name: &str| matches!(place, Place::Field(own) if own == name);
    match (fields.get_mut(prompt_field), place) {
        (Some(Value::String(_)), [_]) => Ok(Cut::InText),
        // Between two messages or token ids, or behind the last one.
        (Some(Value::Array(_)), [_] | [_, Place::Item]) if !in_text => Ok(Cut::AfterMessage),
        (Some(Value::Array(messages)), [_, Place::Item, inside @ ..]) => {
            let message = messages.pop().ok_or(BodyError::Cut)?;
            let is_text = match inside {
                [content] => field(content, "content"),
                // Anthropic's blocks may come to stand in messages of their own.
                [content, Place::Item, text] if endpoint != Endpoint::Messages => {
                    field(content, "content") && field(text, "text") && has_type(&message)
                }
                _ => false,
            };
            if in_text && is_text && message.get("role").is_some() {
                messages.push(message);
                return Ok(Cut::InText);
            }
            let last_role = messages.last().and_then(|message| message.get("role"));
            let may_grow = last_role.is_none_or(|role| role == "assistant");
            if endpoint == Endpoint::Responses && may_grow {
                // The items of one turn are one message, so the last one seen may go on.
                messages.pop();
            }
            Ok(Cut::AfterMessage)
        }
        _ => Err(BodyError::Cut),
    }
}

/// Whether the last part of a message's content said what it is before the cut.
fn has_type(message: &Value) -> bool {
    message["content"].as_array().and_then(|parts| parts.last()).is_some_and(|part| part["type"].is_string())
}

/// JSON made whole.
#[derive(Debug)]
struct Closed {
    json: Vec<u8>,
    /// The way from the outermost object to where the cut was.
    place: Vec<Place>,
    /// The cut was inside of a text.
    in_text: bool,
}

/// A step of the way.
#[derive(PartialEq, Eq, Debug)]
enum Place {
    Field(String),
    Item,
}

/// An object or array that is open.
struct Level {
    closer: u8,
    /// The key that was read last: where its quotes are.
    key: Option<(usize, usize)>,
    /// A value may come next, and not a key.
    wants_value: bool,
}

/// Closes all that is open at the end of `json`. A text stays as far as it goes; a number, a word or a key that is not
/// finished goes. `None` if it is too deep, or no object or array.
///
/// Nothing is validated: whoever reads the result does that.
fn close(json: &[u8]) -> Option<Closed> {
    let mut levels: Vec<Level> = Vec::new();
    let mut whole_until = 0;
    let mut at = 0;
    let mut text_from = None;
    while let Some(&byte) = json.get(at) {
        match byte {
            b'"' => {
                let level = levels.last_mut()?;
                let is_key = level.closer == b'}' && !level.wants_value;
                match end_of_string(json, at + 1) {
                    Some(end) if is_key => {
                        level.key = Some((at, end));
                        at = end;
                    }
                    Some(end) => {
                        whole_until = end;
                        at = end;
                    }
                    None => {
                        text_from = (!is_key).then_some(at);
                        break;
                    }
                }
                continue;
            }
            b'{' | b'[' => {
                if levels.len() == MOST_LEVELS {
                    return None;
                }
                let closer = if byte == b'{' { b'}' } else { b']' };
                levels.push(Level { closer, key: None, wants_value: closer == b']' });
                whole_until = at + 1;
            }
            b'}' | b']' => {
                levels.pop().filter(|level| level.closer == byte)?;
                whole_until = at + 1;
            }
            b':' => levels.last_mut()?.wants_value = true,
            b',' => {
                let level = levels.last_mut()?;
                level.wants_value = level.closer == b']';
                level.key = None;
                whole_until = at;
            }
            _ => {}
        }
        at += 1;
    }
    let mut closed = json.get(..whole_until)?.to_vec();
    if let Some(start) = text_from {
        let text = &json[start..];
        closed.extend_from_slice(&json[whole_until..start]);
        closed.extend_from_slice(&text[..whole_characters(text)]);
        closed.push(b'"');
    }
    closed.extend(levels.iter().rev().map(|level| level.closer));
    let place = levels.iter().filter_map(|level| match level.key {
        _ if level.closer == b']' => Some(Place::Item),
        Some((start, end)) if level.wants_value => {
            serde_json::from_slice(&json[start..end]).ok().map(Place::Field)
        }
        _ => None,
    });
    Some(Closed { json: closed, place: place.collect(), in_text: text_from.is_some() })
}

/// How many bytes of an open string are whole: without half an escape, half a surrogate pair or half a character.
fn whole_characters(text: &[u8]) -> usize {
    let mut end = text.len();
    // A pair of escapes has twelve bytes. Those before the last ones are whole in any case.
    let mut at = 1;
    while at < text.len() {
        if text[at] != b'\\' {
            at += 1;
            continue;
        }
        let length = match text.get(at + 1) {
            None => usize::MAX,
            Some(b'u') => match text.get(at + 2..at + 4) {
                Some([b'd' | b'D', b'8' | b'9' | b'a' | b'b' | b'A' | b'B']) => 12,
                Some(_) => 6,
                None => usize::MAX,
            },
            Some(_) => 2,
        };
        if text.len() - at < length {
            end = at;
            break;
        }
        at += length;
    }
    match std::str::from_utf8(&text[..end]) {
        Ok(_) => end,
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        // Whoever reads it will say so.
        Err(_) => end,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closed(json: &str) -> (String, String, bool) {
        let closed = close(json.as_bytes()).expect("an object");
        let place: Vec<_> = closed
            .place
            .iter()
            .map(|place| match place {
                Place::Field(name) => name.as_str(),
                Place::Item => "*",
            })
            .collect();
        (String::from_utf8(closed.json).expect("UTF-8"), place.join("/"), closed.in_text)
    }

    #[test]
    fn what_is_open_is_closed_and_what_is_half_goes() {
        for (json, whole, place, in_text) in [
            (r#"{"a": "bc"#, r#"{"a": "bc"}"#, "a", true),
            (r#"{"a": [1, 23"#, r#"{"a": [1]}"#, "a/*", false),
            (r#"{"a": [1, 2,"#, r#"{"a": [1, 2]}"#, "a/*", false),
            (r#"{"a": 1, "b"#, r#"{"a": 1}"#, "", false),
            (r#"{"a": 1, "b": "#, r#"{"a": 1}"#, "b", false),
            (r#"{"a": 1, "b": tr"#, r#"{"a": 1}"#, "b", false),
            (r#"{"a": [{"b": "x\"y\\"#, r#"{"a": [{"b": "x\"y\\"}]}"#, "a/*/b", true),
            (r#"{"a": [{"b": "x"}"#, r#"{"a": [{"b": "x"}]}"#, "a/*", false),
            (r#"{"a": {"b": "x"}, "#, r#"{"a": {"b": "x"}}"#, "", false),
        ] {
            assert_eq!(closed(json), (whole.to_owned(), place.to_owned(), in_text), "{json}");
        }
    }

    #[test]
    fn half_a_character_goes_however_it_is_written() {
        for (text, whole) in [
            (r"ab\", "ab"),
            (r"ab\u00", "ab"),
            (r"ab\ud83d", "ab"),
            (r"ab\ud83d\ude", "ab"),
            (r"ab\ud83d\ude00", r"ab\ud83d\ude00"),
            (r"ab\\", r"ab\\"),
            (r"ab\\u00", r"ab\\u00"),
        ] {
            assert_eq!(closed(&format!("[\"{text}")).0, format!("[\"{whole}\"]"), "{text}");
        }
        let euro = "[\"ab€".as_bytes();
        let closed = close(&euro[..euro.len() - 1]).expect("an array");
        assert_eq!(closed.json, b"[\"ab\"]");
    }

    #[test]
    fn no_cut_of_a_body_breaks_the_reader() {
        let body = r#"{"model": "m", "messages": [{"role": "user", "content": "a \u00e9\ud83d\ude00 b"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
            "function": {"name": "f", "arguments": "{\"a\": 1}"}}]}, {"role": "tool", "tool_call_id": "1", "content":
            [{"type": "text", "text": "sunny"}]}], "tools": [{"type": "function", "function": {"name": "f"}}], "n": 1}"#;
        let mut seen = 0;
        for end in 0..body.len() {
            if let Ok(ask) = parse(Endpoint::ChatCompletions, &body.as_bytes()[..end]) {
                assert!(!ask.is_whole);
                seen += 1;
            }
        }
        assert!(seen > body.len() / 2, "{seen}");
    }
}
