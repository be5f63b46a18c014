//! How many requests, and how many bytes of their bodies, may be in the agent at once.

use crate::metrics::SpopMetrics;
use arc_swap::ArcSwap;
use metrics::Gauge;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Why a request was not let in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Refusal {
    /// Too many requests are in flight.
    Requests,
    /// Too many bytes are in flight.
    Bytes,
    /// The payload alone is too long.
    Payload,
}

/// The limits of [`Admission`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdmissionLimits {
    /// Requests in flight, over all connections.
    pub requests: usize,
    /// Payload bytes in flight, over all connections.
    pub bytes: usize,
    /// Payload bytes of one request, and so of one connection's reassembly of fragments.
    pub payload_bytes: usize,
}

/// The budget that all connections share. A request is charged for its whole length before its body is read.
#[derive(Debug)]
pub struct Admission {
    limits: ArcSwap<AdmissionLimits>,
    requests: AtomicUsize,
    bytes: AtomicUsize,
    requests_gauge: Gauge,
    bytes_gauge: Gauge,
}

impl Admission {
    /// An empty budget.
    #[must_use]
    pub fn new(limits: AdmissionLimits, metrics: &SpopMetrics) -> Self {
        Self {
            limits: ArcSwap::from_pointee(limits),
            requests: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            requests_gauge: metrics.in_flight.clone(),
            bytes_gauge: metrics.in_flight_bytes.clone(),
        }
    }

    /// Sets other limits. What is in flight beyond a lower one stays.
    pub fn set_limits(&self, limits: AdmissionLimits) {
        self.limits.store(Arc::new(limits));
    }

    /// Lets a request of so many payload bytes in.
    ///
    /// # Errors
    ///
    /// The limit that stands against it.
    pub fn admit(self: &Arc<Self>, payload_bytes: usize) -> Result<Ticket, Refusal> {
        take(&self.requests, 1, self.limits.load().requests).ok_or(Refusal::Requests)?;
        self.requests_gauge.increment(1.0);
        let mut ticket = Ticket { admission: Arc::clone(self), bytes: 0 };
        ticket.grow(payload_bytes)?;
        Ok(ticket)
    }
}

/// The right to be in flight; given back when dropped.
#[derive(Debug)]
pub struct Ticket {
    admission: Arc<Admission>,
    bytes: usize,
}

impl Ticket {
    /// Asks for more bytes of the same request.
    ///
    /// # Errors
    ///
    /// The limit that stands against it. The ticket stays as it was.
    pub fn grow(&mut self, more_bytes: usize) -> Result<(), Refusal> {
        let total = self.bytes.saturating_add(more_bytes);
        let limits = **self.admission.limits.load();
        if total > limits.payload_bytes {
            return Err(Refusal::Payload);
        }
        take(&self.admission.bytes, more_bytes, limits.bytes).ok_or(Refusal::Bytes)?;
        self.admission.bytes_gauge.increment(more_bytes as f64);
        self.bytes = total;
        Ok(())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.admission.requests.fetch_sub(1, Ordering::Relaxed);
        self.admission.requests_gauge.decrement(1.0);
        self.admission.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.admission.bytes_gauge.decrement(self.bytes as f64);
    }
}

/// Adds to a counter unless that would exceed the limit. The counters order nothing else, so relaxed is enough.
fn take(counter: &AtomicUsize, amount: usize, limit: usize) -> Option<usize> {
    counter
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
            held.checked_add(amount).filter(|total| *total <= limit)
        })
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(requests: usize, bytes: usize, payload_bytes: usize) -> Arc<Admission> {
        let limits = AdmissionLimits { requests, bytes, payload_bytes };
        Arc::new(Admission::new(limits, &SpopMetrics::register()))
    }

    #[test]
    fn requests_are_limited_and_come_back() {
        let admission = admission(1, 100, 100);
        let ticket = admission.admit(1).expect("the first");
        assert_eq!(admission.admit(1).err(), Some(Refusal::Requests));
        drop(ticket);
        assert!(admission.admit(1).is_ok());
    }

    #[test]
    fn a_refusal_for_bytes_takes_nothing() {
        let admission = admission(2, 100, 100);
        let held = admission.admit(60).expect("fits");
        assert_eq!(admission.admit(41).err(), Some(Refusal::Bytes));
        assert_eq!(admission.requests.load(Ordering::Relaxed), 1);
        drop(held);
        assert!(admission.admit(100).is_ok());
    }

    #[test]
    fn other_limits_hold_for_those_that_come() {
        let admission = admission(2, 100, 100);
        let held = [admission.admit(40).expect("fits"), admission.admit(40).expect("fits")];
        admission.set_limits(AdmissionLimits { requests: 1, bytes: 100, payload_bytes: 100 });
        assert_eq!(admission.admit(1).err(), Some(Refusal::Requests));
        admission.set_limits(AdmissionLimits { requests: 3, bytes: 90, payload_bytes: 100 });
        assert_eq!(admission.admit(20).err(), Some(Refusal::Bytes));
        drop(held);
        assert!(admission.admit(90).is_ok());
        assert_eq!(admission.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_request_grows_up_to_the_payload_limit() {
        let admission = admission(2, 100, 50);
        let mut ticket = admission.admit(40).expect("fits");
        assert_eq!(ticket.grow(11), Err(Refusal::Payload));
        assert_eq!(ticket.grow(usize::MAX), Err(Refusal::Payload));
        assert_eq!(ticket.grow(10), Ok(()));
        assert_eq!(admission.bytes.load(Ordering::Relaxed), 50);
        drop(ticket);
        assert_eq!(admission.bytes.load(Ordering::Relaxed), 0);
    }
}
