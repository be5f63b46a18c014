//! Prompt input → rendered text → token ids, exactly as the engine makes them.
//!
//! One token of difference changes every block hash behind it, and nothing fails: the router only stops finding
//! caches. So whatever is not certain to be as in vLLM 0.32 is an error here.

mod error;
mod files;
mod fingerprint;
mod harmony;
mod ids;
mod legacy;
mod messages;
mod options;
pub mod parity;
mod repeats;
mod template;
mod tokenizer;

pub use error::{ModelError, PromptError};
pub use fingerprint::Fingerprint;
pub use ids::TokenIds;
pub use options::ModelOptions;
pub use repeats::{BodyKey, Prompt, Repeats};
pub use template::ContentFormat;
pub use tokenizer::{TimeIsUp, Tokenize, Work};

pub use crate::recent::CacheStats;
use crate::request::SeenMessages;
use crate::request::body::{self, Ask, BodyError, Endpoint, PromptInput};
use crate::request::conversation::{Conversation, Cut};
use crate::request::harmony::{self as harmony_request, Harmony};
use crate::request::limits::{Keep, Truncation};
use crate::units::TokenId;
use files::NativeRenderer;
use std::path::Path;
use std::time::Instant;
use template::{Rendered, Sources, Templates};
use tokenizer::{Encoded, Tokenizer};

/// The eighths of the memory for what was seen lately. A message takes about as much as its ids, but less is lost without
/// it; what the template wrote for it is kept with its ids; whole prompts are for retries, which come soon.
const SEGMENTS_EIGHTHS: usize = 3;
const MESSAGES_EIGHTHS: usize = 2;
const KNOWN_EIGHTHS: usize = 2;
const REPEATS_EIGHTHS: usize = 1;

/// Demonstrations and simulated replicas have short prompts, and there are many of them in one process.
const EMBEDDED_CACHE_BYTES: usize = 8 << 20;

/// What makes token ids of prompts: a model's chat templates, tokenizer and special tokens.
#[derive(Debug)]
pub struct Model {
    name: String,
    templates: Templates,
    tokenizer: Tokenizer,
    /// The first token id that the engine refuses; `None` where only it knows.
    ids_end: Option<u32>,
    native: Option<NativeRenderer>,
    harmony: Option<harmony::Renderer>,
    seen: SeenMessages,
    repeats: Repeats,
}

impl Model {
    /// Loads a model directory: `tokenizer.json`, and if they are there `tokenizer_config.json`, `config.json`,
    /// `special_tokens_map.json`, `chat_template.jinja`, `chat_template.json`, `additional_chat_templates/*.jinja`,
    /// `preprocessor_config.json`, `processor_config.json`.
    /// Takes up to a second and some hundred megabytes for a large vocabulary.
    ///
    /// # Errors
    /// A file is missing, damaged, or of a kind that is not known; the error names it. A missing template is no error:
    /// completions need none.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        Self::load_with(dir, ModelOptions::default())
    }

    /// The same for an engine that was started with options which change its prompts.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn load_with(dir: &Path, options: ModelOptions) -> Result<Self, ModelError> {
        let path = dir.join("tokenizer.json");
        let sources = files::template_sources(dir)?;
        let mut json = files::read(&path)?;
        if options.compat.adds_tokens_by_configuration()
            && let Some(changed) = legacy::with_configured_tokens(&json, &files::tokenizer_config(dir)?)
        {
            json = changed;
        }
        let tokenizer = Tokenizer::load(&json, options.cache_bytes / 8 * SEGMENTS_EIGHTHS)
            .map_err(|detail| ModelError::Tokenizer { path, detail })?;
        let name = dir.file_name().unwrap_or(dir.as_os_str()).to_string_lossy().into_owned();
        let model = Self::assemble(name, dir, sources, options, tokenizer)?;
        let native = files::native_renderer(dir)?;
        let is_harmony = native.is_some_and(|native| native.name == files::HARMONY);
        let harmony = is_harmony.then(|| harmony::Renderer::new(&model.tokenizer)).flatten();
        // Harmony prints the date.
        let repeats = if is_harmony { Repeats::none() } else { model.repeats };
        // Some models have ids that are no tokens, and some tokenizers tokens that are only for the engine.
        let known_ids = model.tokenizer.largest_id().map_or(0, |id| id.0.saturating_add(1));
        let ids_end = files::vocabulary_size(dir)?.map(|size| size.max(known_ids));
        Ok(Self { ids_end, native, harmony, repeats, ..model })
    }

    /// The tiny model that is compiled in, for the demo, the simulated replica and tests: a byte-level BPE of 2,048
    /// tokens with a ChatML template (`scripts/train-tokenizer`).
    ///
    /// # Errors
    /// None in a build whose tests pass.
    pub fn embedded() -> Result<Self, ModelError> {
        Self::embedded_with(ModelOptions::default())
    }

    /// The same for an engine that was started with options which change its prompts.
    ///
    /// # Errors
    /// A template file of the options cannot be read or compiled.
    pub fn embedded_with(options: ModelOptions) -> Result<Self, ModelError> {
        let dir = Path::new("(embedded)");
        let options = ModelOptions { cache_bytes: options.cache_bytes.min(EMBEDDED_CACHE_BYTES), ..options };
        let json = include_bytes!("tiny/tokenizer.json");
        let tokenizer = Tokenizer::load(json, options.cache_bytes / 8 * SEGMENTS_EIGHTHS)
            .map_err(|detail| ModelError::Tokenizer { path: dir.join("tokenizer.json"), detail })?;
        let token = |name: &str, token: &str| (name.to_owned(), token.to_owned());
        let sources = Sources {
            default: Some(include_str!("tiny/chat_template.jinja").to_owned()),
            tool_use: None,
            special_tokens: vec![token("eos_token", "<|im_end|>"), token("pad_token", "<|endoftext|>")],
        };
        Self::assemble("tiny".to_owned(), dir, sources, options, tokenizer)
    }

    fn assemble(
        name: String,
        dir: &Path,
        mut sources: Sources,
        options: ModelOptions,
        tokenizer: Tokenizer,
    ) -> Result<Self, ModelError> {
        let cache_bytes = options.cache_bytes;
        if let Some(path) = &options.template {
            sources.default = Some(files::read_text(path)?);
            sources.tool_use = None;
        }
        let templates = Templates::compile(sources, options, cache_bytes / 8 * KNOWN_EIGHTHS)
            .map_err(|error| ModelError::Template { path: dir.to_owned(), detail: error.to_string() })?;
        let repeats = if templates.depend_on_time() {
            Repeats::none()
        } else {
            Repeats::new(cache_bytes / 8 * REPEATS_EIGHTHS)
        };
        let seen = SeenMessages::new(cache_bytes / 8 * MESSAGES_EIGHTHS);
        Ok(Self { name, templates, tokenizer, ids_end: None, native: None, harmony: None, seen, repeats })
    }

    /// The last part of the directory's path; `tiny` for the embedded model.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The renderer by which vLLM makes prompts of this model without its chat template, which is not done here: its
    /// conversations are routed by load alone.
    #[must_use]
    pub fn native_renderer(&self) -> Option<&'static str> {
        self.native.filter(|_| self.harmony.is_none()).map(|native| native.name)
    }

    /// Whether `/tokenize` of the engine answers what is computed: not for gpt-oss, of which it renders the template.
    #[must_use]
    pub const fn is_told_by_tokenize(&self) -> bool {
        self.harmony.is_none()
    }

    /// Whether a request's own chat template takes the place of the model's.
    #[must_use]
    pub fn takes_request_templates(&self) -> bool {
        self.harmony.is_none() && self.templates.options().trust_request_chat_template
    }

    /// Whether requests may name a model that the engine does not list.
    #[must_use]
    pub fn takes_any_model_name(&self) -> bool {
        self.templates.options().skip_model_name_validation
    }

    /// Reads a whole body as the engine does for this model. What was read lately of the same conversation is not read
    /// again.
    ///
    /// # Errors
    /// See [`BodyError`]; all of them mean "route by load".
    pub fn read(&self, endpoint: Endpoint, body: &[u8]) -> Result<Ask, BodyError> {
        match self.harmony {
            Some(_) => harmony_request::parse(endpoint, body),
            None => body::parse_seen(endpoint, body, &self.seen),
        }
    }

    /// The form in which the chat template takes messages' content; `None` if there is no template.
    #[must_use]
    pub fn content_format(&self) -> Option<ContentFormat> {
        self.templates.content_format()
    }

    /// What is kept of the tokenized pieces; `None` if the tokenizer is of a kind that cannot be cached.
    #[must_use]
    pub fn cache_stats(&self) -> Option<CacheStats> {
        self.tokenizer.cache_stats()
    }

    /// What is kept of the texts that the chat template wrote for messages.
    #[must_use]
    pub fn known_stats(&self) -> CacheStats {
        self.templates.known_stats()
    }

    /// The memory of all that is kept of earlier requests, in bytes.
    #[must_use]
    pub fn cache_bytes(&self) -> usize {
        let segments = self.tokenizer.cache_stats().unwrap_or_default();
        (segments + self.seen.stats() + self.known_stats() + self.repeats.stats()).bytes
    }

    /// The prompts that were made lately.
    #[must_use]
    pub fn repeats(&self) -> &Repeats {
        &self.repeats
    }

    /// The text that the chat template makes of a conversation.
    ///
    /// # Errors
    /// See [`PromptError`]; all of them mean "route by load".
    pub fn render(&self, conversation: &Conversation) -> Result<String, PromptError> {
        Ok(self.rendered_until(conversation, &|| false)?.into_text())
    }

    fn rendered_until(
        &self,
        conversation: &Conversation,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<Rendered, PromptError> {
        if self.native.is_some() {
            return Err(PromptError::NativeRenderer);
        }
        self.templates.render_until(conversation, time_is_up)
    }

    /// The text of a conversation of gpt-oss, with its special tokens.
    ///
    /// # Errors
    /// As [`Model::render`].
    pub fn render_harmony(&self, harmony: &Harmony) -> Result<String, PromptError> {
        Ok(self.harmony_parts(harmony)?.iter().map(harmony::Part::as_str).collect())
    }

    fn harmony_parts<'h>(&self, harmony: &'h Harmony) -> Result<Vec<harmony::Part<'h>>, PromptError> {
        let renderer = self.harmony.as_ref().ok_or(PromptError::NativeRenderer)?;
        renderer.parts(harmony, self.templates.options())
    }

    /// The token ids of a prompt, before any truncation; of several prompts those of the longest.
    ///
    /// # Errors
    /// See [`PromptError`]; all of them mean "route by load".
    pub fn tokenize(&self, prompt: &PromptInput) -> Result<Vec<TokenId>, PromptError> {
        self.tokenize_all(prompt, None, &|| false).map(|prompt| prompt.ids.into_vec())
    }

    /// The token ids of a text as it is.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn tokenize_text(&self, text: &str) -> Result<Vec<TokenId>, PromptError> {
        self.tokenizer.encode_until(text, false, &|| false).map(|encoded| encoded.ids.into_vec())
    }

    fn tokenize_all(
        &self,
        prompt: &PromptInput,
        truncation: Option<Truncation>,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<Tokens, PromptError> {
        let Encoded { mut ids, is_whole, work } = match prompt {
            PromptInput::Chat(conversation) => {
                let started = Instant::now();
                let rendered = self.rendered_until(conversation, time_is_up)?;
                let rendering = started.elapsed();
                let encoded =
                    self.tokenizer.encode_rendered(&rendered, conversation.add_special_tokens, time_is_up)?;
                rendered.recycle();
                encoded.rendered_in(rendering)
            }
            PromptInput::Harmony(harmony) => {
                let started = Instant::now();
                let parts = self.harmony_parts(harmony)?;
                let rendering = started.elapsed();
                let pieces = parts.iter().map(harmony::Part::as_piece);
                self.tokenizer.encode_pieces(pieces, time_is_up)?.rendered_in(rendering)
            }
            PromptInput::Text { text, add_special_tokens } => {
                self.check_text()?;
                self.tokenizer.encode_until(text, *add_special_tokens, time_is_up)?
            }
            PromptInput::Tokens(tokens) => {
                Encoded { ids: tokens.clone().into(), is_whole: true, work: Work::default() }
            }
            PromptInput::Several(prompts) => {
                let none = Tokens { is_whole: true, ..Tokens::default() };
                return prompts.iter().try_fold(none, |all, prompt| {
                    let one = self.tokenize_all(prompt, truncation, time_is_up)?;
                    Ok(Tokens {
                        total: all.total + one.total,
                        is_whole: all.is_whole && one.is_whole,
                        work: all.work + one.work,
                        ids: if one.ids.len() > all.ids.len() { one.ids } else { all.ids },
                    })
                });
            }
        };
        if let Some(truncation) = truncation {
            self.truncate(prompt, &mut ids, is_whole, truncation)?;
        }
        if matches!(prompt, PromptInput::Tokens(_)) {
            // Of those that it drops the engine takes any.
            self.check_ids(ids.iter())?;
        }
        match (ids.is_empty(), is_whole) {
            (true, true) => Err(PromptError::Empty),
            (true, false) => Err(PromptError::Late),
            (false, _) => Ok(Tokens { total: ids.len(), ids, is_whole, work }),
        }
    }

    /// The token ids that the engine will compute for a request: those of its prompt, truncated as it asks. Of a prompt
    /// whose end is not known, or that is not done when `time_is_up`, they are the first ones.
    ///
    /// # Errors
    /// As [`Model::tokenize`]; besides, what the engine refuses for its context or its options has none.
    pub fn tokens(&self, ask: &Ask, time_is_up: TimeIsUp<'_>) -> Result<Tokens, PromptError> {
        let finds_calls = self.templates.options().enable_auto_tool_choice;
        if let PromptInput::Chat(Conversation { calls_are_to_be_found: true, .. }) = &ask.prompt
            && !finds_calls
        {
            return Err(PromptError::ToolsRefused);
        }
        let truncation = ask.limits.truncation;
        let tokens = if ask.is_whole {
            self.tokenize_all(&ask.prompt, truncation, time_is_up)?
        } else {
            self.beginning(&ask.prompt, truncation, time_is_up)?
        };
        if !ask.limits.allow(tokens.ids.len()) {
            return Err(PromptError::BeyondContext);
        }
        Ok(tokens)
    }

    /// Drops the ids of one prompt that the engine drops.
    fn truncate(
        &self,
        prompt: &PromptInput,
        ids: &mut TokenIds,
        is_whole: bool,
        truncation: Truncation,
    ) -> Result<(), PromptError> {
        if !is_whole && truncation.keep != Keep::First {
            return Err(PromptError::NothingKnown);
        }
        let has_own = match prompt {
            PromptInput::Chat(conversation) => conversation.add_special_tokens,
            PromptInput::Text { add_special_tokens, .. } => *add_special_tokens,
            _ => false,
        };
        let around = if has_own { self.tokenizer.around() } else { (0, 0) };
        let mut all = std::mem::take(ids).into_vec();
        if !truncation.apply(&mut all, around) {
            return Err(PromptError::UnknownContext);
        }
        *ids = all.into();
        Ok(())
    }

    fn beginning(
        &self,
        prompt: &PromptInput,
        truncation: Option<Truncation>,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<Tokens, PromptError> {
        if self.native.is_some() && matches!(prompt, PromptInput::Chat(_)) {
            let is_known = self.harmony.is_some();
            return Err(if is_known { PromptError::NothingKnown } else { PromptError::NativeRenderer });
        }
        let encoded = match prompt {
            PromptInput::Chat(conversation) => {
                let cut = conversation.cut.unwrap_or(Cut::AfterMessage);
                let started = Instant::now();
                let text = self.templates.render_beginning(conversation, cut, time_is_up)?;
                let rendering = started.elapsed();
                let add_special_tokens = conversation.add_special_tokens;
                self.tokenizer.encode_beginning(&text, add_special_tokens, time_is_up)?.rendered_in(rendering)
            }
            PromptInput::Text { text, add_special_tokens } => {
                self.check_text()?;
                self.tokenizer.encode_beginning(text, *add_special_tokens, time_is_up)?
            }
            PromptInput::Tokens(tokens) => {
                self.check_ids(tokens.iter().copied())?;
                Encoded { ids: tokens.clone().into(), is_whole: true, work: Work::default() }
            }
            PromptInput::Several(_) | PromptInput::Harmony(_) => return Err(PromptError::NothingKnown),
        };
        let Encoded { mut ids, work, .. } = encoded;
        if let Some(truncation) = truncation {
            self.truncate(prompt, &mut ids, false, truncation)?;
        }
        if ids.is_empty() {
            return Err(PromptError::NothingKnown);
        }
        Ok(Tokens { total: ids.len(), ids, is_whole: false, work })
    }

    fn check_ids(&self, mut ids: impl Iterator<Item = TokenId>) -> Result<(), PromptError> {
        match self.ids_end {
            Some(end) if ids.any(|id| id.0 >= end) => Err(PromptError::BeyondVocabulary),
            _ => Ok(()),
        }
    }

    fn check_text(&self) -> Result<(), PromptError> {
        match self.native {
            Some(NativeRenderer { texts_too: true, .. }) => Err(PromptError::NativeRenderer),
            _ => Ok(()),
        }
    }
}

/// The tokens of a request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tokens {
    /// The prompt's ids; of several prompts those of the longest.
    pub ids: TokenIds,
    /// How many tokens all prompts of the request have together, as far as they are known.
    pub total: usize,
    /// Whether these are all, and not only the first ones.
    pub is_whole: bool,
    /// What was done for them.
    pub work: Work,
}

#[cfg(test)]
mod tests;
