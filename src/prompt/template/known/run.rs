//! Changed loops at work: which messages they leave out, and what they write for the others.

use super::items::Items;
use super::reading::Need;
use super::seen::{self, Bytes};
use super::term::{LoopField, Place, Term};
use super::{KEEP_FILTER, STEPS_FUNCTION, Site, Sites};
use crate::prompt::tokenizer::Tokenized;
use crate::recent::{CacheStats, Key, Recent};
use crate::request::conversation::Message;
use minijinja::value::{Enumerator, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Environment, Error, Output, State};
use smallvec::SmallVec;
use std::cell::Cell;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

/// Enough that threads rarely wait for each other.
const SHARDS: usize = 8;

/// The texts that were written lately, bounded in bytes.
#[derive(Debug)]
pub(in crate::prompt::template) struct Known {
    sites: Vec<Site>,
    texts: Recent<Arc<Text>>,
}

/// The text of a message.
pub(in crate::prompt) struct Text {
    text: Box<str>,
    /// Its ids, once it was tokenized.
    pub(in crate::prompt) tokens: OnceLock<Option<Tokenized>>,
    /// Keeps the message's address its own: messages are told apart by it.
    _message: Weak<Message>,
}

impl Text {
    pub(in crate::prompt) fn as_str(&self) -> &str {
        &self.text
    }

    /// The length of the text, in bytes.
    pub(in crate::prompt) fn len(&self) -> usize {
        self.text.len()
    }

    /// The memory that it takes, ids and all.
    fn memory_bytes(&self) -> usize {
        self.len() + Tokenized::most_bytes(self.len()) + size_of::<Self>() + size_of::<Message>()
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Text").field("bytes", &self.len()).finish_non_exhaustive()
    }
}

impl Known {
    pub(in crate::prompt::template) fn new(sites: Sites, capacity_bytes: usize) -> Arc<Self> {
        Arc::new(Self { sites: sites.0, texts: Recent::new(capacity_bytes, SHARDS) })
    }

    pub(in crate::prompt::template) fn stats(&self) -> CacheStats {
        self.texts.stats()
    }

    /// Gives templates what changed loops need.
    pub(in crate::prompt::template) fn add_to(self: &Arc<Self>, environment: &mut Environment<'_>) {
        let (known, keeping) = (Arc::clone(self), Arc::clone(self));
        environment.add_function(STEPS_FUNCTION, move |state: &State<'_, '_>, site: usize, items: Value| {
            Run::start(&known, state, site, &items).map(|run| Value::from_object(Steps(Arc::new(run))))
        });
        environment.add_filter(KEEP_FILTER, move |text: Value, step: &Value| {
            match step.downcast_object::<Step>() {
                Some(step) => match keeping.keep(&step, &text) {
                    None if step.before.is_empty() => text,
                    kept => Value::from_object(Written { step, text, kept }),
                },
                None => text,
            }
        });
    }

    fn keep(&self, step: &Step, text: &Value) -> Option<Arc<Text>> {
        let (key, message, text) = (step.key?, step.message()?, text.as_str()?);
        let mut written = Bytes::new();
        step.run.append_written(&mut written, &step.place())?;
        // What a message changes would not be changed where its text is left out.
        if written != step.written {
            return None;
        }
        let text =
            Arc::new(Text { text: text.into(), tokens: OnceLock::new(), _message: Arc::downgrade(message) });
        self.texts.insert(key, Arc::clone(&text), text.memory_bytes());
        Some(text)
    }
}

/// One loop that is being run.
struct Run {
    known: Arc<Known>,
    site: usize,
    items: Items,
    outer: SmallVec<[Value; 8]>,
    constants: SmallVec<[Option<Value>; 4]>,
    /// What all keys begin with; `None` where nothing of this run is known or kept.
    steady: Option<Bytes>,
}

impl Run {
    fn start(known: &Arc<Known>, state: &State<'_, '_>, site: usize, items: &Value) -> Result<Self, Error> {
        let mut run = Self {
            known: Arc::clone(known),
            site,
            items: Items::of(items)?,
            outer: SmallVec::new(),
            constants: SmallVec::new(),
            steady: None,
        };
        if let Some(site) = known.sites.get(site) {
            run.outer.extend(site.names.iter().map(|name| state.lookup(name).unwrap_or_default()));
            let constant = |term: &Term| Some(term.value(&run.place(0))?.as_value().into_owned());
            run.constants = site.constants.iter().map(constant).collect();
            let are_functions =
                |name: &String| state.lookup(name).is_some_and(|called| called.kind() == ValueKind::Plain);
            if site.called.iter().all(are_functions) {
                run.steady = run.steady_bytes(site);
            }
        }
        Ok(run)
    }

    fn steady_bytes(&self, site: &Site) -> Option<Bytes> {
        let mut bytes = Bytes::new();
        let place = self.place(0);
        for term in &site.steady {
            seen::append(&mut bytes, &term.value(&place)?)?;
        }
        Some(bytes)
    }

    fn place(&self, index: usize) -> Place<'_> {
        Place { outer: &self.outer, constants: &self.constants, items: &self.items, index }
    }

    /// The name of the text of a message that was seen before, and what its loop may change.
    fn key(&self, place: &Place<'_>) -> Option<(Key, Bytes)> {
        let message = self.message(place.index)?;
        let site = self.known.sites.get(self.site)?;
        let mut bytes = self.steady.clone()?;
        bytes.extend_from_slice(&(Arc::as_ptr(message) as usize).to_le_bytes());
        append_needs(&mut bytes, &site.needs, place)?;
        let mut written = Bytes::new();
        self.append_written(&mut written, place)?;
        Some((self.known.texts.key(self.site as u64, &bytes), written))
    }

    /// The message that an item is, if it is one that was seen before, and as it was sent.
    fn message(&self, index: usize) -> Option<&Arc<Message>> {
        self.items.message(index)?.identity()
    }

    fn append_written(&self, bytes: &mut Bytes, place: &Place<'_>) -> Option<()> {
        let site = self.known.sites.get(self.site)?;
        site.written.iter().try_for_each(|term| seen::append(bytes, &term.value(place)?))
    }
}

fn append_needs(bytes: &mut Bytes, needs: &[Need], place: &Place<'_>) -> Option<()> {
    for need in needs {
        match need {
            Need::Value(term) => seen::append(bytes, &term.value(place)?)?,
            Need::Truth(term) => bytes.push(term.truth(place)?.into()),
            Need::Either { test, then, otherwise } => {
                let is_true = test.truth(place)?;
                bytes.push(is_true.into());
                append_needs(bytes, if is_true { then } else { otherwise }, place)?;
            }
        }
    }
    Some(())
}

/// What a changed loop goes over.
#[derive(Debug)]
struct Steps(Arc<Run>);

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").field("site", &self.site).finish_non_exhaustive()
    }
}

impl Object for Steps {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let run = Arc::clone(&self.0);
        let mut index = 0;
        // What a message's text depends on is looked at when the loop comes to it, and not before.
        Enumerator::Iter(Box::new(std::iter::from_fn(move || {
            let step = Step::next(&run, &mut index)?;
            let item = run.items.get(step.index)?.as_value().into_owned();
            Some(Value::from(vec![item, Value::from_object(step)]))
        })))
    }
}

/// A message that is to be written: what the template sees as `loop`.
#[derive(Debug)]
struct Step {
    run: Arc<Run>,
    index: usize,
    /// The texts of the messages since the one that was written last.
    before: SmallVec<[Arc<Text>; 16]>,
    /// The name of the text that is to be written.
    key: Option<Key>,
    written: Bytes,
}

impl Step {
    /// The next message whose text is not known; the last one is written in any case, as it seldom is.
    fn next(run: &Arc<Run>, index: &mut usize) -> Option<Self> {
        let mut before = SmallVec::new();
        while *index < run.items.len() {
            let at = *index;
            *index += 1;
            let (key, written) = run.key(&run.place(at)).unzip();
            if *index < run.items.len()
                && let Some(known) = key.and_then(|key| run.known.texts.get(key))
            {
                before.push(known);
                continue;
            }
            return Some(Self {
                run: Arc::clone(run),
                index: at,
                before,
                key,
                written: written.unwrap_or_default(),
            });
        }
        None
    }

    fn place(&self) -> Place<'_> {
        self.run.place(self.index)
    }

    fn message(&self) -> Option<&Arc<Message>> {
        self.run.message(self.index)
    }
}

impl Object for Step {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        Some(self.place().field(LoopField::of_name(key)?).as_value().into_owned())
    }
}

/// What a changed loop writes for a message: the known texts before it, and its own.
#[derive(Debug)]
struct Written {
    step: Arc<Step>,
    text: Value,
    kept: Option<Arc<Text>>,
}

impl Object for Written {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }
}

thread_local! {
    /// The text that is being written.
    static BEING_WRITTEN: Cell<Option<Arc<Text>>> = const { Cell::new(None) };
}

/// The text that these bytes are, where a changed loop writes it.
pub(in crate::prompt::template) fn being_written(bytes: &[u8]) -> Option<Arc<Text>> {
    BEING_WRITTEN.take().filter(|text| text.len() == bytes.len())
}

/// Writes what a changed loop has written; `false` for any other value.
pub(in crate::prompt::template) fn write(out: &mut Output<'_>, value: &Value) -> Result<bool, Error> {
    let Some(written) = value.downcast_object_ref::<Written>() else { return Ok(false) };
    let kept = &written.kept;
    for text in written.step.before.iter().chain(kept) {
        BEING_WRITTEN.set(Some(Arc::clone(text)));
        let result = out.write_str(&text.text);
        // It may have gone into a variable.
        BEING_WRITTEN.set(None);
        result?;
    }
    if kept.is_none() {
        out.write_str(written.text.as_str().unwrap_or_default())?;
    }
    Ok(true)
}
