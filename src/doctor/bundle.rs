//! `kvspoa bundle`: what a report of a fault needs, in one file, and no text of a prompt.

use super::{DoctorArgs, examine, gather};
use crate::config::{ConfigError, Loaded, Setting};
use serde_json::{Map, Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// Keys whose texts may be anybody's, with what is kept of them: the names of a table's entries.
const TEXTS: [&str; 1] = ["default_chat_template_kwargs"];

/// Collects the state of everything that a configuration names.
pub async fn bundle(loaded: Result<Loaded, ConfigError>, args: &DoctorArgs) -> Value {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut bundle = json!({
        "kvspoa": env!("CARGO_PKG_VERSION"),
        "written_unix_seconds": seconds,
        "machine": gather::machine(),
    });
    let config = match loaded {
        Ok(loaded) => {
            let settings: Vec<Value> = loaded.settings.iter().map(setting).collect();
            bundle["configuration"] = json!({ "settings": settings, "warnings": loaded.warnings });
            bundle["agent"] = gather::agent_pages(&loaded.config).await;
            bundle["haproxy"] = gather::haproxy_answers(&loaded.config).await;
            Ok(loaded.config)
        }
        // It names a line of the file, and what is wrong with the value there.
        Err(error) => Err(error),
    };
    bundle["doctor"] = examine(config, args).await.json();
    bundle
}

/// A key, its value and where that came from. Of texts that are written for models nothing is told but their length.
fn setting(setting: &Setting) -> Value {
    let is_text = TEXTS.iter().any(|key| setting.key.ends_with(key));
    let value = if is_text { without_texts(&setting.value) } else { setting.value.clone() };
    json!({ "key": setting.key, "value": value, "from": setting.origin.to_string() })
}

fn without_texts(value: &Value) -> Value {
    match value {
        Value::String(text) => format!("({} characters)", text.chars().count()).into(),
        Value::Array(items) => items.iter().map(without_texts).collect(),
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| (name.clone(), without_texts(value)));
            Value::Object(fields.collect::<Map<_, _>>())
        }
        value => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Origin;

    #[test]
    fn of_texts_for_models_only_their_length_is_told() {
        let value = json!({ "enable_thinking": false, "persona": "Be my secret.", "list": ["two"] });
        let kwargs = Setting {
            key: "pool[be].prompt.default_chat_template_kwargs".to_owned(),
            value,
            unset: "none",
            origin: Origin::Default,
        };
        let told =
            json!({ "enable_thinking": false, "persona": "(13 characters)", "list": ["(3 characters)"] });
        assert_eq!(setting(&kwargs)["value"], told);
        let listen = Setting { key: "spop.listen".to_owned(), value: "127.0.0.1:1".into(), ..kwargs };
        assert_eq!(setting(&listen)["value"], "127.0.0.1:1");
    }
}
