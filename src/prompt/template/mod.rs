//! Chat templates: a conversation → the text that the engine tokenizes.
//!
//! Templates are Jinja programs written for Python; this is the environment of Hugging Face `transformers` 5.19, which
//! vLLM 0.32 runs them in.

mod anthropic;
mod beginning;
mod concat;
pub(in crate::prompt) mod date;
mod environment;
mod known;
mod limits;
mod python;
mod rendered;
mod requested;
mod shape;
mod strings;
mod sums;
pub(in crate::prompt) mod values;
mod variables;
mod walk;

pub(super) use known::Text as KnownText;
pub(super) use rendered::Rendered;
pub use shape::ContentFormat;

use super::error::PromptError;
use super::messages::{self, Content};
use super::options::ModelOptions;
use super::tokenizer::TimeIsUp;
use crate::recent::CacheStats;
use crate::request::conversation::Conversation;
use anthropic::Anthropic;
use environment::RaisedByTemplate;
use known::{Known, Sites};
use limits::{Added, Limits};
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};
use rendered::Bounded;
use requested::Requested;
use std::error::Error as _;
use std::sync::Arc;
use variables::Variables;

/// The source of a model's chat templates.
#[derive(Clone, Debug, Default)]
pub(super) struct Sources {
    /// The template for conversations without tools, or for all.
    pub(super) default: Option<String>,
    /// The template for conversations with tools, if the model has one of its own.
    pub(super) tool_use: Option<String>,
    /// `bos_token` and the like.
    pub(super) special_tokens: Vec<(String, String)>,
}

/// The compiled chat templates of a model.
#[derive(Debug)]
pub(super) struct Templates {
    environment: Environment<'static>,
    default: Option<Properties>,
    tool_use: Option<Properties>,
    special_tokens: variables::Shared,
    options: ModelOptions,
    anthropic: Anthropic,
    depend_on_time: bool,
    requested: Requested,
    known: Arc<Known>,
}

/// What is known about one template without running it.
#[derive(Debug)]
struct Properties {
    name: &'static str,
    content_format: ContentFormat,
    knows_developers: bool,
    names_content: bool,
    limits: Limits,
}

impl Templates {
    /// Compiles templates, which keep at most `known_bytes` of what they wrote for messages.
    pub(super) fn compile(
        sources: Sources,
        options: ModelOptions,
        known_bytes: usize,
    ) -> Result<Self, Error> {
        let mut templates = Self::compile_alone(sources, options, known_bytes)?;
        templates.anthropic.disabled_effort = anthropic::disabled_effort(|conversation| {
            templates.render(conversation).ok().map(Rendered::into_text)
        });
        Ok(templates)
    }

    /// The same, without trying what the templates make of Anthropic's Messages.
    fn compile_alone(sources: Sources, options: ModelOptions, known_bytes: usize) -> Result<Self, Error> {
        let mut environment = environment::environment(options.clock, options.utc_offset_seconds)?;
        let wants_system_first = anthropic::wants_system_first(&sources);
        let mut sites = Sites::default();
        let mut add = |name: &'static str, source: Option<String>| -> Result<Option<Properties>, Error> {
            let Some(source) = source else { return Ok(None) };
            let source = as_in_python(without_generation_tags(&source), name)?;
            let parsed = minijinja::machinery::parse(&source, name, environment::syntax()?)?;
            let properties = Properties {
                name,
                content_format: shape::content_format(&parsed),
                knows_developers: source.contains("'developer'") || source.contains("\"developer\""),
                names_content: source.contains("content"),
                limits: limits::of(&parsed),
            };
            let apart = sums::taken_apart(&source, &parsed).unwrap_or(source);
            let changed = match known_bytes {
                0 => None,
                _ => {
                    let parsed = minijinja::machinery::parse(&apart, name, environment::syntax()?)?;
                    sites.prepare(&apart, &parsed, properties.limits.added_to_safe_text != Added::Nothing)
                }
            };
            environment.add_template_owned(name, changed.unwrap_or(apart))?;
            Ok(Some(properties))
        };
        let depend_on_time = [&sources.default, &sources.tool_use]
            .into_iter()
            .flatten()
            .any(|source| source.contains(environment::STRFTIME_NOW));
        let default = add("default", sources.default)?;
        let tool_use = add("tool_use", sources.tool_use)?;
        let known = Known::new(sites, known_bytes);
        known.add_to(&mut environment);
        let special_tokens = sources.special_tokens.into_iter().map(|(name, token)| (name, token.into()));
        let anthropic = Anthropic { wants_system_first, ..Anthropic::default() };
        Ok(Self {
            environment,
            default,
            tool_use,
            special_tokens: special_tokens.collect(),
            options,
            anthropic,
            depend_on_time,
            requested: Requested::default(),
            known,
        })
    }

    /// What is kept of the texts of messages.
    pub(super) fn known_stats(&self) -> CacheStats {
        self.known.stats()
    }

    pub(super) fn options(&self) -> &ModelOptions {
        &self.options
    }

    /// Whether the same conversation has another text at another time.
    pub(super) fn depend_on_time(&self) -> bool {
        self.depend_on_time
    }

    /// The form in which the model's template expects content; `None` without a template.
    pub(super) fn content_format(&self) -> Option<ContentFormat> {
        self.default.as_ref().map(|template| self.options.content_format.unwrap_or(template.content_format))
    }

    pub(super) fn render(&self, conversation: &Conversation) -> Result<Rendered, PromptError> {
        self.render_until(conversation, &|| false)
    }

    /// The text of a conversation. A template that is still at it when `time_is_up` is stopped where it writes; where it does
    /// not, its fuel ends it.
    pub(super) fn render_until(
        &self,
        conversation: &Conversation,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<Rendered, PromptError> {
        match &conversation.template {
            None => self.render_own(conversation, time_is_up),
            Some(source) => self.requested(source)?.render_own(conversation, time_is_up),
        }
    }

    fn render_own(
        &self,
        conversation: &Conversation,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<Rendered, PromptError> {
        let tools = self.tools(conversation)?;
        let template = self.tool_use.as_ref().filter(|_| tools.is_some()).or(self.default.as_ref());
        let template = template.ok_or(PromptError::NoTemplate)?;

        let format = self.options.content_format.unwrap_or(template.content_format);
        let mut prepared = messages::prepare(
            &conversation.messages,
            format,
            template.knows_developers,
            conversation.system_may_be_first && self.anthropic.wants_system_first,
            self.options.compat,
        );
        let continued = match prepared.last_mut() {
            Some(last) if conversation.continue_final_message => {
                Some(mark_to_continue(last.content_mut(), template)?)
            }
            _ => None,
        };
        let messages = Value::from_object(messages::List::new(prepared));
        let context = self.context(conversation, messages, tools);

        let mut output = Bounded::new(self.options.max_rendered_bytes, time_is_up);
        let marked_safe = self
            .environment
            .get_template(template.name)
            .and_then(|compiled| compiled.render_captured_to(context, &mut output))
            .map(|captured| environment::marked_safe(captured.state()))
            .map_err(|error| failure(&error))?;
        if marked_safe && self.escapes(template.limits.added_to_safe_text, conversation) {
            return Err(PromptError::UnlikePython);
        }
        let mut rendered = output.finish();
        if template.limits.concatenates && self.values(conversation).any(limits::written_unlike_python) {
            let text = rendered.into_text();
            if limits::printed_unlike_python(self.values(conversation), &text) {
                return Err(PromptError::UnlikePython);
            }
            rendered = text.into();
        }
        match continued {
            Some(message) => cut_at_mark(rendered.into_text(), &message).map(Rendered::from),
            None => Ok(rendered),
        }
    }

    /// Whether Python escapes something of what is `added` to a text that is marked as safe.
    fn escapes(&self, added: Added, conversation: &Conversation) -> bool {
        match added {
            Added::Nothing => false,
            Added::Names => {
                let names = conversation.messages.iter().filter_map(|message| message.name.clone());
                let arguments =
                    [&self.options.template_arguments, &conversation.template_arguments].into_iter();
                self.values(conversation).any(|value| limits::has_name_with_html(value, false))
                    || names.map(serde_json::Value::from).any(|name| limits::has_name_with_html(&name, true))
                    || arguments
                        .flat_map(|all| all.values())
                        .any(|value| limits::has_name_with_html(value, true))
            }
            Added::Anything => true,
        }
    }

    /// All values that the template may print beside texts.
    fn values<'c>(&'c self, conversation: &'c Conversation) -> impl Iterator<Item = &'c serde_json::Value> {
        let calls = conversation.messages.iter().flat_map(|message| message.tool_calls.iter().flatten());
        let developer_tools = conversation.messages.iter().filter_map(|message| message.tools.as_ref());
        let arguments =
            self.options.template_arguments.values().chain(conversation.template_arguments.values());
        let tools = conversation.tools.iter().flat_map(|tools| tools.list());
        calls.chain(developer_tools).chain(arguments).chain(tools).chain(&conversation.documents)
    }

    /// The tools to render. Those among the client's template arguments win over the request's own.
    fn tools(&self, conversation: &Conversation) -> Result<Option<Value>, PromptError> {
        let named = conversation.template_arguments.get("tools").filter(|value| is_given(value));
        let own = conversation
            .tools
            .as_ref()
            .filter(|_| !(self.options.exclude_unused_tools && conversation.tools_not_to_be_used));
        match (named, own) {
            (Some(serde_json::Value::Array(tools)), _) if tools.iter().all(serde_json::Value::is_object) => {
                Ok(Some(tools.iter().map(values::from_json).collect()))
            }
            (Some(_), _) => Err(PromptError::TemplateRefused),
            (None, Some(tools)) => {
                Ok(Some(tools.templated(|tools| tools.iter().map(values::of_tool).collect())))
            }
            (None, None) => {
                let default = self.options.template_arguments.get("tools").filter(|tools| !tools.is_null());
                Ok(default.map(values::from_json))
            }
        }
    }

    /// The variables of the template.
    fn context(&self, conversation: &Conversation, messages: Value, tools: Option<Value>) -> Value {
        let mut variables = Variables::new(&self.special_tokens);
        variables.set("documents", Value::from(()));
        let defaults = self.options.template_arguments.iter();
        let named = conversation.template_arguments.iter().filter(|(_, value)| is_given(value));
        for (name, value) in defaults.chain(named) {
            variables.set(name.clone(), values::from_json(value));
        }
        if let Some(documents) = &conversation.documents {
            variables.set("documents", values::from_json(documents));
        }
        let disabled = conversation.thinking_disabled.then_some(self.anthropic.disabled_effort);
        if let Some(effort) = disabled.or(conversation.reasoning_effort.as_deref()) {
            if !conversation.template_arguments.contains_key("enable_thinking") {
                variables.set("enable_thinking", Value::from(effort != "none"));
            }
            variables.set("reasoning_effort", Value::from(effort));
        }
        variables.set("add_generation_prompt", Value::from(conversation.add_generation_prompt));
        variables.set("tools", tools.unwrap_or_else(|| Value::from(())));
        variables.set("messages", messages);
        variables.into_value()
    }
}

/// The template with what Python does otherwise than minijinja written out, as far as it can be.
fn as_in_python(mut source: String, name: &'static str) -> Result<String, Error> {
    source = concat::with_texts_of_python(&source).unwrap_or(source);
    let parsed = minijinja::machinery::parse(&source, name, environment::syntax()?)?;
    let escaped = sums::escaped(&source, &parsed);
    Ok(escaped.unwrap_or(source))
}

/// vLLM takes a template argument of `null` or `"auto"` as not given.
fn is_given(value: &serde_json::Value) -> bool {
    !value.is_null() && value != "auto"
}

/// What `transformers` appends to a message that is to be continued, to find it again in the rendered text.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Marks the end of the message that is to be continued, and returns its text.
fn mark_to_continue(content: &mut Content, template: &Properties) -> Result<String, PromptError> {
    if !template.names_content {
        return Err(PromptError::NothingToContinue);
    }
    match content {
        Content::Text(text) => {
            let message = text.to_string();
            *text = format!("{message}{CONTINUE_TAG}").into();
            Ok(message)
        }
        Content::Parts(parts) => {
            let last = parts.iter_mut().rev().find_map(|part| part.get_mut("text"));
            let text = last.ok_or(PromptError::NothingToContinue)?;
            let message = text.as_str().unwrap_or_default().to_owned();
            *text = format!("{message}{CONTINUE_TAG}").into();
            Ok(message)
        }
    }
}

/// Cuts the rendered text where the message ends that is to be continued.
fn cut_at_mark(mut text: String, message: &str) -> Result<String, PromptError> {
    let at = text.rfind(CONTINUE_TAG.trim_end()).ok_or(PromptError::NothingToContinue)?;
    if !text.contains(strings::trim(message, None, true, true)) {
        return Err(PromptError::NothingToContinue);
    }
    let kept_blanks = text[at..].starts_with(CONTINUE_TAG);
    text.truncate(at);
    if !kept_blanks {
        text.truncate(strings::trim(&text, None, false, true).len());
    }
    Ok(text)
}

/// `{% generation %}` marks what the assistant wrote, for training. To the text it is just a scope.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (inside, after) = (&tag[2..end], &tag[end + 2..]);
        let word = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        match word {
            "generation" => out.push_str(&tag[..end + 2].replace("generation", "with")),
            "endgeneration" => out.push_str(&tag[..end + 2].replace("endgeneration", "endwith")),
            _ => out.push_str(&tag[..end + 2]),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Keeps of a template's error what cannot hold a piece of the prompt.
fn failure(error: &Error) -> PromptError {
    let mut kind = error.kind();
    let mut source = error.source();
    while let Some(inner) = source {
        if inner.is::<RaisedByTemplate>() {
            return PromptError::TemplateRefused;
        }
        if rendered::was_late(inner) {
            return PromptError::Late;
        }
        if inner.is::<date::AboutToChange>() {
            return PromptError::DateChanges;
        }
        if let Some(inner) = inner.downcast_ref::<Error>() {
            kind = inner.kind();
        }
        source = inner.source();
    }
    match kind {
        ErrorKind::OutOfFuel | ErrorKind::WriteFailure => PromptError::TooLarge,
        kind => PromptError::TemplateFailed { kind, line: error.line().unwrap_or_default() },
    }
}

#[cfg(test)]
pub(in crate::prompt) mod tests;
