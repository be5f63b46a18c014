//! The texts that a template wrote for messages lately.
//!
//! A template is a program that runs over all messages at every turn of a conversation, and mostly writes for each what
//! it wrote before. Where a loop over messages writes a text that depends on nothing but the message and a few words
//! ([`reading`]), the source is changed so that the loop leaves out the messages whose text is known ([`rewriting`]). The
//! key of a text is everything that it was made from: the loop, the message, and the words. So what is known can never
//! change a prompt.

mod reading;
mod rewriting;
mod searches;
mod term;
#[cfg(test)]
mod tests;

use super::values::Fields;
use super::walk::{self, Visitor, variable};
use crate::recent::{CacheStats, Key, Recent};
use crate::request::conversation::Message;
use minijinja::machinery::ast::{Expr, ForLoop, Macro, Spanned, Stmt};
use minijinja::value::{Enumerator, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Environment, Error, Output, State};
use reading::{Dependence, Need, Refusal, Surroundings};
use rewriting::Edits;
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Weak};
use term::{Bytes, LoopField, Place, Term};

/// The function that a changed loop goes over: the messages to be written, each with a [`Step`].
const STEPS_FUNCTION: &str = "kvspoa_steps";
/// The filter through which a changed loop's text goes.
const KEEP_FILTER: &str = "kvspoa_keep";

/// Enough that threads rarely wait for each other.
const SHARDS: usize = 8;

/// A loop that leaves out what is known.
#[derive(Debug)]
struct Site {
    needs: Vec<Need>,
    /// The needs that are the same for all messages of one run.
    steady: Vec<Term>,
    written: Vec<Term>,
    names: Vec<String>,
    called: Vec<String>,
}

impl From<Dependence> for Site {
    fn from(found: Dependence) -> Self {
        let (mut needs, mut steady) = (Vec::new(), Vec::new());
        for need in found.needs {
            match need {
                Need::Value(term @ Term::Outer(_)) => steady.push(term),
                need => needs.push(need),
            }
        }
        Self { needs, steady, written: found.written, names: found.names, called: found.called }
    }
}

/// The loops of a model's templates that leave out what is known.
#[derive(Debug, Default)]
pub(super) struct Sites(Vec<Site>);

impl Sites {
    /// The source of a template with its loops changed; `None` where none of them can be.
    pub(super) fn prepare(
        &mut self,
        source: &str,
        template: &Stmt<'_>,
        marks_as_safe: bool,
    ) -> Option<String> {
        let Stmt::Template(root) = template else { return None };
        let tags = rewriting::loops(source)?;
        let around = surroundings(template, &root.children, marks_as_safe);
        let mut all = Vec::new();
        loops_at_top(&root.children, &mut all);
        let mut edits = Edits::default();
        let before = self.0.len();
        let mut changed = false;
        for each in all {
            let Some(tags) = tags.iter().find(|tags| tags.are_of(each)) else { continue };
            if let Some(condition) = searches::condition(source, each) {
                edits.end_unless(source, tags, condition);
                changed = true;
            } else if let Ok(found) = dependence(each, &around)
                && edits.make_known(source, tags, each, self.0.len(), &found.loop_reads)
            {
                self.0.push(found.into());
            }
        }
        (changed || self.0.len() > before).then(|| edits.applied(source))
    }
}

/// What the texts of a loop over messages depend on.
fn dependence<'t, 'a>(
    each: &'t ForLoop<'a>,
    around: &'t Surroundings<'t, 'a>,
) -> Result<Dependence, Refusal> {
    let is_plain = !each.recursive && each.filter_expr.is_none() && each.else_body.is_empty();
    if !is_plain || !root(&each.iter).is_some_and(|name| around.messages.contains(name)) {
        return Err(Refusal::Statement);
    }
    let found = reading::of_loop(each, around)?;
    if found.writes_text { Ok(found) } else { Err(Refusal::Statement) }
}

/// The loops of a template that stand neither in another loop nor in a macro.
fn loops_at_top<'t, 'a>(statements: &'t [Stmt<'a>], out: &mut Vec<&'t ForLoop<'a>>) {
    for statement in statements {
        match statement {
            Stmt::ForLoop(each) => out.push(each),
            Stmt::IfCond(cond) => {
                loops_at_top(&cond.true_body, out);
                loops_at_top(&cond.false_body, out);
            }
            _ => {}
        }
    }
}

/// The variable that an expression is a part of.
fn root<'a>(expression: &Expr<'a>) -> Option<&'a str> {
    match expression {
        Expr::Slice(slice) => root(&slice.expr),
        Expr::Filter(filter) => root(filter.expr.as_ref()?),
        expression => variable(expression),
    }
}

fn surroundings<'t, 'a>(
    template: &'t Stmt<'a>,
    top: &'t [Stmt<'a>],
    marks_as_safe: bool,
) -> Surroundings<'t, 'a> {
    let mut names = Names::default();
    walk::statement(template, false, &mut names);
    let mut messages = HashSet::from(["messages"]);
    loop {
        let before = messages.len();
        let made =
            names.assignments.iter().filter(|(_, from)| messages.contains(from)).map(|(name, _)| *name);
        let made: Vec<_> = made.collect();
        messages.extend(made);
        if messages.len() == before {
            break;
        }
    }
    let mut macros: HashMap<&str, &Spanned<Macro<'a>>> = HashMap::new();
    for statement in top {
        if let Stmt::Macro(each) = statement
            && names.macros.iter().filter(|name| **name == each.name).count() == 1
            && !names.bound.contains(each.name)
        {
            macros.insert(each.name, each);
        }
    }
    Surroundings { macros, bound_within: names.bound_within, messages, marks_as_safe }
}

/// What the names of a template stand for.
#[derive(Default)]
struct Names<'a> {
    /// Names that are set from a part of another.
    assignments: Vec<(&'a str, &'a str)>,
    macros: Vec<&'a str>,
    bound: HashSet<&'a str>,
    /// Those that are bound in loops and the like.
    bound_within: HashSet<&'a str>,
}

impl<'t, 'a> Visitor<'t, 'a> for Names<'a> {
    fn statement(&mut self, statement: &'t Stmt<'a>, in_macro: bool) {
        match statement {
            Stmt::Set(set) => {
                self.bind(&set.target);
                if let (Some(name), Some(from)) = (variable(&set.target), root(&set.expr)) {
                    self.assignments.push((name, from));
                }
            }
            Stmt::SetBlock(set) => self.bind(&set.target),
            Stmt::ForLoop(each) => {
                self.bind(&each.target);
                if !in_macro {
                    self.within(std::iter::once(&each.target), &each.body);
                }
            }
            Stmt::WithBlock(with) => {
                with.assignments.iter().for_each(|(target, _)| self.bind(target));
                if !in_macro {
                    self.within(with.assignments.iter().map(|(target, _)| target), &with.body);
                }
            }
            Stmt::Macro(each) => self.macros.push(each.name),
            _ => {}
        }
    }
}

impl<'a> Names<'a> {
    fn bind(&mut self, target: &Expr<'a>) {
        match target {
            Expr::Var(var) => {
                self.bound.insert(var.id);
            }
            Expr::List(list) => list.items.iter().for_each(|item| self.bind(item)),
            Expr::Tuple(tuple) => tuple.items.iter().for_each(|item| self.bind(item)),
            _ => {}
        }
    }

    fn within<'t>(&mut self, targets: impl Iterator<Item = &'t Expr<'a>>, body: &'t [Stmt<'a>])
    where
        'a: 't,
    {
        let mut names = Names::default();
        targets.for_each(|target| names.bind(target));
        body.iter().for_each(|statement| walk::statement(statement, true, &mut names));
        self.bound_within.extend(names.bound);
    }
}

/// The texts that were written lately, bounded in bytes.
#[derive(Debug)]
pub(super) struct Known {
    sites: Vec<Site>,
    texts: Recent<Text>,
}

/// The text of a message.
#[derive(Clone, Debug)]
struct Text {
    text: Arc<str>,
    /// Keeps the message's address its own: messages are told apart by it.
    _message: Weak<Message>,
}

impl Known {
    pub(super) fn new(sites: Sites, capacity_bytes: usize) -> Arc<Self> {
        Arc::new(Self { sites: sites.0, texts: Recent::new(capacity_bytes, SHARDS) })
    }

    pub(super) fn stats(&self) -> CacheStats {
        self.texts.stats()
    }

    /// Gives templates what changed loops need.
    pub(super) fn add_to(self: &Arc<Self>, environment: &mut Environment<'_>) {
        let (known, keeping) = (Arc::clone(self), Arc::clone(self));
        environment.add_function(STEPS_FUNCTION, move |state: &State<'_, '_>, site: usize, items: Value| {
            Run::start(&known, state, site, items).map(|run| Value::from_object(Steps(Arc::new(run))))
        });
        environment.add_filter(KEEP_FILTER, move |text: Value, step: &Value| {
            match step.downcast_object::<Step>() {
                Some(step) => {
                    keeping.keep(&step, &text);
                    if step.before.is_empty() { text } else { Value::from_object(Written { step, text }) }
                }
                None => text,
            }
        });
    }

    fn keep(&self, step: &Step, text: &Value) {
        let (Some(key), Some(message), Some(text)) = (step.key, step.message(), text.as_str()) else {
            return;
        };
        let mut written = Bytes::new();
        let is_unwritten = step.run.append_written(&mut written, &step.place()).is_some();
        if is_unwritten && written == step.written {
            let bytes = text.len() + size_of::<Message>();
            self.texts.insert(key, Text { text: text.into(), _message: Arc::downgrade(message) }, bytes);
        }
    }
}

/// One loop that is being run.
struct Run {
    known: Arc<Known>,
    site: usize,
    items: Vec<Value>,
    is_sized: bool,
    outer: SmallVec<[Value; 8]>,
    /// What all keys begin with; `None` where nothing of this run is known or kept.
    steady: Option<Bytes>,
}

impl Run {
    fn start(known: &Arc<Known>, state: &State<'_, '_>, site: usize, items: Value) -> Result<Self, Error> {
        let iterator = items.try_iter()?;
        let is_sized = matches!(iterator.size_hint(), (least, Some(most)) if least == most);
        let mut run = Self {
            known: Arc::clone(known),
            site,
            items: iterator.collect(),
            is_sized,
            outer: SmallVec::new(),
            steady: None,
        };
        if let Some(site) = known.sites.get(site) {
            run.outer.extend(site.names.iter().map(|name| state.lookup(name).unwrap_or_default()));
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
            term::append(&mut bytes, &term.value(&place)?)?;
        }
        Some(bytes)
    }

    fn place(&self, index: usize) -> Place<'_> {
        Place { outer: &self.outer, items: &self.items, index, is_sized: self.is_sized }
    }

    /// The name of the text of a message that was seen before, and what its loop may change.
    fn key(&self, place: &Place<'_>) -> Option<(Key, Bytes)> {
        let message = message(self.items.get(place.index)?)?;
        let site = self.known.sites.get(self.site)?;
        let mut bytes = self.steady.clone()?;
        bytes.extend_from_slice(&(Arc::as_ptr(message) as usize).to_le_bytes());
        append_needs(&mut bytes, &site.needs, place)?;
        let mut written = Bytes::new();
        self.append_written(&mut written, place)?;
        Some((self.known.texts.key(self.site as u64, &bytes), written))
    }

    fn append_written(&self, bytes: &mut Bytes, place: &Place<'_>) -> Option<()> {
        let site = self.known.sites.get(self.site)?;
        site.written.iter().try_for_each(|term| term::append(bytes, &term.value(place)?))
    }
}

fn append_needs(bytes: &mut Bytes, needs: &[Need], place: &Place<'_>) -> Option<()> {
    for need in needs {
        match need {
            Need::Value(term) => term::append(bytes, &term.value(place)?)?,
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

/// The message that an item is, if it is one that was seen before, and as it was sent.
fn message(item: &Value) -> Option<&Arc<Message>> {
    item.downcast_object_ref::<Fields>()?.message.as_ref()
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
            let item = run.items.get(step.index)?.clone();
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
    before: SmallVec<[Arc<str>; 16]>,
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
                before.push(known.text);
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
        message(self.run.items.get(self.index)?)
    }
}

impl Object for Step {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        Some(self.place().field(LoopField::of_name(key)?))
    }
}

/// What a changed loop writes for a message: the known texts before it, and its own.
#[derive(Debug)]
struct Written {
    step: Arc<Step>,
    text: Value,
}

impl Object for Written {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }
}

/// Writes what a changed loop has written; `false` for any other value.
pub(super) fn write(out: &mut Output<'_>, value: &Value) -> Result<bool, Error> {
    let Some(written) = value.downcast_object_ref::<Written>() else { return Ok(false) };
    for text in &written.step.before {
        out.write_str(text)?;
    }
    out.write_str(written.text.as_str().unwrap_or_default())?;
    Ok(true)
}
