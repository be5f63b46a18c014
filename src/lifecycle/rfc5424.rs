//! The frame of a log line (RFC 5424): the header, and the elements of the structured data.

use std::borrow::Cow;

use thiserror::Error;

/// The structured data ends too early or is not written as RFC 5424 §6.3 says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("structured data is cut or malformed")]
pub struct Malformed;

/// A parameter of an element: its name, and its value without quotes and escapes.
pub type Param<'a> = (&'a [u8], Cow<'a, [u8]>);

/// What follows `<PRI>1 TIMESTAMP HOSTNAME APP-NAME PROCID MSGID `.
#[must_use]
pub fn after_header(line: &[u8]) -> Option<&[u8]> {
    let rest = line.strip_prefix(b"<")?;
    let digits = rest.iter().take(4).take_while(|byte| byte.is_ascii_digit()).count();
    let mut rest = rest.get(digits..)?.strip_prefix(b">1 ")?;
    for _ in 0..5 {
        let space = rest.iter().position(|byte| *byte == b' ')?;
        rest = rest.get(space + 1..)?;
    }
    Some(rest)
}

/// Walks over `[name param="value" …][…]` (RFC 5424 §6.3). HAProxy leaves numbers without quotes.
#[derive(Clone, Copy, Debug)]
pub struct StructuredData<'a>(&'a [u8]);

impl<'a> StructuredData<'a> {
    /// Takes the line from its structured data on, of which there must be some.
    ///
    /// # Errors
    /// [`Malformed`] if there is no element.
    pub fn new(rest: &'a [u8]) -> Result<Self, Malformed> {
        if rest.first() == Some(&b'[') { Ok(Self(rest)) } else { Err(Malformed) }
    }

    /// Steps over `[`; false if there is no further element.
    ///
    /// # Errors
    /// [`Malformed`] if something else than a message follows.
    pub fn enter_element(&mut self) -> Result<bool, Malformed> {
        match self.0.split_first() {
            Some((b'[', rest)) => {
                self.0 = rest;
                Ok(true)
            }
            Some((b' ' | b'\n', _)) | None => Ok(false),
            Some(_) => Err(Malformed),
        }
    }

    /// The name of the element just entered.
    pub fn element_name(&mut self) -> &'a [u8] {
        self.take_until(|byte| matches!(byte, b' ' | b']'))
    }

    /// The next parameter of the element; `None` at its end, which is stepped over.
    ///
    /// # Errors
    /// [`Malformed`] if the line is cut here, or a value or a quote is missing.
    pub fn param(&mut self) -> Result<Option<Param<'a>>, Malformed> {
        self.take_until(|byte| byte != b' ');
        if let Some(rest) = self.0.strip_prefix(b"]") {
            self.0 = rest;
            return Ok(None);
        }
        let name = self.take_until(|byte| matches!(byte, b'=' | b' ' | b']' | b'"'));
        self.0 = self.0.strip_prefix(b"=").ok_or(Malformed)?;
        let value = match self.0.strip_prefix(b"\"") {
            Some(rest) => {
                self.0 = rest;
                self.quoted()?
            }
            None => Cow::Borrowed(self.take_until(|byte| matches!(byte, b' ' | b']'))),
        };
        Ok(Some((name, value)))
    }

    /// Up to the closing quote. A backslash counts only before `"`, `\` and `]` (RFC 5424 §6.3.3).
    fn quoted(&mut self) -> Result<Cow<'a, [u8]>, Malformed> {
        let plain = self.take_until(|byte| matches!(byte, b'"' | b'\\'));
        if let Some(rest) = self.0.strip_prefix(b"\"") {
            self.0 = rest;
            return Ok(Cow::Borrowed(plain));
        }
        let mut value = plain.to_vec();
        loop {
            match self.0 {
                [b'"', rest @ ..] => {
                    self.0 = rest;
                    return Ok(Cow::Owned(value));
                }
                [b'\\', byte @ (b'"' | b'\\' | b']'), rest @ ..] | [byte, rest @ ..] => {
                    value.push(*byte);
                    self.0 = rest;
                }
                [] => return Err(Malformed),
            }
        }
    }

    /// Takes what comes before the first byte that fits, or everything.
    fn take_until(&mut self, stop: impl Fn(u8) -> bool) -> &'a [u8] {
        let end = self.0.iter().position(|byte| stop(*byte)).unwrap_or(self.0.len());
        let (taken, rest) = self.0.split_at(end);
        self.0 = rest;
        taken
    }
}
