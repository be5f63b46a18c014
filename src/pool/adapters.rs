//! The LoRA adapters of a pool: whose blocks are apart from the base model's.

use parking_lot::RwLock;

/// Adapters learned from events; engines serve some dozens. A limit, because the names come from outside.
const MAX_LEARNED: usize = 1024;

/// The longest name taken from an event, bytes.
const MAX_NAME_BYTES: usize = 256;

/// The names by which requests ask for an adapter as their model: configured ones, and those that events name.
#[derive(Debug, Default)]
pub struct Adapters {
    names: RwLock<Names>,
}

#[derive(Debug, Default)]
struct Names {
    configured: Vec<Box<str>>,
    learned: Vec<Box<str>>,
}

impl Adapters {
    pub(super) fn new(configured: &[String]) -> Self {
        let adapters = Self::default();
        adapters.configure(configured);
        adapters
    }

    /// The configuration names these.
    pub(super) fn configure(&self, configured: &[String]) {
        self.names.write().configured = configured.iter().map(|name| name.as_str().into()).collect();
    }

    /// Whether a model of this name is an adapter.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        let names = self.names.read();
        names.configured.iter().chain(&names.learned).any(|known| **known == *name)
    }

    /// An event or the engine's list of models named an adapter.
    pub fn learn(&self, name: &str) {
        if name.len() > MAX_NAME_BYTES || self.contains(name) {
            return;
        }
        let learned = &mut self.names.write().learned;
        if learned.len() < MAX_LEARNED {
            learned.push(name.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_from_the_configuration_and_from_events_up_to_a_limit() {
        let adapters = Adapters::new(&["sql".to_owned()]);
        assert!(adapters.contains("sql") && !adapters.contains("chat"));
        adapters.learn("chat");
        assert!(adapters.contains("chat"));
        adapters.learn(&"x".repeat(MAX_NAME_BYTES + 1));
        (0..2 * MAX_LEARNED).for_each(|n| adapters.learn(&n.to_string()));
        assert_eq!(adapters.names.read().learned.len(), MAX_LEARNED);
    }
}
