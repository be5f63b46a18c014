//! Prompts of gpt-oss, for which vLLM runs no chat template: the format "harmony", as `oss-harmony` 0.0.11 writes it and
//! vLLM 0.32 then changes the headers of tool calls (`render_for_completion`).
//!
//! Each text is tokenized apart from its neighbours, and no text can make a special token.

mod tools;

use super::error::PromptError;
use super::options::ModelOptions;
use super::template::date;
use super::tokenizer::{Piece, Tokenizer};
use crate::request::harmony::{Effort, Harmony, Message};
use crate::units::TokenId;
use std::borrow::Cow;

/// The tokens of the format, by which it is written.
#[derive(Debug)]
pub(super) struct Renderer {
    start: Special,
    message: Special,
    channel: Special,
    end: Special,
    call: Special,
}

type Special = (TokenId, &'static str);

/// A part of a prompt, which may be a text of its own.
#[derive(Debug)]
pub(super) enum Part<'h> {
    Token(Special),
    Text(Cow<'h, str>),
}

impl Part<'_> {
    pub(super) fn as_piece(&self) -> Piece<'_> {
        match self {
            Self::Token((id, _)) => Piece::Token(*id),
            Self::Text(text) => Piece::Text(text),
        }
    }

    pub(super) fn as_str(&self) -> &str {
        match self {
            Self::Token((_, content)) => content,
            Self::Text(text) => text,
        }
    }
}

impl<'h> From<&'h String> for Part<'h> {
    fn from(text: &'h String) -> Self {
        Self::Text(Cow::Borrowed(text))
    }
}

impl From<&'static str> for Part<'_> {
    fn from(text: &'static str) -> Self {
        Self::Text(Cow::Borrowed(text))
    }
}

impl From<String> for Part<'_> {
    fn from(text: String) -> Self {
        Self::Text(Cow::Owned(text))
    }
}

impl Renderer {
    /// `None` if the tokenizer lacks one of the format's tokens.
    pub(super) fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let special = |content: &'static str| Some((tokenizer.added_token(content)?, content));
        Some(Self {
            start: special("<|start|>")?,
            message: special("<|message|>")?,
            channel: special("<|channel|>")?,
            end: special("<|end|>")?,
            call: special("<|call|>")?,
        })
    }

    /// The prompt of a conversation, to be continued by the assistant.
    pub(super) fn parts<'h>(
        &self,
        harmony: &'h Harmony,
        options: &ModelOptions,
    ) -> Result<Vec<Part<'h>>, PromptError> {
        let excluded = harmony.tools_not_to_be_used && options.exclude_unused_tools;
        let tools = if excluded { &[][..] } else { &harmony.tools[..] };
        let mut out = Vec::with_capacity(8 + 6 * harmony.messages.len());
        let date = match &options.start_date {
            Some(date) => date.clone(),
            None => date::of_engine("%Y-%m-%d", (options.clock)(), options.utc_offset_seconds)
                .map_err(|_| PromptError::DateChanges)?,
        };
        self.add(&mut out, "system", [Part::from(system(harmony.effort, &date, !tools.is_empty()))]);
        if !tools.is_empty() || harmony.instructions.as_ref().is_some_and(|text| !text.is_empty()) {
            let sections = harmony.instructions.as_ref().map(|text| format!("# Instructions\n\n{text}"));
            let tools = (!tools.is_empty()).then(|| tools::section(tools));
            let sections: Vec<String> = sections.into_iter().chain(tools).collect();
            self.add(&mut out, "developer", [Part::from(sections.join("\n\n"))]);
        }
        // What was thought before the last answer is dropped.
        let last_final = harmony.messages.iter().rposition(|message| matches!(message, Message::Final(_)));
        for (at, message) in harmony.messages.iter().enumerate() {
            match message {
                Message::Analysis(_) if last_final.is_some_and(|last| at < last) => {}
                message => self.message(&mut out, message),
            }
        }
        out.extend([Part::Token(self.start), "assistant".into()]);
        Ok(out)
    }

    fn message<'h>(&self, out: &mut Vec<Part<'h>>, message: &'h Message) {
        let channel = Part::Token(self.channel);
        match message {
            Message::User(texts) => self.add(out, "user", texts.iter().map(Part::from)),
            Message::Developer(text) => {
                self.add(out, "developer", [Part::from(format!("# Instructions\n\n{text}"))]);
            }
            Message::Final(texts) => {
                out.extend([Part::Token(self.start), "assistant".into(), channel]);
                self.finish(out, "final", texts.iter().map(Part::from));
            }
            Message::Preamble(text) => {
                out.extend([Part::Token(self.start), "assistant".into(), channel]);
                self.finish(out, "commentary", [text.into()]);
            }
            Message::Analysis(text) => {
                out.extend([Part::Token(self.start), "assistant".into(), channel]);
                self.finish(out, "analysis", [text.into()]);
            }
            Message::Call { name, arguments } => {
                out.extend([
                    Part::Token(self.start),
                    format!("assistant to=functions.{name}").into(),
                    channel,
                ]);
                out.extend(["commentary json".into(), Part::Token(self.message), arguments.into()]);
                out.push(Part::Token(self.call));
            }
            Message::Result { name, output } => {
                out.extend([Part::Token(self.start), format!("functions.{name}").into(), channel]);
                out.push("commentary".into());
                self.finish(out, " to=assistant", [output.into()]);
            }
        }
    }

    fn add<'h>(
        &self,
        out: &mut Vec<Part<'h>>,
        role: &'static str,
        texts: impl IntoIterator<Item = Part<'h>>,
    ) {
        out.push(Part::Token(self.start));
        self.finish(out, role, texts);
    }

    fn finish<'h>(
        &self,
        out: &mut Vec<Part<'h>>,
        header: &'static str,
        texts: impl IntoIterator<Item = Part<'h>>,
    ) {
        out.extend([header.into(), Part::Token(self.message)]);
        out.extend(texts);
        out.push(Part::Token(self.end));
    }
}

/// The first message, which the client cannot change but by the effort.
fn system(effort: Effort, date: &str, has_tools: bool) -> String {
    let effort = match effort {
        Effort::Low => "low",
        Effort::Medium => "medium",
        Effort::High => "high",
    };
    let calls =
        if has_tools { "\nCalls to these tools must go to the commentary channel: 'functions'." } else { "" };
    format!(
        "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: {date}\n\n\
         Reasoning: {effort}\n\n# Valid channels: analysis, commentary, final. Channel must be included for every \
         message.{calls}"
    )
}
