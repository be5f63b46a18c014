//! Loops that look for one message, and go on when they have found it.
//!
//! `{% if ns.looking and … %}{% set ns.looking = false %}{% endif %}`: once the first condition is false, nothing that the
//! loop does can be seen any more, so it may end there.

use crate::prompt::template::walk::variable;
use minijinja::machinery::ast::{BinOpKind, Expr, ForLoop, Stmt};

/// What such a loop goes on for, as its source has it; `None` for any other loop.
pub(super) fn condition<'s>(source: &'s str, each: &ForLoop<'_>) -> Option<&'s str> {
    if each.recursive || each.filter_expr.is_some() || !each.else_body.is_empty() {
        return None;
    }
    let target = variable(&each.target)?;
    let mut found: Option<(&str, &str)> = None;
    let mut span = None;
    let mut own = vec![target, "loop"];
    for statement in &each.body {
        match statement {
            Stmt::Set(set) if is_harmless(&set.expr) => own.push(variable(&set.target)?),
            Stmt::IfCond(cond) if cond.false_body.is_empty() => {
                let first = first_condition(&cond.expr);
                let Expr::GetAttr(get) = first else { return None };
                let this = (variable(&get.expr)?, get.name);
                if *found.get_or_insert(this) != this || own.contains(&this.0) {
                    return None;
                }
                span.get_or_insert(first.span());
            }
            _ => return None,
        }
    }
    let (namespace, name) = found?;
    let text = source.get(span?.start_offset as usize..span?.end_offset as usize)?;
    // It is written as it is read here, and not `ns["looking"]`.
    (text.split('.').map(str::trim).eq([namespace, name])).then_some(text)
}

/// The condition that is looked at before all others of a conjunction.
fn first_condition<'t, 'a>(expression: &'t Expr<'a>) -> &'t Expr<'a> {
    match expression {
        Expr::BinOp(op) if matches!(op.op, BinOpKind::ScAnd) => first_condition(&op.left),
        first => first,
    }
}

/// Whether an expression can always be worked out: a number by the loop's place and the conversation's length.
fn is_harmless(expression: &Expr<'_>) -> bool {
    match expression {
        Expr::Const(value) => value.value.is_integer(),
        Expr::GetAttr(get) => variable(&get.expr) == Some("loop") && matches!(get.name, "index" | "index0"),
        Expr::Filter(filter) => {
            let of_messages = filter.expr.as_ref().and_then(variable) == Some("messages");
            of_messages && filter.name == "length" && filter.args.is_empty()
        }
        Expr::BinOp(op) => {
            matches!(op.op, BinOpKind::Add | BinOpKind::Sub)
                && is_harmless(&op.left)
                && is_harmless(&op.right)
        }
        _ => false,
    }
}
