//! What became of requests in a whole vLLM front end, from HTTP to the engine's door (scripts/request_goldens.py), and
//! what becomes of them here.

use kvspoa::prompt::Model;
use kvspoa::request::body::{Endpoint, PromptInput};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// How all requests of a model ended.
#[derive(Default)]
pub(crate) struct Ends {
    /// The same ids.
    pub(crate) equal: usize,
    /// Refused there, routed by load here.
    pub(crate) refused: usize,
    /// Answered there, routed by load here: by the reason.
    pub(crate) not_known: BTreeMap<String, Vec<String>>,
    /// Refused there, with a prompt here; no harm is done, as there is nothing to route.
    pub(crate) accepted: Vec<String>,
    /// Other ids.
    pub(crate) wrong: Vec<String>,
}

impl Ends {
    /// Takes one request to its end; `theirs` are the prompts that reached the engine, `None` where it refused.
    pub(crate) fn add(
        &mut self,
        model: &Model,
        context: usize,
        (path, body): (&str, &Value),
        theirs: Option<Vec<Vec<u32>>>,
    ) {
        let ours = prompts(model, context, path, &body.to_string());
        let said = || format!("{path} {body}");
        match (ours, theirs) {
            (Ok(ours), Some(theirs)) if ours == theirs => self.equal += 1,
            (Ok(ours), Some(theirs)) => {
                let mut line = said();
                let _ = write!(line, "\n  ours   {ours:?}\n  vLLM's {theirs:?}");
                self.wrong.push(line);
            }
            (Ok(_), None) => self.accepted.push(said()),
            (Err(_), None) => self.refused += 1,
            (Err(reason), Some(_)) => self.not_known.entry(reason).or_default().push(said()),
        }
    }
}

/// The token ids of all prompts of a body, or why there are none. With and without what was seen before they are the same.
fn prompts(model: &Model, context: usize, path: &str, body: &str) -> Result<Vec<Vec<u32>>, String> {
    let endpoint = Endpoint::from_path(path).expect("an endpoint");
    let mut ask = model.read(endpoint, body.as_bytes()).map_err(|error| error.to_string())?;
    ask.limits = ask.limits.within(Some(context));
    // The longest prompt alone is told, but whether they are taken depends on all.
    let whole = model.tokens(&ask, &|| false).map_err(|error| error.to_string())?;
    if !whole.is_whole {
        return Err("the beginning alone is known".to_owned());
    }
    let each = match &ask.prompt {
        PromptInput::Several(prompts) => prompts.clone(),
        one => vec![one.clone()],
    };
    let ids: Vec<Vec<u32>> = each
        .into_iter()
        .map(|prompt| {
            let mut one = ask.clone();
            one.prompt = prompt;
            let tokens = model.tokens(&one, &|| false).map_err(|error| error.to_string())?;
            Ok(tokens.ids.iter().map(|id| id.0).collect())
        })
        .collect::<Result<_, String>>()?;
    assert_eq!(whole.total, ids.iter().map(Vec::len).sum::<usize>(), "{body}");
    assert_eq!(Some(whole.ids.len()), ids.iter().map(Vec::len).max(), "{body}");
    Ok(ids)
}

/// The prompts of a row, as they are written in the files.
pub(crate) fn theirs(prompts: &Value) -> Option<Vec<Vec<u32>>> {
    let id = |id: &Value| u32::try_from(id.as_u64().expect("an id")).expect("an id");
    let prompt = |ids: &Value| ids.as_array().expect("a prompt").iter().map(id).collect();
    Some(prompts.as_array()?.iter().map(prompt).collect())
}
