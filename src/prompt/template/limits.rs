//! What a template does that cannot be done here exactly as in Python. It is found before it is run.

use super::environment::STR_FILTER;
use super::walk::{self, Visitor, variable};
use super::{python, values};
use minijinja::machinery::ast::{BinOpKind, Expr, Stmt};
use serde_json::Value;
use std::collections::HashSet;

/// The limits of one template.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Limits {
    /// What it adds to a text that it marked as safe.
    pub(super) added_to_safe_text: Added,
    /// It concatenates by `~` values that are not certain to be texts: some are written unlike Python.
    pub(super) concatenates: bool,
}

/// What is added to a text that is marked as safe. Python escapes it for HTML.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(super) enum Added {
    /// Nothing that escaping could change.
    #[default]
    Nothing,
    /// Names of tools and the like, which seldom have anything to escape.
    Names,
    /// Any text.
    Anything,
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
        added_to_safe_text: found.sums.iter().map(|sum| found.added(sum, &safe)).max().unwrap_or_default(),
        concatenates: found.concatenates,
    }
}

/// Whether an operand of `~` is a text as Python has it.
fn is_text(operand: &Expr<'_>) -> bool {
    match operand {
        Expr::Filter(filter) => filter.name == STR_FILTER,
        Expr::BinOp(op) => matches!(op.op, BinOpKind::Concat),
        Expr::Const(value) => value.value.as_str().is_some(),
        _ => false,
    }
}

/// The terms of a sum.
fn terms<'t, 'a>((left, right): (&'t Expr<'a>, &'t Expr<'a>), out: &mut Vec<&'t Expr<'a>>) {
    for side in [left, right] {
        match side {
            Expr::BinOp(op) if matches!(op.op, BinOpKind::Add) => terms((&op.left, &op.right), out),
            term => out.push(term),
        }
    }
}

/// Whether `text` has a character that Python's `escape` replaces.
fn has_html(text: &str) -> bool {
    text.contains(['&', '<', '>', '\'', '"'])
}

/// Whether the expression is an attribute called `name`.
fn is_attribute_name(expression: &Expr<'_>) -> bool {
    match expression {
        Expr::GetAttr(get) => get.name == "name",
        Expr::GetItem(get) => {
            matches!(&get.subscript_expr, Expr::Const(key) if key.value.as_str() == Some("name"))
        }
        _ => false,
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
    /// Variables that get their values otherwise.
    bound: HashSet<&'a str>,
    concatenates: bool,
}

impl<'a> Found<'_, 'a> {
    /// What a sum adds to a text marked as safe.
    fn added(&self, sum: &(&Expr<'a>, &Expr<'a>), safe: &HashSet<&str>) -> Added {
        let mut all = Vec::new();
        terms(*sum, &mut all);
        let (marked, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|term| may_be_safe(term, safe));
        match marked.len() {
            0 => Added::Nothing,
            1 => others.into_iter().map(|term| self.escaped(term)).max().unwrap_or_default(),
            // Which of them are marked is not known.
            _ => Added::Anything,
        }
    }

    fn escaped(&self, term: &Expr<'a>) -> Added {
        match term {
            Expr::Const(text) if text.value.as_str().is_some_and(|text| !has_html(text)) => Added::Nothing,
            term if is_attribute_name(term) => Added::Names,
            Expr::Var(var) if !self.bound.contains(var.id) => {
                let mut values = self.assignments.iter().filter(|(name, _)| *name == var.id).peekable();
                let is_name = values.peek().is_some() && values.all(|(_, value)| is_attribute_name(value));
                if is_name { Added::Names } else { Added::Anything }
            }
            _ => Added::Anything,
        }
    }
}

impl<'t, 'a> Visitor<'t, 'a> for Found<'t, 'a> {
    fn statement(&mut self, statement: &'t Stmt<'a>, _in_macro: bool) {
        match statement {
            Stmt::Set(set) => match variable(&set.target) {
                Some(target) => self.assignments.push((target, &set.expr)),
                None => walk::bind(&set.target, &mut self.bound),
            },
            Stmt::SetBlock(set) => walk::bind(&set.target, &mut self.bound),
            Stmt::ForLoop(each) => walk::bind(&each.target, &mut self.bound),
            Stmt::WithBlock(with) => {
                with.assignments.iter().for_each(|(target, _)| walk::bind(target, &mut self.bound))
            }
            Stmt::Macro(each) => each.args.iter().for_each(|arg| walk::bind(arg, &mut self.bound)),
            _ => {}
        }
    }

    fn expression(&mut self, expression: &'t Expr<'a>) {
        if let Expr::BinOp(op) = expression {
            match op.op {
                BinOpKind::Add => self.sums.push((&op.left, &op.right)),
                BinOpKind::Concat => self.concatenates |= ![&op.left, &op.right].into_iter().all(is_text),
                _ => {}
            }
        }
    }
}

/// Whether a name in `value`, or any text if `in_name`, has something that Python would escape for HTML.
pub(super) fn has_name_with_html(value: &Value, in_name: bool) -> bool {
    match value {
        Value::String(text) => in_name && has_html(text),
        Value::Array(items) => items.iter().any(|item| has_name_with_html(item, in_name)),
        Value::Object(fields) => {
            fields.iter().any(|(key, field)| has_name_with_html(field, in_name || key == "name"))
        }
        _ => false,
    }
}

/// So much is searched for what Python writes otherwise, in bytes: some tenths of a second.
const MOST_SEARCHED_BYTES: usize = 256 << 20;

/// Whether something in `values` that Python writes otherwise stands in `text` as `~` writes it here, or may do so, where too
/// much would have to be looked for.
pub(super) fn printed_unlike_python<'v>(values: impl IntoIterator<Item = &'v Value>, text: &str) -> bool {
    let mut left = MOST_SEARCHED_BYTES;
    values.into_iter().any(|value| is_printed_unlike_python(value, text, &mut left))
}

/// Of a container within another one it is enough to look for the inner one: the outer one's text has it in it.
fn is_printed_unlike_python(value: &Value, text: &str, left_bytes: &mut usize) -> bool {
    let is_unlike = |value: &Value| !value.is_array() && !value.is_object() && written_unlike_python(value);
    let (is_to_be_found, is_within) = match value {
        Value::String(_) => (false, false),
        Value::Array(items) => (
            items.iter().any(is_unlike),
            items.iter().any(|item| is_printed_unlike_python(item, text, left_bytes)),
        ),
        Value::Object(fields) => (
            fields.iter().any(|(name, field)| text_differs(name) || is_unlike(field)),
            fields.values().any(|field| is_printed_unlike_python(field, text, left_bytes)),
        ),
        leaf => (is_unlike(leaf), false),
    };
    if is_within || !is_to_be_found {
        return is_within;
    }
    let printed = values::from_json(value).to_string();
    // To write a value takes longer than to look for it.
    match left_bytes.checked_sub(text.len() + 8 * printed.len()) {
        Some(left) => *left_bytes = left,
        None => return true,
    }
    text.contains(&printed)
}

/// Python writes some floats with an exponent, and inside of containers it escapes more characters.
pub(super) fn written_unlike_python(value: &Value) -> bool {
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

fn text_differs(text: &str) -> bool {
    !text.is_ascii() && format!("{:?}", minijinja::Value::from(text)) != python::repr_of_text(text)
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
        let added = |source| limits(source).added_to_safe_text;
        assert_eq!(added("{{ 'a' | safe + x }}"), Added::Anything);
        assert_eq!(added("{% set a = x | safe if x else y %}{% set b = a %}{{ 'c<' + b }}"), Added::Anything);
        assert_eq!(
            added("{% set a = x | tojson | safe %}{{ '<' ~ a ~ '>' }}{{ a }}{{ 'x' + y }}"),
            Added::Nothing
        );
    }

    #[test]
    fn what_escaping_does_not_change_may_be_added_and_names_where_they_have_nothing_to_escape() {
        let added = |source: &str| limits(source).added_to_safe_text;
        let set = "{% set a = c.arguments | tojson | safe %}{% set n = c['function']['name'] %}";
        let with = |rest: &str| added(&format!("{set}{rest}"));
        assert_eq!(with("{{ '[ARGS]' + a }}"), Added::Nothing);
        assert_eq!(with("{{ '\\n<' + a }}"), Added::Anything);
        assert_eq!(with("{{ n + '[ARGS]' + a }}{{ a + c.name }}"), Added::Names);
        assert_eq!(with("{% set n = x %}{{ n + a }}"), Added::Anything);
        assert_eq!(with("{% for n in x %}{{ n + a }}{% endfor %}"), Added::Anything);
        assert_eq!(with("{% macro f(n) %}{{ n + a }}{% endmacro %}"), Added::Anything);
        assert_eq!(with("{{ a + a }}"), Added::Anything);
        let unlike = |json: &str| has_name_with_html(&serde_json::from_str(json).expect("JSON"), false);
        assert!(unlike(r#"[{"function": {"name": "a<b"}}]"#));
        assert!(!unlike(r#"[{"function": {"name": "a_b", "arguments": {"x": "<"}}}]"#));
    }

    #[test]
    fn values_that_print_otherwise_matter_only_where_texts_are_concatenated() {
        assert!(limits("{{ a ~ b }}").concatenates);
        assert!(!limits("{{ a + b }}").concatenates);
        assert!(!limits("{{ a | kvspoa_str ~ b | kvspoa_str ~ 'c' }}").concatenates);
        assert!(limits("{{ a | kvspoa_str ~ b ~ 'c' }}").concatenates);
        let unlike =
            |json: &str, text| printed_unlike_python(&[serde_json::from_str(json).expect("JSON")], text);
        assert!(unlike(r#"{"a": [1e-6]}"#, "at least 0.000001"));
        assert!(unlike("1e16", "10000000000000000.0"));
        assert!(!unlike("1e-6", "1e-06"));
        assert!(unlike(r#"["a\u200b"]"#, "['a\u{200b}']"));
        assert!(!unlike(r#"["a\u200b"]"#, "a\u{200b}"));
        assert!(!unlike("[0.0, 0.5, 7]", "0.0 0.5 7"));
        assert!(unlike(r#"{"a": [[1e-6, 2]], "b": 1}"#, "here [1e-6, 2] within others"));
        assert!(!unlike(r#"{"a": [[1e-6, 2]], "b": 1}"#, "[1e-06, 2]"));
        assert!(unlike(r#"{"a": {"\u200b": [1]}}"#, "{'\u{200b}': [1]}"));
    }

    #[test]
    fn what_would_take_long_to_find_may_be_there() {
        let unlike = |count: usize| {
            let values: Vec<Value> = (1..=count).map(|at| Value::from(at as f64 * 1e-9)).collect();
            printed_unlike_python(&[values.into()], &"a text ".repeat(10_000))
        };
        assert_eq!([100, 10_000].map(unlike), [false, true]);
    }
}
