//! What the text that a loop writes for one message depends on.
//!
//! The body of the loop is read once, as it would run, and every expression in it is either worked out of the message
//! (then it is the same whenever the message is), or it is a [`Need`]. A body that does anything else than to write,
//! and to set variables of its own and attributes of namespaces, is refused.

mod expressions;

use super::super::walk::variable;
use super::term::Term;
use minijinja::machinery::ast::{Expr, ForLoop, Macro, Spanned, Stmt};
use std::collections::{HashMap, HashSet};

/// Something that a text depends on beside the message.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Need {
    Value(Term),
    /// Only whether it is true.
    Truth(Term),
    Either {
        test: Term,
        then: Vec<Self>,
        otherwise: Vec<Self>,
    },
}

impl Need {
    /// Puts a [`Term::Constant`] in the place of all that is the same for all messages of a run.
    pub(super) fn take_constants(&mut self, constants: &mut Vec<Term>) {
        match self {
            Self::Value(term) | Self::Truth(term) => term.take_constants(constants),
            Self::Either { test, then, otherwise } => {
                test.take_constants(constants);
                then.iter_mut().chain(otherwise).for_each(|need| need.take_constants(constants));
            }
        }
    }
}

/// What the text of a loop's body is made from.
#[derive(Debug, Default)]
pub(super) struct Dependence {
    pub(super) needs: Vec<Need>,
    /// Variables from outside of the loop.
    pub(super) names: Vec<String>,
    /// Functions that are called, which no variable may hide.
    pub(super) called: Vec<String>,
    /// Attributes of namespaces that the body may set; they are needed as well.
    pub(super) written: Vec<Term>,
    /// Where the variable `loop` is read, in bytes of the source.
    pub(super) loop_reads: HashSet<u32>,
    pub(super) writes_text: bool,
}

/// Why a loop is left as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refusal {
    Statement,
    Function,
    Variable,
    /// Whole messages, or lists of them.
    Messages,
}

/// What is to be known of the whole template.
#[derive(Debug, Default)]
pub(super) struct Surroundings<'t, 'a> {
    /// The macros at the top of the template, each the only thing of its name.
    pub(super) macros: HashMap<&'a str, &'t Spanned<Macro<'a>>>,
    /// Names that mean something else in loops and the like than outside of them.
    pub(super) bound_within: HashSet<&'a str>,
    /// `messages`, and what is made from it.
    pub(super) messages: HashSet<&'a str>,
    pub(super) marks_as_safe: bool,
}

/// Reads the body of a loop over messages.
pub(super) fn of_loop<'t, 'a>(
    each: &'t ForLoop<'a>,
    around: &'t Surroundings<'t, 'a>,
) -> Result<Dependence, Refusal> {
    let first = read(each, around, Unsteady::default())?;
    // What is set on the way is not the same throughout: of such attributes only the value at the start counts.
    let mut found = if first.written.is_empty() { first } else { read(each, around, Unsteady::of(&first))? };
    for term in &found.written {
        let need = Need::Value(term.clone());
        if !found.needs.contains(&need) {
            found.needs.push(need);
        }
    }
    Ok(found)
}

/// What a body sets outside of it.
#[derive(Default)]
struct Unsteady {
    attributes: HashSet<String>,
    namespaces: HashSet<String>,
}

impl Unsteady {
    fn of(found: &Dependence) -> Self {
        let mut unsteady = Self::default();
        for term in &found.written {
            if let Term::Attr(of, attribute) = term {
                unsteady.attributes.insert(attribute.clone());
                if let Term::Outer(at) = **of {
                    unsteady.namespaces.extend(found.names.get(at).cloned());
                }
            }
        }
        unsteady
    }
}

fn read<'t, 'a>(
    each: &'t ForLoop<'a>,
    around: &'t Surroundings<'t, 'a>,
    unsteady: Unsteady,
) -> Result<Dependence, Refusal> {
    let message = variable(&each.target).ok_or(Refusal::Statement)?;
    let mut reader = Reader {
        around,
        start: each.target.span().start_offset,
        unsteady,
        found: Dependence::default(),
        scope: HashMap::from([(message, Bound::Message)]),
        namespaces: HashSet::new(),
        macros: Vec::new(),
        loops: 0,
    };
    reader.statements(&each.body)?;
    Ok(reader.found)
}

/// How a name was set where it is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Bound {
    /// The message itself.
    Message,
    Always,
    /// On some ways: else it is what it is outside of the loop.
    Perhaps,
}

type Scope<'a> = HashMap<&'a str, Bound>;

struct Reader<'t, 'a> {
    around: &'t Surroundings<'t, 'a>,
    /// Where the loop begins.
    start: u32,
    unsteady: Unsteady,
    found: Dependence,
    scope: Scope<'a>,
    /// Names that the body gives to namespaces of its own.
    namespaces: HashSet<&'a str>,
    /// The macros that are being read, one called by the other.
    macros: Vec<&'a str>,
    /// The loops that are being read within the body or macro.
    loops: usize,
}

impl<'t, 'a> Reader<'t, 'a> {
    fn statements(&mut self, list: &'t [Stmt<'a>]) -> Result<(), Refusal> {
        list.iter().try_for_each(|each| self.statement(each))
    }

    fn statement(&mut self, statement: &'t Stmt<'a>) -> Result<(), Refusal> {
        match statement {
            Stmt::EmitRaw(_) => Ok(()),
            Stmt::EmitExpr(emit) => {
                self.found.writes_text = true;
                self.value(&emit.expr)
            }
            Stmt::IfCond(cond) => self.either(
                &cond.expr,
                |reader| reader.statements(&cond.true_body),
                |reader| reader.statements(&cond.false_body),
            ),
            Stmt::ForLoop(each) if !each.recursive => self.inner_loop(each),
            Stmt::WithBlock(with) => {
                let before = self.scope.clone();
                for (target, value) in &with.assignments {
                    self.value(value)?;
                    self.bind(target)?;
                }
                self.statements(&with.body)?;
                self.scope = before;
                Ok(())
            }
            Stmt::Set(set) => {
                self.value(&set.expr)?;
                if let (Some(name), Expr::Call(call)) = (variable(&set.target), &set.expr)
                    && variable(&call.expr) == Some("namespace")
                {
                    self.namespaces.insert(name);
                }
                self.bind(&set.target)
            }
            Stmt::SetBlock(set) => {
                self.statements(&set.body)?;
                set.filter.iter().try_for_each(|filter| self.value(filter))?;
                self.bind(&set.target)
            }
            Stmt::FilterBlock(block) => {
                self.statements(&block.body)?;
                self.value(&block.filter)
            }
            // The body's own would leave the text half written.
            Stmt::Break(_) | Stmt::Continue(_) if self.loops > 0 => Ok(()),
            _ => Err(Refusal::Statement),
        }
    }

    fn inner_loop(&mut self, each: &'t ForLoop<'a>) -> Result<(), Refusal> {
        self.value(&each.iter)?;
        let before = self.scope.clone();
        self.bind(&each.target)?;
        each.filter_expr.iter().try_for_each(|filter| self.truth(filter))?;
        self.scope.insert("loop", Bound::Always);
        self.loops += 1;
        self.statements(&each.body)?;
        self.loops -= 1;
        self.scope = before;
        self.statements(&each.else_body)
    }

    /// Two ways, of which a test chooses.
    fn either(
        &mut self,
        test: &'t Expr<'a>,
        then: impl FnOnce(&mut Self) -> Result<(), Refusal>,
        otherwise: impl FnOnce(&mut Self) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let term = self.term(test);
        if term.is_none() {
            self.truth(test)?;
        }
        let outside = std::mem::take(&mut self.found.needs);
        let before = self.scope.clone();
        then(self)?;
        let needs_then = std::mem::take(&mut self.found.needs);
        let after_then = std::mem::replace(&mut self.scope, before);
        otherwise(self)?;
        let needs_otherwise = std::mem::replace(&mut self.found.needs, outside);
        self.scope = either_scope(after_then, &self.scope);
        match term {
            Some(test)
                if !needs_then.is_empty() || !needs_otherwise.is_empty() || !test.is_of_the_message() =>
            {
                self.need(Need::Either { test, then: needs_then, otherwise: needs_otherwise });
            }
            Some(_) => {}
            None => needs_then.into_iter().chain(needs_otherwise).for_each(|need| self.need(need)),
        }
        Ok(())
    }

    fn need(&mut self, need: Need) {
        if !self.found.needs.contains(&need) {
            self.found.needs.push(need);
        }
    }

    fn bind(&mut self, target: &'t Expr<'a>) -> Result<(), Refusal> {
        match target {
            Expr::Var(var) => {
                self.scope.insert(var.id, Bound::Always);
                Ok(())
            }
            Expr::List(list) => list.items.iter().try_for_each(|item| self.bind(item)),
            Expr::Tuple(tuple) => tuple.items.iter().try_for_each(|item| self.bind(item)),
            Expr::GetAttr(get) => {
                let namespace = variable(&get.expr).ok_or(Refusal::Statement)?;
                if self.scope.contains_key(namespace) {
                    let is_own = self.namespaces.contains(namespace);
                    return if is_own { Ok(()) } else { Err(Refusal::Statement) };
                }
                let term = Term::Attr(Box::new(self.outer(namespace)?), get.name.to_owned());
                if !self.found.written.contains(&term) {
                    self.found.written.push(term);
                }
                Ok(())
            }
            _ => Err(Refusal::Statement),
        }
    }
}

/// What is bound behind two ways.
fn either_scope<'a>(mut one: Scope<'a>, other: &Scope<'a>) -> Scope<'a> {
    for (name, bound) in &mut one {
        *bound = match other.get(name) {
            Some(same) if same == bound => *bound,
            Some(Bound::Message | Bound::Always) if *bound != Bound::Perhaps => Bound::Always,
            _ => Bound::Perhaps,
        };
    }
    for name in other.keys() {
        one.entry(name).or_insert(Bound::Perhaps);
    }
    one
}
