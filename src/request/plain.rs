//! A message that is nothing but what a user or the assistant says, read without making a value of each of its fields.
//!
//! Most are: what is new in a conversation's next turn is an answer and what the user says to it.

use super::body::BodyError;
use super::conversation::Message;
use super::scan;
use super::text::text;

/// The message that is written so; `None` if it is another one, or none. It is the same in all APIs that have it.
pub(super) fn message(json: &[u8]) -> Option<Message> {
    let (mut role, mut content) = (None, None);
    let fields = scan::fields(json, |name, scan| {
        let field = match name {
            br#""role""# => &mut role,
            br#""content""# => &mut content,
            _ => return Err(BodyError::Field("messages")),
        };
        // Of a repeated field the last one counts, but all of them must be JSON.
        field.replace(scan.value()?).map_or(Ok(()), |_| Err(BodyError::Field("messages")))
    });
    fields.ok()?;
    let role @ (br#""user""# | br#""assistant""#) = role? else { return None };
    let content = content.filter(|content| content.starts_with(b"\""))?;
    Some(Message::of_text(&text(role).ok()?, &text(content).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_with_more_than_a_text_is_not_read_here() {
        let said = Some(Message::of_text("user", "a\n"));
        assert_eq!(message(br#"{"role": "user", "content": "a\n"}"#), said);
        assert_eq!(message(br#" { "content" :"a\n", "role":"user" } "#), said);
        for other in [
            r#"{"role": "system", "content": "a"}"#,
            r#"{"role": "developer", "content": "a"}"#,
            r#"{"role": "user", "content": "a", "name": "b"}"#,
            r#"{"role": "user", "content": "a", "content": "b"}"#,
            r#"{"role": "user", "content": ["a"]}"#,
            r#"{"role": "user", "content": null}"#,
            r#"{"role": "user", "content": "\ud800"}"#,
            r#"{"role": "user", "content": "a"},"#,
            r#"{"role": "user"}"#,
            r#"{"role": "user", "cont\u0065nt" : "a"}"#,
            r#"{"content": "a"}"#,
            "7",
        ] {
            assert_eq!(message(other.as_bytes()), None, "{other}");
        }
    }
}
