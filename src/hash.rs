//! The hash chain by which we name prefixes: tokens → block hash → sequence hash.
//!
//! The keys are random per process, or come from the secret of agents that are peers. Nobody else ever sees a hash, so
//! nobody can build prompts that collide, and no value need agree with an engine's.
//!
//! A block is cut into groups of 16 tokens. Each group is the xor of four products of keyed words (the shape of
//! UMAC's NH and of wyhash): independent multiplications, so the processor works on all at once. Only the chain is
//! sequential, one multiplication a block.

use crate::units::{BlockHash, SequenceHash, TokenId};
use std::hash::{BuildHasher, RandomState};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Tokens that one round of the block hash takes.
const GROUP_TOKENS: usize = 16;

/// The top bit of both tokens of a word. Set in every word key: as no vocabulary reaches 2^31, a keyed word is never
/// zero, and a product never loses its other factor.
const TOKEN_TOP_BITS: u64 = 0x8000_0000_8000_0000;

/// The secret key for all hashes. Two values from different keys never compare.
#[derive(Clone)]
pub struct HashKey {
    words: [u64; GROUP_TOKENS / 2],
    group: u64,
    length: u64,
    parent: u64,
    block: u64,
    seed: u64,
}

impl HashKey {
    /// A key drawn from the operating system's randomness (by way of `RandomState`, a keyed SipHash).
    #[must_use]
    pub fn random() -> Self {
        let entropy = RandomState::new();
        let mut counter = 0u64;
        Self::from_words(|| {
            counter += 1;
            entropy.hash_one(counter)
        })
    }

    /// The bytes of [`Self::from_bytes`].
    pub const BYTES: usize = (GROUP_TOKENS / 2 + 5) * size_of::<u64>();

    /// A key that several processes have in common. The bytes must be secret and as good as random.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let (words, _) = bytes.as_chunks();
        let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
        Self::from_words(|| words.next().unwrap_or_default())
    }

    /// A fixed key, for tests, benches and seeded simulation.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        Self::from_words(|| rng.u64(..))
    }

    fn from_words(mut next: impl FnMut() -> u64) -> Self {
        Self {
            words: std::array::from_fn(|_| next() | TOKEN_TOP_BITS),
            group: next() | 1,
            length: next() | 1,
            parent: next(),
            block: next(),
            seed: next(),
        }
    }

    /// Where a chain starts that has neither LoRA adapter nor cache salt.
    #[must_use]
    pub fn plain_root(&self) -> SequenceHash {
        self.root(None, None)
    }

    /// Where a chain starts: caches are apart for each LoRA adapter and each cache salt.
    #[must_use]
    pub fn root(&self, lora_name: Option<&str>, cache_salt: Option<&str>) -> SequenceHash {
        let part = |kind: u64, text: Option<&str>| {
            text.map_or(kind, |t| xxh3_64_with_seed(t.as_bytes(), self.seed.wrapping_add(kind)))
        };
        SequenceHash(fold(part(1, lora_name) ^ self.parent, part(2, cache_salt) ^ self.seed))
    }

    /// The hash of one full block. The number of tokens is part of it, so chains of different block sizes never meet.
    #[must_use]
    #[inline]
    pub fn block(&self, tokens: &[TokenId]) -> BlockHash {
        let mut hash = self.start(tokens.len());
        let (groups, rest) = tokens.as_chunks::<GROUP_TOKENS>();
        for group in groups {
            hash = self.add_group(hash, group);
        }
        if !rest.is_empty() {
            // Zeros are no ambiguity: the length is part of the hash.
            let mut padded = [TokenId(0); GROUP_TOKENS];
            padded[..rest.len()].copy_from_slice(rest);
            hash = self.add_group(hash, &padded);
        }
        BlockHash(hash)
    }

    /// The same for a block whose identity depends on more than its tokens (multi-modal items and the like).
    #[must_use]
    pub fn block_with_extra(&self, tokens: &[TokenId], extra: &[u8]) -> BlockHash {
        let plain = self.block(tokens);
        let extra = xxh3_64_with_seed(extra, self.seed);
        BlockHash(fold(plain.0 ^ self.group, extra ^ self.seed) ^ extra)
    }

    /// [`Self::sequence`] of a prompt with media: a block that an item reaches into is one of that item, at that place.
    /// Without items it is the same. The items are in the order of their places.
    #[must_use]
    pub fn sequence_with_media(
        &self,
        root: SequenceHash,
        tokens: &[TokenId],
        media: &[MediaItem],
        block_tokens: u32,
    ) -> Vec<SequenceHash> {
        if media.is_empty() {
            return self.sequence(root, tokens, block_tokens);
        }
        let size = block_tokens.max(1) as usize;
        let (mut at, mut items, mut extra) = (root, media, Vec::new());
        let hashes = tokens.chunks_exact(size).enumerate().map(|(number, block)| {
            let (start, end) = (number * size, (number + 1) * size);
            while items.first().is_some_and(|item| item.end() <= start) {
                items = &items[1..];
            }
            extra.clear();
            for item in items.iter().take_while(|item| item.first_token < end) {
                item.key_in_block(start, &mut extra);
            }
            let block =
                if extra.is_empty() { self.block(block) } else { self.block_with_extra(block, &extra) };
            at = self.chain(at, block);
            at
        });
        hashes.collect()
    }

    /// The sequence hash of `block` standing behind `parent`.
    #[must_use]
    #[inline]
    pub fn chain(&self, parent: SequenceHash, block: BlockHash) -> SequenceHash {
        // The last xor is off the critical path (the low half of a product is ready first).
        SequenceHash(fold(parent.0 ^ self.parent, block.0 ^ self.block) ^ block.0)
    }

    /// Sequence hashes of all full blocks of a prompt, in order. A `block_tokens` of 0 is taken as 1.
    #[must_use]
    pub fn sequence(&self, root: SequenceHash, tokens: &[TokenId], block_tokens: u32) -> Vec<SequenceHash> {
        let mut hashes = Vec::new();
        self.sequence_into(root, tokens, block_tokens, &mut hashes);
        hashes
    }

    /// [`Self::sequence`] behind `parent`, appended to `hashes`: a prompt can be hashed piece by piece.
    pub fn sequence_into(
        &self,
        parent: SequenceHash,
        tokens: &[TokenId],
        block_tokens: u32,
        hashes: &mut Vec<SequenceHash>,
    ) {
        let size = (block_tokens as usize).max(1);
        let first = hashes.len();
        hashes.resize(first + tokens.len() / size, parent);
        let hashes = &mut hashes[first..];
        let mut at = parent;
        // Not by a closure that changes `at`: it would stand in memory, and each block would wait for that too.
        if size == GROUP_TOKENS {
            // The most common size, without a loop inside of the loop.
            let start = fold(self.start(GROUP_TOKENS), self.group);
            let (blocks, _) = tokens.as_chunks::<GROUP_TOKENS>();
            for (hash, block) in hashes.iter_mut().zip(blocks) {
                at = self.chain(at, BlockHash(start ^ self.sum(block)));
                *hash = at;
            }
        } else {
            for (hash, block) in hashes.iter_mut().zip(tokens.chunks_exact(size)) {
                at = self.chain(at, self.block(block));
                *hash = at;
            }
        }
    }

    /// [`Self::sequence`] of a prompt of so many `tokens`, which lie in runs one behind the other.
    #[must_use]
    pub fn sequence_of_runs<'t>(
        &self,
        root: SequenceHash,
        runs: impl IntoIterator<Item = &'t [TokenId]>,
        tokens: usize,
        block_tokens: u32,
    ) -> Vec<SequenceHash> {
        let size = (block_tokens as usize).max(1);
        let mut hashes = Vec::with_capacity(tokens / size);
        // Of a block that goes on in the next run.
        let mut begun = Vec::with_capacity(size.min(tokens));
        let mut at = root;
        // Not by `for`: iterators that are put together are much slower then.
        runs.into_iter().for_each(|mut run| {
            if !begun.is_empty() {
                let (missing, rest) = run.split_at(run.len().min(size - begun.len()));
                begun.extend_from_slice(missing);
                run = rest;
                if begun.len() == size {
                    at = self.chain(at, self.block(&begun));
                    hashes.push(at);
                    begun.clear();
                }
            }
            self.sequence_into(at, run, block_tokens, &mut hashes);
            at = hashes.last().copied().unwrap_or(root);
            begun.extend_from_slice(run.chunks_exact(size).remainder());
        });
        hashes
    }

    /// [`Self::chain`] along `blocks` behind `parent`; `hashes` are these then.
    pub(crate) fn chain_all(
        &self,
        parent: SequenceHash,
        blocks: &[BlockHash],
        hashes: &mut Vec<SequenceHash>,
    ) {
        let mut at = parent;
        hashes.clear();
        hashes.reserve(blocks.len());
        for block in blocks {
            at = self.chain(at, *block);
            hashes.push(at);
        }
    }

    /// A secret for hash tables, so that nobody can choose keys that meet.
    pub(crate) fn secret(&self) -> u64 {
        fold(self.seed ^ self.block, self.group)
    }

    /// The hash of a block of so many tokens, before the first of them.
    fn start(&self, tokens: usize) -> u64 {
        self.length.wrapping_mul(tokens as u64 + 1)
    }

    #[inline]
    fn add_group(&self, hash: u64, group: &[TokenId; GROUP_TOKENS]) -> u64 {
        fold(hash, self.group) ^ self.sum(group)
    }

    #[inline]
    fn sum(&self, group: &[TokenId; GROUP_TOKENS]) -> u64 {
        let word =
            |at: usize| (u64::from(group[2 * at].0) | u64::from(group[2 * at + 1].0) << 32) ^ self.words[at];
        fold(word(0), word(1)) ^ fold(word(2), word(3)) ^ fold(word(4), word(5)) ^ fold(word(6), word(7))
    }
}

/// An image, a sound or the like in a prompt: the engine computes its own content at tokens that stand for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MediaItem {
    /// The engine's name of its content (vLLM's `mm_hash`).
    pub identifier: String,
    /// The first of the tokens that stand for it, counted from the prompt's start.
    pub first_token: usize,
    /// How many they are.
    pub tokens: usize,
}

impl MediaItem {
    const fn end(&self) -> usize {
        self.first_token.saturating_add(self.tokens)
    }

    fn key_in_block(&self, start: usize, extra: &mut Vec<u8>) {
        push_media_key(&self.identifier, self.first_token as i64 - start as i64, extra);
    }
}

/// Appends what a block depends on besides its tokens where an item of media reaches into it: the item, and where it
/// begins, in tokens from the block's start; negative if it began before (vLLM's `extra_keys`).
pub fn push_media_key(identifier: &str, offset: i64, extra: &mut Vec<u8>) {
    extra.push(MEDIA_KEY);
    extra.extend_from_slice(&(identifier.len() as u64).to_le_bytes());
    extra.extend_from_slice(identifier.as_bytes());
    extra.extend_from_slice(&offset.to_le_bytes());
}

/// Appends another thing that a block depends on, as its bytes.
pub fn push_other_key(key: &[u8], extra: &mut Vec<u8>) {
    extra.push(OTHER_KEY);
    extra.extend_from_slice(&(key.len() as u64).to_le_bytes());
    extra.extend_from_slice(key);
}

/// First bytes, so that no key of one kind is one of the other.
const MEDIA_KEY: u8 = 1;
const OTHER_KEY: u8 = 0;

/// Shows nothing of the key.
impl std::fmt::Debug for HashKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HashKey")
    }
}

/// 64 × 64 → 128 bit multiplication, both halves folded together.
#[inline]
pub(crate) fn fold(a: u64, b: u64) -> u64 {
    let wide = u128::from(a) * u128::from(b);
    (wide as u64) ^ (wide >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn tokens(ids: impl IntoIterator<Item = u32>) -> Vec<TokenId> {
        ids.into_iter().map(TokenId).collect()
    }

    #[test]
    fn equal_prefixes_have_equal_hashes_and_nothing_behind_a_difference_has() {
        let key = HashKey::from_seed(1);
        let one = tokens(0..160);
        let mut other = one.clone();
        other[70] = TokenId(7);
        let (one, other) =
            (key.sequence(key.plain_root(), &one, 16), key.sequence(key.plain_root(), &other, 16));
        assert_eq!(one.len(), 10);
        assert_eq!(one[..4], other[..4]);
        assert!(one[4..].iter().zip(&other[4..]).all(|(a, b)| a != b));
    }

    #[test]
    fn the_fast_path_agrees_with_block_and_chain_for_every_size() {
        let key = HashKey::from_seed(2);
        let prompt = tokens(1000..1700);
        for block_tokens in [1u32, 4, 8, 15, 16, 17, 32, 64, 100, 128] {
            let mut at = key.plain_root();
            let slow: Vec<_> = prompt
                .chunks_exact(block_tokens as usize)
                .map(|block| {
                    at = key.chain(at, key.block(block));
                    at
                })
                .collect();
            assert_eq!(key.sequence(key.plain_root(), &prompt, block_tokens), slow, "{block_tokens}");
        }
        assert_eq!(key.sequence(key.plain_root(), &prompt, 0).len(), prompt.len());
    }

    #[test]
    fn a_prompt_can_be_hashed_piece_by_piece() {
        let key = HashKey::from_seed(3);
        let prompt = tokens(0..320);
        let whole = key.sequence(key.plain_root(), &prompt, 32);
        let mut pieces = key.sequence(key.plain_root(), &prompt[..96], 32);
        key.sequence_into(pieces[2], &prompt[96..], 32, &mut pieces);
        assert_eq!(pieces, whole);
    }

    #[test]
    fn one_changed_bit_of_a_token_changes_about_half_of_the_hash() {
        let key = HashKey::from_seed(4);
        for size in [8usize, 16, 32, 48] {
            let mut flipped = 0u32;
            let mut trials = 0u32;
            for base in 0..64u32 {
                let block = tokens((0..size as u32).map(|i| i * 31 + base * 977));
                let plain = key.chain(key.plain_root(), key.block(&block)).0;
                for at in 0..size {
                    for bit in 0..17 {
                        let mut changed = block.clone();
                        changed[at].0 ^= 1 << bit;
                        let different = plain ^ key.chain(key.plain_root(), key.block(&changed)).0;
                        assert_ne!(different, 0);
                        flipped += different.count_ones();
                        trials += 64;
                    }
                }
            }
            let share = f64::from(flipped) / f64::from(trials);
            assert!((0.49..0.51).contains(&share), "size {size}: {share}");
        }
    }

    #[test]
    fn a_million_structured_and_random_blocks_do_not_collide() {
        let key = HashKey::from_seed(5);
        let mut rng = fastrand::Rng::with_seed(5);
        let mut seen = HashSet::new();
        let mut low_halves = HashSet::new();
        let mut insert = |block: &[TokenId]| {
            let hash = key.block(block).0;
            assert!(seen.insert(hash), "{block:?}");
            low_halves.insert(hash as u32);
        };
        for _ in 0..400_000 {
            insert(&tokens((0..16).map(|_| rng.u32(..128_000))));
        }
        for value in 0..100_000u32 {
            // Counters in one place, in swapped places, and all tokens alike.
            let mut block = [TokenId(1); 16];
            block[(value % 16) as usize] = TokenId(value + 200_000);
            insert(&block);
            block[((value + 1) % 16) as usize] = TokenId(value + 200_001);
            insert(&block);
            insert(&[TokenId(value + 2); 16]);
            insert(&[TokenId(value); 8]);
            insert(&[TokenId(value); 17]);
            insert(&[TokenId(value + 2); 32]);
        }
        // A random 32-bit half of n values repeats n²/2^33 times: the halves must be as good as random.
        let repeats = seen.len() - low_halves.len();
        assert!((80..160).contains(&repeats), "{repeats}");
    }

    #[test]
    fn the_order_of_tokens_and_of_blocks_counts() {
        let key = HashKey::from_seed(6);
        let mut block = tokens(100..116);
        let plain = key.block(&block);
        for (a, b) in [(0, 1), (0, 2), (0, 4), (3, 12), (7, 15)] {
            block.swap(a, b);
            assert_ne!(key.block(&block), plain);
            block.swap(a, b);
        }
        let root = key.plain_root();
        let (a, b) = (key.block(&tokens(0..16)), key.block(&tokens(16..32)));
        assert_ne!(key.chain(key.chain(root, a), b), key.chain(key.chain(root, b), a));
    }

    #[test]
    fn zeros_keep_their_places_and_a_repeated_block_never_stands_still() {
        let key = HashKey::from_seed(7);
        let mut seen = HashSet::new();
        for size in 1..=64usize {
            assert!(seen.insert(key.block(&vec![TokenId(0); size])), "{size}");
        }
        let all = key.sequence(key.plain_root(), &vec![TokenId(0); 16 * 100_000], 16);
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
    }

    #[test]
    fn caches_of_adapters_salts_and_media_are_apart() {
        let key = HashKey::from_seed(8);
        let roots = [
            key.plain_root(),
            key.root(Some("a"), None),
            key.root(None, Some("a")),
            key.root(Some("a"), Some("a")),
            key.root(Some("b"), Some("a")),
            key.root(Some("a"), Some("b")),
            key.root(Some(""), None),
        ];
        assert_eq!(roots.iter().collect::<HashSet<_>>().len(), roots.len());
        let block = tokens(0..16);
        assert_ne!(key.block(&block), key.block_with_extra(&block, b""));
        assert_ne!(key.block_with_extra(&block, b"x"), key.block_with_extra(&block, b"y"));
    }

    #[test]
    fn a_block_with_media_is_that_of_the_item_and_its_place_and_no_other() {
        let key = HashKey::from_seed(9);
        let prompt = tokens((0..20).chain([9; 40]).chain(100..140));
        let sequence = |media: &[MediaItem]| key.sequence_with_media(key.plain_root(), &prompt, media, 16);
        let item = |identifier: &str, first_token, tokens| MediaItem {
            identifier: identifier.to_owned(),
            first_token,
            tokens,
        };
        let plain = key.sequence(key.plain_root(), &prompt, 16);
        assert_eq!(sequence(&[]), plain);
        let cat = sequence(&[item("cat", 20, 40)]);
        assert_eq!(cat.len(), plain.len());
        for other in [&plain, &sequence(&[item("dog", 20, 40)]), &sequence(&[item("cat", 21, 39)])] {
            assert_eq!(cat[..1], other[..1], "before the item");
            assert!(cat[1..].iter().zip(&other[1..]).all(|(a, b)| a != b));
        }
        // Each block has the keys of the items that reach into it.
        let two = [item("cat", 20, 40), item("dog", 60, 4)];
        let mut at = key.plain_root();
        let expected = prompt.chunks_exact(16).zip([
            vec![],
            vec![("cat", 4)],
            vec![("cat", -12)],
            vec![("cat", -28), ("dog", 12)],
            vec![],
            vec![],
        ]);
        let expected = expected.map(|(block, keys)| {
            let mut extra = Vec::new();
            keys.iter().for_each(|(name, offset)| push_media_key(name, *offset, &mut extra));
            let plain = keys.is_empty();
            at = key.chain(at, if plain { key.block(block) } else { key.block_with_extra(block, &extra) });
            at
        });
        assert_eq!(sequence(&two), expected.collect::<Vec<_>>());
    }

    #[test]
    fn keys_are_apart_and_never_shown() {
        let block = tokens(0..16);
        let (one, other) = (HashKey::random(), HashKey::random());
        assert_ne!(one.block(&block), other.block(&block));
        assert_ne!(one.plain_root(), other.plain_root());
        assert_eq!(format!("{one:?}"), "HashKey");
    }
}
