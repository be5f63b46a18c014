//! What vLLM reads off a chat template's syntax tree: whether it takes messages' content as text or as parts.
//!
//! It is a rule of thumb about names, not an analysis of the program, so it is followed to the letter
//! (vLLM `renderers/hf.py`, `_iter_nodes_assign_content_item`).

use super::walk::{self, Visitor, variable};
use minijinja::machinery::ast::{CallArg, Expr, ForLoop, Macro, Stmt};
use std::collections::HashSet;

/// The form in which a template expects the content of a message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ContentFormat {
    /// One string; several parts are joined by newlines.
    Text,
    /// A list of parts, even for a single string (vLLM's `openai`).
    Parts,
}

/// Finds the form that `template` expects: parts if any loop runs over a message's content.
pub(super) fn content_format(template: &Stmt<'_>) -> ContentFormat {
    let mut nodes = Nodes::default();
    walk::statement(template, false, &mut nodes);
    // Where vLLM's search meets a target that is no plain name, it gives up.
    let Some(messages) = nodes.assigned_from("messages") else { return ContentFormat::Text };
    let message_names: Option<HashSet<&str>> = nodes
        .loops
        .iter()
        .filter(|(each, _)| messages.iter().any(|name| reads(&each.iter, name, None)))
        .map(|(each, _)| variable(&each.target))
        .collect();
    let Some(message_names) = message_names else { return ContentFormat::Text };
    let is_content = |expr: &Expr<'_>| message_names.iter().any(|name| reads(expr, name, Some("content")));

    let loops_over_content = nodes.loops.iter().any(|(each, in_macro)| {
        is_content(&each.iter) || (!in_macro && variable(&each.iter) == Some("content"))
    });
    let macro_loops_over_content = nodes.macros.iter().any(|each| {
        let given = nodes.parameters_given(each, &is_content);
        let mut inside = Nodes::default();
        each.body.iter().for_each(|statement| walk::statement(statement, true, &mut inside));
        inside.loops.iter().any(|(each, _)| variable(&each.iter).is_some_and(|name| given.contains(name)))
    });
    if loops_over_content || macro_loops_over_content { ContentFormat::Parts } else { ContentFormat::Text }
}

/// Whether `expr` is the variable `name`, or its attribute or item `key`, perhaps filtered, tested or sliced.
fn reads(expr: &Expr<'_>, name: &str, key: Option<&str>) -> bool {
    match (expr, key) {
        (Expr::Filter(filter), _) => filter.expr.as_ref().is_some_and(|inner| reads(inner, name, key)),
        (Expr::Test(test), _) => reads(&test.expr, name, key),
        (Expr::Slice(slice), _) => reads(&slice.expr, name, key),
        (Expr::GetAttr(get), Some(key)) => variable(&get.expr) == Some(name) && get.name == key,
        (Expr::GetItem(get), Some(key)) => {
            let constant = match &get.subscript_expr {
                Expr::Const(constant) => constant.value.as_str() == Some(key),
                _ => false,
            };
            variable(&get.expr) == Some(name) && constant
        }
        (expr, None) => variable(expr) == Some(name),
        _ => false,
    }
}

/// A call in the template: the name called and its arguments, by position and by name.
struct Called<'t, 'a> {
    name: &'a str,
    args: &'t [CallArg<'a>],
}

/// The parts of a template that the rule looks at.
#[derive(Default)]
struct Nodes<'t, 'a> {
    /// Loops, and whether they stand inside a macro.
    loops: Vec<(&'t ForLoop<'a>, bool)>,
    /// `set` statements: target, if it is a plain name, and value.
    assignments: Vec<(Option<&'a str>, &'t Expr<'a>)>,
    macros: Vec<&'t Macro<'a>>,
    calls: Vec<Called<'t, 'a>>,
}

impl<'t, 'a> Nodes<'t, 'a> {
    /// The variable `name` and all that are set from it, one from the other; `None` if one of them is no plain name.
    fn assigned_from(&self, name: &'a str) -> Option<Vec<&'a str>> {
        let mut names = vec![name];
        let mut at = 0;
        while let Some(&from) = names.get(at) {
            for (target, _) in self.assignments.iter().filter(|(_, value)| reads(value, from, None)) {
                let target = (*target)?;
                if !names.contains(&target) {
                    names.push(target);
                }
            }
            at += 1;
        }
        Some(names)
    }

    /// The parameters of a macro that are somewhere given a message's content.
    fn parameters_given(&self, each: &Macro<'a>, is_content: &dyn Fn(&Expr<'_>) -> bool) -> HashSet<&'a str> {
        let mut given = HashSet::new();
        for call in self.calls.iter().filter(|call| call.name == each.name) {
            let mut position = 0;
            for arg in call.args {
                match arg {
                    CallArg::Pos(value) => {
                        if is_content(value) {
                            given.extend(each.args.get(position).and_then(variable));
                        }
                        position += 1;
                    }
                    CallArg::Kwarg(name, value) if is_content(value) => {
                        given.extend(each.args.iter().filter_map(variable).filter(|own| own == name));
                    }
                    _ => {}
                }
            }
        }
        given
    }
}

impl<'t, 'a> Visitor<'t, 'a> for Nodes<'t, 'a> {
    fn statement(&mut self, statement: &'t Stmt<'a>, in_macro: bool) {
        match statement {
            Stmt::ForLoop(each) => self.loops.push((each, in_macro)),
            Stmt::Set(set) => self.assignments.push((variable(&set.target), &set.expr)),
            Stmt::Macro(each) => self.macros.push(each),
            _ => {}
        }
    }

    fn expression(&mut self, expression: &'t Expr<'a>) {
        if let Expr::Call(call) = expression {
            self.calls.extend(variable(&call.expr).map(|name| Called { name, args: &call.args }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::template::environment::syntax;
    use minijinja::machinery::parse;

    fn format_of(source: &str) -> ContentFormat {
        content_format(&parse(source, "test", syntax().expect("syntax")).expect("a template"))
    }

    #[test]
    fn a_template_that_prints_content_takes_text() {
        assert_eq!(format_of("{% for m in messages %}{{ m.content }}{% endfor %}"), ContentFormat::Text);
        assert_eq!(
            format_of("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}"),
            ContentFormat::Text
        );
    }

    #[test]
    fn a_loop_over_content_takes_parts() {
        for source in [
            "{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
            "{% for m in messages[1:] %}{% for c in m['content'] | list %}{% endfor %}{% endfor %}",
            "{% set chat = messages %}{% set rest = chat[1:] %}{% for m in rest %}{% for c in m.content %}{% endfor %}{% endfor %}",
            "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}",
            "{% macro show(parts) %}{% for p in parts %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "{% macro show(x, parts) %}{% for p in parts %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(1, parts=m['content']) }}{% endfor %}",
        ] {
            assert_eq!(format_of(source), ContentFormat::Parts, "{source}");
        }
    }

    #[test]
    fn a_loop_over_a_macros_own_content_alone_takes_text() {
        let source = "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}{{ show(1) }}";
        assert_eq!(format_of(source), ContentFormat::Text);
    }
}
