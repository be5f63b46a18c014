//! Finds while events are applied.

use crate::measure::Quantiles;
use crate::ours::{KEY, Ours};
use crate::shapes::print;
use crate::subject::Subject;
use kvspoa::index::Overlaps;
use kvspoa::units::{SequenceHash, TokenId};
use kvspoa::workload::{BLOCK_TOKENS, Shape, Workload, short_prompts};
use parking_lot::RwLock;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Blocks a second that the writer applies.
const RATE: f64 = 1e6;

/// Events that the writer applies under one lock.
const EVENTS_PER_HOLD: usize = 64;

/// One thread finds, another applies the second half of the workload: the maps grow meanwhile. Before that, the finds
/// alone.
pub fn run(ranks: u16, scale: u64) -> bool {
    let shape = Shape::conv2k8k(ranks, scale);
    let workload = Workload::new(&KEY, &|tokens: &[TokenId]| KEY.block(tokens), shape);
    let queries: Vec<Vec<SequenceHash>> = short_prompts(&shape, 2000)
        .iter()
        .map(|tokens| KEY.sequence(KEY.plain_root(), tokens, BLOCK_TOKENS as u32))
        .collect();
    let events: Vec<_> = workload.events().collect();
    let (first, second) = events.split_at(events.len() / 2);
    let mut ours = Ours::new(ranks);
    for (rank, event) in first {
        ours.index.apply(*rank, event);
    }
    let index = RwLock::new(ours.index);

    let find_until = |done: &dyn Fn() -> bool| {
        let (mut times, mut overlaps) = (Quantiles::default(), Overlaps::default());
        for query in queries.iter().cycle() {
            times.time(|| index.read().find(black_box(query), &mut overlaps));
            if done() {
                break;
            }
        }
        times
    };
    let start = Instant::now();
    report("alone", &mut find_until(&|| start.elapsed() > Duration::from_secs(2)));

    let finished = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let (start, mut blocks) = (Instant::now(), 0);
            for events in second.chunks(EVENTS_PER_HOLD) {
                let mut index = index.write();
                for (rank, event) in events {
                    blocks += index.apply(*rank, event).stored;
                }
                drop(index);
                while start.elapsed().as_secs_f64() * RATE < blocks as f64 {
                    thread::sleep(Duration::from_micros(50));
                }
            }
            finished.store(true, Ordering::Relaxed);
        });
        report("writer", &mut find_until(&|| finished.load(Ordering::Relaxed)));
    });
    true
}

fn report(name: &str, times: &mut Quantiles) {
    for (label, share) in [("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0)] {
        print(&format!("{name} {label}"), times.at_us(share));
    }
}
