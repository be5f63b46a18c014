//! Workloads made from a seed, where there is no trace: each has one shape that routing goes wrong on.
//!
//! The rates suit eight replicas of the default model at speed 1.

use super::workload::{Request, Workload};
use std::time::Duration;

/// The shape of a generated workload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(super) enum Shape {
    /// Bursts of 2 to 16 requests with one long beginning: an agent that fans out. Before any of them is computed, no
    /// cache tells that they belong together.
    Fanout,
    /// 45 % of the requests ask about one document, the others about nothing that was seen before.
    Hot,
    /// 150 groups of users, each with a long system prompt of its own.
    Groups,
    /// Chats behind one common head, little load: whoever follows the head alone puts all of them on one replica.
    Head,
}

/// Tokens in a piece: the grain of all lengths but the last one of a prompt.
const PIECE_TOKENS: u32 = 128;

/// Makes the requests of a workload one after the other.
struct Generator {
    rng: fastrand::Rng,
    next_piece: u64,
    requests: Vec<Request>,
}

impl Generator {
    /// Pieces that were never there before.
    fn new_pieces(&mut self, count: u64) -> Vec<u64> {
        let first = self.next_piece;
        self.next_piece += count;
        (first..first + count).collect()
    }

    /// The time until the next of events that come by chance, so many a second.
    fn gap(&mut self, per_second: f64) -> Duration {
        Duration::from_secs_f64(-(1.0 - self.rng.f64()).ln() / per_second)
    }

    /// A request for these pieces, of which the last may be cut.
    fn ask(&mut self, at: Duration, pieces: Vec<u64>, answer_tokens: u32) {
        let cut = self.rng.u32(..PIECE_TOKENS);
        let prompt_tokens = pieces.len() as u32 * PIECE_TOKENS - cut;
        self.requests.push(Request { at, prompt_tokens, answer_tokens, pieces });
    }

    fn fanout(&mut self, count: usize) {
        let mut now = Duration::ZERO;
        while self.requests.len() < count {
            now += self.gap(0.65);
            let beginning_pieces = self.rng.u64(64..192);
            let beginning = self.new_pieces(beginning_pieces);
            for _ in 0..self.rng.u32(2..=16) {
                let (at, own) = (now + Duration::from_millis(self.rng.u64(..50)), self.rng.u64(2..=8));
                let answer = self.rng.u32(50..300);
                let pieces = [beginning.clone(), self.new_pieces(own)].concat();
                self.ask(at, pieces, answer);
            }
        }
    }

    fn hot(&mut self, count: usize) {
        let document = self.new_pieces(192);
        let mut now = Duration::ZERO;
        while self.requests.len() < count {
            now += self.gap(12.0);
            let pieces = if self.rng.f64() < 0.45 {
                let question = self.rng.u64(2..=5);
                [document.clone(), self.new_pieces(question)].concat()
            } else {
                let length = self.rng.u64(8..96);
                self.new_pieces(length)
            };
            let answer = self.rng.u32(50..400);
            self.ask(now, pieces, answer);
        }
    }

    fn groups(&mut self, count: usize) {
        let systems: Vec<_> = (0..150).map(|_| self.new_pieces(48)).collect();
        let mut now = Duration::ZERO;
        while self.requests.len() < count {
            now += self.gap(16.0);
            let system = systems[self.rng.usize(..systems.len())].clone();
            let question = self.rng.u64(4..16);
            let answer = self.rng.u32(100..500);
            let pieces = [system, self.new_pieces(question)].concat();
            self.ask(now, pieces, answer);
        }
    }

    /// 60 chats at a time, of 4 to 12 turns each.
    fn head(&mut self, count: usize) {
        let head = self.new_pieces(32);
        let mut chats: Vec<(Vec<u64>, u32)> = vec![(Vec::new(), 0); 60];
        let mut now = Duration::ZERO;
        while self.requests.len() < count {
            now += self.gap(2.0);
            let chat = self.rng.usize(..chats.len());
            if chats[chat].1 == 0 {
                chats[chat] = (head.clone(), self.rng.u32(4..=12));
            }
            let (question, answer_pieces) = (self.rng.u64(2..=8), self.rng.u64(1..=4));
            let said = self.new_pieces(question);
            let answered = self.new_pieces(answer_pieces);
            chats[chat].0.extend(said);
            chats[chat].1 -= 1;
            self.ask(now, chats[chat].0.clone(), (answer_pieces as u32 - 1) * PIECE_TOKENS + 1);
            chats[chat].0.extend(answered);
        }
    }
}

/// A workload of this shape with so many requests. The same seed makes the same requests.
#[must_use]
pub(super) fn generate(shape: Shape, count: usize, seed: u64) -> Workload {
    let mut generator =
        Generator { rng: fastrand::Rng::with_seed(seed), next_piece: 1, requests: Vec::new() };
    match shape {
        Shape::Fanout => generator.fanout(count),
        Shape::Hot => generator.hot(count),
        Shape::Groups => generator.groups(count),
        Shape::Head => generator.head(count),
    }
    let mut requests = generator.requests;
    requests.sort_by_key(|request| request.at);
    requests.truncate(count);
    Workload::with_answers(PIECE_TOKENS, requests)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPES: [Shape; 4] = [Shape::Fanout, Shape::Hot, Shape::Groups, Shape::Head];

    /// The share of the prompts' pieces that an earlier prompt had too: what a cache without end would serve.
    fn repeated(workload: &Workload) -> f64 {
        let mut seen = std::collections::HashSet::new();
        let (mut hits, mut all) = (0, 0);
        for request in &workload.requests {
            let pieces = &request.pieces[..(request.prompt_tokens / PIECE_TOKENS) as usize];
            all += pieces.len();
            hits += pieces.iter().filter(|piece| !seen.insert(**piece)).count();
        }
        hits as f64 / all as f64
    }

    #[test]
    fn a_seed_makes_the_same_requests_in_order_of_arrival() {
        for shape in SHAPES {
            let workload = generate(shape, 500, 3);
            assert_eq!(workload, generate(shape, 500, 3), "{shape:?}");
            assert_ne!(workload, generate(shape, 500, 4), "{shape:?}");
            assert_eq!(workload.requests.len(), 500, "{shape:?}");
            assert!(workload.requests.is_sorted_by_key(|request| request.at), "{shape:?}");
        }
    }

    #[test]
    fn each_shape_repeats_as_it_says() {
        let shares = SHAPES.map(|shape| repeated(&generate(shape, 2000, 1)));
        for (share, expected) in shares.into_iter().zip([0.86, 0.76, 0.79, 0.89]) {
            assert!((share - expected).abs() < 0.04, "{shares:?}");
        }
    }

    #[test]
    fn most_turns_of_a_chat_contain_the_answer_before() {
        let workload = generate(Shape::Head, 1000, 1);
        let known = |request: &&Request| request.pieces.last().is_some_and(|piece| *piece < 1 << 63);
        let answered = workload.requests.iter().filter(known).count();
        assert!(answered > 700, "{answered}");
    }
}
