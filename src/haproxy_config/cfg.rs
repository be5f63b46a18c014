//! The text of HAProxy's configuration → its sections, and what holds in them.

use std::{collections::HashMap, fmt, path::Path, sync::Arc};

use super::{
    spoe::SpoeAgent,
    words::{WordError, words},
};

/// A line of a file. Prints as `FILE:LINE`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Place {
    /// The file, as it was named.
    pub file: Arc<Path>,
    /// From 1.
    pub line: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)
    }
}

/// Why a configuration cannot be read. HAProxy would not start with it either.
#[derive(Debug, thiserror::Error)]
pub enum CfgError {
    /// A file or folder is not there or not ours to read.
    #[error("{path}: {error}")]
    Read {
        /// As it was named.
        path: String,
        /// The system's reason.
        error: std::io::Error,
    },
    /// A line cannot be split into words.
    #[error("{0}: {1}")]
    Words(Place, WordError),
    /// A keyword before the first section.
    #[error("{0}: `{1}` stands outside of a section")]
    Outside(Place, String),
    /// A section names `defaults` that do not stand before it.
    #[error("{0}: there is no `defaults {1}` before this line")]
    NoDefaults(Place, String),
    /// `.else` or `.endif` without `.if`, or an `.if` that is not closed.
    #[error("{0}: `.if` and `.endif` do not match")]
    Conditional(Place),
}

/// What a section is for; only those that matter here are told apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SectionKind {
    /// `global`
    Global,
    /// `defaults`
    Defaults,
    /// `frontend`
    Frontend,
    /// `backend`
    Backend,
    /// `listen`: a frontend and a backend in one.
    Listen,
    /// Any other.
    Other,
}

impl SectionKind {
    /// The manual's list of sections, up to HAProxy 3.4. Any of these words begins a section, wherever it stands.
    fn of(keyword: &str) -> Option<Self> {
        Some(match keyword {
            "global" => Self::Global,
            "defaults" => Self::Defaults,
            "frontend" => Self::Frontend,
            "backend" => Self::Backend,
            "listen" => Self::Listen,
            "peers" | "userlist" | "mailers" | "resolvers" | "cache" | "program" | "http-errors" | "ring"
            | "log-forward" | "log-profile" | "fcgi-app" | "crt-store" | "traces" | "acme" => Self::Other,
            _ => return None,
        })
    }
}

/// A line that is not a comment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Line {
    /// Where it stands.
    pub place: Place,
    /// At least one.
    pub words: Vec<String>,
    /// Whether it stands between `.if` and `.endif`, so that it may not count. Conditions are not evaluated.
    pub conditional: bool,
}

impl Line {
    /// The word of this number, or an empty one.
    #[must_use]
    pub fn word(&self, number: usize) -> &str {
        self.words.get(number).map_or("", String::as_str)
    }

    /// Whether it begins with these words.
    #[must_use]
    pub fn begins(&self, words: &[&str]) -> bool {
        words.iter().enumerate().all(|(number, word)| self.word(number) == *word)
    }

    /// The word that follows this one.
    #[must_use]
    pub fn after(&self, word: &str) -> Option<&str> {
        let at = self.words.iter().position(|found| found == word)?;
        self.words.get(at + 1).map(String::as_str)
    }

    /// Whether a word of it has this in it.
    #[must_use]
    pub fn mentions(&self, text: &str) -> bool {
        self.words.iter().any(|word| word.contains(text))
    }
}

/// A section with its lines.
#[derive(Clone, Debug)]
pub struct Section {
    /// What it is for.
    pub kind: SectionKind,
    /// Empty where it has none.
    pub name: String,
    /// Its first line.
    pub place: Place,
    /// The line after which it can be continued: its last one that is not inside of an `.if`.
    pub end: Place,
    /// What stands in it.
    pub lines: Vec<Line>,
    /// The `defaults` section that it inherits from.
    defaults: Option<usize>,
}

impl Section {
    /// Whether clients connect to it.
    #[must_use]
    pub fn is_frontend(&self) -> bool {
        matches!(self.kind, SectionKind::Frontend | SectionKind::Listen)
    }

    /// Whether it has servers.
    #[must_use]
    pub fn is_backend(&self) -> bool {
        matches!(self.kind, SectionKind::Backend | SectionKind::Listen)
    }
}

/// HAProxy's whole configuration: every file, in the order in which HAProxy loads them.
#[derive(Clone, Debug, Default)]
pub struct HaproxyCfg {
    /// All sections, in order.
    pub sections: Vec<Section>,
    /// Environment variables that are not set here, though the files name them without a default. HAProxy's own
    /// environment may have them.
    pub unset: Vec<(Place, String)>,
    /// The agents of the SPOE files that filters name, by the name; those that could be read.
    pub(super) spoe: HashMap<String, Vec<SpoeAgent>>,
}

impl HaproxyCfg {
    /// Reads files of these names and texts. `env` is HAProxy's environment.
    ///
    /// # Errors
    /// The first line that HAProxy would refuse for its form.
    pub fn parse<'a>(
        files: impl IntoIterator<Item = (&'a Path, &'a str)>,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, CfgError> {
        let mut parser = Parser { cfg: Self::default(), env, set: HashMap::new(), reset: false };
        for (path, text) in files {
            parser.file(&Arc::from(path), text)?;
        }
        Ok(parser.cfg)
    }

    /// The agents of an SPOE file, as a `filter` names it; `None`: it cannot be read.
    #[must_use]
    pub fn spoe_agents(&self, file: &str) -> Option<&[SpoeAgent]> {
        self.spoe.get(file).map(Vec::as_slice)
    }

    /// The sections that `wanted` takes.
    pub fn sections(&self, wanted: impl Fn(&Section) -> bool) -> impl Iterator<Item = &Section> {
        self.sections.iter().filter(move |section| wanted(section))
    }

    /// The backend, or `listen`, of this name.
    #[must_use]
    pub fn backend(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|section| section.is_backend() && section.name == name)
    }

    /// Every line of every `global` section.
    pub fn global(&self) -> impl DoubleEndedIterator<Item = &Line> {
        self.sections.iter().filter(|s| s.kind == SectionKind::Global).flat_map(|s| &s.lines)
    }

    /// A section and the `defaults` that it inherits from, nearest first.
    pub fn inheritance<'a>(&'a self, section: &'a Section) -> impl Iterator<Item = &'a Section> {
        std::iter::successors(Some(section), |section| self.sections.get(section.defaults?))
    }

    /// The line that decides: the last one of the section that `wanted` takes, else the last one of its `defaults`. Lines
    /// that may not count come first, then the one that counts if they do not.
    pub fn deciding<'a>(&'a self, section: &'a Section, wanted: impl Fn(&Line) -> bool) -> Vec<&'a Line> {
        let mut found = Vec::new();
        for line in self.inheritance(section).flat_map(|section| section.lines.iter().rev()) {
            if wanted(line) {
                found.push(line);
                if !line.conditional {
                    break;
                }
            }
        }
        found
    }

    /// The line of `option NAME` or `no option NAME` that decides, if the option is on.
    #[must_use]
    pub fn option<'a>(&'a self, section: &'a Section, name: &str) -> Option<&'a Line> {
        let line = *self
            .deciding(section, |line| line.begins(&["option", name]) || line.begins(&["no", "option", name]))
            .first()?;
        (line.word(0) == "option").then_some(line)
    }

    /// The frontends whose requests may come to this backend, each with the line that leads there. `None` for the line:
    /// it is a `listen` itself.
    pub fn ways_to<'a>(&'a self, backend: &'a Section) -> Vec<(&'a Section, Option<&'a Line>)> {
        let leads = |line: &Line| match line.word(0) {
            "default_backend" => line.word(1) == backend.name,
            // A name that is made at run time may be any.
            "use_backend" => line.word(1) == backend.name || line.word(1).contains("%["),
            _ => false,
        };
        let way = |section: &'a Section| {
            let own = std::ptr::eq(section, backend).then_some((section, None));
            own.or_else(|| {
                let line = self.inheritance(section).flat_map(|section| &section.lines).find(|l| leads(l));
                line.map(|line| (section, Some(line)))
            })
        };
        self.sections.iter().filter(|section| section.is_frontend()).filter_map(way).collect()
    }
}

struct Parser<'a> {
    cfg: HaproxyCfg,
    env: &'a dyn Fn(&str) -> Option<String>,
    /// What the `global` section has set or removed so far.
    set: HashMap<String, Option<String>>,
    /// Whether it has removed everything else.
    reset: bool,
}

impl Parser<'_> {
    fn file(&mut self, path: &Arc<Path>, text: &str) -> Result<(), CfgError> {
        let mut depth = 0_usize;
        // How deep the `.if`s are in which the section began.
        let mut section_depth = None;
        let place = |line| Place { file: Arc::clone(path), line };
        for (number, text) in text.lines().enumerate() {
            let place = place(number + 1);
            let line = self.words(&place, text)?;
            let Some(keyword) = line.first() else { continue };
            match keyword.as_str() {
                ".if" => depth += 1,
                ".elif" | ".else" if depth == 0 => return Err(CfgError::Conditional(place)),
                ".endif" => {
                    depth = depth.checked_sub(1).ok_or_else(|| CfgError::Conditional(place.clone()))?;
                }
                keyword if keyword.starts_with('.') => {}
                keyword => match SectionKind::of(keyword) {
                    Some(kind) => {
                        self.begin(kind, &line, place.clone())?;
                        section_depth = Some(depth);
                    }
                    // Sections do not go on from one file into the next.
                    None if section_depth.is_none() => {
                        return Err(CfgError::Outside(place, keyword.to_owned()));
                    }
                    None => self.line(Line { place: place.clone(), words: line, conditional: depth > 0 }),
                },
            }
            if let (Some(began), Some(section)) = (section_depth, self.cfg.sections.last_mut())
                && depth <= began
            {
                section.end = place;
            }
        }
        if depth > 0 { Err(CfgError::Conditional(place(text.lines().count()))) } else { Ok(()) }
    }

    fn words(&mut self, place: &Place, text: &str) -> Result<Vec<String>, CfgError> {
        let unset = std::cell::RefCell::new(Vec::new());
        let value = |name: &str| {
            let value = match self.set.get(name) {
                Some(value) => value.clone(),
                None if self.reset => None,
                None => (self.env)(name),
            };
            if value.is_none() {
                unset.borrow_mut().push(name.to_owned());
            }
            value
        };
        let words = words(text, &value).map_err(|error| CfgError::Words(place.clone(), error))?;
        let has_default = |name: &str| text.contains(&format!("${{{name}-"));
        let unset = unset.into_inner().into_iter().filter(|name| !has_default(name));
        self.cfg.unset.extend(unset.map(|name| (place.clone(), name)));
        Ok(words)
    }

    fn begin(&mut self, kind: SectionKind, words: &[String], place: Place) -> Result<(), CfgError> {
        let word = |number: usize| words.get(number).map_or("", String::as_str);
        // `defaults` may have a parent and no name.
        let (name, from) = match (kind, word(1), word(2)) {
            (SectionKind::Defaults, "from", parent) if word(3).is_empty() => ("", Some(parent)),
            (_, name, "from") => (name, Some(word(3))),
            (_, name, _) => (name, None),
        };
        let is_defaults = |section: &Section| section.kind == SectionKind::Defaults;
        let sections = &self.cfg.sections;
        let defaults = match (kind, from) {
            (SectionKind::Global | SectionKind::Other, _) | (SectionKind::Defaults, None) => None,
            (_, None) => sections.iter().rposition(is_defaults),
            (_, Some(from)) => {
                let named = |section: &Section| is_defaults(section) && section.name == from;
                let Some(found) = sections.iter().rposition(named) else {
                    return Err(CfgError::NoDefaults(place, from.to_owned()));
                };
                Some(found)
            }
        };
        let end = place.clone();
        self.cfg.sections.push(Section {
            kind,
            name: name.to_owned(),
            place,
            end,
            lines: Vec::new(),
            defaults,
        });
        Ok(())
    }

    fn line(&mut self, line: Line) {
        let Some(section) = self.cfg.sections.last_mut() else { return };
        if section.kind == SectionKind::Global {
            let (name, value) = (line.word(1).to_owned(), line.word(2).to_owned());
            match line.word(0) {
                "setenv" => {
                    self.set.insert(name, Some(value));
                }
                "presetenv" if (self.env)(&name).is_none() => {
                    self.set.entry(name).or_insert(Some(value));
                }
                "unsetenv" => {
                    self.set.extend(line.words.iter().skip(1).map(|name| (name.clone(), None)));
                }
                "resetenv" => {
                    let kept = |name: &String| Some((name.clone(), Some((self.env)(name)?)));
                    self.set = line.words.iter().skip(1).filter_map(kept).collect();
                    self.reset = true;
                }
                _ => {}
            }
        }
        section.lines.push(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(files: &[&str]) -> Result<HaproxyCfg, CfgError> {
        let names: Vec<String> = (1..=files.len()).map(|n| format!("{n}.cfg")).collect();
        let files = names.iter().map(Path::new).zip(files.iter().copied());
        HaproxyCfg::parse(files, &|name| (name == "HOME").then(|| "/root".to_owned()))
    }

    fn parsed(files: &[&str]) -> HaproxyCfg {
        parse(files).expect("well formed")
    }

    fn mode(cfg: &HaproxyCfg, backend: &str) -> Vec<String> {
        let section = cfg.backend(backend).expect("it is there");
        let lines = cfg.deciding(section, |line| line.word(0) == "mode");
        lines.iter().map(|line| format!("{} {}", line.place, line.word(1))).collect()
    }

    #[test]
    fn a_section_begins_at_its_keyword_and_every_line_has_a_place() {
        let cfg = parsed(&[
            "# first\nglobal\n maxconn 5 # five\n\nbackend b\nserver s 1.2.3.4:5\n",
            "listen l\n bind :1\n",
        ]);
        let said: Vec<String> = cfg
            .sections
            .iter()
            .map(|s| format!("{:?} {} {} to {}", s.kind, s.name, s.place, s.end))
            .collect();
        assert_eq!(
            said,
            ["Global  1.cfg:2 to 1.cfg:3", "Backend b 1.cfg:5 to 1.cfg:6", "Listen l 2.cfg:1 to 2.cfg:2"]
        );
        let line = cfg.global().next().expect("a line");
        assert_eq!((line.place.to_string(), line.words.join(" ")), ("1.cfg:3".into(), "maxconn 5".into()));
    }

    #[test]
    fn a_proxy_inherits_from_the_last_defaults_before_it_or_from_those_that_it_names() {
        let cfg = parsed(&[
            "defaults base\n mode http\nbackend a\ndefaults\n option httplog\nbackend b\nbackend c from base\n",
            "backend d\n mode tcp\ndefaults tcp from base\n log global\nbackend e\n",
        ]);
        assert_eq!(mode(&cfg, "a"), ["1.cfg:2 http"]);
        assert_eq!(mode(&cfg, "b"), [""; 0], "a `defaults` section begins anew");
        assert_eq!(mode(&cfg, "c"), ["1.cfg:2 http"]);
        assert_eq!(mode(&cfg, "d"), ["2.cfg:2 tcp"]);
        assert!(cfg.option(cfg.backend("d").expect("d"), "httplog").is_some(), "across files");
        assert_eq!(mode(&cfg, "e"), ["1.cfg:2 http"], "defaults inherit only where they say so");
    }

    #[test]
    fn the_last_line_decides_and_no_takes_an_option_away() {
        let cfg = parsed(&[
            "defaults\n option abortonclose\nbackend a\nbackend b\n no option abortonclose\nbackend c\n no option abortonclose\n option abortonclose\n",
        ]);
        let on = |name: &str| cfg.option(cfg.backend(name).expect("it is there"), "abortonclose").is_some();
        assert_eq!([on("a"), on("b"), on("c")], [true, false, true]);
    }

    #[test]
    fn what_a_condition_encloses_may_count_or_not() {
        let cfg = parsed(&[
            "backend a\n mode http\n.if defined(X)\n mode tcp\n.else\n balance first\n.endif\n# end\nbackend b\n",
        ]);
        assert_eq!(mode(&cfg, "a"), ["1.cfg:4 tcp", "1.cfg:2 http"]);
        assert_eq!(cfg.backend("a").expect("a").end.line, 7, "after `.endif`");
        for wrong in ["backend a\n.if 1\n", "backend a\n.endif\n", "backend a\n.else\n"] {
            assert!(matches!(parse(&[wrong]), Err(CfgError::Conditional(_))), "{wrong}");
        }
    }

    #[test]
    fn the_environment_is_what_global_makes_of_it() {
        let cfg = parsed(&[
            "global\n setenv A x\n presetenv HOME /other\n presetenv B y\n unsetenv A\nbackend a\n cookie \"$HOME$B$A\"\n server \"${N-s}\" \"${M}\"\n",
        ]);
        let lines = &cfg.backend("a").expect("a").lines;
        assert_eq!(
            lines.iter().map(|line| line.words.join(" ")).collect::<Vec<_>>(),
            ["cookie /rooty", "server s"]
        );
        let unset: Vec<&str> = cfg.unset.iter().map(|(_, name)| name.as_str()).collect();
        assert_eq!(unset, ["A", "M"]);
    }

    #[test]
    fn the_ways_to_a_backend_are_all_that_may_lead_there() {
        let cfg = parsed(&[
            "frontend a\n use_backend x if TRUE\n default_backend llm\nfrontend b\n use_backend %[req.hdr(host)]\nfrontend c\n default_backend x\nbackend llm\nlisten x\n",
        ]);
        let ways = |name: &str| {
            let ways = cfg.ways_to(cfg.backend(name).expect("it is there"));
            ways.iter().map(|(frontend, _)| frontend.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(ways("llm"), ["a", "b"]);
        assert_eq!(ways("x"), ["a", "b", "c", "x"]);
    }

    #[test]
    fn what_haproxy_refuses_is_refused_with_its_place() {
        for (text, said) in [
            ("maxconn 5\n", "1.cfg:1: `maxconn` stands outside of a section"),
            ("global\n\n log \"x\n", "1.cfg:3: a quote is not closed"),
            ("backend b from nowhere\n", "1.cfg:1: there is no `defaults nowhere` before this line"),
        ] {
            assert_eq!(parse(&[text]).expect_err("refused").to_string(), said);
        }
        let second = parse(&["global\n", "maxconn 5\n"]).expect_err("a section ends with its file");
        assert!(second.to_string().starts_with("2.cfg:1: "), "{second}");
    }
}
