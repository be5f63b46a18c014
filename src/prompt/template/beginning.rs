//! The text of a conversation whose end is not known.
//!
//! A template is a program: what it writes for the first messages may depend on later ones (some drop what an assistant
//! thought before the user's last message). So the conversation is rendered with several ends, and only what all of
//! these texts start with counts.

use super::{Rendered, Templates};
use crate::{
    prompt::{error::PromptError, tokenizer::TimeIsUp},
    request::conversation::{Conversation, Cut, Message, Part},
};
use std::sync::Arc;

/// What may be added to a text that was cut, who may speak next, and whether the answer is opened then. Each text begins
/// otherwise than the others.
const ENDS: [(&str, &[&str], bool); 3] =
    [("Q", &[], false), ("R.\n</think>\n\nS", &["user"], true), ("\u{e000}", &["assistant", "user"], true)];

impl Templates {
    /// The text with which the prompt certainly starts.
    pub(in crate::prompt) fn render_beginning(
        &self,
        conversation: &Conversation,
        cut: Cut,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<String, PromptError> {
        let mut known: Option<String> = None;
        let mut rendered = 0;
        let mut failed = PromptError::NothingKnown;
        for (end, next, add_generation_prompt) in ENDS {
            let mut continued = Conversation {
                add_generation_prompt,
                continue_final_message: false,
                cut: None,
                ..conversation.clone()
            };
            if cut == Cut::InText {
                let last = continued.messages.last_mut().map(Arc::make_mut);
                let part = last.and_then(|message| message.content.last_mut());
                let Some(Part::Text { text, .. }) = part else { return Err(PromptError::NothingKnown) };
                *text = format!("{text}{end}").into();
            }
            continued.messages.extend(next.iter().map(|role| Arc::new(Message::of_text(role, end))));
            match self.render_until(&continued, time_is_up).map(Rendered::into_text) {
                Ok(text) => {
                    rendered += 1;
                    match &mut known {
                        None => known = Some(text),
                        Some(known) => known.truncate(common(known, &text)),
                    }
                }
                Err(PromptError::Late) => return Err(PromptError::Late),
                // A template that wants turns to alternate refuses some of these.
                Err(error) => failed = error,
            }
        }
        known.filter(|_| rendered > 1).ok_or(failed)
    }
}

/// How many bytes two texts have in common at their start, in whole characters.
fn common(a: &str, b: &str) -> usize {
    let equal = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    (0..=equal).rev().find(|at| a.is_char_boundary(*at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{conversation, templates};
    use super::*;

    fn known(source: &str, body: &str, cut: Cut) -> Result<String, PromptError> {
        templates(source).render_beginning(&conversation(body), cut, &|| false)
    }

    const TURNS: &str =
        r#"{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "ab"}]}"#;

    #[test]
    fn the_text_ends_where_the_next_message_or_more_of_this_one_may_follow() {
        let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}";
        assert_eq!(known(source, TURNS, Cut::AfterMessage).as_deref(), Ok("<user>u</><assistant>ab</>"));
        assert_eq!(known(source, TURNS, Cut::InText).as_deref(), Ok("<user>u</><assistant>ab"));
    }

    #[test]
    fn what_a_later_message_would_change_is_not_known() {
        let source = "{% for m in messages %}<{{ m.role }}>{% if loop.last %}last {% endif %}{{ m.content }}</>{% endfor %}";
        assert_eq!(known(source, TURNS, Cut::AfterMessage).as_deref(), Ok("<user>u</><assistant>"));
        let counts = "{{ messages | length }}: {{ messages[0].content }}";
        assert_eq!(known(counts, TURNS, Cut::AfterMessage).as_deref(), Ok(""));
        let opens = "{{ messages[0].content }} {{ add_generation_prompt }}";
        assert_eq!(known(opens, TURNS, Cut::AfterMessage).as_deref(), Ok("u "));
    }

    #[test]
    fn a_template_that_refuses_all_ends_says_so() {
        let source = "{{ raise_exception('no') }}";
        assert_eq!(known(source, TURNS, Cut::AfterMessage), Err(PromptError::TemplateRefused));
    }
}
