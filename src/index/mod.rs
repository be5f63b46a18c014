//! Which rank holds which block.
