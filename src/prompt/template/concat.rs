//! `{{ a ~ b }}` → `{{ a | kvspoa_str ~ b | kvspoa_str }}`.
//!
//! `~` joins the texts of its operands, and some values have another text here than in Python. The filter makes it Python's
//! of each operand before.

use super::environment::{STR_FILTER, syntax};
use minijinja::machinery::{Token, tokenize};

/// The template with that filter behind every operand; `None` where there are none, or where one is of a form that is not
/// known to end where its last token does.
pub(super) fn with_texts_of_python(source: &str) -> Option<String> {
    let mut ends = Vec::new();
    let mut levels = vec![Level::default()];
    let mut last_end = 0;
    for token in tokenize(source, false, syntax().ok()?) {
        let (token, span) = token.ok()?;
        let level = levels.last_mut()?;
        match kind(&token) {
            Kind::Tilde => {
                ends.push(level.operand_ends(last_end)?);
                *level = Level { has_tilde: true, is_compound: false };
            }
            Kind::Compound => level.is_compound = true,
            Kind::Between => ends.extend(level.ends(last_end)?),
            Kind::Opens => levels.push(Level::default()),
            Kind::Closes => {
                ends.extend(level.ends(last_end)?);
                levels.pop();
            }
            Kind::Operand => {}
        }
        last_end = span.end_offset as usize;
    }
    let mut out = String::with_capacity(source.len() + ends.len() * 16);
    let mut from = 0;
    for end in &ends {
        out.push_str(source.get(from..*end)?);
        out.push_str(" | ");
        out.push_str(STR_FILTER);
        from = *end;
    }
    out.push_str(source.get(from..)?);
    (!ends.is_empty()).then_some(out)
}

/// What was seen of the expression that is open within the same brackets.
#[derive(Default)]
struct Level {
    /// There is a `~` before the operand.
    has_tilde: bool,
    /// The operand has operators in it that bind no closer than a filter.
    is_compound: bool,
}

impl Level {
    /// Where an operand of `~` ends.
    fn operand_ends(&self, last_end: usize) -> Option<usize> {
        (!self.is_compound).then_some(last_end)
    }

    /// Ends the expression: and the last operand of `~`, if it is one. `None` where that is compound.
    fn ends(&mut self, last_end: usize) -> Option<Option<usize>> {
        let level = std::mem::take(self);
        if level.has_tilde { level.operand_ends(last_end).map(Some) } else { Some(None) }
    }
}

/// What a token is between the operands of `~`.
enum Kind {
    Tilde,
    /// Stands inside of an operand, and binds closer than `~`, but less than a filter; or may do so.
    Compound,
    /// Binds less than `~`.
    Between,
    Opens,
    Closes,
    Operand,
}

fn kind(token: &Token<'_>) -> Kind {
    match token {
        Token::Tilde => Kind::Tilde,
        Token::Mul
        | Token::Div
        | Token::FloorDiv
        | Token::Mod
        | Token::Pow
        | Token::Minus
        | Token::Ident("is") => Kind::Compound,
        Token::Ident("and" | "or" | "not" | "in" | "if" | "else")
        | Token::Plus
        | Token::Comma
        | Token::Colon
        | Token::Assign
        | Token::Eq
        | Token::Ne
        | Token::Gt
        | Token::Gte
        | Token::Lt
        | Token::Lte => Kind::Between,
        Token::ParenOpen
        | Token::BracketOpen
        | Token::BraceOpen
        | Token::VariableStart
        | Token::BlockStart => Kind::Opens,
        Token::ParenClose
        | Token::BracketClose
        | Token::BraceClose
        | Token::VariableEnd
        | Token::BlockEnd => Kind::Closes,
        _ => Kind::Operand,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operand_is_made_a_text_before() {
        for (source, expected) in [
            ("{{ a ~ 'b' -}} c", "{{ a | S ~ 'b' | S -}} c"),
            (
                "{%- set x = [a.b ~ c[1 + 2] ~ f(d)] -%}",
                "{%- set x = [a.b | S ~ c[1 + 2] | S ~ f(d) | S] -%}",
            ),
            ("{{ 'a' + b ~ c + 'd' }}", "{{ 'a' + b | S ~ c | S + 'd' }}"),
            ("{{ a ~ (b ~ 1 * 2 if c else d) }}", "-"),
            (
                "{{ a ~ (b ~ c if d == 1 else 2 * 3) }}",
                "{{ a | S ~ (b | S ~ c | S if d == 1 else 2 * 3) | S }}",
            ),
            (
                "{{ f(x=a ~ b, y={'k': c | upper ~ d}) }}",
                "{{ f(x=a | S ~ b | S, y={'k': c | upper | S ~ d | S}) }}",
            ),
            ("~ {# a ~ b #}{{ '~' }}{% raw %}{{ a ~ b }}{% endraw %}", "-"),
            ("{{ 2 * a ~ b }}", "-"),
            ("{{ -a ~ b }}", "-"),
            ("{{ a ~ b is string }}", "-"),
            ("{{ a ~ b - c }}", "-"),
        ] {
            let changed = with_texts_of_python(source);
            assert_eq!(changed.as_deref().unwrap_or("-"), expected.replace('S', STR_FILTER), "{source}");
        }
    }
}
