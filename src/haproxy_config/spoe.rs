//! SPOE files, as far as they matter to another agent of the same HAProxy (doc/SPOE.txt, §2).

use std::{path::Path, sync::Arc};

use super::cfg::{CfgError, Place};
use super::words::words;

/// An agent that an SPOE file describes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpoeAgent {
    /// The engine whose scope it stands in; none: the whole file is for one engine.
    pub engine: Option<String>,
    /// The backend with the agent's servers.
    pub backend: Option<String>,
    /// The largest frame that may be sent to it, in bytes, where the file lowers it.
    pub max_frame_bytes: Option<(usize, Place)>,
    /// Where a message takes a whole body along.
    pub body: Option<Place>,
}

/// The agents of a file.
///
/// # Errors
/// A line that HAProxy would refuse.
pub(super) fn agents(
    path: &Path,
    text: &str,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Vec<SpoeAgent>, CfgError> {
    let path = Arc::from(path);
    let mut scope = None;
    let mut agents: Vec<SpoeAgent> = Vec::new();
    let mut bodies = Vec::new();
    for (number, text) in text.lines().enumerate() {
        let place = Place { file: Arc::clone(&path), line: number + 1 };
        let line = words(text, env).map_err(|error| CfgError::Words(place.clone(), error))?;
        let word = |number: usize| line.get(number).map_or("", String::as_str);
        if let Some(engine) = word(0).strip_prefix('[').and_then(|word| word.strip_suffix(']')) {
            scope = Some(engine.to_owned());
            continue;
        }
        match (word(0), agents.last_mut()) {
            ("spoe-agent", _) => agents.push(SpoeAgent {
                engine: scope.clone(),
                backend: None,
                max_frame_bytes: None,
                body: None,
            }),
            ("use-backend", Some(agent)) => agent.backend = Some(word(1).to_owned()),
            ("max-frame-size", Some(agent)) => {
                agent.max_frame_bytes = word(1).parse().ok().map(|bytes| (bytes, place));
            }
            ("args", _) if line.iter().any(|word| is_whole_body(word)) => bodies.push((scope.clone(), place)),
            _ => {}
        }
    }
    for agent in &mut agents {
        agent.body =
            bodies.iter().find(|(engine, _)| *engine == agent.engine).map(|(_, place)| place.clone());
    }
    Ok(agents)
}

/// Whether an argument is a body, and not cut by the `bytes` converter.
fn is_whole_body(argument: &str) -> bool {
    let sample = argument.split_once('=').map_or(argument, |(_, sample)| sample);
    ["req.body", "res.body"]
        .iter()
        .any(|body| sample.strip_prefix(body).is_some_and(|rest| rest.is_empty() || rest.starts_with(',')))
        && !sample.contains(",bytes(")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_has_a_backend_a_cap_and_bodies() {
        let text = "[waf]\nspoe-agent a\n messages m\n max-frame-size 65532\n use-backend waf\nspoe-message m\n args app=str(x) body=req.body\n\
                    [geo]\nspoe-agent b\n use-backend geo\nspoe-message g\n args src body=req.body,bytes(0,9) len=req.body_len\n";
        let agents = agents(Path::new("f"), text, &|_| None).expect("well formed");
        let said: Vec<String> = agents
            .iter()
            .map(|agent| {
                let cap = agent.max_frame_bytes.as_ref().map(|(bytes, place)| format!("{bytes} at {place}"));
                let body = agent.body.as_ref().map(ToString::to_string);
                format!("{:?} {:?} {cap:?} {body:?}", agent.engine, agent.backend)
            })
            .collect();
        assert_eq!(
            said,
            [
                r#"Some("waf") Some("waf") Some("65532 at f:4") Some("f:7")"#,
                r#"Some("geo") Some("geo") None None"#
            ]
        );
    }
}
