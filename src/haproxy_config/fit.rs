//! How our lines go into a site: which names are free, and where the lines stand.

use super::cfg::{HaproxyCfg, Line, Place, Section, SectionKind};
use super::findings::{Finding, FindingKind, Severity};
use super::forms::{AGENT_BACKEND, AGENT_DEFAULTS, Form, Names, PREFIX, render};
use super::ours::{BackendLines, frontend_line, is_log_format};

/// Lines to be put into a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Edit {
    /// The line that they follow.
    pub after: Place,
    /// Which lines.
    pub form: Form,
    /// The section that they continue; none for whole sections.
    pub section: Option<String>,
}

/// A site with our lines.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fit {
    /// The names to use.
    pub names: Names,
    /// What is still to be put in, in the order of the files.
    pub edits: Vec<Edit>,
    /// What is in place, and which names are others than usual.
    pub notes: Vec<Finding>,
}

/// Fits our lines to these pools of a site: its own names where our lines are in place already, else free ones.
#[must_use]
pub fn fit(cfg: &HaproxyCfg, pools: &[String], names: &Names) -> Fit {
    let mut fit = Fit { names: names.clone(), edits: Vec::new(), notes: Vec::new() };
    match cfg.sections.iter().find_map(BackendLines::of) {
        Some(lines) => {
            fit.names.prefix = lines.prefix.to_owned();
            fit.names.agent_backend = lines.agent_backend.to_owned();
            fit.names.spoe_file = lines.spoe_file.to_owned();
        }
        None => fit.choose_names(cfg),
    }
    let is_pool = |section: &Section| section.is_backend() && pools.contains(&section.name);
    // Once for each pool, not for each section: a site may have thousands.
    let ways: Vec<&Section> =
        cfg.sections(is_pool).flat_map(|pool| cfg.ways_to(pool)).map(|(way, _)| way).collect();
    for section in &cfg.sections {
        let is_way = ways.iter().any(|way| std::ptr::eq(*way, section));
        fit.place_lines(section, is_way, is_pool(section));
    }
    if agent(cfg, &fit.names.agent_backend).is_none()
        && let Some(last) = cfg.sections.last()
    {
        let is_defaults =
            |name: &str| cfg.sections(|s| s.kind == SectionKind::Defaults && s.name == name).next().is_some();
        fit.names.agent_defaults = free(AGENT_DEFAULTS, is_defaults);
        // Behind all else: its `defaults` must not reach another section.
        fit.edits.push(Edit { after: last.end.clone(), form: Form::Agent, section: None });
    }
    fit
}

impl Fit {
    fn choose_names(&mut self, cfg: &HaproxyCfg) {
        let taken = |name: &str| cfg.sections(|s| is_proxy(s) && s.name == name).next().map(|s| &s.place);
        if let Some(place) = taken(&self.names.agent_backend)
            && agent(cfg, &self.names.agent_backend).is_none()
        {
            let free = free(AGENT_BACKEND, |name| taken(name).is_some());
            self.another(place, "the name", &self.names.agent_backend.clone(), &free);
            self.names.agent_backend = free;
        }
        if let Some(line) = user_of(cfg, PREFIX) {
            let prefix = free("kvspoa", |prefix| user_of(cfg, prefix).is_some());
            self.another(&line.place, "the prefix of our variables", PREFIX, &prefix);
            self.names.prefix = prefix;
        }
    }

    fn another(&mut self, place: &Place, what: &str, taken: &str, free: &str) {
        let what = format!("{what} `{taken}` is taken");
        let remedy = format!("Ours is `{free}`");
        self.notes.push(Finding::new(Severity::Note, FindingKind::NameTaken, Some(place), what, remedy));
    }

    /// `is_way`: requests come from here to a pool; `is_pool`: it is one. A `listen` may be both.
    fn place_lines(&mut self, section: &Section, is_way: bool, is_pool: bool) {
        let wanted = [
            (is_way, Form::Frontend, frontend_line(section).is_some()),
            (is_pool, Form::Backend, BackendLines::of(section).is_some()),
        ];
        for (_, form, in_place) in wanted.into_iter().filter(|(wanted, ..)| *wanted) {
            if in_place {
                let what = format!("`{}` has our lines already", section.name);
                let remedy = "Nothing is put there";
                let note =
                    Finding::new(Severity::Note, FindingKind::InPlace, Some(&section.place), what, remedy);
                self.notes.push(note);
            } else {
                let edit = Edit { after: section.end.clone(), form, section: Some(section.name.clone()) };
                self.edits.push(edit);
            }
        }
    }

    /// A file's bytes with what is to be put into it.
    #[must_use]
    pub fn apply(&self, file: &std::path::Path, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len() + 8192);
        for (number, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
            out.extend_from_slice(line);
            let here = |edit: &&Edit| *edit.after.file == *file && edit.after.line == number + 1;
            for edit in self.edits.iter().filter(here) {
                // The last line of a file may lack its end.
                if !out.ends_with(b"\n") {
                    out.push(b'\n');
                }
                out.push(b'\n');
                out.extend_from_slice(render(edit.form, &self.names).as_bytes());
            }
        }
        out
    }
}

/// The agent's backend, as our form makes it, and not just one of its name.
fn agent<'a>(cfg: &'a HaproxyCfg, name: &str) -> Option<&'a Section> {
    let section = cfg.backend(name)?;
    let mode = cfg.deciding(section, |line| line.word(0) == "mode");
    let spop = mode.first().is_some_and(|line| matches!(line.word(1), "tcp" | "spop"));
    (spop && section.lines.iter().any(|line| line.begins(&["server", "agent"]))).then_some(section)
}

fn is_proxy(section: &Section) -> bool {
    section.is_frontend() || section.is_backend()
}

/// A line of the site's own that uses variables or conditions of this prefix.
fn user_of<'a>(cfg: &'a HaproxyCfg, prefix: &str) -> Option<&'a Line> {
    let variables: Vec<String> = ["proc", "sess", "txn", "req", "res"]
        .iter()
        .flat_map(|scope| [format!("{scope}.{prefix}."), format!("{scope}.{prefix}_")])
        .collect();
    let condition = format!("{prefix}_");
    let uses = |line: &&Line| {
        if is_log_format(line) {
            return false;
        }
        variables.iter().any(|name| line.mentions(name))
            || (line.word(0) == "acl" && line.word(1).starts_with(&condition))
    };
    cfg.sections.iter().flat_map(|section| &section.lines).find(uses)
}

/// The name, or the name with the first number from 2 on with which it is free.
fn free(name: &str, taken: impl Fn(&str) -> bool) -> String {
    let numbered = (2..).map(|number: u32| format!("{name}{number}"));
    std::iter::once(name.to_owned()).chain(numbered).find(|name| !taken(name)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const SITE: &str = "global\n maxconn 9\nfrontend www\n default_backend llm\n\n# caf\u{e9}\nbackend llm\n server a 1.2.3.4:5";

    fn fitted(text: &str, pools: &[&str]) -> (HaproxyCfg, Fit) {
        let cfg = HaproxyCfg::parse([(Path::new("h.cfg"), text)], &|_| None).expect("well formed");
        let pools: Vec<String> = pools.iter().map(|name| (*name).to_owned()).collect();
        let fit = fit(&cfg, &pools, &Names::default());
        (cfg, fit)
    }

    fn applied(text: &str, pools: &[&str]) -> String {
        let (_, fit) = fitted(text, pools);
        String::from_utf8(fit.apply(Path::new("h.cfg"), text.as_bytes())).expect("UTF-8")
    }

    #[test]
    fn our_lines_end_their_sections_and_the_agent_ends_the_file() {
        let text = applied(SITE, &["llm"]);
        let [frontend, backend, agent] = [Form::Frontend, Form::Backend, Form::Agent].map(Form::source);
        let (before, after) = SITE.split_once("\n\n").expect("two halves");
        assert_eq!(text, format!("{before}\n\n{frontend}\n{after}\n\n{backend}\n{agent}"));
    }

    #[test]
    fn what_is_in_place_is_left_alone() {
        let (_, fit) = fitted(&applied(SITE, &["llm"]), &["llm"]);
        assert_eq!(fit.edits, []);
        assert_eq!(fit.names, Names::default());
        assert_eq!(fit.notes.len(), 2, "{:?}", fit.notes);
    }

    #[test]
    fn what_is_in_place_in_part_is_completed_under_the_same_names() {
        let whole = applied(SITE, &["llm"]);
        for form in [Form::Frontend, Form::Backend, Form::Agent] {
            let part = whole.replace(form.source(), "");
            let (_, fit) = fitted(&part, &["llm"]);
            assert_eq!(fit.names, Names::default(), "without {form:?}");
            assert_eq!(fit.edits.iter().map(|edit| edit.form).collect::<Vec<_>>(), [form]);
        }
    }

    #[test]
    fn a_second_pool_takes_the_names_of_the_first() {
        let other = Names {
            prefix: "zz".into(),
            agent_backend: "router".into(),
            spoe_file: "/r".into(),
            ..Names::default()
        };
        let first = render(Form::Backend, &other);
        let text = format!("backend one\n{first} server a 1.2.3.4:5\nbackend two\n server a 1.2.3.4:5\n");
        let (_, fit) = fitted(&text, &["one", "two"]);
        assert_eq!((fit.names.prefix.as_str(), fit.names.agent_backend.as_str()), ("zz", "router"));
        assert_eq!(fit.names.spoe_file, "/r");
        let places: Vec<(Form, Option<&str>)> =
            fit.edits.iter().map(|e| (e.form, e.section.as_deref())).collect();
        assert_eq!(places, [(Form::Backend, Some("two")), (Form::Agent, None)]);
    }

    #[test]
    fn names_that_are_taken_are_not_used() {
        let text = format!(
            "defaults kvspoa\n mode http\nbackend kvspoa_agent\n acl kv_mine path /\n{SITE}\nfrontend kvspoa_agent2\n \
             http-request set-var(txn.kvspoa.x) int(1)\n"
        );
        let (_, fit) = fitted(&text, &["llm"]);
        assert_eq!(fit.names.agent_backend, "kvspoa_agent3");
        assert_eq!(fit.names.agent_defaults, "kvspoa2");
        assert_eq!(fit.names.prefix, "kvspoa2");
        let said: Vec<String> = fit.notes.iter().map(ToString::to_string).collect();
        assert_eq!(
            said,
            [
                "h.cfg:3: note: the name `kvspoa_agent` is taken. Ours is `kvspoa_agent3`.",
                "h.cfg:4: note: the prefix of our variables `kv` is taken. Ours is `kvspoa2`."
            ]
        );
    }

    #[test]
    fn a_listen_gets_both_and_a_condition_is_not_entered() {
        let text = "listen llm\n bind :1\n.if TRUE\n server a 1.2.3.4:5\n.endif\n";
        let (_, fit) = fitted(text, &["llm"]);
        let places: Vec<(Form, usize)> = fit.edits.iter().map(|edit| (edit.form, edit.after.line)).collect();
        assert_eq!(places, [(Form::Frontend, 5), (Form::Backend, 5), (Form::Agent, 5)]);
    }
}
