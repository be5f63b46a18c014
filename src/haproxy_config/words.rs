//! One line of HAProxy's configuration → its words (configuration manual, §2.2 "Quoting and escaping" and §2.3
//! "Environment variables").

use std::{iter::Peekable, str::Chars};

/// Why a line cannot be split into words. HAProxy refuses such a line too.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WordError {
    /// `"` or `'` without its partner.
    #[error("a quote is not closed")]
    OpenQuote,
    /// `\x` without two hexadecimal digits.
    #[error("`\\x` must be followed by two hexadecimal digits")]
    Hex,
    /// `$` in double quotes without a name behind it.
    #[error("`$` is not followed by the name of a variable; in double quotes write `\\$`")]
    VariableName,
    /// `${` without its `}`.
    #[error("`${{` is not closed")]
    OpenBrace,
}

/// The words of a line, without its comment. `env` knows the environment variables, which count in double quotes only.
///
/// # Errors
/// What HAProxy refuses as well.
pub(super) fn words(line: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<Vec<String>, WordError> {
    let mut words = Vec::new();
    // An empty pair of quotes is a word too, so that one that has begun differs from one that is empty.
    let mut word: Option<String> = None;
    let mut quote: Option<char> = None;
    let mut rest = line.chars().peekable();
    while let Some(c) = rest.next() {
        match (c, quote) {
            ('\n' | '\r', _) | ('#', None) => break,
            ('"' | '\'', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (_, Some(open)) if c == open => quote = None,
            ('\\', None | Some('"')) => escaped(&mut rest, quote, word.get_or_insert_default())?,
            ('$', Some('"')) => match variable(&mut rest, env)? {
                Variable::Text(text) => word.get_or_insert_default().push_str(&text),
                Variable::Words(text) => {
                    let mut parts = text.split_whitespace();
                    word.get_or_insert_default().push_str(parts.next().unwrap_or_default());
                    for part in parts {
                        words.extend(word.replace(part.to_owned()));
                    }
                }
                // As HAProxy does: nothing stands for it, not even an empty word.
                Variable::Unset => {
                    if rest.next_if_eq(&'"').is_some() {
                        quote = None;
                        word = word.filter(|word| !word.is_empty());
                        while rest.next_if(char::is_ascii_whitespace).is_some() {}
                    }
                }
            },
            (c, None) if c.is_ascii_whitespace() => words.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return Err(WordError::OpenQuote);
    }
    words.extend(word);
    Ok(words)
}

/// What follows a backslash. A pair that is no escape stands for itself.
fn escaped(rest: &mut Peekable<Chars<'_>>, quote: Option<char>, word: &mut String) -> Result<(), WordError> {
    let meant = match (rest.peek(), quote) {
        (Some(c @ (' ' | '\\' | '#' | '"' | '\'')), _) | (Some(c @ '$'), Some(_)) => Some(*c),
        (Some('t'), _) => Some('\t'),
        (Some('n'), _) => Some('\n'),
        (Some('r'), _) => Some('\r'),
        (Some('x'), _) => {
            rest.next();
            let mut digit = || rest.next().and_then(|c| c.to_digit(16)).ok_or(WordError::Hex);
            let byte = digit()? * 16 + digit()?;
            word.extend(char::from_u32(byte));
            return Ok(());
        }
        _ => None,
    };
    if meant.is_some() {
        rest.next();
    }
    word.push(meant.unwrap_or('\\'));
    Ok(())
}

enum Variable {
    Text(String),
    /// `${NAME[*]}`: each word of the value is one.
    Words(String),
    Unset,
}

/// `NAME`, `{NAME}`, `{NAME-default}` or `{NAME[*]}`, after the `$`.
fn variable(
    rest: &mut Peekable<Chars<'_>>,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Variable, WordError> {
    let brace = rest.next_if_eq(&'{').is_some();
    let mut name = String::new();
    name.extend(rest.next_if(|c| c.is_ascii_alphabetic() || matches!(c, '_' | '.')));
    if name.is_empty() {
        return Err(WordError::VariableName);
    }
    while let Some(c) = rest.next_if(|c| c.is_ascii_alphanumeric() || *c == '_') {
        name.push(c);
    }
    let mut value = env(&name);
    let mut as_words = false;
    if brace {
        let mut inside = String::new();
        loop {
            match rest.next() {
                Some('}') => break,
                Some(c) => inside.push(c),
                None => return Err(WordError::OpenBrace),
            }
        }
        let (star, default) = match inside.strip_prefix("[*]") {
            Some(default) => (true, default),
            None => (false, inside.as_str()),
        };
        as_words = star;
        match default.strip_prefix('-') {
            Some(default) => value = value.or_else(|| Some(default.to_owned())),
            None if default.is_empty() => {}
            None => return Err(WordError::OpenBrace),
        }
    }
    Ok(match value {
        Some(value) if as_words => Variable::Words(value),
        Some(value) => Variable::Text(value),
        None => Variable::Unset,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(name: &str) -> Option<String> {
        match name {
            "SET" => Some("s v".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        }
    }

    /// Each was said by HAProxy 2.8.25 itself (`.notice`; `tests/haproxy_forms.rs` asks again).
    #[test]
    fn words_are_haproxys() {
        let cases: [(&str, &[&str]); 21] = [
            ("", &[]),
            ("   # a comment", &[]),
            ("  bind  :80\tssl ", &["bind", ":80", "ssl"]),
            (r"a\ b\#c", &["a b#c"]),
            ("x#comment", &["x"]),
            (r#""a#b" 'c # d'"#, &["a#b", "c # d"]),
            (r#"a"b c"'d e'f"#, &["ab cd ef"]),
            (r#""" ''"#, &["", ""]),
            ("${SET}", &["${SET}"]),
            (r#""${SET}""#, &["s v"]),
            (r#""$SET/x""#, &["s v/x"]),
            (r#"'$SET "b" \n'"#, &[r#"$SET "b" \n"#]),
            (r#""${SET[*]}" n"#, &["s", "v", "n"]),
            (r#""${UNSET-d x}""#, &["d x"]),
            (r#""${EMPTY-d}""#, &[""]),
            (r#""a${UNSET}b""#, &["ab"]),
            (r#""${UNSET}" next"#, &["next"]),
            (r#"pre"${UNSET}" next"#, &["prenext"]),
            (r#""q\"r\$s\\t\'u""#, &[r#"q"r$s\t'u"#]),
            (r"\x41\t|\q", &["A\t|\\q"]),
            ("a\r\n", &["a"]),
        ];
        for (line, expected) in cases {
            let split = words(line, &env).expect("HAProxy takes it");
            assert_eq!(split, expected, "{line}");
        }
    }

    #[test]
    fn a_line_that_haproxy_refuses_is_refused() {
        for (line, error) in [
            (r#"a "b"#, WordError::OpenQuote),
            ("a 'b", WordError::OpenQuote),
            (r"\x4", WordError::Hex),
            (r#""$ a""#, WordError::VariableName),
            (r#""${SET""#, WordError::OpenBrace),
            (r#""${SET+1}""#, WordError::OpenBrace),
        ] {
            assert_eq!(words(line, &env), Err(error), "{line}");
        }
    }
}
