//! The life of a request after the choice, as HAProxy log lines tell it.
