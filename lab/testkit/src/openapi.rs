//! Comparison of JSON answers with an OpenAPI description: every field of an answer is described,
//! with its type, and every required field is in the answer.

use serde_json::{Map, Value};

static NULL: Value = Value::Null;

/// Differences between an answer and its description, one line each. `operation` is method, in
/// small letters, and path.
#[must_use]
pub fn differences(description: &Value, operation: (&str, &str), status: u16, answer: &Value) -> Vec<String> {
    let (method, path) = operation;
    let response = &description["paths"][path][method]["responses"][status.to_string()];
    let schema = &resolved(description, response)["content"]["application/json"]["schema"];
    let mut found = Vec::new();
    compare(description, schema, answer, &format!("{method} {path} {status}: answer"), &mut found);
    found
}

/// Places of a description where a type has no content: objects without fields, lists without
/// items, and required fields that are not described.
#[must_use]
pub fn vague(description: &Value) -> Vec<String> {
    let mut found = Vec::new();
    search(description, "", &mut found);
    found
}

fn search(part: &Value, place: &str, found: &mut Vec<String>) {
    match part {
        Value::Object(fields) => {
            let has = |name: &str| fields.contains_key(name);
            let names: Vec<&str> = types(part);
            if names.contains(&"object") && !has("properties") && !has("additionalProperties") {
                found.push(format!("{place}: an object without fields"));
            }
            if names.contains(&"array") && !has("items") {
                found.push(format!("{place}: a list without items"));
            }
            for name in required(part).filter(|name| part["properties"].get(*name).is_none()) {
                found.push(format!("{place}: {name} is required, and not described"));
            }
            for (name, below) in fields {
                search(below, &format!("{place}/{name}"), found);
            }
        }
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                search(item, &format!("{place}/{i}"), found);
            }
        }
        _ => {}
    }
}

/// Object that a reference leads to, or this one.
fn resolved<'a>(description: &'a Value, part: &'a Value) -> &'a Value {
    let place = part["$ref"].as_str().and_then(|reference| reference.strip_prefix('#'));
    place.map_or(part, |place| description.pointer(place).unwrap_or(&NULL))
}

fn types(schema: &Value) -> Vec<&str> {
    match &schema["type"] {
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        one => one.as_str().into_iter().collect(),
    }
}

fn required(schema: &Value) -> impl Iterator<Item = &str> {
    schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str)
}

fn compare(description: &Value, schema: &Value, value: &Value, place: &str, found: &mut Vec<String>) {
    let schema = resolved(description, schema);
    if schema.is_null() {
        found.push(format!("{place} is not described"));
        return;
    }
    let names = types(schema);
    if !names.is_empty() && !names.iter().any(|name| is_of(name, value)) {
        found.push(format!("{place} is {value}, and described as {}", names.join(" or ")));
        return;
    }
    if schema["enum"].as_array().is_some_and(|allowed| !allowed.contains(value)) {
        found.push(format!("{place} is {value}, and described as one of {}", schema["enum"]));
    }
    if schema.get("const").is_some_and(|only| only != value) {
        found.push(format!("{place} is {value}, and described as {}", schema["const"]));
    }
    match value {
        Value::Object(fields) => compare_fields(description, schema, fields, place, found),
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                compare(description, &schema["items"], item, &format!("{place}[{i}]"), found);
            }
        }
        _ => {}
    }
}

fn compare_fields(
    description: &Value,
    schema: &Value,
    fields: &Map<String, Value>,
    place: &str,
    found: &mut Vec<String>,
) {
    for (name, value) in fields {
        let of_name = schema["properties"].get(name).unwrap_or(&schema["additionalProperties"]);
        compare(description, of_name, value, &format!("{place}.{name}"), found);
    }
    for name in required(schema).filter(|name| !fields.contains_key(*name)) {
        found.push(format!("{place}.{name} is required, and not there"));
    }
}

fn is_of(name: &str, value: &Value) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn description() -> Value {
        json!({
            "paths": { "/all": { "get": { "responses": {
                "200": { "content": { "application/json": { "schema": {
                    "type": "array", "items": { "$ref": "#/components/schemas/One" }
                } } } },
                "404": { "$ref": "#/components/responses/Problem" }
            } } } },
            "components": {
                "responses": { "Problem": { "content": { "application/json": { "schema": {
                    "type": "object", "required": ["error"], "properties": { "error": { "type": "string" } }
                } } } } },
                "schemas": { "One": {
                    "type": "object",
                    "required": ["state", "size"],
                    "properties": {
                        "state": { "enum": ["on", "off"] },
                        "size": { "type": ["integer", "null"] },
                        "by_name": { "type": "object", "additionalProperties": { "type": "number" } }
                    }
                } }
            }
        })
    }

    #[test]
    fn both_directions_are_compared() {
        let description = description();
        let of = |answer: Value| differences(&description, ("get", "/all"), 200, &answer);
        for fits in [
            json!([]),
            json!([{ "state": "on", "size": 1 }]),
            json!([{ "state": "off", "size": null, "by_name": { "a": 0.5, "b": 1 } }]),
        ] {
            assert_eq!(of(fits.clone()), Vec::<String>::new(), "{fits}");
        }
        for (answer, says) in [
            (json!({}), "answer is {}, and described as array"),
            (json!([{ "state": "on" }]), "answer[0].size is required, and not there"),
            (json!([{ "state": "on", "size": 1, "more": 1 }]), "answer[0].more is not described"),
            (json!([{ "state": "up", "size": 1 }]), "answer[0].state is \"up\""),
            (json!([{ "state": "on", "size": 0.5 }]), "described as integer or null"),
            (json!([{ "state": "on", "size": 1, "by_name": { "a": "x" } }]), "by_name.a is \"x\""),
        ] {
            let found = of(answer);
            assert!(found.len() == 1 && found[0].contains(says), "{says}: {found:?}");
        }
        let problem = |answer: Value| differences(&description, ("get", "/all"), 404, &answer);
        assert!(problem(json!({ "error": "why" })).is_empty() && !problem(json!({})).is_empty());
        assert!(differences(&description, ("get", "/all"), 500, &json!({}))[0].contains("not described"));
    }

    #[test]
    fn a_type_without_content_is_found() {
        let mut description = description();
        assert_eq!(vague(&description), Vec::<String>::new());
        let one = &mut description["components"]["schemas"]["One"];
        one["required"] = json!(["state", "sise"]);
        one["properties"]["by_name"] = json!({ "type": "object" });
        one["properties"]["list"] = json!({ "type": ["array", "null"] });
        let found = vague(&description).join("\n");
        for says in ["sise is required", "by_name: an object without", "list: a list without"] {
            assert!(found.contains(says), "{says}: {found}");
        }
    }
}
