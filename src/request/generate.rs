//! `/inference/v1/generate`: a prompt that was rendered and tokenized before (vLLM 0.32, `GenerateRequest`).
//!
//! The one endpoint that says which tokens stand for which item of media, as the engine itself keys its cache. Elsewhere
//! only the engine's own processing tells how many tokens an image takes.

use super::body::{self, BodyError};
use super::json::{self, Object};
use crate::{hash::MediaItem, units::TokenId};
use serde_json::Value;

const UNFIT: BodyError = BodyError::Refused("features that do not fit together");

pub(super) fn tokens(body: &mut Object) -> Result<Vec<TokenId>, BodyError> {
    let ids = json::take(body, "token_ids").ok_or(BodyError::EmptyPrompt)?;
    let tokens = body::token_ids(ids, "token_ids")?;
    if tokens.is_empty() { Err(BodyError::EmptyPrompt) } else { Ok(tokens) }
}

/// The items of `features`, by place.
pub(super) fn media(body: &mut Object) -> Result<Vec<MediaItem>, BodyError> {
    if json::take(body, "content_parts").is_some_and(|parts| parts != Value::Array(Vec::new())) {
        // The engine puts these in itself, in place of tokens of the prompt.
        return Err(BodyError::Media);
    }
    let Some(mut features) = json::take(body, "features") else { return Ok(Vec::new()) };
    let features = features.as_object_mut().ok_or(BodyError::Field("features"))?;
    let mut maps = ["mm_hashes", "mm_placeholders"].map(|name| json::take(features, name));
    let [Some(Value::Object(hashes)), Some(Value::Object(placeholders))] = &mut maps else {
        return Err(BodyError::Field("features"));
    };
    let mut media = Vec::new();
    for (modality, hashes) in hashes.iter() {
        let (Some(hashes), Some(places)) =
            (hashes.as_array(), placeholders.get(modality).and_then(Value::as_array))
        else {
            return Err(UNFIT);
        };
        if hashes.len() != places.len() {
            return Err(UNFIT);
        }
        for (hash, place) in hashes.iter().zip(places) {
            let number = |name: &str| usize::try_from(place.get(name)?.as_u64()?).ok();
            let (Some(identifier), Some(first_token), Some(tokens)) =
                (hash.as_str(), number("offset"), number("length"))
            else {
                return Err(BodyError::Field("features"));
            };
            media.push(MediaItem { identifier: identifier.to_owned(), first_token, tokens });
        }
    }
    if placeholders.len() != hashes.len() {
        return Err(UNFIT);
    }
    media.sort_by_key(|item| item.first_token);
    Ok(media)
}

#[cfg(test)]
mod tests {
    use super::super::body::{Ask, Endpoint, PromptInput, parse};
    use super::super::partial;
    use super::*;

    fn ask(fields: &str) -> Result<Ask, BodyError> {
        let body = format!(r#"{{"token_ids": [1, 2, 3], "sampling_params": {{"max_tokens": 7}}, {fields}}}"#);
        parse(Endpoint::from_path("/inference/v1/generate").expect("known"), body.as_bytes())
    }

    fn item(identifier: &str, first_token: usize, tokens: usize) -> MediaItem {
        MediaItem { identifier: identifier.to_owned(), first_token, tokens }
    }

    const FEATURES: &str = r#""features": {
        "mm_hashes": {"image": ["a", "b"], "audio": ["c"]},
        "mm_placeholders": {"image": [{"offset": 9, "length": 4}, {"offset": 20, "length": 4}],
            "audio": [{"offset": 13, "length": 2}]},
        "kwargs_data": {"image": ["AAAA""#;

    #[test]
    fn tokens_and_items_are_taken_as_they_are() {
        let asked = ask(r#""model": "m", "cache_salt": "s", "features": null"#).expect("a prompt");
        assert_eq!(asked.prompt, PromptInput::Tokens([1, 2, 3].map(TokenId).to_vec()));
        assert_eq!((asked.media, asked.limits.max_tokens, asked.is_whole), (vec![], Some(7), true));
        assert_eq!((asked.model.as_deref(), asked.cache_salt.as_deref()), (Some("m"), Some("s")));
        let asked = ask(&format!("{FEATURES}, null], \"audio\": [null]}}}}")).expect("a prompt");
        assert_eq!(asked.media, [item("a", 9, 4), item("c", 13, 2), item("b", 20, 4)]);
    }

    #[test]
    fn what_the_engine_puts_in_itself_or_would_refuse_is_no_prompt() {
        for (fields, error) in [
            (r#""content_parts": [{"type": "image_url"}]"#, BodyError::Media),
            (r#""features": {"mm_hashes": {"image": ["a"]}}"#, BodyError::Field("features")),
            (r#""features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {}}"#, UNFIT),
            (r#""features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": []}}"#, UNFIT),
            (r#""features": {"mm_hashes": {}, "mm_placeholders": {"image": []}}"#, UNFIT),
            (
                r#""features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": -1, "length": 1}]}}"#,
                BodyError::Field("features"),
            ),
        ] {
            assert_eq!(ask(fields), Err(error), "{fields}");
        }
        assert!(ask(r#""content_parts": []"#).is_ok());
        let empty = parse(Endpoint::Generate, br#"{"token_ids": []}"#);
        assert_eq!(empty, Err(BodyError::EmptyPrompt));
    }

    #[test]
    fn of_a_body_that_was_cut_the_items_must_be_known() {
        let cut = |text: &str| partial::parse(Endpoint::Generate, text.as_bytes());
        let whole = format!(r#"{{"token_ids": [1, 2, 3], {FEATURES}"#);
        let asked = cut(&whole).expect("cut in an item's data");
        assert_eq!((asked.media.len(), asked.is_whole, asked.identity_is_known), (3, false, false));
        for end in [r#"[1, 2, "#, r#""mm_hashes""#, r#""c""#, r#""offset": 20"#, r#""kwargs_data""#] {
            let at = whole.find(end).expect("there") + end.len();
            assert_eq!(cut(&whole[..at]), Err(BodyError::Cut), "{end}");
        }
        assert!(cut(r#"{"token_ids": [1, 2, 3], "features": null, "model": "m", "#).is_ok());
    }
}
