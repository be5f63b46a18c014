//! Which KV cache groups of a hybrid model count.
//!
//! Models that mix attention kinds keep one group of blocks for each kind, and announce the same block once for each
//! group. Only groups that hold every block of a prefix say how much of a prompt is cached; a sliding window keeps
//! the last few blocks alone. The kind decides, never the index: vLLM gives index 0 to either.

/// What one stream has told about its groups. Stores name the kind of their group, removals only its index, so what
/// the stores said is remembered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Groups {
    /// Bit i: group i is known to hold whole prefixes.
    whole: u64,
    /// Bit i: group i is known not to.
    partial: u64,
    partial_seen: bool,
}

impl Groups {
    /// Whether the stream has groups that do not count. The overlap of such a model is then an upper bound: a hit
    /// needs the other groups too.
    #[must_use]
    pub fn has_window_groups(&self) -> bool {
        self.partial_seen
    }

    /// Whether a store of this group counts. `kind` is vLLM's `kv_cache_spec_kind`.
    pub(super) fn store_counts(&mut self, kind: Option<&[u8]>, index: Option<u64>) -> bool {
        let counts = match kind {
            Some(kind) => {
                let whole = holds_whole_prefixes(kind) && index.is_none_or(|i| i < u64::from(u64::BITS));
                self.learn(index, whole);
                whole
            }
            None => self.removal_counts(index),
        };
        self.partial_seen |= !counts;
        counts
    }

    /// Whether a removal from this group counts. An index never heard of counts if it is 0: engines without groups
    /// say 0 or nothing.
    pub(super) fn removal_counts(&self, index: Option<u64>) -> bool {
        match index {
            None => true,
            Some(index) => match bit(index) {
                0 => false,
                bit => self.whole & bit != 0 || (index == 0 && self.partial & bit == 0),
            },
        }
    }

    fn learn(&mut self, index: Option<u64>, whole: bool) {
        let bit = index.map_or(0, bit);
        let (to, from) =
            if whole { (&mut self.whole, &mut self.partial) } else { (&mut self.partial, &mut self.whole) };
        *to |= bit;
        *from &= !bit;
    }
}

/// The bit of a group; none for an index beyond what a model could have.
fn bit(index: u64) -> u64 {
    u32::try_from(index).ok().and_then(|index| 1u64.checked_shl(index)).unwrap_or(0)
}

/// `sink_full_attention` is full attention with extra sink tokens: it holds whole prefixes too.
fn holds_whole_prefixes(kind: &[u8]) -> bool {
    matches!(kind, b"full_attention" | b"mla_attention" | b"sink_full_attention")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_decides_and_not_the_index() {
        let mut groups = Groups::default();
        assert!(!groups.store_counts(Some(b"sliding_window"), Some(0)));
        assert!(groups.store_counts(Some(b"full_attention"), Some(1)));
        assert!(!groups.removal_counts(Some(0)));
        assert!(groups.removal_counts(Some(1)));
        assert!(groups.has_window_groups());
    }

    #[test]
    fn an_engine_without_groups_counts_whole() {
        let mut groups = Groups::default();
        assert!(groups.store_counts(None, None));
        assert!(groups.store_counts(None, Some(0)));
        assert!(groups.removal_counts(None));
        assert!(groups.removal_counts(Some(0)));
        assert!(!groups.has_window_groups());
    }

    #[test]
    fn a_store_without_a_kind_goes_by_what_its_group_was_before() {
        let mut groups = Groups::default();
        groups.store_counts(Some(b"mamba"), Some(0));
        groups.store_counts(Some(b"mla_attention"), Some(2));
        assert!(!groups.store_counts(None, Some(0)));
        assert!(groups.store_counts(None, Some(2)));
        assert!(!groups.store_counts(None, Some(3)), "never heard of");
    }

    #[test]
    fn an_index_beyond_reason_never_counts() {
        let mut groups = Groups::default();
        assert!(!groups.store_counts(Some(b"full_attention"), Some(64)));
        assert!(!groups.removal_counts(Some(u64::MAX)));
    }
}
