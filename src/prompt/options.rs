//! What is set for a model beside its files.

use super::template::ContentFormat;
use crate::config;
use serde_json::{Map, Value};
use std::{path::PathBuf, time::SystemTime};

/// How the engine was told to render (what `vllm serve` is given as options), and our own limits.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// `--chat-template`, a file; `None` for the model's own.
    pub template: Option<PathBuf>,
    /// `--chat-template-content-format`; `None` for `auto`.
    pub content_format: Option<ContentFormat>,
    /// `--default-chat-template-kwargs`.
    pub template_arguments: Map<String, Value>,
    /// `--exclude-tools-when-tool-choice-none`. Default false.
    pub exclude_unused_tools: bool,
    /// `--trust-request-chat-template`. Default false.
    pub trust_request_chat_template: bool,
    /// `--enable-auto-tool-choice`. Default true, unlike there.
    pub enable_auto_tool_choice: bool,
    /// `VLLM_SKIP_MODEL_NAME_VALIDATION`. Default false.
    pub skip_model_name_validation: bool,
    /// The engine's time zone, for templates that print the date; seconds east of UTC. Default 0.
    pub utc_offset_seconds: i32,
    /// `VLLM_SYSTEM_START_DATE`, the date that gpt-oss is told; `None` for the day's.
    pub start_date: Option<String>,
    /// The release of `transformers` that the engine has. Default 5.19, vLLM 0.32's.
    pub compat: config::Compat,
    /// The longest text that may be rendered, in bytes. Default 16 MiB, twice the largest body.
    pub max_rendered_bytes: usize,
    /// Memory for what was seen lately: ids of pieces of text, messages as they were read, whole prompts. Default
    /// 256 MiB: the ids of the last half minute of a thousand requests a second with 1,000 new tokens each. 0 keeps nothing.
    pub cache_bytes: usize,
    /// The clock, for templates that print the date.
    pub clock: fn() -> SystemTime,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self {
            template: None,
            content_format: None,
            template_arguments: Map::new(),
            exclude_unused_tools: false,
            trust_request_chat_template: false,
            enable_auto_tool_choice: true,
            skip_model_name_validation: false,
            utc_offset_seconds: 0,
            start_date: None,
            compat: config::Compat::default(),
            max_rendered_bytes: 16 << 20,
            cache_bytes: 256 << 20,
            clock: SystemTime::now,
        }
    }
}

impl From<&config::Rendering> for ModelOptions {
    fn from(rendering: &config::Rendering) -> Self {
        Self {
            template: rendering.chat_template.clone(),
            content_format: match rendering.chat_template_content_format {
                config::ContentFormat::Auto => None,
                config::ContentFormat::String => Some(ContentFormat::Text),
                config::ContentFormat::Openai => Some(ContentFormat::Parts),
            },
            template_arguments: rendering.default_chat_template_kwargs.clone(),
            exclude_unused_tools: rendering.exclude_tools_when_tool_choice_none,
            trust_request_chat_template: rendering.trust_request_chat_template,
            enable_auto_tool_choice: rendering.enable_auto_tool_choice,
            skip_model_name_validation: rendering.skip_model_name_validation,
            utc_offset_seconds: rendering.utc_offset.seconds,
            compat: rendering.compat,
            start_date: rendering.system_start_date.clone(),
            ..Self::default()
        }
    }
}
