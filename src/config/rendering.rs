//! How a pool's engines make prompts, as far as they were told by options: `[pool.prompt]`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// What `vllm serve` was given that changes its prompts, or which requests it takes. Each key has vLLM's own name.
#[derive(Clone, PartialEq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rendering {
    /// `--chat-template`, a file; absent: the model's own.
    pub chat_template: Option<PathBuf>,
    /// `--chat-template-content-format`.
    pub chat_template_content_format: ContentFormat,
    /// `--default-chat-template-kwargs`.
    pub default_chat_template_kwargs: Map<String, Value>,
    /// `--exclude-tools-when-tool-choice-none`.
    pub exclude_tools_when_tool_choice_none: bool,
    /// `--trust-request-chat-template`.
    pub trust_request_chat_template: bool,
    /// `--enable-auto-tool-choice`, with its parser: else requests with tools to be called are refused.
    pub enable_auto_tool_choice: bool,
    /// `VLLM_SKIP_MODEL_NAME_VALIDATION`: requests may name any model.
    pub skip_model_name_validation: bool,
    /// `VLLM_SYSTEM_START_DATE`, the date that gpt-oss is told; absent: the day's.
    pub system_start_date: Option<String>,
    /// The time zone of the engines' clocks, for templates that print the date.
    pub utc_offset: UtcOffset,
    /// The release of `transformers` that the engines have.
    pub compat: Compat,
}

impl Default for Rendering {
    /// As `vllm serve` without options, but for tools: whoever sends some has engines that take them.
    fn default() -> Self {
        Self {
            chat_template: None,
            chat_template_content_format: ContentFormat::default(),
            default_chat_template_kwargs: Map::new(),
            exclude_tools_when_tool_choice_none: false,
            trust_request_chat_template: false,
            enable_auto_tool_choice: true,
            skip_model_name_validation: false,
            system_start_date: None,
            utc_offset: UtcOffset::default(),
            compat: Compat::default(),
        }
    }
}

/// Another way in which some of a pool's engines make prompts, while a fleet changes from one template to the next:
/// `[[pool.revision]]`.
#[derive(Clone, PartialEq, Debug)]
pub struct Revision {
    /// By which replicas name it.
    pub name: String,
    /// The model directory; the pool's own where the file names none.
    pub model_dir: Option<PathBuf>,
    /// How these engines were told to make prompts; as the pool's where the file has no such table.
    pub rendering: Rendering,
}

/// `auto`, `string` or `openai`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ContentFormat {
    /// As the template shows by what it does with a message's content.
    #[default]
    Auto,
    /// One text.
    String,
    /// A list of parts.
    Openai,
}

/// A release of `transformers`, whose ways change prompts: `transformers-5.19`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Compat {
    major: u16,
    minor: u16,
}

impl Default for Compat {
    /// What vLLM 0.32 installs.
    fn default() -> Self {
        Self { major: 5, minor: 19 }
    }
}

impl Compat {
    /// Up to 4, `add_bos_token` and `add_eos_token` of some tokenizers' configurations count, and no longer what
    /// `tokenizer.json` says.
    #[must_use]
    pub fn adds_tokens_by_configuration(self) -> bool {
        self < Self { major: 5, minor: 0 }
    }

    /// From 5.21 on, what an assistant thought is also its message's `thinking`.
    #[must_use]
    pub fn names_thinking(self) -> bool {
        self >= Self { major: 5, minor: 21 }
    }

    /// From 5.24 on, a message has no fields that are `null`.
    #[must_use]
    pub fn drops_nulls(self) -> bool {
        self >= Self { major: 5, minor: 24 }
    }
}

impl From<Compat> for String {
    fn from(compat: Compat) -> Self {
        format!("transformers-{}.{}", compat.major, compat.minor)
    }
}

impl TryFrom<String> for Compat {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let release = text.strip_prefix("transformers-").and_then(|release| release.split_once('.'));
        let number = |text: &str| text.parse::<u16>().ok();
        let numbers = release.and_then(|(major, minor)| Some((number(major)?, number(minor)?)));
        match numbers {
            // Those that were compared, and 4 as far as its last one goes.
            Some((major, minor)) if major == 4 || major == 5 && (16..=24).contains(&minor) => {
                Ok(Self { major, minor })
            }
            _ => Err(format!(
                "`{text}` is not known: transformers-4.57, or transformers-5.16 to transformers-5.24"
            )),
        }
    }
}

/// A distance from UTC: `+02:00`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct UtcOffset {
    /// Seconds east of UTC.
    pub seconds: i32,
}

impl From<UtcOffset> for String {
    fn from(offset: UtcOffset) -> Self {
        let sign = if offset.seconds < 0 { '-' } else { '+' };
        let minutes = offset.seconds.unsigned_abs() / 60;
        format!("{sign}{:02}:{:02}", minutes / 60, minutes % 60)
    }
}

impl TryFrom<String> for UtcOffset {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no distance from UTC: use hours and minutes, as in \"+02:00\"");
        let sign = match text.as_bytes().first() {
            Some(b'+') => 1,
            Some(b'-') => -1,
            _ => return Err(wrong()),
        };
        let (hours, minutes) = text.get(1..).and_then(|rest| rest.split_once(':')).ok_or_else(wrong)?;
        let number = |digits: &str, most: i32| {
            let digits = Some(digits).filter(|d| d.len() == 2 && d.bytes().all(|b| b.is_ascii_digit()))?;
            digits.parse::<i32>().ok().filter(|number| *number <= most)
        };
        let (hours, minutes) = number(hours, 14).zip(number(minutes, 59)).ok_or_else(wrong)?;
        Ok(Self { seconds: sign * (hours * 3600 + minutes * 60) })
    }
}

impl Rendering {
    /// Takes paths as relative to `base`.
    #[must_use]
    pub(super) fn at(mut self, base: &Path) -> Self {
        self.chat_template = self.chat_template.map(|path| base.join(path));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_one_that_was_compared() {
        let compat = |text: &str| Compat::try_from(text.to_owned());
        assert_eq!(compat("transformers-5.19"), Ok(Compat::default()));
        let of = |text: &str| {
            compat(text)
                .map(|it| [it.adds_tokens_by_configuration(), it.names_thinking(), it.drops_nulls()])
                .expect(text)
        };
        assert_eq!(of("transformers-4.57"), [true, false, false]);
        assert_eq!(of("transformers-5.20"), [false, false, false]);
        assert_eq!(of("transformers-5.21"), [false, true, false]);
        assert_eq!(of("transformers-5.24"), [false, true, true]);
        for wrong in
            ["", "5.19", "transformers-5", "transformers-5.25", "transformers-6.0", "transformers-3.1"]
        {
            assert!(compat(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_time_zone_is_hours_and_minutes() {
        let seconds = |text: &str| UtcOffset::try_from(text.to_owned()).ok().map(|offset| offset.seconds);
        assert_eq!(seconds("+02:00"), Some(7200));
        assert_eq!(seconds("-09:30"), Some(-34_200));
        for wrong in ["", "2", "02:00", "+2:00", "+02:60", "+15:00", "+02", "+0a:00", "+é:00"] {
            assert_eq!(seconds(wrong), None, "{wrong}");
        }
    }
}
