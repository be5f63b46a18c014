//! The fail-open table: every way in which a decision can end, what it does to the request, and its name.
//!
//! Nothing here ever becomes an HTTP error. Where we have no opinion, HAProxy's own `balance` serves the request.

use super::workers::NotDone;
use crate::{prompt::PromptError, request::body::BodyError};

/// What a reason means for the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// A replica was chosen by the prompt's own tokens.
    Scored,
    /// A replica was chosen by load alone, as the prompt's tokens are not known.
    LoadOnly,
    /// HAProxy chooses.
    NoOpinion,
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $outcome:ident;)*) => {
        /// How a decision ended. The name of each is stable: it is a metric label, a log field and `txn.kv.reason`.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Reason {
            $($(#[$doc])* $name,)*
        }

        impl Reason {
            /// All reasons, in the order of their discriminants.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The stable name.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// What it means for the request.
            #[must_use]
            pub const fn outcome(self) -> Outcome {
                match self { $(Self::$name => Outcome::$outcome,)* }
            }
        }
    };
}

reasons! {
    /// The chosen replica holds a part of the prompt.
    Overlap = "overlap", Scored;
    /// No replica of the band holds any of it: chosen by load, session or chance.
    NoOverlap = "no_overlap", Scored;

    /// No events confirm that the chosen replica holds any of it, but a part of it was sent there before, and the events of
    /// that replica do not tell all.
    History = "history", Scored;

    /// Only the beginning of the prompt is known, and the chosen replica holds a part of it. So it is where the body did
    /// not fit HAProxy's buffer, from the first image on, and where time was too short for more.
    BeginningOverlap = "beginning_overlap", Scored;
    /// The same, and no replica of the band holds any of it.
    BeginningNoOverlap = "beginning_no_overlap", Scored;
    /// The same as `History`, of the beginning.
    BeginningHistory = "beginning_history", Scored;

    /// The body did not fit HAProxy's buffer, and nothing of the prompt is certain.
    BodyCut = "body_cut", LoadOnly;
    /// The body is compressed.
    BodyCompressed = "body_compressed", LoadOnly;
    /// The body is not what the endpoint takes; the engine will say so.
    BodyMalformed = "body_malformed", LoadOnly;
    /// The body asks for something whose prompt is not built here.
    BodyUnsupported = "body_unsupported", LoadOnly;
    /// The engine will refuse the request.
    Refused = "refused", LoadOnly;
    /// No replica lists the model that the request names, so the engine will not know it.
    UnknownModel = "unknown_model", LoadOnly;
    /// There is no prompt, or an empty one.
    EmptyPrompt = "empty_prompt", LoadOnly;
    /// Images, audio or the like: their tokens are made by the engine.
    Media = "media", LoadOnly;
    /// The client brings its own chat template, and the engines are not known to trust it.
    RequestTemplate = "request_template", LoadOnly;
    /// The path is one for which engines keep no cache of prompts, such as `/v1/embeddings`.
    NoPromptCache = "no_prompt_cache", LoadOnly;
    /// The path is none whose prompt we know how to read.
    UnknownEndpoint = "unknown_endpoint", LoadOnly;
    /// The model has no chat template.
    NoTemplate = "no_template", LoadOnly;
    /// vLLM makes this model's prompts by code of its own, which is not done here (Mistral, DeepSeek 3.2, …).
    NativeRenderer = "native_renderer", LoadOnly;
    /// The chat template refused the conversation, as it will in the engine.
    TemplateRefused = "template_refused", LoadOnly;
    /// The chat template broke or did too much work.
    TemplateFailed = "template_failed", LoadOnly;
    /// The replicas render by a revision that the configuration does not name.
    UnknownRevision = "unknown_revision", LoadOnly;
    /// The tokenizer failed, or would be at it for too long.
    TokenizerFailed = "tokenizer_failed", LoadOnly;
    /// Too many prompts wait for a thread.
    Busy = "busy", LoadOnly;

    /// The message is not what our snippet sends.
    MessageMalformed = "message_malformed", NoOpinion;
    /// No pool of that name is configured.
    UnknownPool = "unknown_pool", NoOpinion;
    /// The pool is switched off.
    Off = "off", NoOpinion;
    /// Not a POST: nothing is generated.
    NotPost = "not_post", NoOpinion;
    /// The pool has no replica that may be named.
    NoReplica = "no_replica", NoOpinion;
    /// The deadline passed first.
    Deadline = "deadline", NoOpinion;
    /// A fault of ours.
    Internal = "internal", NoOpinion;
}

impl Reason {
    /// The place in a table by reason.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl From<BodyError> for Reason {
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::Malformed | BodyError::NotAnObject | BodyError::Field(_) | BodyError::Number => {
                Self::BodyMalformed
            }
            BodyError::Cut => Self::BodyCut,
            BodyError::EmptyPrompt => Self::EmptyPrompt,
            BodyError::Media => Self::Media,
            BodyError::RequestTemplate => Self::RequestTemplate,
            BodyError::Unsupported(_) => Self::BodyUnsupported,
            BodyError::Refused(_) => Self::Refused,
        }
    }
}

impl From<PromptError> for Reason {
    fn from(error: PromptError) -> Self {
        match error {
            PromptError::NoTemplate => Self::NoTemplate,
            PromptError::RequestTemplate => Self::RequestTemplate,
            PromptError::NativeRenderer => Self::NativeRenderer,
            PromptError::TemplateRefused | PromptError::NothingToContinue => Self::TemplateRefused,
            PromptError::TemplateFailed { .. }
            | PromptError::UnlikePython
            | PromptError::DateChanges
            | PromptError::TooLarge => Self::TemplateFailed,
            PromptError::NothingKnown => Self::BodyCut,
            PromptError::UnknownContext => Self::BodyUnsupported,
            PromptError::BeyondContext | PromptError::BeyondVocabulary | PromptError::ToolsRefused => {
                Self::Refused
            }
            PromptError::Late => Self::Deadline,
            PromptError::LongWords | PromptError::Tokenizer => Self::TokenizerFailed,
            PromptError::Empty => Self::EmptyPrompt,
        }
    }
}

impl From<NotDone> for Reason {
    fn from(why: NotDone) -> Self {
        match why {
            NotDone::Full => Self::Busy,
            NotDone::Late => Self::Deadline,
            NotDone::Panicked => Self::Internal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_reason_has_its_own_place_and_name() {
        let names: HashSet<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        assert_eq!(names.len(), Reason::ALL.len());
        for (at, reason) in Reason::ALL.iter().enumerate() {
            assert_eq!(reason.index(), at);
        }
    }
}
