//! News as bytes: little endian, texts and lists with their length in front. Nothing is allocated by a length that the
//! bytes do not bear out.

use super::news::{News, Told, What};
use crate::{
    select::{Ask, PromptBlocks, SequenceKey},
    units::{RequestId, SequenceHash},
};
use nom::{
    IResult, Parser,
    combinator::{all_consuming, map, map_opt, map_res},
    multi::{length_count, length_data},
    number::complete::{le_u8, le_u16, le_u32, le_u64, le_u128},
};
use std::sync::Arc;

/// The longest message, bytes: a prompt of two million tokens in blocks of 16.
pub(super) const MAX_BYTES: usize = 1 << 20;

/// Sequence hashes that are told of one prompt at most: what lies behind them counts as load, but not as prefix.
const MAX_HASHES: usize = (MAX_BYTES - (64 << 10)) / size_of::<u64>();

/// Ids in one message at most.
pub(super) const MAX_IDS: usize = 4096;

/// Names of HAProxy's are far shorter.
const MAX_NAME_BYTES: usize = 1024;

const BOOKED: u8 = 1;
const ENDED: u8 = 2;
const ALIVE: u8 = 3;

/// Appends the bytes of `news`. Of longer lists and names than there can be, the beginning is told.
pub(super) fn encode(news: &News, out: &mut Vec<u8>) {
    let kind = match news.what {
        What::Booked(_) => BOOKED,
        What::Ended(_) => ENDED,
        What::Alive(_) => ALIVE,
    };
    out.push(kind);
    name(&news.pool, out);
    match &news.what {
        What::Booked(told) => {
            name(&told.server, out);
            out.extend(told.rank.to_le_bytes());
            out.extend(told.key.block_tokens.to_le_bytes());
            out.extend(told.ask.id.0.to_le_bytes());
            out.push(u8::from(told.ask.session.is_some()));
            out.extend(told.ask.session.unwrap_or_default().to_le_bytes());
            out.extend(told.ask.prompt.tokens(told.key).to_le_bytes());
            let hashes = told.ask.prompt.sequence(told.key);
            let hashes = hashes.get(..MAX_HASHES).unwrap_or(hashes);
            out.extend((hashes.len() as u32).to_le_bytes());
            out.extend(hashes.iter().flat_map(|hash| hash.0.to_le_bytes()));
        }
        What::Ended(id) => out.extend(id.0.to_le_bytes()),
        What::Alive(ids) => {
            let ids = ids.get(..MAX_IDS).unwrap_or(ids);
            out.extend((ids.len() as u32).to_le_bytes());
            out.extend(ids.iter().flat_map(|id| id.0.to_le_bytes()));
        }
    }
}

fn name(name: &str, out: &mut Vec<u8>) {
    let mut length = name.len().min(MAX_NAME_BYTES);
    while !name.is_char_boundary(length) {
        length -= 1;
    }
    out.extend((length as u16).to_le_bytes());
    out.extend_from_slice(&name.as_bytes()[..length]);
}

/// A message is not as it should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("malformed news of a peer")]
pub(super) struct Malformed;

/// Reads one whole message.
pub(super) fn decode(bytes: &[u8]) -> Result<News, Malformed> {
    all_consuming(read_news).parse(bytes).map(|(_, news)| news).map_err(|_| Malformed)
}

fn read_news(input: &[u8]) -> IResult<&[u8], News> {
    let (input, (kind, pool)) = (le_u8, read_name).parse(input)?;
    let (input, what) = match kind {
        BOOKED => map(read_told, What::Booked).parse(input)?,
        ENDED => map(read_id, What::Ended).parse(input)?,
        ALIVE => map(length_count(le_u32, read_id), What::Alive).parse(input)?,
        _ => return Err(nom::Err::Error(nom::error::make_error(input, nom::error::ErrorKind::Switch))),
    };
    Ok((input, News { pool, what }))
}

fn read_name(input: &[u8]) -> IResult<&[u8], Arc<str>> {
    map_res(length_data(le_u16), |bytes: &[u8]| std::str::from_utf8(bytes).map(Arc::from)).parse(input)
}

fn read_id(input: &[u8]) -> IResult<&[u8], RequestId> {
    map(le_u128, RequestId).parse(input)
}

fn read_session(input: &[u8]) -> IResult<&[u8], Option<u64>> {
    let flag = map_opt(le_u8, |flag| [false, true].get(usize::from(flag)).copied());
    map((flag, le_u64), |(is_there, session)| is_there.then_some(session)).parse(input)
}

fn read_told(input: &[u8]) -> IResult<&[u8], Told> {
    let (input, (server, rank, block_tokens)) = (read_name, le_u16, le_u32).parse(input)?;
    let (input, (id, session, tokens)) = (read_id, read_session, le_u32).parse(input)?;
    let (input, hashes) = length_count(le_u32, map(le_u64, SequenceHash)).parse(input)?;
    let prompt = Arc::new(PromptBlocks::new(tokens, [(block_tokens, hashes)]));
    Ok((
        input,
        Told { server, rank, key: SequenceKey::of_size(block_tokens), ask: Ask { id, prompt, session } },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn booked(hashes: usize) -> News {
        let sequence = (0..hashes as u64).map(SequenceHash).collect();
        let prompt = Arc::new(PromptBlocks::new(16 * hashes as u32 + 5, [(16, sequence)]));
        let ask = Ask { id: RequestId(u128::MAX - 1), prompt, session: Some(9) };
        News {
            pool: "be".into(),
            what: What::Booked(Told { server: "s1".into(), rank: 3, key: SequenceKey::of_size(16), ask }),
        }
    }

    fn bytes(news: &News) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode(news, &mut bytes);
        bytes
    }

    #[test]
    fn what_is_told_is_what_is_read() {
        let ids: Vec<RequestId> = (0..3).map(RequestId).collect();
        let ended = News { pool: "".into(), what: What::Ended(RequestId(1 << 100)) };
        for news in [booked(0), booked(100), ended, News { pool: "b-ü".into(), what: What::Alive(ids) }] {
            let read = decode(&bytes(&news)).expect("whole");
            assert_eq!(format!("{read:?}"), format!("{news:?}"));
        }
    }

    #[test]
    fn of_a_prompt_without_end_the_beginning_is_told() {
        let news = booked(3 * MAX_HASHES);
        let bytes = bytes(&news);
        assert!(bytes.len() <= MAX_BYTES);
        let What::Booked(told) = decode(&bytes).expect("whole").what else { panic!("a booking") };
        assert_eq!(told.ask.prompt.sequence(told.key).len(), MAX_HASHES);
        assert_eq!(told.ask.prompt.tokens(told.key) as usize, 16 * 3 * MAX_HASHES + 5);
    }

    #[test]
    fn what_is_cut_or_goes_on_is_malformed() {
        let whole = bytes(&booked(4));
        for length in 0..whole.len() {
            assert!(decode(&whole[..length]).is_err(), "{length}");
        }
        assert!(decode(&[&whole[..], &[0]].concat()).is_err());
        let claims = [&[ALIVE, 0, 0][..], &u32::MAX.to_le_bytes()].concat();
        assert!(decode(&claims).is_err(), "a length that nothing follows");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(news) = decode(&bytes) {
                let mut again = Vec::new();
                encode(&news, &mut again);
                prop_assert!(decode(&again).is_ok());
            }
        }
    }
}
