//! What answers the requests.

use super::actions::Actions;
use bytes::Bytes;
use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

/// Answers NOTIFYs: the contract between the protocol and what decides.
///
/// The future runs as a task of its own. It is dropped at its deadline, when its connection closes, and when HAProxy
/// aborts the request; a panic in it costs this one answer.
pub trait Handler: Send + Sync + 'static {
    /// Answers one NOTIFY. Must not fail: no opinion = no actions.
    ///
    /// `messages` is the payload, for [`messages`](super::messages); `received` is when its first byte was read.
    fn notify(&self, messages: Bytes, received: Instant) -> impl Future<Output = Actions> + Send;

    /// A request was answered without an opinion, because its future did not end as it should.
    fn unanswered(&self, _why: Unanswered) {}
}

/// Why a handler's answer did not come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unanswered {
    /// Its deadline passed.
    Late,
    /// It panicked.
    Panicked,
}

impl<H: Handler> Handler for Arc<H> {
    fn notify(&self, messages: Bytes, received: Instant) -> impl Future<Output = Actions> + Send {
        H::notify(self, messages, received)
    }

    fn unanswered(&self, why: Unanswered) {
        H::unanswered(self, why);
    }
}
