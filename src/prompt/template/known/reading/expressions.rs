//! What expressions depend on: terms that can be worked out before the body runs, and all others by what stands in them.

use super::{Bound, Need, Reader, Refusal};
use crate::prompt::template::known::term::{Comparison, Kind, LoopField, Term};
use crate::prompt::template::walk::variable;
use minijinja::machinery::ast::{BinOpKind, Call, CallArg, Expr, Macro, UnaryOpKind};

/// Functions without memory. What a namespace remembers is looked after otherwise.
const FUNCTIONS: [&str; 4] = ["range", "dict", "namespace", "raise_exception"];

impl<'t, 'a> Reader<'t, 'a> {
    pub(super) fn value(&mut self, expression: &'t Expr<'a>) -> Result<(), Refusal> {
        self.expression(expression, false)
    }

    /// An expression of which it only matters whether it is true.
    pub(super) fn truth(&mut self, expression: &'t Expr<'a>) -> Result<(), Refusal> {
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
    pub(super) fn outer(&mut self, name: &'a str) -> Result<Term, Refusal> {
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
    pub(super) fn term(&mut self, expression: &'t Expr<'a>) -> Option<Term> {
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
