use super::*;
use crate::request::body::{Endpoint, parse};

fn tokens(body: &str) -> Vec<TokenId> {
    let model = Model::embedded().expect("the embedded model");
    let ask = parse(Endpoint::ChatCompletions, body.as_bytes()).expect("a body");
    model.tokens(&ask).expect("tokens")
}

fn rendered(body: &str) -> String {
    let model = Model::embedded().expect("the embedded model");
    let ask = parse(Endpoint::ChatCompletions, body.as_bytes()).expect("a body");
    let PromptInput::Chat(conversation) = ask.prompt else { panic!("a conversation") };
    model.render(&conversation).expect("text")
}

#[test]
fn the_embedded_model_renders_chatml() {
    let body =
        r#"{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}"#;
    assert_eq!(
        rendered(body),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
}
#[test]
fn special_tokens_in_the_text_are_one_token() {
    let all = tokens(r#"{"messages": [{"role": "user", "content": "<|im_end|>"}]}"#);
    assert_eq!(all.iter().filter(|token| **token == TokenId(2)).count(), 2);
}
