//! What a template wrote. Texts that were written before are not copied.

use super::known::{self, Text};
use crate::prompt::tokenizer::TimeIsUp;
use std::cell::Cell;
use std::io;
use std::sync::Arc;

thread_local! {
    /// Memory of an earlier text of this thread: a fresh one costs more than to write it.
    static SPARE: Cell<Rendered> = const { Cell::new(Rendered::new()) };
}

/// The longest text whose memory is kept: of prompts that fill the largest context of today.
const SPARE_BYTES: usize = 4 << 20;

/// The most known parts whose memory is kept.
const SPARE_PARTS: usize = 1024;

/// What a template made of a conversation: a text, of which parts were written before.
#[derive(Debug)]
pub(in crate::prompt) struct Rendered {
    new: String,
    /// The places in `new` where the other parts stand; one behind the other.
    known: Vec<(usize, Arc<Text>)>,
    text_bytes: usize,
}

impl Rendered {
    const fn new() -> Self {
        Self { new: String::new(), known: Vec::new(), text_bytes: 0 }
    }

    /// The length of the whole text, in bytes.
    pub(in crate::prompt) const fn text_bytes(&self) -> usize {
        self.text_bytes
    }

    /// The text: what was written now, and the known text behind it, which only the last part has not.
    pub(in crate::prompt) fn parts(&self) -> impl Iterator<Item = (&str, Option<&Arc<Text>>)> {
        let known = self.known.iter().map(|(at, text)| (*at, Some(text)));
        let mut start = 0;
        known.chain([(self.new.len(), None)]).map(move |(end, text)| {
            let new = self.new.get(start..end).unwrap_or_default();
            start = end;
            (new, text)
        })
    }

    /// The whole text.
    pub(in crate::prompt) fn into_text(self) -> String {
        if self.known.is_empty() {
            return self.new;
        }
        let mut whole = String::with_capacity(self.text_bytes);
        for (new, known) in self.parts() {
            whole.push_str(new);
            whole.push_str(known.map_or("", |text| text.as_str()));
        }
        self.recycle();
        whole
    }

    /// Takes back the memory of a text that is used up.
    pub(in crate::prompt) fn recycle(mut self) {
        if self.new.capacity() <= SPARE_BYTES && self.known.capacity() <= SPARE_PARTS {
            self.new.clear();
            self.known.clear();
            self.text_bytes = 0;
            SPARE.set(self);
        }
    }
}

impl From<String> for Rendered {
    fn from(text: String) -> Self {
        Self { text_bytes: text.len(), new: text, known: Vec::new() }
    }
}

/// The output of a template, which is stopped at a limit, and when the time is up.
pub(super) struct Bounded<'t> {
    rendered: Rendered,
    limit_bytes: usize,
    time_is_up: TimeIsUp<'t>,
    /// What may be written until the next look at the time.
    unwatched: usize,
}

/// A look at the time costs as much as some writes of a few bytes.
const UNWATCHED_BYTES: usize = 256 << 10;
const BYTES_OF_A_WRITE: usize = 1 << 10;

impl<'t> Bounded<'t> {
    pub(super) fn new(limit_bytes: usize, time_is_up: TimeIsUp<'t>) -> Self {
        Self { rendered: SPARE.replace(Rendered::new()), limit_bytes, time_is_up, unwatched: UNWATCHED_BYTES }
    }

    pub(super) fn finish(self) -> Rendered {
        self.rendered
    }

    fn watch(&mut self) -> io::Result<()> {
        if (self.time_is_up)() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.unwatched = UNWATCHED_BYTES;
        Ok(())
    }
}

/// Whether a template was stopped as the time was up.
pub(super) fn was_late(error: &(dyn std::error::Error + 'static)) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::TimedOut)
}

impl io::Write for Bounded<'_> {
    /// Takes a whole text: minijinja writes no others.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text_bytes = &mut self.rendered.text_bytes;
        *text_bytes += bytes.len();
        if *text_bytes > self.limit_bytes {
            return Err(io::ErrorKind::StorageFull.into());
        }
        match self.unwatched.checked_sub(bytes.len() + BYTES_OF_A_WRITE) {
            Some(left) => self.unwatched = left,
            None => self.watch()?,
        }
        let Rendered { new, known, .. } = &mut self.rendered;
        match known::being_written(bytes) {
            Some(text) => known.push((new.len(), text)),
            None => new.push_str(std::str::from_utf8(bytes).map_err(|_| io::ErrorKind::InvalidData)?),
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
