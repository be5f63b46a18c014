//! The secret that peers have in common, and the keys that come from it.

use crate::hash::HashKey;
use ring::{
    aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    error::Unspecified,
    hkdf::{HKDF_SHA256, KeyType, Salt},
};
use std::{fmt, fs, io, path::Path};

/// Fewer bytes could be guessed.
const MIN_BYTES: usize = 32;

/// What both ends of a connection draw by chance for it.
pub(super) const RANDOM_BYTES: usize = 32;

/// What is a secret of peers worth that hash or speak otherwise? These names change with the hash or the protocol, so
/// that agents which do not understand each other do not hear each other.
const CONNECTION: &[u8] = b"kvspoa peers 1: connection";
const BLOCK_HASH: &[u8] = b"kvspoa peers 1: block hash";

/// A secret that all agents of a site have.
#[derive(Clone)]
pub struct Secret(Box<[u8]>);

/// Why a file holds no secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// It cannot be read.
    #[error("cannot be read")]
    Read(#[from] io::Error),
    /// It is too short.
    #[error("has {0} bytes, and {MIN_BYTES} are the least: make one by `openssl rand -hex 32`")]
    Short(usize),
}

impl Secret {
    /// Reads the secret from a file; space around it does not count.
    ///
    /// # Errors
    /// [`SecretError`].
    pub fn load(path: &Path) -> Result<Self, SecretError> {
        let bytes = fs::read(path)?;
        Self::new(bytes.trim_ascii())
    }

    fn new(bytes: &[u8]) -> Result<Self, SecretError> {
        if bytes.len() < MIN_BYTES { Err(SecretError::Short(bytes.len())) } else { Ok(Self(bytes.into())) }
    }

    /// The key of the block hashes of all who have the secret.
    #[must_use]
    pub fn hash_key(&self) -> HashKey {
        let mut bytes = [0; HashKey::BYTES];
        self.derive(&[], BLOCK_HASH, &mut bytes);
        HashKey::from_bytes(&bytes)
    }

    /// The seal of one connection, from what both ends drew for it. Neither can bring the other to use a key again.
    pub(super) fn seal(&self, dialer: &[u8; RANDOM_BYTES], listener: &[u8; RANDOM_BYTES]) -> Seal {
        let mut key = [0; 32];
        self.derive(&[*dialer, *listener].concat(), CONNECTION, &mut key);
        let key = UnboundKey::new(&CHACHA20_POLY1305, &key).expect("a key of 32 bytes");
        Seal { key: LessSafeKey::new(key), messages: 0 }
    }

    fn derive(&self, salt: &[u8], purpose: &[u8], out: &mut [u8]) {
        struct Bytes(usize);
        impl KeyType for Bytes {
            fn len(&self) -> usize {
                self.0
            }
        }
        let secret = Salt::new(HKDF_SHA256, salt).extract(&self.0);
        let expanded = secret.expand(&[purpose], Bytes(out.len())).and_then(|okm| okm.fill(out));
        expanded.expect("far fewer bytes than HKDF can make");
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Seals, or opens, the messages of one connection in their order.
#[derive(Debug)]
pub(super) struct Seal {
    key: LessSafeKey,
    /// So many had their turn; the number of each is its nonce.
    messages: u64,
}

impl Seal {
    /// What a seal adds to a message.
    pub(super) const BYTES: usize = 16;

    /// Seals in place the message that begins at `start`.
    pub(super) fn seal(&mut self, message: &mut Vec<u8>, start: usize) -> Result<(), Unspecified> {
        let nonce = self.nonce();
        let text = message.get_mut(start..).ok_or(Unspecified)?;
        let tag = self.key.seal_in_place_separate_tag(nonce, Aad::empty(), text)?;
        message.extend_from_slice(tag.as_ref());
        Ok(())
    }

    /// Opens the next message in place; refused unless it is that one, unchanged, of somebody who has the secret.
    pub(super) fn open<'a>(&mut self, message: &'a mut [u8]) -> Result<&'a [u8], Unspecified> {
        let nonce = self.nonce();
        self.key.open_in_place(nonce, Aad::empty(), message).map(|opened| &*opened)
    }

    fn nonce(&mut self) -> Nonce {
        let mut nonce = [0; NONCE_LEN];
        nonce[..8].copy_from_slice(&self.messages.to_le_bytes());
        self.messages += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::TokenId;

    fn secret(byte: u8) -> Secret {
        Secret::new(&[byte; MIN_BYTES]).expect("long enough")
    }

    fn sealed(seal: &mut Seal, text: &[u8]) -> Vec<u8> {
        let mut message = text.to_vec();
        seal.seal(&mut message, 0).expect("sealed");
        assert_eq!(message.len(), text.len() + Seal::BYTES);
        message
    }

    #[test]
    fn messages_open_in_their_order_and_once() {
        let (mut ours, mut theirs) = (secret(1).seal(&[5; 32], &[6; 32]), secret(1).seal(&[5; 32], &[6; 32]));
        let first = sealed(&mut ours, b"one");
        assert_ne!(first[..3], *b"one");
        assert_eq!(theirs.open(&mut first.clone()), Ok(&b"one"[..]));
        assert!(theirs.open(&mut first.clone()).is_err(), "a second time");
    }

    #[test]
    fn another_secret_another_connection_and_another_message_are_refused() {
        let message = sealed(&mut secret(1).seal(&[5; 32], &[6; 32]), b"one");
        for mut other in [
            secret(2).seal(&[5; 32], &[6; 32]),
            secret(1).seal(&[7; 32], &[6; 32]),
            secret(1).seal(&[5; 32], &[7; 32]),
        ] {
            assert!(other.open(&mut message.clone()).is_err());
        }
        let mut changed = message;
        changed[1] ^= 1;
        assert!(secret(1).seal(&[5; 32], &[6; 32]).open(&mut changed).is_err());
    }

    #[test]
    fn who_has_the_secret_has_the_same_hashes() {
        let hash = |byte| secret(byte).hash_key().block(&[TokenId(1), TokenId(2)]);
        assert_eq!(hash(1), hash(1));
        assert_ne!(hash(1), hash(2));
    }

    #[test]
    fn a_secret_is_read_from_its_file_and_a_short_one_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), format!("{}\n", "x".repeat(MIN_BYTES))).expect("written");
        let loaded = Secret::load(file.path()).expect("long enough");
        assert_eq!(loaded.0.len(), MIN_BYTES);
        assert_eq!(format!("{loaded:?}"), "Secret");
        fs::write(file.path(), "short\n").expect("written");
        let error = Secret::load(file.path()).expect_err("too short");
        assert!(error.to_string().contains('5') && error.to_string().contains("openssl"), "{error}");
    }
}
