//! What the text that a loop writes for one message depends on.
//!
//! The body of the loop is read once, as it would run, and every expression in it is either worked out of the message
//! (then it is the same whenever the message is), or it is a [`Need`]. A body that does anything else than to write,
//! and to set variables of its own and attributes of namespaces, is refused.

use super::super::walk::variable;
use super::term::{Comparison, Kind, LoopField, Term};
use minijinja::machinery::ast::{BinOpKind, Call, CallArg, Expr, ForLoop, Macro, Spanned, Stmt, UnaryOpKind};
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

/// Functions without memory. What a namespace remembers is looked after otherwise.
const FUNCTIONS: [&str; 4] = ["range", "dict", "namespace", "raise_exception"];

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

    fn value(&mut self, expression: &'t Expr<'a>) -> Result<(), Refusal> {
        self.expression(expression, false)
    }

    /// An expression of which it only matters whether it is true.
    fn truth(&mut self, expression: &'t Expr<'a>) -> Result<(), Refusal> {
        self.expression(expression, true)
    }

    fn expression(&mut self, expression: &'t Expr<'a>, truth: bool) -> Result<(), Refusal> {
        if let Some(term) = self.term(expression) {
            if term.is_of_the_message() {
                return Ok(());
            }
            if !truth && self.is_whole_message(&term) {
                return Err(Refusal::Messages);
            }
            self.need(if truth { Need::Truth(term) } else { Need::Value(term) });
            return Ok(());
        }
        match expression {
            Expr::Const(_) => Ok(()),
            Expr::Var(var) => match self.scope.get(var.id) {
                Some(Bound::Perhaps) => {
                    let outer = self.outer(var.id)?;
                    self.need(Need::Value(outer));
                    Ok(())
                }
                Some(_) => Ok(()),
                // The variable `loop` itself, a namespace as a whole, or what a macro sees otherwise.
                None => Err(Refusal::Variable),
            },
            Expr::Slice(slice) => {
                self.value(&slice.expr)?;
                [&slice.start, &slice.stop, &slice.step]
                    .into_iter()
                    .flatten()
                    .try_for_each(|part| self.value(part))
            }
            Expr::UnaryOp(op) => self.expression(&op.expr, matches!(op.op, UnaryOpKind::Not)),
            Expr::BinOp(op) => {
                let passes_on = truth && matches!(op.op, BinOpKind::ScAnd | BinOpKind::ScOr);
                self.expression(&op.left, passes_on)?;
                self.expression(&op.right, passes_on)
            }
            Expr::Compare(compare) => {
                self.value(&compare.expr)?;
                compare.ops.iter().try_for_each(|op| self.value(&op.expr))
            }
            Expr::IfExpr(cond) => self.either(
                &cond.test_expr,
                |reader| reader.expression(&cond.true_expr, truth),
                |reader| cond.false_expr.iter().try_for_each(|other| reader.expression(other, truth)),
            ),
            Expr::Filter(filter) => {
                if self.around.marks_as_safe && filter.name == "safe" {
                    return Err(Refusal::Function);
                }
                filter.expr.iter().try_for_each(|of| self.value(of))?;
                self.arguments(&filter.args)
            }
            Expr::Test(test) => {
                self.value(&test.expr)?;
                self.arguments(&test.args)
            }
            // What it was at the start is needed anyway.
            Expr::GetAttr(get) if self.is_written(&get.expr, get.name) => Ok(()),
            Expr::GetAttr(get) => self.value(&get.expr),
            Expr::GetItem(get) => {
                self.value(&get.expr)?;
                self.value(&get.subscript_expr)
            }
            Expr::Call(call) => self.call(call),
            Expr::List(list) => list.items.iter().try_for_each(|item| self.value(item)),
            Expr::Tuple(tuple) => tuple.items.iter().try_for_each(|item| self.value(item)),
            Expr::Map(map) => map.keys.iter().chain(&map.values).try_for_each(|item| self.value(item)),
        }
    }

    fn is_whole_message(&self, term: &Term) -> bool {
        let is_list = |term: &Term| match term {
            Term::Outer(at) => {
                self.found.names.get(*at).is_some_and(|name| self.around.messages.contains(name.as_str()))
            }
            _ => false,
        };
        match term {
            Term::Item(of, _) => is_list(of),
            Term::Loop(LoopField::Previtem | LoopField::Nextitem) => true,
            term => is_list(term),
        }
    }

    fn is_written(&self, of: &Expr<'a>, name: &str) -> bool {
        self.unsteady.attributes.contains(name) && variable(of).is_some_and(|of| !self.scope.contains_key(of))
    }

    fn arguments(&mut self, list: &'t [CallArg<'a>]) -> Result<(), Refusal> {
        list.iter().try_for_each(|arg| match arg {
            CallArg::Pos(value)
            | CallArg::Kwarg(_, value)
            | CallArg::PosSplat(value)
            | CallArg::KwargSplat(value) => self.value(value),
        })
    }

    fn call(&mut self, call: &'t Call<'a>) -> Result<(), Refusal> {
        self.arguments(&call.args)?;
        let name = match &call.expr {
            Expr::GetAttr(method) => return self.value(&method.expr),
            callee => {
                variable(callee).filter(|name| !self.scope.contains_key(name)).ok_or(Refusal::Function)?
            }
        };
        match self.around.macros.get(name) {
            Some(_) if self.macros.contains(&name) => Ok(()),
            // One that stands further down is not there yet.
            Some(called) if called.span().start_offset < self.start => self.called_macro(called),
            None if FUNCTIONS.contains(&name) => {
                if !self.found.called.iter().any(|known| known == name) {
                    self.found.called.push(name.to_owned());
                }
                Ok(())
            }
            _ => Err(Refusal::Function),
        }
    }

    fn called_macro(&mut self, called: &'t Macro<'a>) -> Result<(), Refusal> {
        let parameters = called.args.iter().filter_map(variable).map(|name| (name, Bound::Always));
        let before = std::mem::replace(&mut self.scope, parameters.collect());
        let loops = std::mem::take(&mut self.loops);
        let namespaces = std::mem::take(&mut self.namespaces);
        self.macros.push(called.name);
        called.defaults.iter().try_for_each(|default| self.value(default))?;
        self.statements(&called.body)?;
        self.macros.pop();
        self.namespaces = namespaces;
        self.loops = loops;
        self.scope = before;
        Ok(())
    }

    /// The variable `name` as it is outside of the loop.
    fn outer(&mut self, name: &'a str) -> Result<Term, Refusal> {
        // A macro sees what stands at the top of the template, the loop what is nearest.
        let is_in_macro = !self.macros.is_empty();
        if name == "loop" || name == "self" || (is_in_macro && self.around.bound_within.contains(name)) {
            return Err(Refusal::Variable);
        }
        let names = &mut self.found.names;
        let at = names.iter().position(|known| known == name).unwrap_or_else(|| {
            names.push(name.to_owned());
            names.len() - 1
        });
        Ok(Term::Outer(at))
    }

    /// The expression, if it can be worked out before the body runs and stays the same while it does.
    fn term(&mut self, expression: &'t Expr<'a>) -> Option<Term> {
        if let Some(value) = expression.as_const() {
            return Some(Term::Const(value));
        }
        let boxed = |term: Term| Box::new(term);
        Some(match expression {
            Expr::Var(var) => match self.scope.get(var.id) {
                Some(Bound::Message) => Term::Message,
                Some(_) => return None,
                // What a namespace is as a whole changes with what is set in it.
                None if self.unsteady.namespaces.contains(var.id) => return None,
                None => self.outer(var.id).ok()?,
            },
            Expr::GetAttr(get) => {
                if let Some(field) = self.loop_field(&get.expr, get.name) {
                    return Some(Term::Loop(field));
                }
                if self.unsteady.attributes.contains(get.name) {
                    return None;
                }
                let of = match variable(&get.expr).filter(|name| !self.scope.contains_key(name)) {
                    Some(name) => self.outer(name).ok()?,
                    None => self.term(&get.expr)?,
                };
                Term::Attr(boxed(of), get.name.to_owned())
            }
            Expr::GetItem(get) => {
                let key = self.term(&get.subscript_expr)?;
                if matches!(&key, Term::Const(name) if name.as_str().is_some_and(|name| self.unsteady.attributes.contains(name)))
                {
                    return None;
                }
                Term::Item(boxed(self.term(&get.expr)?), boxed(key))
            }
            Expr::Filter(filter) if filter.args.is_empty() && matches!(filter.name, "length" | "count") => {
                Term::Length(boxed(self.term(filter.expr.as_ref()?)?))
            }
            Expr::Test(test) if test.args.is_empty() => {
                Term::Is(boxed(self.term(&test.expr)?), Kind::of_test(test.name)?)
            }
            Expr::UnaryOp(op) if matches!(op.op, UnaryOpKind::Not) => Term::Not(boxed(self.term(&op.expr)?)),
            Expr::BinOp(op) => {
                let (a, b) = (boxed(self.term(&op.left)?), boxed(self.term(&op.right)?));
                match op.op {
                    // Perhaps a sum of texts.
                    BinOpKind::Add if !a.is_number() && !b.is_number() => return None,
                    BinOpKind::ScAnd => Term::And(a, b),
                    BinOpKind::ScOr => Term::Or(a, b),
                    BinOpKind::Add => Term::Add(a, b),
                    BinOpKind::Sub => Term::Subtract(a, b),
                    op => Term::compare(*a, Comparison::of_operator(op)?, *b),
                }
            }
            Expr::Compare(compare) => match &compare.ops[..] {
                [only] => {
                    Term::compare(self.term(&compare.expr)?, Comparison::of(only.op)?, self.term(&only.expr)?)
                }
                _ => return None,
            },
            _ => return None,
        })
    }

    fn loop_field(&mut self, of: &Expr<'a>, name: &str) -> Option<LoopField> {
        if variable(of) != Some("loop") || self.scope.contains_key("loop") || !self.macros.is_empty() {
            return None;
        }
        let field = LoopField::of_name(name)?;
        self.found.loop_reads.insert(of.span().start_offset);
        Some(field)
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
