//! Visits a template's syntax tree.

use minijinja::machinery::ast::{CallArg, Expr, Stmt};
use std::collections::HashSet;

/// What is done at each node, before its children.
pub(super) trait Visitor<'t, 'a> {
    /// A statement, and whether it stands inside a macro.
    fn statement(&mut self, _statement: &'t Stmt<'a>, _in_macro: bool) {}
    /// An expression.
    fn expression(&mut self, _expression: &'t Expr<'a>) {}
}

/// Visits a statement and everything in it.
pub(super) fn statement<'t, 'a>(statement: &'t Stmt<'a>, in_macro: bool, visitor: &mut impl Visitor<'t, 'a>) {
    visitor.statement(statement, in_macro);
    match statement {
        Stmt::Template(template) => statements(&template.children, in_macro, visitor),
        Stmt::EmitExpr(emit) => expression(&emit.expr, visitor),
        Stmt::ForLoop(each) => {
            expression(&each.iter, visitor);
            expressions(&each.filter_expr, visitor);
            statements(&each.body, in_macro, visitor);
            statements(&each.else_body, in_macro, visitor);
        }
        Stmt::IfCond(cond) => {
            expression(&cond.expr, visitor);
            statements(&cond.true_body, in_macro, visitor);
            statements(&cond.false_body, in_macro, visitor);
        }
        Stmt::WithBlock(with) => {
            expressions(with.assignments.iter().map(|(_, value)| value), visitor);
            statements(&with.body, in_macro, visitor);
        }
        Stmt::Set(set) => expression(&set.expr, visitor),
        Stmt::SetBlock(set) => {
            expressions(&set.filter, visitor);
            statements(&set.body, in_macro, visitor);
        }
        Stmt::AutoEscape(block) => statements(&block.body, in_macro, visitor),
        Stmt::FilterBlock(block) => {
            expression(&block.filter, visitor);
            statements(&block.body, in_macro, visitor);
        }
        Stmt::Block(block) => statements(&block.body, in_macro, visitor),
        Stmt::Macro(each) => {
            expressions(&each.defaults, visitor);
            statements(&each.body, true, visitor);
        }
        Stmt::CallBlock(block) => {
            expression(&block.call.expr, visitor);
            arguments(&block.call.args, visitor);
            statements(&block.macro_decl.body, true, visitor);
        }
        Stmt::Do(each) => {
            expression(&each.call.expr, visitor);
            arguments(&each.call.args, visitor);
        }
        _ => {}
    }
}

fn statements<'t, 'a>(list: &'t [Stmt<'a>], in_macro: bool, visitor: &mut impl Visitor<'t, 'a>) {
    for each in list {
        statement(each, in_macro, visitor);
    }
}

fn expressions<'t, 'a: 't>(list: impl IntoIterator<Item = &'t Expr<'a>>, visitor: &mut impl Visitor<'t, 'a>) {
    for each in list {
        expression(each, visitor);
    }
}

fn expression<'t, 'a>(node: &'t Expr<'a>, visitor: &mut impl Visitor<'t, 'a>) {
    visitor.expression(node);
    match node {
        Expr::Var(_) | Expr::Const(_) => {}
        Expr::Slice(slice) => {
            expression(&slice.expr, visitor);
            expressions([&slice.start, &slice.stop, &slice.step].into_iter().flatten(), visitor);
        }
        Expr::UnaryOp(op) => expression(&op.expr, visitor),
        Expr::BinOp(op) => expressions([&op.left, &op.right], visitor),
        Expr::Compare(compare) => {
            expression(&compare.expr, visitor);
            expressions(compare.ops.iter().map(|op| &op.expr), visitor);
        }
        Expr::IfExpr(cond) => {
            expressions([&cond.test_expr, &cond.true_expr], visitor);
            expressions(&cond.false_expr, visitor);
        }
        Expr::Filter(filter) => {
            expressions(&filter.expr, visitor);
            arguments(&filter.args, visitor);
        }
        Expr::Test(test) => {
            expression(&test.expr, visitor);
            arguments(&test.args, visitor);
        }
        Expr::GetAttr(get) => expression(&get.expr, visitor),
        Expr::GetItem(get) => expressions([&get.expr, &get.subscript_expr], visitor),
        Expr::Call(call) => {
            expression(&call.expr, visitor);
            arguments(&call.args, visitor);
        }
        Expr::List(list) => expressions(&list.items, visitor),
        Expr::Tuple(tuple) => expressions(&tuple.items, visitor),
        Expr::Map(map) => expressions(map.keys.iter().chain(&map.values), visitor),
    }
}

fn arguments<'t, 'a>(list: &'t [CallArg<'a>], visitor: &mut impl Visitor<'t, 'a>) {
    for arg in list {
        match arg {
            CallArg::Pos(value)
            | CallArg::Kwarg(_, value)
            | CallArg::PosSplat(value)
            | CallArg::KwargSplat(value) => expression(value, visitor),
        }
    }
}

/// The name, if the expression is a plain variable.
pub(super) fn variable<'a>(expression: &Expr<'a>) -> Option<&'a str> {
    match expression {
        Expr::Var(var) => Some(var.id),
        _ => None,
    }
}

/// Takes note of the variables that a target sets.
pub(super) fn bind<'a>(target: &Expr<'a>, bound: &mut HashSet<&'a str>) {
    match target {
        Expr::Var(var) => _ = bound.insert(var.id),
        Expr::List(list) => list.items.iter().for_each(|item| bind(item, bound)),
        Expr::Tuple(tuple) => tuple.items.iter().for_each(|item| bind(item, bound)),
        _ => {}
    }
}
