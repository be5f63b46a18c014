//! What must hold for any bytes that arrive as a body; for random tests and for the fuzzer (`tests/fuzz`).

use kvspoa::prompt::Model;
use kvspoa::request::{
    Endpoint,
    body::{self, BodyError},
    partial,
};

/// Reads `body` in every way and checks what follows from each other: nothing panics, messages that were seen lately are those
/// that would be read now, and the tokens of a cut body are the first ones of the whole. Returns whether the body has tokens.
///
/// # Panics
/// Where that does not hold.
pub(crate) fn check(model: &Model, endpoint: Endpoint, body: &[u8], cut_at: usize) -> bool {
    let whole = model.read(endpoint, body);
    assert!(model.read(endpoint, body) == whole, "the second time it is read otherwise");
    // gpt-oss is read in another way, and what is behind the first message with media is not looked at where it was written.
    let is_harmony = !model.is_told_by_tokenize();
    let read = body::parse(endpoint, body);
    let is_no_json = matches!(read, Err(BodyError::Malformed | BodyError::Cut));
    assert!(whole == read || is_no_json || is_harmony, "what was seen lately is read otherwise");
    let whole = whole.ok().and_then(|ask| model.tokens(&ask, &|| false).ok());
    let beginning = body.get(..cut_at.min(body.len())).unwrap_or_default();
    let cut = partial::parse(endpoint, beginning).ok();
    let identity_is_known = cut.as_ref().is_some_and(|ask| ask.identity_is_known);
    let cut = cut.and_then(|ask| model.tokens(&ask, &|| false).ok());
    if let (Some(whole), Some(cut), true) = (&whole, &cut, identity_is_known) {
        assert!(whole.ids.starts_with(&cut.ids) || !whole.is_whole, "a cut body's tokens are others");
    }
    whole.is_some()
}

/// The endpoints whose bodies hold prompts.
pub(crate) const ENDPOINTS: [Endpoint; 6] = [
    Endpoint::ChatCompletions,
    Endpoint::ChatBatch,
    Endpoint::Completions,
    Endpoint::Responses,
    Endpoint::Messages,
    Endpoint::Generate,
];
