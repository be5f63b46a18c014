//! Agents that serve the same replicas tell each other what they have booked, so that each weighs the load of all.
//!
//! Every agent connects to every other one and only talks on the connections that it opened. What it tells is a booking
//! when it is made, its end, and now and then which ones it still has: whoever is silent for long has none. Nothing
//! waits for a peer, and what one misses costs balance, never a request.
//!
//! The peers have a secret in common. From it comes the key of their block hashes, which must be the same on all, and the
//! key of each connection: what is told is sealed, and without the secret nobody is heard.
//!
//! | file | what |
//! |---|---|
//! | `news`, `wire` | what is told, and its bytes |
//! | `secret` | the keys |
//! | `outbox` | what waits to be told |
//! | `link` | the connections |

mod link;
mod news;
mod outbox;
mod secret;
mod wire;

pub use link::{Listener, tell};
pub use news::{News, Told, What};
pub use outbox::Outbox;
pub use secret::{Secret, SecretError};
