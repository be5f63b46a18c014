//! What a replica serves (`GET /v1/models`, vLLM `ModelList`).

use serde::Deserialize;

/// One name by which requests may ask.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct ServedModel {
    /// The name.
    pub id: String,
    /// What it was loaded from: a path, or a name in a model hub.
    #[serde(default)]
    pub root: Option<String>,
    /// For a LoRA adapter, the model that it adapts.
    #[serde(default)]
    pub parent: Option<String>,
    /// Whose list it is: `vllm`, which refuses requests that name a model beyond it.
    #[serde(default)]
    pub owned_by: Option<String>,
    /// The longest context, in tokens; adapters have none.
    #[serde(default, deserialize_with = "number")]
    pub max_model_len: Option<u32>,
}

/// What is no number of tokens is not known.
fn number<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let number = serde_json::Value::deserialize(deserializer)?;
    Ok(number.as_u64().and_then(|number| number.try_into().ok()))
}

/// Far more than an engine serves.
const MAX_MODELS: usize = 4096;

/// Reads the list; entries that are not understood are left out.
#[must_use]
pub fn parse_models(list: &[u8]) -> Vec<ServedModel> {
    #[derive(Deserialize)]
    struct List {
        data: Vec<serde_json::Value>,
    }
    let Ok(list) = serde_json::from_slice::<List>(list) else { return Vec::new() };
    let models =
        list.data.into_iter().take(MAX_MODELS).filter_map(|model| ServedModel::deserialize(model).ok());
    // What is its own parent is no adapter.
    models
        .map(|model| {
            let parent = model.parent.filter(|parent| *parent != model.id);
            ServedModel { parent, ..model }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_adapters_are_the_models_with_a_parent() {
        let list = br#"{"object":"list","data":[
            {"id":"qwen3","root":"/models/qwen3","parent":null,"max_model_len":2048},
            {"id":"sql","root":"/adapters/sql","parent":"qwen3","max_model_len":null},{"id":"self","parent":"self"},
            {"id":7},{"id":"odd","max_model_len":-1}]}"#;
        let models = parse_models(list);
        let ids: Vec<_> = models.iter().map(|model| (model.id.as_str(), model.parent.as_deref())).collect();
        assert_eq!(ids, [("qwen3", None), ("sql", Some("qwen3")), ("self", None), ("odd", None)]);
        assert_eq!(models[3].max_model_len, None);
        assert_eq!((models[0].root.as_deref(), models[0].max_model_len), (Some("/models/qwen3"), Some(2048)));
        assert!(parse_models(b"not JSON").is_empty());
    }
}
