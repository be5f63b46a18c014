//! What a template does that cannot be done here exactly as in Python. It is found before it is run.

use super::walk::{self, Visitor, variable};
use super::{python, values};
use minijinja::machinery::ast::{BinOpKind, Expr, Stmt};
use serde_json::Value;
use std::collections::HashSet;

/// The limits of one template.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Limits {
    /// It adds to a text that it marked as safe. Python then escapes the other one for HTML.
    pub(super) adds_to_safe_text: bool,
    /// It concatenates by `~`, which writes some values unlike Python.
    pub(super) concatenates: bool,
}

pub(super) fn of(template: &Stmt<'_>) -> Limits {
    let mut found = Found::default();
    walk::statement(template, false, &mut found);
    let mut safe: HashSet<&str> = HashSet::new();
    loop {
        let before = safe.len();
        for (target, value) in &found.assignments {
            if may_be_safe(value, &safe) {
                safe.insert(target);
            }
        }
        if safe.len() == before {
            break;
        }
    }
    Limits {
        adds_to_safe_text: found
            .sums
            .iter()
            .any(|(left, right)| may_be_safe(left, &safe) || may_be_safe(right, &safe)),
        concatenates: found.concatenates,
    }
}

/// Whether the value of an expression may be a text marked as safe, where the variables in `safe` may be.
fn may_be_safe(expression: &Expr<'_>, safe: &HashSet<&str>) -> bool {
    match expression {
        Expr::Filter(filter) => filter.name == "safe",
        Expr::IfExpr(cond) => {
            may_be_safe(&cond.true_expr, safe)
                || cond.false_expr.as_ref().is_some_and(|other| may_be_safe(other, safe))
        }
        Expr::BinOp(op) => {
            matches!(op.op, BinOpKind::Add | BinOpKind::Mul | BinOpKind::ScAnd | BinOpKind::ScOr)
                && (may_be_safe(&op.left, safe) || may_be_safe(&op.right, safe))
        }
        other => variable(other).is_some_and(|name| safe.contains(name)),
    }
}

#[derive(Default)]
struct Found<'t, 'a> {
    assignments: Vec<(&'a str, &'t Expr<'a>)>,
    sums: Vec<(&'t Expr<'a>, &'t Expr<'a>)>,
    concatenates: bool,
}

impl<'t, 'a> Visitor<'t, 'a> for Found<'t, 'a> {
    fn statement(&mut self, statement: &'t Stmt<'a>, _in_macro: bool) {
        if let Stmt::Set(set) = statement {
            self.assignments.extend(variable(&set.target).map(|target| (target, &set.expr)));
        }
    }

    fn expression(&mut self, expression: &'t Expr<'a>) {
        if let Expr::BinOp(op) = expression {
            match op.op {
                BinOpKind::Add => self.sums.push((&op.left, &op.right)),
                BinOpKind::Concat => self.concatenates = true,
                _ => {}
            }
        }
    }
}

/// Whether something in `value` that Python writes otherwise stands in `text` as `~` writes it here.
pub(super) fn printed_unlike_python(value: &Value, text: &str) -> bool {
    if !written_unlike_python(value) {
        return false;
    }
    let printed = || text.contains(&values::from_json(value).to_string());
    match value {
        Value::String(_) => false,
        Value::Array(items) => printed() || items.iter().any(|item| printed_unlike_python(item, text)),
        Value::Object(fields) => printed() || fields.values().any(|field| printed_unlike_python(field, text)),
        _ => printed(),
    }
}

/// Python writes some floats with an exponent, and inside of containers it escapes more characters.
fn written_unlike_python(value: &Value) -> bool {
    let text_differs = |text: &str| {
        !text.is_ascii() && format!("{:?}", minijinja::Value::from(text)) != python::repr_of_text(text)
    };
    match value {
        Value::Number(number) if number.is_f64() => {
            number.as_f64().is_some_and(|float| float != 0.0 && !(1e-4..1e16).contains(&float.abs()))
        }
        Value::String(text) => text_differs(text),
        Value::Array(items) => items.iter().any(written_unlike_python),
        Value::Object(fields) => {
            fields.iter().any(|(name, field)| text_differs(name) || written_unlike_python(field))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::template::environment::syntax;
    use minijinja::machinery::parse;

    fn limits(source: &str) -> Limits {
        of(&parse(source, "test", syntax().expect("syntax")).expect("a template"))
    }

    #[test]
    fn adding_to_safe_text_is_found_through_variables() {
        assert!(limits("{{ 'a' | safe + x }}").adds_to_safe_text);
        assert!(limits("{% set a = x | safe if x else y %}{% set b = a %}{{ 'c' + b }}").adds_to_safe_text);
        assert!(
            !limits("{% set a = x | tojson | safe %}{{ '<' ~ a ~ '>' }}{{ a }}{{ 'x' + y }}")
                .adds_to_safe_text
        );
    }

    #[test]
    fn values_that_print_otherwise_matter_only_where_texts_are_concatenated() {
        assert!(limits("{{ a ~ b }}").concatenates);
        assert!(!limits("{{ a + b }}").concatenates);
        let unlike =
            |json: &str, text| printed_unlike_python(&serde_json::from_str(json).expect("JSON"), text);
        assert!(unlike(r#"{"a": [1e-6]}"#, "at least 0.000001"));
        assert!(unlike("1e16", "10000000000000000.0"));
        assert!(!unlike("1e-6", "1e-06"));
        assert!(unlike(r#"["a\u200b"]"#, "['a\u{200b}']"));
        assert!(!unlike(r#"["a\u200b"]"#, "a\u{200b}"));
        assert!(!unlike("[0.0, 0.5, 7]", "0.0 0.5 7"));
    }
}
