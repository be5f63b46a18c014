//! What vLLM finds out about a chat template before it serves Anthropic's Messages with it.

use super::{Sources, environment};
use crate::request::conversation::{Conversation, Message};
use minijinja::context;
use serde_json::Map;
use std::sync::Arc;

/// What a template makes of what only Anthropic's API can say.
#[derive(Clone, Copy, Debug)]
pub(super) struct Anthropic {
    /// The template refuses a system message that is not the first one.
    pub(super) wants_system_first: bool,
    /// The `reasoning_effort` that stands for `thinking: disabled`.
    pub(super) disabled_effort: &'static str,
}

impl Default for Anthropic {
    fn default() -> Self {
        Self { wants_system_first: true, disabled_effort: NONE }
    }
}

const NONE: &str = "none";

/// Whether one of the templates fails where a system message follows another message
/// (`_detect_merge_inline_system`). vLLM tries this in plain Jinja: a template that needs more fails as well.
pub(super) fn wants_system_first(sources: &Sources) -> bool {
    let message = |role: &str| context! { role => role, content => "t" };
    let messages = ["system", "user", "system", "user"].map(message);
    let renders = |source: &String| {
        environment::bare_environment()
            .and_then(|environment| {
                let messages = &messages;
                let context = context! { messages, add_generation_prompt => false };
                environment.render_str(source, context)
            })
            .is_ok()
    };
    let mut given = [&sources.default, &sources.tool_use].into_iter().flatten().peekable();
    given.peek().is_none() || !given.all(renders)
}

/// `none`, unless the template refuses it or makes the same of it as of any effort; then `low`
/// (`_probe_disabled_thinking_effort`).
pub(super) fn disabled_effort(render: impl Fn(&Conversation) -> Option<String>) -> &'static str {
    let rendered = |effort: &str| render(&greeting(effort));
    let Some(none) = rendered(NONE) else { return "low" };
    let same = |effort: &str| rendered(effort).as_ref() == Some(&none);
    if ["low", "medium", "high", "xhigh", "max"].into_iter().any(same) { "low" } else { NONE }
}

fn greeting(effort: &str) -> Conversation {
    Conversation {
        template: None,
        messages: vec![Arc::new(Message::of_text("user", "Hi"))],
        tools: None,
        tools_not_to_be_used: false,
        calls_are_to_be_found: false,
        template_arguments: Map::new(),
        documents: None,
        reasoning_effort: Some(effort.to_owned()),
        add_generation_prompt: true,
        continue_final_message: false,
        add_special_tokens: false,
        system_may_be_first: false,
        cut: None,
        thinking_disabled: false,
    }
}
