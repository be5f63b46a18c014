//! What the names of a template stand for.

use super::reading::Surroundings;
use crate::prompt::template::walk::{self, Visitor, variable};
use minijinja::machinery::ast::{Expr, Macro, Spanned, Stmt};
use std::collections::{HashMap, HashSet};

/// The variable that an expression is a part of.
pub(super) fn root<'a>(expression: &Expr<'a>) -> Option<&'a str> {
    match expression {
        Expr::Slice(slice) => root(&slice.expr),
        Expr::Filter(filter) => root(filter.expr.as_ref()?),
        expression => variable(expression),
    }
}

/// What is to be known of a template whose statements are those at its `top`.
pub(super) fn surroundings<'t, 'a>(
    template: &'t Stmt<'a>,
    top: &'t [Stmt<'a>],
    marks_as_safe: bool,
) -> Surroundings<'t, 'a> {
    let mut names = Names::default();
    walk::statement(template, false, &mut names);
    let mut messages = HashSet::from(["messages"]);
    loop {
        let before = messages.len();
        let made =
            names.assignments.iter().filter(|(_, from)| messages.contains(from)).map(|(name, _)| *name);
        let made: Vec<_> = made.collect();
        messages.extend(made);
        if messages.len() == before {
            break;
        }
    }
    let mut macros: HashMap<&str, &Spanned<Macro<'a>>> = HashMap::new();
    for statement in top {
        if let Stmt::Macro(each) = statement
            && names.macros.iter().filter(|name| **name == each.name).count() == 1
            && !names.bound.contains(each.name)
        {
            macros.insert(each.name, each);
        }
    }
    Surroundings { macros, bound_within: names.bound_within, messages, marks_as_safe }
}

/// What the names of a template stand for.
#[derive(Default)]
struct Names<'a> {
    /// Names that are set from a part of another.
    assignments: Vec<(&'a str, &'a str)>,
    macros: Vec<&'a str>,
    bound: HashSet<&'a str>,
    /// Those that are bound in loops and the like.
    bound_within: HashSet<&'a str>,
}

impl<'t, 'a> Visitor<'t, 'a> for Names<'a> {
    fn statement(&mut self, statement: &'t Stmt<'a>, in_macro: bool) {
        match statement {
            Stmt::Set(set) => {
                walk::bind(&set.target, &mut self.bound);
                if let (Some(name), Some(from)) = (variable(&set.target), root(&set.expr)) {
                    self.assignments.push((name, from));
                }
            }
            Stmt::SetBlock(set) => walk::bind(&set.target, &mut self.bound),
            Stmt::ForLoop(each) => {
                walk::bind(&each.target, &mut self.bound);
                if !in_macro {
                    self.within(std::iter::once(&each.target), &each.body);
                }
            }
            Stmt::WithBlock(with) => {
                with.assignments.iter().for_each(|(target, _)| walk::bind(target, &mut self.bound));
                if !in_macro {
                    self.within(with.assignments.iter().map(|(target, _)| target), &with.body);
                }
            }
            Stmt::Macro(each) => self.macros.push(each.name),
            _ => {}
        }
    }
}

impl<'a> Names<'a> {
    fn within<'t>(&mut self, targets: impl Iterator<Item = &'t Expr<'a>>, body: &'t [Stmt<'a>])
    where
        'a: 't,
    {
        let mut names = Names::default();
        targets.for_each(|target| walk::bind(target, &mut names.bound));
        body.iter().for_each(|statement| walk::statement(statement, true, &mut names));
        self.bound_within.extend(names.bound);
    }
}
