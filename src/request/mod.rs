//! What HAProxy hands over → what must be routed.
