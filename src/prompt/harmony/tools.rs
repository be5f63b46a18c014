//! Tools in the form of TypeScript, as `oss-harmony` writes them (`template_tools_section`). What looks like a slip
//! there is one here too.

use crate::request::harmony::Tool;
use serde_json::{Map, Value};

/// The section of a developer's message that describes the tools.
pub(super) fn section(tools: &[Tool]) -> String {
    let mut out = String::from("# Tools\n\n## functions\n\nnamespace functions {\n\n");
    for tool in tools {
        for line in tool.description.lines() {
            out.push_str(&format!("// {line}\n"));
        }
        let parameters = tool.parameters.as_ref().map(|schema| format!("_: {}", type_of(schema, "")));
        out.push_str(&format!("type {} = ({}) => any;\n\n", tool.name, parameters.unwrap_or_default()));
    }
    out.push_str("} // namespace functions");
    out
}

/// The type that a JSON schema describes. `indent` stands before its further lines.
fn type_of(schema: &Value, indent: &str) -> String {
    if let Some(variants) = schema.get("oneOf").and_then(Value::as_array) {
        let variant = |variant| format!("\n{indent} | {}", variant_of(variant, indent, None, true));
        return variants.iter().map(variant).collect();
    }
    match schema.get("type") {
        Some(Value::Array(kinds)) => {
            let kinds: Vec<&str> = kinds
                .iter()
                .filter_map(Value::as_str)
                .map(|kind| if kind == "integer" { "number" } else { kind })
                .collect();
            if kinds.is_empty() { "any".to_owned() } else { kinds.join(" | ") }
        }
        Some(Value::String(kind)) => match kind.as_str() {
            "object" => object(schema, indent),
            "string" => {
                let texts = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
                let texts: Vec<String> =
                    texts.filter_map(Value::as_str).map(|text| format!("\"{text}\"")).collect();
                if texts.is_empty() { "string".to_owned() } else { texts.join(" | ") }
            }
            "number" | "integer" => "number".to_owned(),
            "boolean" => "boolean".to_owned(),
            "array" => match schema.get("items") {
                Some(items) => format!("{}[]", type_of(items, indent)),
                None => "Array<any>".to_owned(),
            },
            _ => "any".to_owned(),
        },
        _ => "any".to_owned(),
    }
}

fn object(schema: &Value, indent: &str) -> String {
    let mut out = String::new();
    if let Some(description) = text(schema, "description") {
        out.push_str(&format!("{indent}// {description}\n"));
    }
    out.push_str("{\n");
    let none = Map::new();
    let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
    let required = schema.get("required").and_then(Value::as_array);
    for (name, property) in properties {
        let is_required = required.is_some_and(|names| names.iter().any(|required| required == name));
        let optional = if is_required { "" } else { "?" };
        write_property(&mut out, &format!("{indent}{name}{optional}:"), property, indent);
    }
    out.push_str(indent);
    out.push('}');
    out
}

/// Writes a property, whose name with all around it is `head`, and the comments before it.
fn write_property(out: &mut String, head: &str, property: &Value, indent: &str) {
    if let Some(title) = text(property, "title") {
        out.push_str(&format!("{indent}// {title}\n{indent}//\n"));
    }
    let description = text(property, "description");
    if let (None, Some(description)) = (property.get("oneOf"), description) {
        out.push_str(&format!("{indent}// {description}\n"));
    }
    if let Some(examples) = property.get("examples").and_then(Value::as_array).filter(|all| !all.is_empty()) {
        out.push_str(&format!("{indent}// Examples:\n"));
        for example in examples.iter().filter_map(Value::as_str) {
            out.push_str(&format!("{indent}// - \"{example}\"\n"));
        }
    }
    if let Some(variants) = property.get("oneOf").and_then(Value::as_array) {
        let of_first = variants.first().and_then(|first| text(first, "description"));
        let above = description.filter(|description| of_first != Some(*description));
        if let Some(description) = above {
            out.push_str(&format!("{indent}// {description}\n"));
        }
        if let Some(default) = default_of(property) {
            out.push_str(&format!("{indent}// {default}\n"));
        }
        out.push_str(&format!("{head}\n"));
        for (at, variant) in variants.iter().enumerate() {
            // The first variant's description is left out beside one above, the others' only where they repeat it.
            let comment = text(variant, "description")
                .filter(|own| !(at == 0 && above.is_some()) && Some(*own) != description);
            let variant = variant_of(variant, indent, Some(comment), false);
            out.push_str(&format!("{indent} | {variant}\n"));
        }
        out.push_str(&format!("{indent},\n"));
        return;
    }
    out.push_str(&format!("{head} {},", nullable(property, type_of(property, &format!("{indent}    ")))));
    if let (None, Some(default)) = (property.get("oneOf"), default_of(property)) {
        out.push_str(&format!(" // {default}"));
    }
    out.push('\n');
}

/// One of several types, with the comments behind it: its own description unless another `comment` is told.
fn variant_of(variant: &Value, indent: &str, comment: Option<Option<&str>>, quote_enum: bool) -> String {
    let mut out = nullable(variant, type_of(variant, &format!("{indent}   ")));
    let default = match variant.get("default") {
        Some(default) if quote_enum && has_enum(variant) => Some(format!("default: {default}")),
        _ => default_of(variant),
    };
    let comment = comment.unwrap_or_else(|| text(variant, "description")).map(str::to_owned);
    let comments: Vec<String> = comment.into_iter().chain(default).collect();
    if !comments.is_empty() {
        out.push_str(&format!(" // {}", comments.join(" ")));
    }
    out
}

fn nullable(schema: &Value, mut name: String) -> String {
    if schema.get("nullable") == Some(&Value::Bool(true)) && !name.contains("null") {
        name.push_str(" | null");
    }
    name
}

/// The default as a comment. A text is quoted, but not escaped, unless it is one of an enumeration.
fn default_of(schema: &Value) -> Option<String> {
    Some(match schema.get("default")? {
        Value::String(text) if has_enum(schema) => format!("default: {text}"),
        Value::String(text) => format!("default: \"{text}\""),
        other => format!("default: {other}"),
    })
}

fn has_enum(schema: &Value) -> bool {
    schema.get("enum").and_then(Value::as_array).is_some_and(|values| !values.is_empty())
}

fn text<'s>(schema: &'s Value, name: &str) -> Option<&'s str> {
    schema.get(name)?.as_str()
}
