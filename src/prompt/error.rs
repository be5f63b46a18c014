//! What can go wrong between a model's files and a prompt's tokens.

use std::path::PathBuf;

/// Why a model directory cannot be used. The text names the file and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file is missing or cannot be read.
    #[error("cannot read {}: {source}; copy the model's tokenizer files there", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is not the JSON that it should be.
    #[error("{} is not valid: {detail}; copy it again from the model's repository", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        detail: String,
    },
    /// The tokenizer's type is not one that is known.
    #[error("cannot load the tokenizer {}: {detail}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// The tokenizer library's reason.
        detail: String,
    },
    /// The chat template cannot be compiled.
    #[error("cannot compile the chat template of {}: {detail}", path.display())]
    Template {
        /// The file that it stands in.
        path: PathBuf,
        /// The line and the reason.
        detail: String,
    },
}

/// Why a prompt has no tokens that are certainly the engine's. No variant holds text of the prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PromptError {
    /// The model has no chat template.
    #[error("the model has no chat template")]
    NoTemplate,
    /// The client brings its own chat template, which the engines were not told to trust, or which may be a name.
    #[error("the request has a chat template of its own")]
    RequestTemplate,
    /// The engine makes this model's prompts without the template, in a way that is not known here.
    #[error("the engine renders this model by code of its own")]
    NativeRenderer,
    /// The template refused the conversation (`raise_exception`), as it does in the engine.
    #[error("the chat template refuses the conversation")]
    TemplateRefused,
    /// The template could not be run to its end.
    #[error("the chat template failed in line {line}: {kind}")]
    TemplateFailed {
        /// minijinja's kind of error.
        kind: minijinja::ErrorKind,
        /// The line of the template; 0 if unknown.
        line: usize,
    },
    /// The template, or a number in the request with it, would print other text here than in Python.
    #[error("the chat template cannot be rendered exactly as in Python")]
    UnlikePython,
    /// The prompt has the date in it, and the engine may see the next one already.
    #[error("the date in the prompt is about to change")]
    DateChanges,
    /// The template used up its budget of work or of output.
    #[error("the chat template did too much work")]
    TooLarge,
    /// The last message cannot be continued: it has no text, or the template changes it.
    #[error("the final message cannot be continued")]
    NothingToContinue,
    /// Of a prompt whose end is not known, the beginning is not certain either.
    #[error("nothing of the prompt's beginning is certain")]
    NothingKnown,
    /// The prompt is to be cut to the engine's context, whose length nobody told.
    #[error("the prompt is cut to a context of unknown length")]
    UnknownContext,
    /// The prompt and one token of the answer are more than the engine's context.
    #[error("the prompt is longer than the engine's context")]
    BeyondContext,
    /// A token id that neither the tokenizer nor the model has.
    #[error("a token id is beyond the vocabulary")]
    BeyondVocabulary,
    /// There are tools to be called, and the engine was not told how to find calls in the answer.
    #[error("the engine takes no tools")]
    ToolsRefused,
    /// The time was up before anything was tokenized.
    #[error("the time is up")]
    Late,
    /// The text has words that the tokenizer would be at for too long.
    #[error("the text has words that take too long to tokenize")]
    LongWords,
    /// The tokenizer failed.
    #[error("the tokenizer failed")]
    Tokenizer,
    /// The prompt has no tokens at all.
    #[error("the prompt has no tokens")]
    Empty,
}

impl PromptError {
    /// The error's name in metrics.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::NoTemplate => "no_template",
            Self::RequestTemplate => "request_template",
            Self::NativeRenderer => "native_renderer",
            Self::TemplateRefused => "template_refused",
            Self::TemplateFailed { .. } => "template_failed",
            Self::UnlikePython => "unlike_python",
            Self::DateChanges => "date_changes",
            Self::TooLarge => "prompt_too_large",
            Self::NothingToContinue => "nothing_to_continue",
            Self::NothingKnown => "nothing_known",
            Self::UnknownContext => "unknown_context",
            Self::BeyondContext => "beyond_context",
            Self::BeyondVocabulary => "beyond_vocabulary",
            Self::ToolsRefused => "tools_refused",
            Self::Late => "late",
            Self::LongWords => "long_words",
            Self::Tokenizer => "tokenizer_failed",
            Self::Empty => "empty_prompt",
        }
    }
}
