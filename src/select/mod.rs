//! Loads, bookings, the cost of a candidate and the choice.
