//! The confirmed overlap: how much of a prompt a cache will really serve.

use super::candidate::Candidate;

/// Confirmed prefix overlap of a prompt with one rank, by tier, each the contiguous extension of the one before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Overlap {
    /// Tokens served by the GPU tier.
    pub gpu_tokens: u32,
    /// Tokens after those, served by the CPU tier.
    pub cpu_tokens: u32,
    /// Tokens after those, served from disk.
    pub disk_tokens: u32,
}

impl Overlap {
    /// What the index knows of the candidate, no more than an engine can use. Nothing of an untrusted candidate.
    pub(super) fn confirmed(candidate: &Candidate, prompt_tokens: u32) -> Self {
        if !candidate.trusted {
            return Self::default();
        }
        let size = candidate.block_tokens;
        let gpu = candidate.gpu_blocks;
        let cpu = gpu.saturating_add(candidate.cpu_blocks);
        let disk = cpu.saturating_add(candidate.disk_blocks);
        let [gpu, cpu, disk] = [gpu, cpu, disk].map(|blocks| usable_tokens(blocks, size, prompt_tokens));
        Self { gpu_tokens: gpu, cpu_tokens: cpu - gpu, disk_tokens: disk - cpu }
    }

    /// Tokens over all tiers.
    #[must_use]
    pub const fn tokens(&self) -> u32 {
        self.gpu_tokens + self.cpu_tokens + self.disk_tokens
    }
}

/// Tokens of `blocks` leading blocks, no more than an engine can take from a cache: it always computes the last token
/// itself, and takes whole blocks.
pub(super) fn usable_tokens(blocks: u32, block_tokens: u32, prompt_tokens: u32) -> u32 {
    let size = block_tokens.max(1);
    let most = prompt_tokens.saturating_sub(1) / size * size;
    blocks.saturating_mul(size).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::RankId;

    fn confirmed(gpu: u32, cpu: u32, disk: u32, prompt_tokens: u32) -> (u32, u32, u32) {
        let candidate = Candidate {
            gpu_blocks: gpu,
            cpu_blocks: cpu,
            disk_blocks: disk,
            ..Candidate::idle(RankId(0), 16)
        };
        let overlap = Overlap::confirmed(&candidate, prompt_tokens);
        (overlap.gpu_tokens, overlap.cpu_tokens, overlap.disk_tokens)
    }

    #[test]
    fn the_last_token_is_always_computed() {
        assert_eq!(confirmed(4, 0, 0, 64), (48, 0, 0));
        assert_eq!(confirmed(4, 0, 0, 65), (64, 0, 0));
        assert_eq!(confirmed(1, 0, 0, 16), (0, 0, 0));
        assert_eq!(confirmed(1, 0, 0, 0), (0, 0, 0));
    }

    #[test]
    fn the_cap_holds_for_the_sum_of_the_tiers() {
        assert_eq!(confirmed(1, 1, 1, 49), (16, 16, 16));
        assert_eq!(confirmed(1, 1, 1, 48), (16, 16, 0));
        assert_eq!(confirmed(3, 1, 1, 48), (32, 0, 0));
        assert_eq!(confirmed(u32::MAX, u32::MAX, 9, 48), (32, 0, 0));
    }

    #[test]
    fn an_untrusted_index_confirms_nothing() {
        let candidate = Candidate { gpu_blocks: 4, trusted: false, ..Candidate::idle(RankId(0), 16) };
        assert_eq!(Overlap::confirmed(&candidate, 100), Overlap::default());
    }
}
