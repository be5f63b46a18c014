//! What the bookings of one rank add up to.

/// The load of one rank as booked.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Load {
    /// Bookings, those of other agents included.
    pub requests: u32,
    /// Bookings of other agents.
    pub mirrored: u32,
    /// Bookings whose prefill is done.
    pub decoding: u32,
    /// Prompt tokens still to be prefilled: booked, and not yet seen stored.
    pub prefill_tokens: u64,
    /// Prompt tokens that were uncached at booking, of the bookings whose prefill is not done: Dynamo's
    /// `active_prefill_tokens`, which doesn't follow progress.
    pub unfinished_tokens: u64,
    /// Prompt tokens of all bookings, and tokens of their answers where these are followed.
    pub context_tokens: u64,
    /// Distinct blocks of all bookings' prompts, and stored blocks of answers that are followed.
    pub booked_blocks: usize,
}

impl Load {
    /// Bookings that were made here.
    #[must_use]
    pub const fn own_requests(&self) -> u32 {
        self.requests.saturating_sub(self.mirrored)
    }
}

/// A slow mean over requests, for what can't be known of a single one.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlowMean(f64);

impl SlowMean {
    /// The share of a new value. A hundred requests settle it.
    const GAIN: f64 = 0.02;

    pub(super) const fn new(first_guess: f64) -> Self {
        Self(first_guess)
    }

    pub(super) const fn get(self) -> f64 {
        self.0
    }

    pub(super) fn update(&mut self, value: f64) {
        self.0 += Self::GAIN * (value - self.0);
    }
}
