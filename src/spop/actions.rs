//! What an ACK tells HAProxy to do (SPOE.txt §3.4).

use super::value::{Value, put_string, put_value};
use smallvec::SmallVec;

/// The most bytes of one action beside name and value: type, number of arguments, scope.
const ACTION_BYTES: usize = 3;

/// How long a variable lives in HAProxy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Scope {
    /// `proc`: until HAProxy ends.
    Process = 0,
    /// `sess`: the client's connection.
    Session = 1,
    /// `txn`: request and response.
    Transaction = 2,
    /// `req`: while the request is processed.
    Request = 3,
    /// `res`: while the response is processed.
    Response = 4,
}

/// The actions of one answer, encoded as they are added. None at all is "no opinion".
///
/// The important ones come first: if all of them do not fit into a frame, the last are left out.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Actions {
    payload: Vec<u8>,
    ends: SmallVec<[usize; 8]>,
}

impl Actions {
    /// No opinion.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Sets a variable. The name goes without scope and prefix: HAProxy makes it `<scope>.<var-prefix>.<name>`, which
    /// must not exceed 63 characters, or it is dropped without a word.
    pub fn set_var<'a>(&mut self, scope: Scope, name: &str, value: impl Into<Value<'a>>) {
        let value = value.into();
        self.payload.reserve(ACTION_BYTES + name.len() + value.as_bytes().map_or(0, <[u8]>::len) + 16);
        self.payload.extend_from_slice(&[1, 3, scope as u8]);
        put_string(&mut self.payload, name.as_bytes());
        put_value(&mut self.payload, &value);
        self.ends.push(self.payload.len());
    }

    /// Removes a variable.
    pub fn unset_var(&mut self, scope: Scope, name: &str) {
        self.payload.extend_from_slice(&[2, 2, scope as u8]);
        put_string(&mut self.payload, name.as_bytes());
        self.ends.push(self.payload.len());
    }

    /// The number of actions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no opinion.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The payload of as many actions, from the first, as fit into `limit_bytes`.
    #[must_use]
    pub fn payload_within(&self, limit_bytes: usize) -> &[u8] {
        let fits = self.ends.iter().rev().find(|end| **end <= limit_bytes).copied().unwrap_or(0);
        self.payload.get(..fits).unwrap_or_default()
    }

    /// The payload of all actions.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_have_the_bytes_of_the_specification() {
        let mut actions = Actions::none();
        actions.set_var(Scope::Transaction, "server", "s1");
        actions.unset_var(Scope::Session, "old");
        assert_eq!(actions.payload(), b"\x01\x03\x02\x06server\x08\x02s1\x02\x02\x01\x03old");
        assert_eq!(actions.len(), 2);
    }

    #[test]
    fn no_opinion_is_an_empty_payload() {
        assert!(Actions::none().is_empty());
        assert_eq!(Actions::none().payload(), b"");
    }

    #[test]
    fn what_does_not_fit_is_left_out_from_the_end() {
        let mut actions = Actions::none();
        actions.set_var(Scope::Transaction, "a", true);
        let one = actions.payload().len();
        actions.set_var(Scope::Transaction, "long", "x".repeat(300).as_str());
        let two = actions.payload().len();
        assert_eq!(actions.payload_within(two).len(), two);
        assert_eq!(actions.payload_within(two - 1).len(), one);
        assert_eq!(actions.payload_within(one).len(), one);
        assert_eq!(actions.payload_within(one - 1), b"");
    }
}
