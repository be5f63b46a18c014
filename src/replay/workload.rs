//! What is played: requests by their arrival, their lengths, and the pieces that their tokens are made of.

use crate::units::TokenId;
use hashbrown::HashMap;
use std::time::Duration;

/// One request of a workload.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Request {
    /// When it arrives, from the start of the workload.
    pub at: Duration,
    /// The prompt's length, at least 1.
    pub prompt_tokens: u32,
    /// The answer's length, at least 1.
    pub answer_tokens: u32,
    /// The names of the pieces that prompt and answer are cut into: equal names mean equal tokens. As many as cover
    /// both, each of [`Workload::piece_tokens`].
    pub pieces: Vec<u64>,
}

/// Requests in the order of their arrival.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Workload {
    /// Tokens in one piece.
    pub piece_tokens: u32,
    /// Tokens in a block of the engines that it was recorded before; `None`: it was not.
    pub recorded_block_tokens: Option<u32>,
    /// The requests.
    pub requests: Vec<Request>,
}

/// Names of pieces that no trace and no generator gives: those of answers that nobody repeats.
const ANSWERS: u64 = 1 << 63;

impl Workload {
    /// Gives every request the pieces of its answer, where `requests` have those of their prompts.
    ///
    /// The next turn of a conversation contains the answer: it is the first later request that continues all full pieces
    /// of the prompt, is long enough to hold the answer too, and shares more than the first piece (a system prompt that
    /// all requests have is no conversation). Where there is none, the answer is like no other.
    #[must_use]
    pub(super) fn with_answers(piece_tokens: u32, mut requests: Vec<Request>) -> Self {
        let mut by_piece: HashMap<u64, Vec<u32>> = HashMap::new();
        for (at, request) in (0u32..).zip(&requests) {
            for piece in &request.pieces {
                by_piece.entry(*piece).or_default().push(at);
            }
        }
        let next_turns: Vec<Option<u32>> = (0u32..)
            .zip(&requests)
            .map(|(at, request)| {
                let full = (request.prompt_tokens / piece_tokens) as usize;
                let last = *request.pieces.get(full.checked_sub(1).filter(|_| full >= 2)?)?;
                let later = by_piece.get(&last)?;
                let whole = request.prompt_tokens + request.answer_tokens;
                let first = later.partition_point(|other| *other <= at);
                later[first..].iter().copied().find(|other| requests[*other as usize].prompt_tokens >= whole)
            })
            .collect();
        for (at, next) in next_turns.into_iter().enumerate().rev() {
            let length = requests[at].prompt_tokens + requests[at].answer_tokens;
            let pieces = length.div_ceil(piece_tokens) as usize;
            if let Some(next) = next {
                requests[at].pieces = requests[next as usize].pieces[..pieces].to_vec();
            }
            let known = requests[at].pieces.len();
            let own = |piece: usize| ANSWERS | (at as u64) << 20 | piece as u64;
            requests[at].pieces.extend((known..pieces).map(own));
        }
        Self { piece_tokens, recorded_block_tokens: None, requests }
    }

    /// The tokens of a request: its prompt and its answer, one behind the other.
    #[must_use]
    pub(super) fn tokens(&self, request: &Request) -> Vec<TokenId> {
        let length = (request.prompt_tokens + request.answer_tokens) as usize;
        let mut tokens = Vec::with_capacity(length + self.piece_tokens as usize);
        for piece in &request.pieces {
            // Both halves of a mixed name, so that 62 bits of it are told by any two tokens.
            let mixed = mix(*piece);
            let (even, odd) = (mixed as u32 & (u32::MAX >> 1), (mixed >> 33) as u32);
            tokens
                .extend((0..self.piece_tokens).map(|at| TokenId(if at % 2 == 0 { even } else { odd } ^ at)));
        }
        tokens.truncate(length);
        tokens
    }
}

/// A bijection that spreads every bit over the word (the finaliser of splitmix64).
const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(prompt_tokens: u32, answer_tokens: u32, pieces: &[u64]) -> Request {
        Request { at: Duration::ZERO, prompt_tokens, answer_tokens, pieces: pieces.to_vec() }
    }

    #[test]
    fn the_next_turn_of_a_conversation_contains_the_answer() {
        let turns = vec![
            request(25, 10, &[1, 2, 3]),
            request(38, 5, &[1, 2, 4, 5]),
            request(25, 10, &[1, 7, 8]),
            request(60, 2, &[1, 2, 4, 9, 10, 11]),
        ];
        let workload = Workload::with_answers(10, turns);
        let tokens: Vec<_> = workload.requests.iter().map(|request| workload.tokens(request)).collect();
        assert_eq!(tokens[0][..], tokens[1][..35], "prompt and answer are the next prompt's beginning");
        assert_eq!(tokens[1].len(), 43);
        assert_eq!(tokens[1][..], tokens[3][..43], "and so on with the turn after that");
        assert_ne!(tokens[2][25..], tokens[0][25..]);
    }

    #[test]
    fn a_piece_that_all_requests_begin_with_makes_no_conversation() {
        let workload = Workload::with_answers(10, vec![request(12, 3, &[1, 2]), request(20, 3, &[1, 5])]);
        assert_eq!(workload.requests[0].pieces, [1, 2]);
    }

    #[test]
    fn equal_pieces_are_equal_tokens_and_no_vocabulary_is_that_large() {
        let workload = Workload::with_answers(16, vec![request(32, 4, &[3, 3]), request(32, 4, &[4, 3])]);
        let [one, other] = [0, 1].map(|at| workload.tokens(&workload.requests[at]));
        assert_eq!(one[..16], one[16..32]);
        assert_eq!(one[16..32], other[16..32]);
        assert_ne!(one[..16], other[..16]);
        assert!(one.iter().all(|token| token.0 < 1 << 31));
    }
}
