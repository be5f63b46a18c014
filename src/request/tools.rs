//! The tools that a request offers to the model: the same ones in all turns of a conversation, and mostly in all of a
//! client's.

use super::body::BodyError;
use super::json::{self, Object};
use serde_json::Value;
use std::sync::{Arc, OnceLock};

/// Tools, each with exactly the fields and their order that vLLM gives them.
#[derive(Debug)]
pub struct Tools {
    list: Vec<Value>,
    /// They as values of the template engine, once it has made them.
    templated: OnceLock<minijinja::Value>,
}

/// How often their values are in memory: by themselves, and as those of the template.
const VALUES: usize = 2;

/// How often their JSON is at the most: as the template writes the tools and their functions, perhaps with indentation.
const TEXTS: usize = 4;

impl Tools {
    /// The tools of a body, which may be `known` already; `read` makes them of those that the client wrote.
    pub(super) fn take(
        body: &mut Object,
        known: Option<Arc<Self>>,
        read: impl FnOnce(Vec<Value>) -> Result<Option<Vec<Value>>, BodyError>,
    ) -> Result<Option<Arc<Self>>, BodyError> {
        match (known, json::take(body, "tools")) {
            (Some(known), _) => Ok(Some(known)),
            (None, None) => Ok(None),
            (None, Some(Value::Array(tools))) => Ok(read(tools)?.map(|list| Arc::new(list.into()))),
            (None, Some(_)) => Err(BodyError::Field("tools")),
        }
    }

    /// One after the other.
    #[must_use]
    pub fn list(&self) -> &[Value] {
        &self.list
    }

    /// What `make` makes of them for the template engine, or made before.
    pub(crate) fn templated(&self, make: impl FnOnce(&[Value]) -> minijinja::Value) -> minijinja::Value {
        self.templated.get_or_init(|| make(&self.list)).clone()
    }

    /// The memory that they take, with all that is kept beside them, if their JSON has so many bytes.
    pub(super) fn memory_bytes(&self, json_bytes: usize) -> usize {
        let values: usize = self.list.iter().map(json::memory_bytes).sum();
        size_of::<Self>() + VALUES * values + TEXTS * json_bytes
    }
}

impl From<Vec<Value>> for Tools {
    fn from(list: Vec<Value>) -> Self {
        Self { list, templated: OnceLock::new() }
    }
}

impl PartialEq for Tools {
    fn eq(&self, other: &Self) -> bool {
        self.list == other.list
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::SeenMessages;
    use crate::request::body::{Ask, Endpoint, PromptInput, parse, parse_seen};

    const ENDPOINTS: [(Endpoint, &str); 3] = [
        (Endpoint::ChatCompletions, "messages"),
        (Endpoint::Messages, "messages"),
        (Endpoint::Responses, "input"),
    ];

    /// A tool of each API, and what is one of none.
    const TOOLS: [&str; 9] = [
        r#"[{"type": "function", "function": {"name": "f", "parameters": {"x": 1e2}}}]"#,
        r#"[{"name": "f", "input_schema": {"properties": {}}}, {"name": "g", "input_schema": {}}]"#,
        r#"[{"type": "function", "name": "f", "strict": true}, {"type": "web_search"}]"#,
        r#"[{"type": "custom", "name": "f"}]"#,
        r#"[{"type": "function", "function": {"name": "f", "parameters": {"x": 36893488147419103232}}}]"#,
        "[]",
        "null",
        "7",
        r#"["f"]"#,
    ];

    fn tools(ask: Ask) -> Option<Arc<Tools>> {
        match ask.prompt {
            PromptInput::Chat(conversation) => conversation.tools,
            other => panic!("{other:?} is no conversation"),
        }
    }

    #[test]
    fn tools_that_were_seen_are_those_that_are_read() {
        let seen = SeenMessages::new(1 << 20);
        for _ in 0..2 {
            for (endpoint, list) in ENDPOINTS {
                let turns = format!(r#""{list}": [{{"role": "user", "content": "a"}}]"#);
                let once = TOOLS.map(|tools| format!(r#"{{{turns}, "tools": {tools} }}"#));
                let twice = [0, 1, 6].map(|at| {
                    format!(r#"{{"tools": {}, {turns}, "tools":{}}}"#, TOOLS[at], TOOLS[1 - at.min(1)])
                });
                for body in once.iter().chain(&twice) {
                    let read = parse(endpoint, body.as_bytes());
                    assert_eq!(parse_seen(endpoint, body.as_bytes(), &seen), read, "{endpoint:?} {body}");
                }
            }
        }
    }

    #[test]
    fn tools_are_read_once_in_each_api() {
        let seen = SeenMessages::new(1 << 20);
        for ((endpoint, list), tool) in ENDPOINTS.into_iter().zip(TOOLS) {
            let body = |content: &str| {
                format!(r#"{{"tools": {tool}, "{list}": [{{"role": "user", "content": "{content}"}}]}}"#)
            };
            let [one, other] = ["a", "b"].map(|content| {
                tools(parse_seen(endpoint, body(content).as_bytes(), &seen).expect("a body")).expect("tools")
            });
            assert!(Arc::ptr_eq(&one, &other), "{endpoint:?}");
            assert!(seen.stats().bytes >= one.memory_bytes(tool.len()));
        }
    }
}
