use super::*;
use crate::{select::SequenceKey, units::SequenceHash};
use std::time::UNIX_EPOCH;

fn decided(id: u128, hashes: std::ops::Range<u64>) -> Decided {
    let sequence: Vec<SequenceHash> = hashes.map(|hash| SequenceHash(hash * 7)).collect();
    let prompt_tokens = 16 * sequence.len() as u32 + 5;
    Decided {
        request: RequestId(id),
        at: UNIX_EPOCH + Duration::from_millis(id as u64),
        pool: "be".to_owned(),
        mode: "shadow",
        session: Some(99),
        prompt: Arc::new(PromptBlocks::new(prompt_tokens, [(16, sequence)])),
        key: SequenceKey::of_size(16),
        chosen: Some("s1".into()),
        held: [("s1".into(), 32), ("s2".into(), 16)].into_iter().collect(),
    }
}

fn over(id: u128, served: &str) -> Over {
    Over {
        request: RequestId(id),
        served: Some(served.to_owned()),
        response: Some(Duration::from_millis(12)),
        total: Some(Duration::from_millis(850)),
        is_normal: true,
    }
}

fn read(line: &str) -> Line {
    serde_json::from_str(line).expect("a line")
}

#[test]
fn a_line_has_what_was_chosen_and_what_haproxy_did_and_no_hash() {
    let mut book = Book::new(1 << 20);
    assert_eq!(book.decided(decided(5, 0..3)), None);
    let text = book.over(&over(5, "s2")).expect("a line");
    let line = read(&text);
    assert_eq!((line.at_ms, line.session, line.prompt_tokens), (5, Some(1), 53));
    assert_eq!((&line.blocks[..], line.block_tokens), (&[(1, 3)][..], 16));
    assert_eq!((line.chosen.as_deref(), line.chosen_cached), (Some("s1"), 32));
    assert_eq!((line.served.as_deref(), line.served_cached), (Some("s2"), 16));
    assert_eq!((line.response_ms, line.total_ms, line.normal), (Some(12), Some(850), true));
    assert_eq!(book.over(&over(5, "s2")), None, "told once");
    assert_eq!(book.over(&over(6, "s2")), None, "nothing was decided about it");
    book.decided(decided(8, 0..4));
    let next = read(&book.over(&over(8, "s1")).expect("a line"));
    assert_eq!(next.blocks, [(1, 4)], "it goes on where the one before ended");
    assert_eq!(book.lines("be", 6).iter().map(|line| read(line)).collect::<Vec<_>>(), [next]);
    assert!(book.lines("other", 0).is_empty());
}

#[test]
fn lines_and_decisions_that_wait_are_bounded() {
    let mut book = Book::new(20_000);
    for id in 0..200 {
        book.decided(decided(id, 0..2));
        book.over(&over(id, "s1"));
        assert!(book.bytes() <= 10_000);
    }
    let last = read(book.lines("be", 0).last().expect("lines"));
    assert_eq!(last.at_ms, 199);
    let mut lost =
        (0..20_000).filter_map(|id| book.decided(decided(1_000 + id, 0..1))).map(|line| read(&line));
    let first = lost.next().expect("the oldest becomes a line without its end");
    assert_eq!((first.at_ms, first.served), (1_000, None));
    assert!(lost.count() > 10_000);
}

#[test]
fn what_is_handed_over_is_written_and_the_file_turned_over_by_size() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("decisions.jsonl");
    let config = config::Record { max_bytes: 0, file: Some(path.clone()), file_max_bytes: 4_096 };
    let recording = Recording::start(&config).expect("a thread").expect("a file");
    for id in 0..60 {
        recording.recorder().decided(decided(id, 0..2));
        recording.recorder().over(over(id, "s1"));
    }
    recording.stop();
    let lines = |name: &str| {
        let text = std::fs::read_to_string(dir.path().join(name)).expect("a file");
        assert!(text.len() <= 4_096);
        text.lines().map(read).collect::<Vec<_>>()
    };
    let (before, now) = (lines("decisions.jsonl.1"), lines("decisions.jsonl"));
    assert_eq!(now.last().expect("lines").at_ms, 59);
    assert_eq!(before.last().expect("lines").at_ms + 1, now[0].at_ms, "none is lost between the two");
    let off = config::Record { max_bytes: 0, file: None, file_max_bytes: 1 };
    assert!(Recording::start(&off).expect("nothing to do").is_none());
}
