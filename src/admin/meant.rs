//! Whether a request that changes something was sent by a program that means it.

use hyper::{HeaderMap, StatusCode, header};

/// A page in a browser on this machine could send a form here, but not JSON: for that the browser asks first, and is refused.
/// One whose own name leads to this machine (DNS rebinding) need not ask, but the browser says in `Origin` where it is from,
/// as with every POST; our page sends none. Ray's HAProxy sends JSON, and nothing of its client's headers but the session.
pub(super) fn is_meant(headers: &HeaderMap) -> Result<(), (StatusCode, &'static str)> {
    if headers.contains_key(header::ORIGIN) {
        return Err((StatusCode::FORBIDDEN, "pages in browsers may look, and switch nothing"));
    }
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let is_json = kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json");
    let why = "send JSON, with `content-type: application/json`";
    if is_json { Ok(()) } else { Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, why)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;

    #[test]
    fn only_json_is_meant() {
        for (kind, status) in [
            (Some("application/json"), None),
            (Some("Application/JSON; charset=utf-8"), None),
            (Some("text/plain"), Some(StatusCode::UNSUPPORTED_MEDIA_TYPE)),
            (Some("application/x-www-form-urlencoded"), Some(StatusCode::UNSUPPORTED_MEDIA_TYPE)),
            (None, Some(StatusCode::UNSUPPORTED_MEDIA_TYPE)),
        ] {
            let mut headers = HeaderMap::new();
            if let Some(kind) = kind {
                headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
            }
            assert_eq!(is_meant(&headers).err().map(|(status, _)| status), status, "{kind:?}");
        }
    }

    #[test]
    fn no_page_in_a_browser_is_meant() {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        for origin in ["http://evil.example:9102", "null", "http://127.0.0.1:9102"] {
            headers.insert(header::ORIGIN, HeaderValue::from_static(origin));
            let refused = is_meant(&headers).err().map(|(status, _)| status);
            assert_eq!(refused, Some(StatusCode::FORBIDDEN), "{origin}");
        }
    }
}
