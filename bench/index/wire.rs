//! The workload as vLLM sends it: maps with the fields of vLLM 0.24 and later, 16 events a batch.

use crate::events::Stored;
use crate::units::{EngineHash, RankId, TokenId};
use crate::workload::{BLOCK_TOKENS, Workload};

/// Events of a batch: what a busy engine publishes in one step.
const BATCH_EVENTS: usize = 16;

/// One rank's batch.
#[derive(Debug)]
pub struct Payload {
    /// Who sends it.
    pub rank: RankId,
    /// The message's last frame.
    pub bytes: Vec<u8>,
}

/// All events as batches; no two are alike.
#[must_use]
pub fn payloads(workload: &Workload) -> Vec<Payload> {
    let mut open: Vec<Vec<Vec<u8>>> = vec![Vec::new(); usize::from(workload.ranks)];
    let mut payloads = Vec::new();
    for ((rank, stored), tokens) in workload.stores().zip(workload.event_tokens()) {
        let events = &mut open[rank.index()];
        events.push(event(&stored, &tokens));
        if events.len() == BATCH_EVENTS {
            payloads.push(Payload { rank, bytes: batch(events) });
            events.clear();
        }
    }
    for (events, rank) in open.iter().zip(0..).filter(|(events, _)| !events.is_empty()) {
        payloads.push(Payload { rank: RankId(rank), bytes: batch(events) });
    }
    payloads
}

fn batch(events: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![0x93, 0xcb];
    out.extend(1.7e9f64.to_be_bytes());
    array(&mut out, events.len());
    out.extend(events.concat());
    out.push(0);
    out
}

fn event(stored: &Stored<'_>, tokens: &[TokenId]) -> Vec<u8> {
    const NIL: u8 = 0xc0;
    let mut out = vec![0x8b];
    text(&mut out, "type");
    text(&mut out, "BlockStored");
    text(&mut out, "block_hashes");
    array(&mut out, stored.engine_hashes.len());
    stored.engine_hashes.iter().for_each(|name| hash(&mut out, *name));
    text(&mut out, "parent_block_hash");
    match stored.parent {
        Some(parent) => hash(&mut out, parent),
        None => out.push(NIL),
    }
    text(&mut out, "token_ids");
    array(&mut out, tokens.len());
    tokens.iter().for_each(|token| integer(&mut out, token.0));
    text(&mut out, "block_size");
    integer(&mut out, BLOCK_TOKENS as u32);
    text(&mut out, "lora_id");
    out.push(NIL);
    text(&mut out, "medium");
    text(&mut out, "GPU");
    text(&mut out, "lora_name");
    out.push(NIL);
    text(&mut out, "extra_keys");
    array(&mut out, stored.engine_hashes.len());
    out.extend(stored.engine_hashes.iter().map(|_| NIL));
    text(&mut out, "group_idx");
    out.push(0);
    text(&mut out, "kv_cache_spec_kind");
    text(&mut out, "full_attention");
    out
}

fn array(out: &mut Vec<u8>, length: usize) {
    match length {
        0..16 => out.push(0x90 | length as u8),
        _ => {
            out.push(0xdc);
            out.extend((length as u16).to_be_bytes());
        }
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(0xa0 | text.len() as u8);
    out.extend(text.as_bytes());
}

fn hash(out: &mut Vec<u8>, name: EngineHash) {
    out.push(0xcf);
    out.extend(name.0.to_be_bytes());
}

fn integer(out: &mut Vec<u8>, value: u32) {
    match value {
        0..128 => out.push(value as u8),
        128..256 => out.extend([0xcc, value as u8]),
        256..65_536 => {
            out.push(0xcd);
            out.extend((value as u16).to_be_bytes());
        }
        _ => {
            out.push(0xce);
            out.extend(value.to_be_bytes());
        }
    }
}
