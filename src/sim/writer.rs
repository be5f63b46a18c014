//! What the simulated model says: words drawn by the prompt's tokens, so the same chat gets the same answers.
//!
//! Every word is one token, and text of such words gets the same tokens wherever it stands: so the answer, sent back as
//! the next turn of the chat, hits the blocks that generating it filled.

use crate::prompt::Model;
use crate::request::body::PromptInput;
use crate::units::TokenId;
use std::hash::{Hash, Hasher};
use xxhash_rust::xxh3::Xxh3;

/// Words that are one token in any English vocabulary, with a space before them or not.
const WORDS: &[&str] = &[
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his",
    "they", "at", "be", "this", "from", "have", "or", "by", "one", "had", "not", "but", "what", "all",
    "were", "when", "we", "there", "can", "an", "your", "which", "their", "if", "do", "will", "each", "how",
    "them", "then", "she", "many", "some", "so", "these", "would", "other", "into", "has", "more", "two",
    "like", "him", "time", "see", "no", "make", "than", "first", "been", "its", "who", "now", "people", "my",
    "made", "over", "did", "down", "only", "way", "find", "use",
];

/// A piece of an answer: a token and its text.
pub(super) type Piece = (TokenId, String);

/// Makes answers of a model's vocabulary.
#[derive(Debug)]
pub(super) struct Writer {
    first_words: Vec<Piece>,
    words: Vec<Piece>,
}

impl Writer {
    pub(super) fn new(model: &Model) -> Self {
        let one_token = |text: String| {
            let prompt = PromptInput::Text { text: text.clone(), add_special_tokens: false };
            let tokens = model.tokenize(&prompt).ok()?;
            Some((*tokens.first().filter(|_| tokens.len() == 1)?, text))
        };
        let first_words = WORDS.iter().filter_map(|word| one_token((*word).to_owned())).collect();
        let words = WORDS.iter().filter_map(|word| one_token(format!(" {word}"))).collect();
        Self { first_words, words }
    }

    /// The answer's `tokens` tokens; another for each `choice` of one prompt. A turn of a chat starts without a space, the
    /// continuation of a text with one.
    pub(super) fn answer(
        &self,
        prompt: &[TokenId],
        choice: usize,
        tokens: usize,
        is_turn: bool,
    ) -> Vec<Piece> {
        let mut hasher = Xxh3::new();
        (prompt, choice).hash(&mut hasher);
        let mut random = fastrand::Rng::with_seed(hasher.finish());
        let mut draw = |words: &[Piece]| match words.len() {
            // A vocabulary without these words gets an answer too, if no sensible one.
            0 => (TokenId(0), "?".to_owned()),
            count => words[random.usize(..count)].clone(),
        };
        (0..tokens).map(|at| draw(if at == 0 && is_turn { &self.first_words } else { &self.words })).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(prompt: u32, choice: usize) -> (Vec<TokenId>, String) {
        let writer = Writer::new(&Model::embedded().expect("the embedded model"));
        let pieces = writer.answer(&[TokenId(prompt)], choice, 40, true);
        (pieces.iter().map(|(token, _)| *token).collect(), pieces.into_iter().map(|(_, text)| text).collect())
    }

    #[test]
    fn an_answer_is_the_same_again_and_another_for_another_prompt_or_choice() {
        assert_eq!(written(1, 0), written(1, 0));
        assert_ne!(written(1, 0), written(2, 0));
        assert_ne!(written(1, 0), written(1, 1));
    }

    #[test]
    fn the_text_of_an_answer_has_the_tokens_of_the_answer() {
        let (tokens, text) = written(3, 0);
        assert_eq!(tokens.len(), 40);
        let prompt = PromptInput::Text { text, add_special_tokens: false };
        assert_eq!(Model::embedded().expect("the embedded model").tokenize(&prompt), Ok(tokens));
    }
}
