//! The life of a request after the choice, as HAProxy log lines tell it.

pub mod log_line;
pub mod log_receiver;
pub mod rfc5424;

pub use log_line::{LogLine, RequestEnd, Skip};
pub use log_receiver::{LogListen, LogReceiver, LogReceiverError};
