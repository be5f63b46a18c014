use proptest::prelude::*;

use super::*;

/// Captured from HAProxy 2.6.12 with `haproxy/snippet-frontend.cfg` and `option httplog`.
const NORMAL: &str = concat!(
    r#"<142>1 2026-11-30T14:03:06.614859+00:00 - haproxy 13503 - [kv@1 rid="2da0413c-c64d-40d4-8b3c-5491af108fc6" "#,
    r#"pool="llm" want="r1" srv="r1" ts=-- st=200 rc=0 reason="overlap" skip="" err="" pt="2" tw=0 tc=1 tr=38 ta=1007] "#,
    r#"127.0.0.1:34834 [30/Nov/2026:14:03:06.610] fe llm/r1 0/0/1/38/1007 200 269 - - ---- 1/1/0/0/0 0/0 "POST /a HTTP/1.1""#,
    "\n"
);

fn end(line: &str) -> RequestEnd {
    match parse(line.as_bytes()) {
        Ok(LogLine::End(end)) => *end,
        other => panic!("{other:?} from {line}"),
    }
}

fn element(fields: &str) -> String {
    format!("<142>1 2026-11-30T14:03:06.614859+00:00 - haproxy 1 - [kv@1 {fields}] message\n")
}

#[test]
fn a_normal_end_has_every_field() {
    let end = end(NORMAL);
    assert_eq!(end.request, RequestId(0x2da0413c_c64d_40d4_8b3c_5491af108fc6));
    assert_eq!(end.pool, "llm");
    assert_eq!(end.wanted.as_deref(), Some("r1"));
    assert_eq!(end.served.as_deref(), Some("r1"));
    assert!(end.termination.is_normal());
    assert_eq!(end.status, Some(200));
    assert_eq!((end.retries, end.redispatched), (0, false));
    assert_eq!(end.reason.as_deref(), Some("overlap"));
    assert_eq!((end.skip, end.spoe_error), (None, None));
    assert_eq!(end.agent_wait, Some(Duration::from_millis(2)));
    assert_eq!(end.queue_wait, Some(Duration::ZERO));
    assert_eq!(end.connect, Some(Duration::from_millis(1)));
    assert_eq!(end.response, Some(Duration::from_millis(38)));
    assert_eq!(end.total, Some(Duration::from_millis(1007)));
}

#[test]
fn a_503_without_a_server_names_none_and_has_no_times() {
    let end = end(&element(
        r#"rid="x" pool="llm" want="r1" srv="<NOSRV>" ts=SC st=503 rc=+3 tw=-1 tc=-1 tr=-1 ta=12"#,
    ));
    assert_eq!(end.wanted.as_deref(), Some("r1"));
    assert_eq!(end.served, None);
    assert!(end.termination.is_by_server());
    assert_eq!(end.status, Some(503));
    assert_eq!((end.retries, end.redispatched), (3, true));
    assert_eq!((end.queue_wait, end.connect, end.response), (None, None, None));
}

#[test]
fn a_client_that_left_before_the_answer_got_no_status() {
    let end = end(&element(r#"rid="x" pool="llm" srv="r1" ts=CH st=-1 rc=0 tr=-1"#));
    assert!(end.termination.is_by_client());
    assert_eq!(end.status, None);
}

#[test]
fn the_reason_not_to_ask_is_told() {
    for (text, skip) in [
        (r#"skip="method""#, Some(Skip::Method)),
        (r#"skip="agent_down""#, Some(Skip::AgentDown)),
        (r#"skip="breaker""#, Some(Skip::Breaker)),
        (r#"skip="a rule of the site""#, Some(Skip::Site)),
        ("skip=-", None),
        ("", None),
    ] {
        assert_eq!(end(&element(&format!(r#"rid="x" pool="p" ts=-- {text}"#))).skip, skip, "{text}");
    }
}

#[test]
fn a_request_of_another_backend_is_other() {
    for rid in [r#"rid="""#, "rid=-", ""] {
        let line = element(&format!(r#"{rid} pool="" want="" srv="s1" ts=-- st=200 rc=0"#));
        assert_eq!(parse(line.as_bytes()), Ok(LogLine::Other));
    }
}

#[test]
fn a_line_without_our_element_is_told_apart() {
    let plain = b"<142>1 2026-11-30T14:03:06+00:00 host haproxy 1 - - 127.0.0.1:1 [now] fe be/s1\n";
    assert_eq!(parse(plain), Ok(LogLine::WithoutFields));
}

#[test]
fn an_element_of_the_site_before_ours_is_stepped_over() {
    let line = r#"<142>1 t h a p m [site@9 q="[kv@1 rid=\"evil\" \]"][kv@1 rid="x" pool="p" ts=--] m"#;
    assert_eq!(end(line).request, RequestId::parse(b"x").expect("an id"));
}

#[test]
fn our_element_in_the_message_is_not_ours() {
    let line = r#"<142>1 t h a p m [site@9] [kv@1 rid="evil" pool="p" ts=--]"#;
    assert_eq!(parse(line.as_bytes()), Ok(LogLine::WithoutFields));
    let line = r#"<142>1 t h a p m - [kv@1 rid="evil" pool="p" ts=--]"#;
    assert_eq!(parse(line.as_bytes()), Ok(LogLine::WithoutFields));
}

#[test]
fn escaped_characters_are_restored_and_other_backslashes_kept() {
    let end = end(&element(r#"rid="x" pool="p" ts=-- reason="a\"]\]\\b\n""#));
    assert_eq!(end.reason.as_deref(), Some(r#"a"]]\b\n"#));
}

#[test]
fn a_line_cut_anywhere_in_the_structured_data_is_an_error() {
    let complete = NORMAL.find("] 127").expect("the end of the element") + 1;
    for length in 0..complete {
        let line = NORMAL.get(..length).expect("ASCII");
        assert!(parse(line.as_bytes()).is_err(), "cut at {length}");
    }
    assert!(parse(NORMAL.get(..complete).expect("ASCII").as_bytes()).is_ok());
}

#[test]
fn what_haproxy_does_not_write_is_named() {
    for (fields, name) in [
        (r#"rid="x" ts=--"#, "pool"),
        (r#"rid="x" pool="p""#, "ts"),
        (r#"rid="x" pool="p" ts=---"#, "ts"),
        (r#"rid="x" pool="p" ts=-- st=99999"#, "st"),
        (r#"rid="x" pool="p" ts=-- ta=soon"#, "ta"),
        (r#"rid="x" pool="p" ts=-- rc=-2"#, "rc"),
    ] {
        assert_eq!(parse(element(fields).as_bytes()), Err(LogLineError::Field(name)), "{fields}");
    }
    assert_eq!(parse(b"<134>Nov 30 14:03:06 haproxy[1]: x"), Err(LogLineError::NotRfc5424));
    assert_eq!(parse(element(r#"rid "x""#).as_bytes()), Err(rfc5424::Malformed.into()));
}

#[test]
fn server_notices_tell_pool_server_and_change() {
    for (message, change) in [
        ("Server llm/r1 is DOWN, reason: Layer4 connection problem", ServerChange::Down),
        ("Server llm/r1 is UP, reason: Layer4 check passed", ServerChange::Up),
        ("Backup Server llm/r1 is UP/READY (leaving forced maintenance).", ServerChange::Up),
        ("Server llm/r1 is going DOWN for maintenance.", ServerChange::Other),
        ("Server llm/r1 enters drain state.", ServerChange::Other),
        ("Server llm/r1 remains in forced drain mode.", ServerChange::Other),
    ] {
        let line = format!("<145>1 t - haproxy 1 - - {message}");
        let notice = ServerNotice { pool: "llm".into(), server: "r1".into(), change };
        assert_eq!(parse(line.as_bytes()), Ok(LogLine::Server(notice)), "{message}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_a_panic(bytes: Vec<u8>) {
        let _ = parse(&bytes);
        let _ = parse(&[b"<1>1 t h a p m [kv@1 ", bytes.as_slice()].concat());
    }

    #[test]
    fn any_value_survives_its_escaping(reason in "[^\0]{1,40}") {
        prop_assume!(reason != "-");
        let escaped = reason.replace('\\', r"\\").replace('"', r#"\""#).replace(']', r"\]");
        let line = element(&format!(r#"rid="x" pool="p" ts=-- reason="{escaped}" skip="method""#));
        let end = end(&line);
        prop_assert_eq!(end.reason, Some(reason));
        prop_assert_eq!(end.skip, Some(Skip::Method));
    }
}
