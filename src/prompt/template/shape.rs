//! What vLLM reads off a chat template's syntax tree: whether it takes messages' content as text or as parts.
//!
//! It is a rule of thumb about names, not an analysis of the program, so it is followed to the letter
//! (vLLM `renderers/hf.py`, `_iter_nodes_assign_content_item`).

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
    nodes.statement(template, false);
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
        inside.statements(&each.body, true);
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

fn variable<'a>(expr: &Expr<'a>) -> Option<&'a str> {
    match expr {
        Expr::Var(var) => Some(var.id),
        _ => None,
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

    fn statements(&mut self, statements: &'t [Stmt<'a>], in_macro: bool) {
        for statement in statements {
            self.statement(statement, in_macro);
        }
    }

    fn statement(&mut self, statement: &'t Stmt<'a>, in_macro: bool) {
        match statement {
            Stmt::Template(template) => self.statements(&template.children, in_macro),
            Stmt::EmitExpr(emit) => self.expression(&emit.expr),
            Stmt::ForLoop(each) => {
                self.loops.push((each, in_macro));
                self.expression(&each.iter);
                self.optional(each.filter_expr.as_ref());
                self.statements(&each.body, in_macro);
                self.statements(&each.else_body, in_macro);
            }
            Stmt::IfCond(cond) => {
                self.expression(&cond.expr);
                self.statements(&cond.true_body, in_macro);
                self.statements(&cond.false_body, in_macro);
            }
            Stmt::WithBlock(with) => {
                with.assignments.iter().for_each(|(_, value)| self.expression(value));
                self.statements(&with.body, in_macro);
            }
            Stmt::Set(set) => {
                self.assignments.push((variable(&set.target), &set.expr));
                self.expression(&set.expr);
            }
            Stmt::SetBlock(set) => {
                self.optional(set.filter.as_ref());
                self.statements(&set.body, in_macro);
            }
            Stmt::AutoEscape(block) => self.statements(&block.body, in_macro),
            Stmt::FilterBlock(block) => {
                self.expression(&block.filter);
                self.statements(&block.body, in_macro);
            }
            Stmt::Block(block) => self.statements(&block.body, in_macro),
            Stmt::Macro(each) => {
                self.macros.push(each);
                each.defaults.iter().for_each(|value| self.expression(value));
                self.statements(&each.body, true);
            }
            Stmt::CallBlock(block) => {
                self.call(&block.call.expr, &block.call.args);
                self.statements(&block.macro_decl.body, true);
            }
            Stmt::Do(each) => self.call(&each.call.expr, &each.call.args),
            _ => {}
        }
    }

    fn call(&mut self, callee: &'t Expr<'a>, args: &'t [CallArg<'a>]) {
        if let Some(name) = variable(callee) {
            self.calls.push(Called { name, args });
        }
        self.expression(callee);
        self.arguments(args);
    }

    fn arguments(&mut self, args: &'t [CallArg<'a>]) {
        for arg in args {
            match arg {
                CallArg::Pos(value)
                | CallArg::Kwarg(_, value)
                | CallArg::PosSplat(value)
                | CallArg::KwargSplat(value) => self.expression(value),
            }
        }
    }

    fn optional(&mut self, expr: Option<&'t Expr<'a>>) {
        if let Some(expr) = expr {
            self.expression(expr);
        }
    }

    /// Looks for calls inside an expression.
    fn expression(&mut self, expr: &'t Expr<'a>) {
        match expr {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(slice) => {
                self.expression(&slice.expr);
                [&slice.start, &slice.stop, &slice.step]
                    .into_iter()
                    .for_each(|part| self.optional(part.as_ref()));
            }
            Expr::UnaryOp(op) => self.expression(&op.expr),
            Expr::BinOp(op) => {
                self.expression(&op.left);
                self.expression(&op.right);
            }
            Expr::Compare(compare) => {
                self.expression(&compare.expr);
                compare.ops.iter().for_each(|op| self.expression(&op.expr));
            }
            Expr::IfExpr(cond) => {
                self.expression(&cond.test_expr);
                self.expression(&cond.true_expr);
                self.optional(cond.false_expr.as_ref());
            }
            Expr::Filter(filter) => {
                self.optional(filter.expr.as_ref());
                self.arguments(&filter.args);
            }
            Expr::Test(test) => {
                self.expression(&test.expr);
                self.arguments(&test.args);
            }
            Expr::GetAttr(get) => self.expression(&get.expr),
            Expr::GetItem(get) => {
                self.expression(&get.expr);
                self.expression(&get.subscript_expr);
            }
            Expr::Call(call) => self.call(&call.expr, &call.args),
            Expr::List(list) => list.items.iter().for_each(|item| self.expression(item)),
            Expr::Tuple(tuple) => tuple.items.iter().for_each(|item| self.expression(item)),
            Expr::Map(map) => {
                map.keys.iter().chain(&map.values).for_each(|item| self.expression(item));
            }
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
