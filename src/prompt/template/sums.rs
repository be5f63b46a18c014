//! `{{ '<user>' + text + '</>' + end }}` → `{{ '<user>' }}{{ text }}</>{{ end }}`.
//!
//! Templates put messages together by sums, and each `+` copies all text before it. Written one after the other, the
//! operands are the same text, as long as all of them are texts: a sum in which one operand is a literal text has no
//! other value. That the others are texts too is tested, so what failed before fails as well.
//!
//! `{{ '<'|safe + text }}` → `{{ ('<'|safe) | kvspoa_escaped }}{{ (text) | kvspoa_escaped }}`, as in Python a text that is added
//! to one that is marked as safe is escaped for HTML, wherever in the sum it stands.

use super::environment::{ESCAPED_FILTER, TEXT_FILTER, syntax};
use super::walk::{self, Visitor};
use minijinja::machinery::ast::{BinOpKind, Expr, Stmt};
use minijinja::machinery::parse;

/// What is made of an operand.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Term {
    /// A literal text, and its value.
    Literal(String),
    /// It must be a text.
    Text,
    /// The same, and it is escaped unless it is marked as safe.
    Escaped,
}

/// Of an expression that is a sum to be taken apart what becomes of its operands; of any other one nothing.
type Summands = fn(&Expr<'_>) -> Vec<Term>;

/// The template with its sums taken apart that have a literal text in them; `None` where there are none, or where it is not
/// certain that all were found.
pub(super) fn taken_apart(source: &str, template: &Stmt<'_>) -> Option<String> {
    rewritten(source, template, with_literal)
}

/// The same of sums in which an operand is marked as safe.
pub(super) fn escaped(source: &str, template: &Stmt<'_>) -> Option<String> {
    rewritten(source, template, marked_safe)
}

fn rewritten(source: &str, template: &Stmt<'_>, summands: Summands) -> Option<String> {
    let mut out = String::with_capacity(source.len() * 2);
    let (mut taken, mut rest) = (Vec::new(), source);
    while let Some((start, end)) = next_output(rest) {
        let block = &rest[start..end];
        out.push_str(&rest[..start]);
        match operands(block, summands) {
            Some(operands) => {
                taken.push(operands.len());
                write(&mut out, block, operands);
            }
            None => out.push_str(block),
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    let mut sums = Sums { summands, counts: Vec::new() };
    walk::statement(template, false, &mut sums);
    sums.counts.sort_unstable();
    taken.sort_unstable();
    (!taken.is_empty() && taken == sums.counts).then_some(out)
}

/// The operands of a sum; of any other expression it alone.
fn terms<'e, 'a>(expression: &'e Expr<'a>) -> Vec<&'e Expr<'a>> {
    let (mut terms, mut left) = (Vec::new(), expression);
    while let Expr::BinOp(op) = left {
        if !matches!(op.op, BinOpKind::Add) {
            break;
        }
        terms.push(&op.right);
        left = &op.left;
    }
    terms.push(left);
    terms.reverse();
    terms
}

fn with_literal(expression: &Expr<'_>) -> Vec<Term> {
    let term = |expr: &Expr<'_>| match expr {
        Expr::Const(text) => text.value.as_str().map_or(Term::Text, |text| Term::Literal(text.to_owned())),
        _ => Term::Text,
    };
    let terms: Vec<_> = terms(expression).into_iter().map(term).collect();
    let has_literal = terms.iter().any(|term| matches!(term, Term::Literal(_)));
    if terms.len() > 1 && has_literal { terms } else { Vec::new() }
}

fn marked_safe(expression: &Expr<'_>) -> Vec<Term> {
    let terms = terms(expression);
    let is_marked = |term: &&Expr<'_>| matches!(term, Expr::Filter(filter) if filter.name == "safe");
    if terms.len() > 1 && terms.iter().any(is_marked) { vec![Term::Escaped; terms.len()] } else { Vec::new() }
}

/// The numbers of operands of all sums that a template writes.
struct Sums {
    summands: Summands,
    counts: Vec<usize>,
}

impl<'t, 'a> Visitor<'t, 'a> for Sums {
    fn statement(&mut self, statement: &'t Stmt<'a>, _in_macro: bool) {
        if let Stmt::EmitExpr(emit) = statement {
            self.counts.extend(Some((self.summands)(&emit.expr).len()).filter(|count| *count > 0));
        }
    }
}

/// The operands of a `{{ … }}` as they are written, and what becomes of each, if it is a sum that can be taken apart.
fn operands(block: &str, summands: Summands) -> Option<Vec<(&str, Term)>> {
    let template = parse(block, "block", syntax().ok()?).ok()?;
    let Stmt::Template(template) = &template else { return None };
    let [Stmt::EmitExpr(emit)] = &template.children[..] else { return None };
    let inside = block.get(2..block.len() - 2)?;
    let inside = inside.strip_prefix(['-', '+']).unwrap_or(inside);
    let inside = inside.strip_suffix(['-', '+']).unwrap_or(inside);
    let mut operands = Vec::new();
    let mut start = 0;
    for (at, byte) in outside_of_texts(inside) {
        if byte == b'+' {
            operands.push(&inside[start..at]);
            start = at + 1;
        }
    }
    operands.push(&inside[start..]);
    // Every `+` outside of brackets is one of the sum's, and if there are as many, all of them are.
    let terms = summands(&emit.expr);
    (terms.len() == operands.len()).then(|| operands.into_iter().zip(terms).collect())
}

fn write(out: &mut String, block: &str, operands: Vec<(&str, Term)>) {
    let mark = |byte: Option<&u8>| byte.map(|byte| char::from(*byte)).filter(|c| matches!(c, '-' | '+'));
    let bytes = block.as_bytes();
    let last = operands.len() - 1;
    for (at, (operand, term)) in operands.into_iter().enumerate() {
        // Between two operands a text needs no expression, and there nothing is trimmed.
        if let Term::Literal(text) = &term
            && at > 0
            && at < last
            && !text.contains(['{', '\r'])
        {
            out.push_str(text);
            continue;
        }
        out.push_str("{{");
        out.extend(mark(bytes.get(2)).filter(|_| at == 0));
        match term {
            Term::Literal(_) => out.extend([" ", operand.trim(), " "]),
            Term::Text => out.extend([" (", operand.trim(), ") | ", TEXT_FILTER, " "]),
            Term::Escaped => out.extend([" (", operand.trim(), ") | ", ESCAPED_FILTER, " "]),
        }
        out.extend(mark(bytes.get(bytes.len() - 3)).filter(|_| at == last));
        out.push_str("}}");
    }
}

/// Where the next `{{ … }}` of a template begins and ends. Comments and statements are passed over.
fn next_output(source: &str) -> Option<(usize, usize)> {
    let mut at = 0;
    loop {
        let rest = source.get(at..)?;
        let open = rest.find("{{").into_iter().chain(rest.find("{%")).chain(rest.find("{#")).min()?;
        let (start, tag) = (at + open, rest.get(open..)?);
        let length = match tag.as_bytes().get(1)? {
            b'#' => tag.find("#}")? + 2,
            kind => {
                let end = if *kind == b'{' { "}}" } else { "%}" };
                let inside = tag.get(2..)?;
                let is_end = |at: usize| inside.get(at..).is_some_and(|rest| rest.starts_with(end));
                let found = outside_of_texts(inside).find(|(at, _)| is_end(*at)).map(|(at, _)| at);
                found? + 4
            }
        };
        if tag.starts_with("{{") {
            return Some((start, start + length));
        }
        at = start + length;
    }
}

/// The bytes of an expression that stand in no literal text and in no brackets.
fn outside_of_texts(expression: &str) -> impl Iterator<Item = (usize, u8)> + '_ {
    let (mut quote, mut escaped, mut depth) = (None, false, 0_usize);
    expression.bytes().enumerate().filter(move |(_, byte)| {
        match (quote, *byte) {
            (Some(_), _) if escaped => escaped = false,
            (Some(_), b'\\') => escaped = true,
            (Some(open), byte) if open == byte => quote = None,
            (Some(_), _) => {}
            (None, byte @ (b'"' | b'\'')) => quote = Some(byte),
            (None, b'(' | b'[' | b'{') => depth += 1,
            (None, b')' | b']' | b'}') if depth > 0 => depth -= 1,
            (None, _) => return depth == 0,
        }
        false
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apart(source: &str) -> Option<String> {
        taken_apart(source, &parse(source, "test", syntax().expect("syntax")).expect("a template"))
    }

    #[test]
    fn a_sum_with_a_literal_text_is_taken_apart() {
        assert_eq!(
            apart("{{- a + '\\n\\'' + b + '\"' + ' {' + '}' + '\r' + '\\n' -}} \n").as_deref(),
            Some("{{- (a) | kvspoa_text }}\n'{{ (b) | kvspoa_text }}\"{{ ' {' }}}{{ '\r' }}{{ '\\n' -}} \n")
        );
        assert_eq!(
            apart("x {{- 'a+' + b.c(1 + 2)['d'] + (e if f else '}}') -}} y").as_deref(),
            Some(concat!(
                "x {{- 'a+' }}{{ (b.c(1 + 2)['d']) | kvspoa_text }}",
                "{{ ((e if f else '}}')) | kvspoa_text -}} y"
            ))
        );
    }

    #[test]
    fn in_a_sum_with_a_text_that_is_marked_as_safe_all_others_are_escaped() {
        let source = "{{ 'a<'|safe + b + c | tojson }}{{ d + ('e' if f else g) }}";
        let parsed = parse(source, "test", syntax().expect("syntax")).expect("a template");
        assert_eq!(
            escaped(source, &parsed).as_deref(),
            Some(concat!(
                "{{ ('a<'|safe) | kvspoa_escaped }}{{ (b) | kvspoa_escaped }}{{ (c | tojson) | kvspoa_escaped }}",
                "{{ d + ('e' if f else g) }}"
            ))
        );
        let source = "{{ a + b }}{{ a | safe }}{% set x = 'a' | safe + b %}";
        assert_eq!(
            escaped(source, &parse(source, "test", syntax().expect("syntax")).expect("a template")),
            None
        );
    }

    #[test]
    fn what_may_be_something_else_than_a_sum_of_texts_stays() {
        for source in [
            "plain",
            "{{ a }}",
            "{{ a + b }}",
            "{{ 'a' + b if c else d }}",
            "{{ 'a' + b == c }}",
            "{{ ('a' + b) + c }}",
            "{{ f('a' + b) }}",
            "{# {{ 'a' + b }} #}",
            "{% set x = 'a' + b %}",
        ] {
            assert_eq!(apart(source), None, "{source}");
        }
    }

    #[test]
    fn where_not_all_sums_are_found_none_is_taken_apart() {
        assert_eq!(apart("{{ ('a' + b) + c }}{{ 'a' + b }}"), None);
        assert_eq!(apart("{% raw %}{{ 'a' + b }}{% endraw %}"), None);
    }
}
