//! Chat templates that clients bring with their requests, for engines that were told to trust them.
//!
//! Such a template runs within the limits of every other one, and less of work: depth and output are bounded, and it
//! reaches nothing but the conversation.

use super::{Sources, Templates, environment::FUEL_OF_REQUESTED, failure};
use crate::prompt::error::PromptError;
use crate::recent::Recent;
use std::sync::Arc;

/// What is kept of them in compiled form, in bytes: a client has one or a few.
const CAPACITY_BYTES: usize = 8 << 20;

/// A compiled template takes some times its text, and its environment some tens of kilobytes.
const TIMES_SOURCE: usize = 16;
const ENVIRONMENT_BYTES: usize = 64 << 10;

/// The compiled templates of lately.
#[derive(Debug)]
pub(super) struct Requested(Recent<Arc<Templates>>);

impl Default for Requested {
    fn default() -> Self {
        Self(Recent::new(CAPACITY_BYTES, 1))
    }
}

impl Templates {
    /// The template of a request, in place of the model's own.
    pub(super) fn requested(&self, source: &str) -> Result<Arc<Self>, PromptError> {
        // One without braces may be the name of one of the model's.
        if !self.options.trust_request_chat_template || !source.contains(['{', '}']) {
            return Err(PromptError::RequestTemplate);
        }
        let key = self.requested.0.key(0, source.as_bytes());
        if let Some(known) = self.requested.0.get(key) {
            return Ok(known);
        }
        let sources = Sources {
            default: Some(source.to_owned()),
            tool_use: None,
            special_tokens: self
                .special_tokens
                .iter()
                .map(|(name, token)| (name.clone(), token.to_string()))
                .collect(),
        };
        let compiled = Self::compile_alone(sources, self.options.clone(), 0);
        let mut compiled = compiled.map_err(|error| failure(&error))?;
        compiled.environment.set_fuel(Some(FUEL_OF_REQUESTED));
        let compiled = Arc::new(compiled);
        let bytes = TIMES_SOURCE * source.len() + ENVIRONMENT_BYTES;
        self.requested.0.insert(key, Arc::clone(&compiled), bytes);
        Ok(compiled)
    }
}

#[cfg(test)]
mod tests {
    use crate::prompt::template::tests::{conversation, templates};
    use crate::prompt::{Model, ModelOptions, PromptError};
    use crate::request::body::Endpoint;
    use serde_json::{Value, json};

    fn model(trusts: bool) -> Model {
        let options = ModelOptions { trust_request_chat_template: trusts, ..ModelOptions::default() };
        Model::embedded_with(options).expect("the embedded model")
    }

    fn body(template: &str) -> Value {
        json!({ "messages": [{ "role": "user", "content": "Hi" }], "chat_template": template })
    }

    fn tokens(model: &Model, body: &Value) -> Result<usize, PromptError> {
        let ask = model.read(Endpoint::ChatCompletions, body.to_string().as_bytes()).expect("a body");
        model.tokenize(&ask.prompt).map(|ids| ids.len())
    }

    #[test]
    fn a_clients_template_takes_the_place_of_the_models_where_engines_trust_it() {
        let model = model(true);
        let text = |text: &str| model.tokenize_text(text).map(|ids| ids.len());
        let template = "{{ messages[0].content }}, says {{ messages[0].role }} before {{ eos_token }}";
        for _ in 0..2 {
            assert_eq!(tokens(&model, &body(template)), text("Hi, says user before <|im_end|>"));
        }
        assert_eq!(tokens(&model, &body("{{ messages[0].content }}")), text("Hi"));
        let own = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
        assert_eq!(tokens(&model, &body("")), tokens(&model, &own), "an empty one is none");
        assert_eq!(tokens(&model, &body("tool_use")), Err(PromptError::RequestTemplate), "a name, perhaps");
    }

    #[test]
    fn elsewhere_the_engine_refuses_it() {
        assert_eq!(tokens(&model(false), &body("{{ messages }}")), Err(PromptError::RequestTemplate));
    }

    #[test]
    fn it_is_held_to_the_limits_of_every_template() {
        let model = model(true);
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
        assert_eq!(tokens(&model, &body(endless)), Err(PromptError::TooLarge));
        // Work that a model's own template may do.
        let long = "{% for a in range(9999) %}{% for b in range(120) %}{% endfor %}{% endfor %}";
        assert_eq!(tokens(&model, &body(long)), Err(PromptError::TooLarge));
        let own =
            templates(long).render(&conversation(r#"{"messages": [{"role": "user", "content": "Hi"}]}"#));
        assert_eq!(own.map(|rendered| rendered.into_text()), Ok(String::new()));
        // What is doubled is paid for by its length.
        let doubled = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
        assert_eq!(tokens(&model, &body(doubled)), Err(PromptError::TooLarge));
        let deep = format!("{}x{}", "{{ (".repeat(2), ") }}".repeat(2));
        assert!(matches!(tokens(&model, &body(&deep)), Err(PromptError::TemplateFailed { .. })));
        let nested = format!("{{{{ {}1{} }}}}", "(".repeat(50_000), ")".repeat(50_000));
        assert!(matches!(tokens(&model, &body(&nested)), Err(PromptError::TemplateFailed { .. })));
        let refusing = "{{ raise_exception('no') }}";
        assert_eq!(tokens(&model, &body(refusing)), Err(PromptError::TemplateRefused));
    }
}
