//! Any bytes as a body: the first two choose the endpoint and the place of the cut.

#![no_main]

#[path = "../../support/any_body.rs"]
mod any_body;

use kvspoa::prompt::Model;
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static MODEL: LazyLock<Model> = LazyLock::new(|| Model::embedded().expect("the embedded model"));

fuzz_target!(|data: &[u8]| {
    let [endpoint, cut, body @ ..] = data else { return };
    let endpoint = any_body::ENDPOINTS[usize::from(*endpoint) % any_body::ENDPOINTS.len()];
    any_body::check(&MODEL, endpoint, body, body.len() * usize::from(*cut) / 255);
});
