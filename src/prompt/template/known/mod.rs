//! The texts that a template wrote for messages lately.
//!
//! A template is a program that runs over all messages at every turn of a conversation, and mostly writes for each what
//! it wrote before. Where a loop over messages writes a text that depends on nothing but the message and a few words
//! ([`reading`]), the source is changed so that the loop leaves out the messages whose text is known ([`rewriting`]). The
//! key of a text is everything that it was made from: the loop, the message, and the words. So what is known can never
//! change a prompt.

mod items;
mod names;
mod reading;
mod rewriting;
mod run;
mod searches;
mod seen;
mod term;
#[cfg(test)]
mod tests;

pub(in crate::prompt) use run::Text;
pub(super) use run::{Known, being_written, write};

use minijinja::machinery::ast::{ForLoop, Stmt};
use names::{root, surroundings};
use reading::{Dependence, Need, Refusal, Surroundings};
use rewriting::Edits;
use term::Term;

/// The function that a changed loop goes over: the messages to be written, each with a [`Step`].
const STEPS_FUNCTION: &str = "kvspoa_steps";
/// The filter through which a changed loop's text goes.
const KEEP_FILTER: &str = "kvspoa_keep";

/// A loop that leaves out what is known.
#[derive(Debug)]
struct Site {
    needs: Vec<Need>,
    /// The needs that are the same for all messages of one run.
    steady: Vec<Term>,
    /// What is worked out once for all messages of one run.
    constants: Vec<Term>,
    written: Vec<Term>,
    names: Vec<String>,
    called: Vec<String>,
}

impl From<Dependence> for Site {
    fn from(found: Dependence) -> Self {
        let (mut needs, mut steady, mut constants) = (Vec::new(), Vec::new(), Vec::new());
        for mut need in found.needs {
            // What the loop sets may be another for every message.
            if found.written.is_empty() {
                need.take_constants(&mut constants);
            }
            match need {
                Need::Value(term @ (Term::Outer(_) | Term::Constant(_))) => steady.push(term),
                need => needs.push(need),
            }
        }
        let Dependence { written, names, called, .. } = found;
        Self { needs, steady, constants, written, names, called }
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
