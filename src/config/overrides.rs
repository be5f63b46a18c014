//! What flags and environment set. Flags win over the environment, our own variables over other products' names, all of
//! them over the file. The table of knobs says which there are.

use super::{
    ConfigError, Span,
    effective::Origin,
    knobs::{self, FOREIGN, Form, Knob},
};
use std::ffi::OsString;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

/// What flags and environment set.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// The weakest first.
    set: Vec<Override>,
    /// What was found in the environment that may be a mistake.
    warnings: Vec<String>,
}

#[derive(Clone, Debug)]
struct Override {
    knob: &'static Knob,
    text: String,
    origin: Origin,
}

impl Overrides {
    /// Takes in the environment, below what was set before.
    ///
    /// # Errors
    /// A value that cannot be read, or a name of ours that does not exist.
    pub fn with_environment(
        mut self,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, ConfigError> {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for (name, value) in variables {
            // Names of other products are never other than ASCII.
            let Some(name) = name.to_str() else { continue };
            let fail = |why: String| ConfigError::Set { by: name.to_owned(), why };
            let text = || value.to_str().ok_or_else(|| fail("is not UTF-8".to_owned()));
            if let Some(knob) = knobs::keys().find(|knob| knob.variable().as_deref() == Some(name)) {
                let origin = Origin::Variable(name.to_owned());
                ours.push(Override { knob, text: text()?.to_owned(), origin });
            } else if let Some(foreign) = FOREIGN.iter().find(|foreign| foreign.name == name) {
                let text = (foreign.read)(text()?).map_err(fail)?;
                self.warnings.extend(foreign.warning(&text));
                let origin = Origin::Variable(name.to_owned());
                let knob = foreign.effect.key().and_then(knobs::find);
                theirs.extend(knob.map(|knob| Override { knob, text, origin }));
            } else if knobs::is_unknown_of_ours(name) {
                return Err(fail("no such variable: docs/configuration.md has all of them".to_owned()));
            } else {
                self.warnings.extend(knobs::suspicion(name));
            }
        }
        self.set = theirs.into_iter().chain(ours).chain(self.set).collect();
        Ok(self)
    }

    /// What was found in the environment that may be a mistake.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Lays all that is set over a file of `length` bytes. A value gets a place behind its end, by which it is known
    /// again ([`Overrides::origin`]).
    pub(super) fn lay_over<'t>(&'t self, file: &mut DeTable<'t>, length: usize) -> Result<(), ConfigError> {
        for (place, Override { knob, text, origin }) in (length + 1..).zip(&self.set) {
            let value =
                value(knob.form, text).map_err(|why| ConfigError::Set { by: origin.to_string(), why })?;
            let value = || Spanned::new(place..place, value.clone());
            let Some(key) = knob.key.strip_prefix("pool.") else {
                put(file, knob.key, place, value());
                continue;
            };
            let pools = file.get_mut("pool").map(Spanned::get_mut);
            let Some(DeValue::Array(pools)) = pools else { continue };
            for pool in pools.iter_mut() {
                if let DeValue::Table(pool) = pool.get_mut() {
                    put(pool, key, place, value());
                }
            }
        }
        Ok(())
    }

    /// Who set what stands at a place behind the end of a file of `length` bytes.
    pub(super) fn origin(&self, place: &Span, length: usize) -> Option<&Origin> {
        let at = place.start.checked_sub(length + 1)?;
        self.set.get(at).map(|set| &set.origin)
    }
}

/// Puts a value where the key says, unless something stands in the way that is wrong anyway.
fn put<'t>(table: &mut DeTable<'t>, key: &str, place: usize, value: Spanned<DeValue<'t>>) {
    let spanned = |key: &str| Spanned::new(place..place, key.to_owned().into());
    match key.split_once('.') {
        // The old key would keep its place.
        None => {
            table.remove(key);
            table.insert(spanned(key), value);
        }
        Some((section, rest)) => {
            let section = table
                .entry(spanned(section))
                .or_insert_with(|| Spanned::new(place..place, DeValue::Table(DeTable::new())));
            if let DeValue::Table(section) = section.get_mut() {
                put(section, rest, place, value);
            }
        }
    }
}

/// A text as the file would have it.
fn value(form: Form, text: &str) -> Result<DeValue<'_>, String> {
    match form {
        Form::Text(_) | Form::Bytes | Form::Time => Ok(DeValue::String(text.into())),
        Form::Switch => match text {
            "1" => Ok(DeValue::Boolean(true)),
            "0" => Ok(DeValue::Boolean(false)),
            _ => Err(format!("`{text}` is neither 1 nor 0")),
        },
        Form::Count(_) | Form::Weight(_) => {
            let number = DeValue::parse(text).map(Spanned::into_inner).ok();
            number
                .filter(|number| number.is_integer() || number.is_float())
                .ok_or_else(|| format!("`{text}` is no number"))
        }
        Form::List | Form::Table => Err("can be set in the file only".to_owned()),
    }
}

impl clap::Args for Overrides {
    fn augment_args(command: clap::Command) -> clap::Command {
        knobs::keys().fold(command, |command, knob| match knob.flag {
            Some(flag) => command
                .arg(clap::Arg::new(flag).long(flag).value_name(knob.form.value_name()).help(knob.help())),
            None => command,
        })
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for Overrides {
    fn from_arg_matches(matches: &clap::ArgMatches) -> Result<Self, clap::Error> {
        let mut overrides = Self::default();
        overrides.update_from_arg_matches(matches)?;
        Ok(overrides)
    }

    fn update_from_arg_matches(&mut self, matches: &clap::ArgMatches) -> Result<(), clap::Error> {
        for knob in knobs::keys() {
            let Some(flag) = knob.flag else { continue };
            if let Some(text) = matches.get_one::<String>(flag) {
                let origin = Origin::Flag(format!("--{flag}"));
                self.set.push(Override { knob, text: text.clone(), origin });
            }
        }
        Ok(())
    }
}
