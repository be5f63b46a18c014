//! What a request says of lengths: which part of a prompt is kept, how long the answer may be, and what the engine refuses.
//!
//! The rules are those of vLLM 0.32: `TokenizeParams`, `SamplingParams`, `get_max_tokens` and
//! `InputProcessor._validate_prompt_len`; `scripts/request-goldens` asks it.

use super::body::{BodyError, Endpoint};
use super::json::{self, Object};
use crate::units::TokenId;
use serde_json::Value;

/// The answer's length where the request names none: of `/v1/completions`, and where `min_tokens` is checked of
/// `/inference/v1/generate`.
const DEFAULT_ANSWER_TOKENS: i64 = 16;

/// The lengths of a request, and the context that they must fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Limits {
    /// Which tokens of the prompt the engine drops; `None` keeps all.
    pub truncation: Option<Truncation>,
    /// The most tokens to generate; `None` is the engine's default.
    pub max_tokens: Option<u32>,
    /// The engine's context, in tokens; `None` where nobody told. No body tells it: [`Self::within`] does.
    pub context_tokens: Option<usize>,
    /// The engine takes no number above its context, even where it would not come to count.
    least_context_tokens: usize,
    /// There must be room for so long an answer. The engine takes any answer that is only at most too long, and ends it.
    least_answer_tokens: usize,
}

/// The request's `truncate_prompt_tokens` and `truncation_side`, or `truncation: auto` of `/v1/responses`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Truncation {
    /// How many tokens stay.
    pub limit: Limit,
    /// Which of them.
    pub keep: Keep,
}

/// How many tokens of a prompt stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// So many.
    Tokens(usize),
    /// As many as the engine's context takes, less so many.
    ContextLess(usize),
}

/// The part of a prompt that survives truncation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keep {
    /// `truncation_side: right`: the first tokens.
    First,
    /// `truncation_side: left`: the last tokens.
    Last,
    /// No side: the end of the text, between the tokens that the tokenizer puts around it. It is the tokenizer that
    /// truncates then.
    EndOfText,
}

impl Truncation {
    /// Drops the tokens that the engine drops; `around` are how many the tokenizer has put before and behind a text.
    /// `false` if it is not known how many stay.
    #[must_use]
    pub fn apply(&self, tokens: &mut Vec<TokenId>, around: (usize, usize)) -> bool {
        let Limit::Tokens(count) = self.limit else { return false };
        let excess = tokens.len().saturating_sub(count);
        match (self.keep, around) {
            (Keep::First, _) => tokens.truncate(count),
            // With less room than it needs for its own, the tokenizer truncates nothing, and the engine cuts the rest.
            (Keep::EndOfText, (before, after)) if before + after <= count => {
                drop(tokens.drain(before..before + excess));
            }
            (Keep::Last | Keep::EndOfText, _) => drop(tokens.drain(..excess)),
        }
        true
    }
}

impl Limits {
    pub(super) fn take(body: &mut Object, endpoint: Endpoint, echo: bool) -> Result<Self, BodyError> {
        let lengths = Lengths::of(body, endpoint)?;
        lengths.check(endpoint, echo)?;
        let is_generate = endpoint == Endpoint::Generate;
        let asked = if endpoint == Endpoint::Completions { lengths.most() } else { lengths.max };
        // One token of the context is left for the answer, if its length is told.
        let context = Limit::ContextLess(usize::from(asked.is_some_and(|tokens| tokens > 0)));
        let truncation = match endpoint {
            Endpoint::Messages | Endpoint::Generate => None,
            Endpoint::Responses => truncation_of_responses(body, context)?,
            _ => truncation(body, context)?,
        };
        let kept = match truncation {
            Some(Truncation { limit: Limit::Tokens(count), .. }) => count,
            _ => 0,
        };
        let tokens = |number: i64| usize::try_from(number).unwrap_or(0);
        Ok(Self {
            truncation,
            max_tokens: lengths.max.map(|max| u32::try_from(max).unwrap_or(u32::MAX)),
            context_tokens: None,
            least_context_tokens: asked.filter(|_| !is_generate).map_or(0, tokens).max(kept),
            least_answer_tokens: if is_generate && lengths.most().is_some() {
                1
            } else {
                tokens(lengths.min).max(1)
            },
        })
    }

    /// The same where the engine takes the prompt's ids as they are.
    pub(super) const fn of_ids_as_they_are(self) -> Self {
        Self { truncation: None, ..self }
    }

    /// The same where it does not look at the numbers before it has the prompt.
    pub(super) const fn not_looked_at(self) -> Self {
        Self { truncation: None, least_context_tokens: 0, ..self }
    }

    /// Whether the prompt is cut by the length of the engine's context.
    #[must_use]
    pub fn go_by_context(&self) -> bool {
        self.truncation.is_some_and(|truncation| matches!(truncation.limit, Limit::ContextLess(_)))
    }

    /// The same in an engine with a context of so many tokens, which some truncations go by.
    #[must_use]
    pub fn within(mut self, context_tokens: Option<usize>) -> Self {
        self.context_tokens = context_tokens;
        if let Some(Truncation { limit, .. }) = &mut self.truncation
            && let (Limit::ContextLess(count), Some(context)) = (*limit, context_tokens)
        {
            *limit = Limit::Tokens(context.saturating_sub(count));
        }
        self
    }

    /// Whether the engine takes a prompt that has so many tokens after truncation. Where nobody told of its context, it
    /// may.
    #[must_use]
    pub fn allow(&self, prompt_tokens: usize) -> bool {
        self.context_tokens.is_none_or(|context| {
            context >= self.least_context_tokens
                && context.saturating_sub(prompt_tokens) >= self.least_answer_tokens
        })
    }
}

/// The numbers that bound an answer.
struct Lengths {
    max: Option<i64>,
    /// What counts in the place of `max`.
    default: Option<i64>,
    min: i64,
}

impl Lengths {
    fn of(body: &Object, endpoint: Endpoint) -> Result<Self, BodyError> {
        let empty = Object::new();
        let fields = match endpoint {
            Endpoint::Generate => body.get("sampling_params").and_then(Value::as_object).unwrap_or(&empty),
            _ => body,
        };
        let number = |name| integer(fields, name);
        let is_null = |name| json::get(fields, name).is_some_and(Value::is_null);
        let max = match endpoint {
            Endpoint::Responses => number("max_output_tokens")?,
            Endpoint::ChatCompletions | Endpoint::ChatBatch => {
                let other = number("max_tokens")?;
                number("max_completion_tokens")?.or(other)
            }
            Endpoint::Messages if is_null("max_tokens") => return Err(BodyError::Refused("no max_tokens")),
            Endpoint::Completions | Endpoint::Messages | Endpoint::Generate => number("max_tokens")?,
        };
        let default = match endpoint {
            Endpoint::Completions => Some(DEFAULT_ANSWER_TOKENS),
            Endpoint::Generate => Some(DEFAULT_ANSWER_TOKENS).filter(|_| !is_null("max_tokens")),
            _ => None,
        };
        let min = match endpoint {
            Endpoint::Responses | Endpoint::Messages => 0,
            _ => number("min_tokens")?.unwrap_or(0),
        };
        Ok(Self { max, default, min })
    }

    fn most(&self) -> Option<i64> {
        self.max.or(self.default)
    }

    /// What the engine refuses whatever its context.
    fn check(&self, endpoint: Endpoint, echo: bool) -> Result<(), BodyError> {
        let most = match self.most() {
            // A prompt that is only to be said again is answered with one token more.
            Some(0) if endpoint == Endpoint::Completions && echo => Some(1),
            most => most,
        };
        if most.is_some_and(|most| most < 1) {
            return Err(BodyError::Refused("an answer of no tokens"));
        }
        if self.min < 0 || most.is_some_and(|most| self.min > most) {
            return Err(BodyError::Refused("min_tokens does not fit max_tokens"));
        }
        Ok(())
    }
}

/// A number as the API's validation reads it; `None` if it is absent or `null`.
fn integer(fields: &Object, name: &'static str) -> Result<Option<i64>, BodyError> {
    const MOST: f64 = 9_007_199_254_740_992.0;
    let value = match json::get(fields, name) {
        None | Some(Value::Null) => return Ok(None),
        Some(value) => value,
    };
    let number = match value {
        Value::Bool(flag) => Some(i64::from(*flag)),
        Value::String(text) => text.trim().parse().ok(),
        Value::Number(number) if number.is_u64() => Some(number.as_i64().unwrap_or(i64::MAX)),
        Value::Number(number) => number.as_i64().or_else(|| {
            let float = number.as_f64().filter(|float| float.fract() == 0.0 && float.abs() <= MOST)?;
            Some(float as i64)
        }),
        _ => None,
    };
    number.map(Some).ok_or(BodyError::Field(name))
}

/// `-1` keeps as many tokens as the context takes (`TokenizeParams.max_truncation_tokens`).
fn truncation(body: &mut Object, context: Limit) -> Result<Option<Truncation>, BodyError> {
    let keep = match json::take_text(body, "truncation_side")?.as_deref() {
        None => Keep::EndOfText,
        Some("left") => Keep::Last,
        Some("right") => Keep::First,
        Some(_) => return Err(BodyError::Field("truncation_side")),
    };
    let limit = match integer(body, "truncate_prompt_tokens")? {
        None => return Ok(None),
        Some(-1) => context,
        Some(0) => return Err(BodyError::EmptyPrompt),
        Some(count) => Limit::Tokens(
            usize::try_from(count).map_err(|_| BodyError::Refused("a negative truncate_prompt_tokens"))?,
        ),
    };
    Ok(Some(Truncation { limit, keep }))
}

fn truncation_of_responses(body: &mut Object, context: Limit) -> Result<Option<Truncation>, BodyError> {
    // What is told to be `null` is not `disabled`.
    let is_null = json::get(body, "truncation").is_some_and(Value::is_null);
    match json::take_text(body, "truncation")?.as_deref() {
        None if !is_null => Ok(None),
        Some("disabled") => Ok(None),
        None | Some("auto") => Ok(Some(Truncation { limit: context, keep: Keep::EndOfText })),
        Some(_) => Err(BodyError::Field("truncation")),
    }
}

#[cfg(test)]
mod tests {
    use crate::request::body::{BodyError, Endpoint, parse};
    use crate::units::TokenId;

    /// What stays of five ids, of which the tokenizer put one before the text and one behind it.
    fn kept(fields: &str, context: Option<usize>) -> Option<Vec<u32>> {
        let body = format!(r#"{{"prompt": "x", {fields}}}"#);
        let limits = parse(Endpoint::Completions, body.as_bytes()).expect("a body").limits.within(context);
        let mut ids: Vec<_> = (1..=5).map(TokenId).collect();
        let is_known = limits.truncation.is_none_or(|truncation| truncation.apply(&mut ids, (1, 1)));
        is_known.then(|| ids.iter().map(|id| id.0).collect())
    }

    #[test]
    fn without_a_side_the_tokenizer_keeps_what_it_puts_around_the_text() {
        let count = |count| format!(r#""truncate_prompt_tokens": {count}"#);
        assert_eq!(kept(&count(9), None), Some(vec![1, 2, 3, 4, 5]));
        assert_eq!(kept(&count(4), None), Some(vec![1, 3, 4, 5]));
        assert_eq!(kept(&count(2), None), Some(vec![1, 5]));
        assert_eq!(kept(&count(1), None), Some(vec![5]), "there is no room for both");
        assert_eq!(kept(&format!(r#"{}, "truncation_side": "left""#, count(3)), None), Some(vec![3, 4, 5]));
        assert_eq!(kept(&format!(r#"{}, "truncation_side": "right""#, count(3)), None), Some(vec![1, 2, 3]));
    }

    #[test]
    fn a_prompt_that_is_cut_to_the_context_leaves_room_for_an_answer() {
        let all = r#""truncate_prompt_tokens": -1"#;
        assert_eq!(kept(all, None), None);
        assert_eq!(
            kept(all, Some(5)),
            Some(vec![1, 3, 4, 5]),
            "the answer has 16 tokens unless told otherwise"
        );
        assert_eq!(kept(&format!(r#"{all}, "max_tokens": 7"#), Some(9)), Some(vec![1, 2, 3, 4, 5]));
        assert_eq!(
            kept(&format!(r#"{all}, "max_tokens": 0, "echo": true"#), Some(4)),
            Some(vec![1, 3, 4, 5])
        );
    }

    #[test]
    fn no_number_is_above_the_context_and_the_answer_has_room() {
        let allows = |endpoint, body: &str, prompt_tokens| {
            let limits = parse(endpoint, body.as_bytes()).expect("a body").limits;
            assert!(limits.allow(usize::MAX), "where nobody told of the context");
            limits.within(Some(20)).allow(prompt_tokens)
        };
        let completion = |fields: &str| {
            [1, 18, 19, 20]
                .map(|tokens| allows(Endpoint::Completions, &format!(r#"{{"prompt": "x"{fields}}}"#), tokens))
        };
        assert_eq!(completion(""), [true, true, true, false]);
        assert_eq!(completion(r#", "max_tokens": 20"#), [true, true, true, false], "it ends earlier");
        assert_eq!(completion(r#", "max_tokens": 21"#), [false; 4]);
        assert_eq!(completion(r#", "truncate_prompt_tokens": 21"#), [false; 4]);
        assert_eq!(completion(r#", "min_tokens": 2"#), [true, true, false, false]);
        let generate = |max| format!(r#"{{"token_ids": [1], "sampling_params": {{"max_tokens": {max}}}}}"#);
        assert!(allows(Endpoint::Generate, &generate(10_000), 19), "here the number is not looked at");
    }

    #[test]
    fn lengths_that_contradict_each_other_are_refused() {
        let read = |fields: &str| {
            parse(Endpoint::Completions, format!(r#"{{"prompt": "x", {fields}}}"#).as_bytes())
                .map(|ask| ask.limits.max_tokens)
        };
        assert_eq!(read(r#""max_tokens": "7""#), Ok(Some(7)), "as the API reads numbers");
        assert_eq!(read(r#""max_tokens": 7.0"#), Ok(Some(7)));
        assert_eq!(read(r#""max_tokens": 7.5"#), Err(BodyError::Field("max_tokens")));
        for fields in [
            r#""max_tokens": 0"#,
            r#""max_tokens": -1"#,
            r#""min_tokens": -1"#,
            r#""min_tokens": 17"#,
            r#""max_tokens": 3, "min_tokens": 4"#,
        ] {
            assert_eq!(read(fields).expect_err(fields).reason(), "refused", "{fields}");
        }
        assert_eq!(read(r#""max_tokens": 0, "echo": true"#), Ok(Some(0)));
    }
}
