use super::*;
use crate::request::body::{Endpoint, parse};

fn tokens(body: &str) -> Vec<TokenId> {
    let model = Model::embedded().expect("the embedded model");
    let ask = parse(Endpoint::ChatCompletions, body.as_bytes()).expect("a body");
    model.tokens(&ask).expect("tokens").ids
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

#[test]
fn of_several_prompts_the_longest_counts_and_all_together() {
    let model = Model::embedded().expect("the embedded model");
    let body = r#"{"prompt": [[1, 2], [3, 4, 5], [6]], "truncate_prompt_tokens": 2}"#;
    let mut ask = parse(Endpoint::Completions, body.as_bytes()).expect("a body");
    let all = model.tokens(&ask).expect("tokens");
    assert_eq!((all.ids, all.total), (vec![TokenId(4), TokenId(5)], 5));
    ask.truncation = None;
    assert_eq!(model.tokens(&ask).expect("tokens").total, 6);
}
