//! `{% for message in messages %}…{% endfor %}` → a loop over the messages whose text is not known.
//!
//! The tags keep their marks for the blanks around them, so the text between them is what it was.

use super::{KEEP_FILTER, STEPS_FUNCTION};
use crate::prompt::template::environment::syntax;
use crate::prompt::template::walk::{self, Visitor, variable};
use minijinja::machinery::ast::{Expr, ForLoop, Stmt};
use minijinja::machinery::{Span, Token, tokenize};
use std::collections::HashSet;
use std::ops::Range;

/// Where a loop stands in the source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Tags {
    open: Tag,
    /// What it goes over.
    items: Range<usize>,
    close: Tag,
}

/// The two ends of a tag, `{%-` and `-%}`.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Tag {
    start: Range<usize>,
    end: Range<usize>,
}

/// The loops of a template that have one variable; `None` where they are not found for certain.
pub(super) fn loops(source: &str) -> Option<Vec<Tags>> {
    let (mut found, mut open) = (Vec::new(), Vec::new());
    let mut tokens = tokenize(source, false, syntax().ok()?);
    while let Some(token) = tokens.next() {
        let (Token::BlockStart, start) = token.ok()? else { continue };
        let mut words = Vec::new();
        let end = loop {
            match tokens.next()?.ok()? {
                (Token::BlockEnd, end) => break end,
                word => words.push(word),
            }
        };
        let tag = Tag { start: range(start), end: range(end) };
        match &words[..] {
            [(Token::Ident("for"), _), (Token::Ident(_), _), (Token::Ident("in"), within), ..] => {
                let items = range(*within).end..tag.end.start;
                open.push((tag, Some(items)));
            }
            [(Token::Ident("for"), _), ..] => open.push((tag, None)),
            [(Token::Ident("endfor"), _)] => {
                let (open, items) = open.pop()?;
                found.extend(items.map(|items| Tags { open, items, close: tag }));
            }
            _ => {}
        }
    }
    open.is_empty().then_some(found)
}

fn range(span: Span) -> Range<usize> {
    span.start_offset as usize..span.end_offset as usize
}

impl Tags {
    /// Whether these are the tags of that loop.
    pub(super) fn are_of(&self, each: &ForLoop<'_>) -> bool {
        let target = range(each.target.span());
        self.open.start.end <= target.start && target.end <= self.items.start
    }
}

/// The changes that a template needs, each to be made at its place in the source.
#[derive(Debug, Default)]
pub(super) struct Edits(Vec<(Range<usize>, String)>);

impl Edits {
    /// Lets the loop of that number go over the messages whose text is not known, and keep what it writes. `false` where
    /// not all places are found that read the variable `loop`, in bytes: `loop_reads`.
    pub(super) fn make_known(
        &mut self,
        source: &str,
        tags: &Tags,
        each: &ForLoop<'_>,
        site: usize,
        loop_reads: &HashSet<u32>,
    ) -> bool {
        let (Some(target), true) = (variable(&each.target), own_loop_reads(each) == *loop_reads) else {
            return false;
        };
        let text = |range: &Range<usize>| source.get(range.clone()).unwrap_or_default();
        let items = text(&tags.items).trim();
        let step = format!("kvspoa_step{site}");
        let (open_end, close_start) = (text(&tags.open.end), text(&tags.close.start));
        let open = format!(
            " for {target}, {step} in {STEPS_FUNCTION}({site}, {items}) %}}{{% filter {KEEP_FILTER}({step}) {open_end}"
        );
        self.0.push((tags.open.start.end..tags.open.end.end, open));
        for start in loop_reads {
            let start = *start as usize;
            self.0.push((start..start + "loop".len(), step.clone()));
        }
        self.0.push((tags.close.start.clone(), format!("{close_start} endfilter %}}{{%")));
        true
    }

    /// Ends a loop as soon as `condition` is false.
    pub(super) fn end_unless(&mut self, source: &str, tags: &Tags, condition: &str) {
        let end = source.get(tags.open.end.clone()).unwrap_or_default();
        let stop = format!("%}}{{% if not {condition} %}}{{% break %}}{{% endif {end}");
        self.0.push((tags.open.end.clone(), stop));
    }

    /// The changed source.
    pub(super) fn applied(mut self, source: &str) -> String {
        self.0.sort_by_key(|(range, _)| range.start);
        let (mut out, mut at) = (String::with_capacity(source.len() * 2), 0);
        for (range, text) in self.0 {
            out.push_str(source.get(at..range.start).unwrap_or_default());
            out.push_str(&text);
            at = range.end;
        }
        out.push_str(source.get(at..).unwrap_or_default());
        out
    }
}

/// Where a loop's body reads the loop's own variable `loop`, and not that of a loop within.
fn own_loop_reads(each: &ForLoop<'_>) -> HashSet<u32> {
    let mut reads = LoopReads::default();
    each.body.iter().for_each(|statement| walk::statement(statement, false, &mut reads));
    reads.all.difference(&reads.within).copied().collect()
}

#[derive(Default)]
struct LoopReads {
    all: HashSet<u32>,
    within: HashSet<u32>,
}

impl<'t, 'a> Visitor<'t, 'a> for LoopReads {
    fn statement(&mut self, statement: &'t Stmt<'a>, _in_macro: bool) {
        if let Stmt::ForLoop(inner) = statement {
            let mut within = Self::default();
            inner.body.iter().for_each(|statement| walk::statement(statement, false, &mut within));
            self.within.extend(within.all);
        }
    }

    fn expression(&mut self, expression: &'t Expr<'a>) {
        if let Expr::Var(var) = expression
            && var.id == "loop"
        {
            self.all.insert(var.span().start_offset);
        }
    }
}
