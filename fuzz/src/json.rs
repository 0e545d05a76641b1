//! JSON documents of an input: a text of its own, or a good document with edits, which reaches what
//! lies behind the parser.
//!
//! Layout: an input whose first byte is 1 to 8 edits the document of that number, counted round;
//! any other input is the text itself. An edit has a header of four bytes (node in pre-order,
//! counted round, 2 bytes; kind; length of the payload) and its payload.

use serde_json::{Map, Number, Value};

/// Edits of one input.
const MOST_EDITS: usize = 32;
/// Nodes of an edited document; edits that copy stop there.
const MOST_NODES: usize = 20_000;

/// Numbers on which readers fail.
const NUMBERS: [f64; 16] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    0.999_999,
    5e-324,
    2.3e-308,
    1e-9,
    1e9,
    1e18,
    1.8e19,
    1e30,
    1e308,
    1.797_693_134_862_315_7e308,
    -1e308,
];
const INTEGERS: [i128; 12] = [
    0,
    1,
    -1,
    2,
    255,
    65_535,
    (1 << 31) - 1,
    1 << 31,
    (1 << 53) + 1,
    i64::MAX as i128,
    i64::MIN as i128,
    u64::MAX as i128,
];

/// The document of an input.
///
/// # Panics
/// When one of `documents` is no JSON.
pub fn document(documents: &[&str], data: &[u8]) -> Vec<u8> {
    match data.split_first() {
        Some((n @ 1..=8, rest)) => {
            let text = documents[usize::from(*n - 1) % documents.len()];
            let mut root: Value = serde_json::from_str(text).expect("a good document");
            edit(&mut root, rest);
            serde_json::to_vec(&root).expect("JSON")
        }
        _ => data.to_vec(),
    }
}

fn edit(root: &mut Value, mut rest: &[u8]) {
    for _ in 0..MOST_EDITS {
        let [low, high, kind, len, tail @ ..] = rest else { return };
        let (payload, tail) = tail.split_at(usize::from(*len).min(tail.len()));
        rest = tail;
        let nodes = count(root);
        if nodes > MOST_NODES {
            return;
        }
        let at = usize::from(u16::from_le_bytes([*low, *high])) % nodes;
        let other = nth(root, &mut (number(payload) as usize % nodes)).map(|v| v.clone());
        let Some(node) = nth(root, &mut { at }) else { return };
        apply(node, *kind, payload, other);
    }
}

/// The first eight bytes of a payload.
fn number(payload: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    let n = payload.len().min(8);
    bytes[..n].copy_from_slice(&payload[..n]);
    u64::from_le_bytes(bytes)
}

fn apply(node: &mut Value, kind: u8, payload: &[u8], other: Option<Value>) {
    let n = number(payload);
    let text = || String::from_utf8_lossy(payload).into_owned();
    match kind % 14 {
        0 => *node = Number::from_f64(f64::from_bits(n)).map_or(Value::Null, Value::Number),
        1 => *node = Number::from_f64(NUMBERS[n as usize % NUMBERS.len()]).map_or(Value::Null, Value::Number),
        2 => {
            *node =
                Number::from_i128(INTEGERS[n as usize % INTEGERS.len()]).map_or(Value::Null, Value::Number)
        }
        3 => *node = Value::from(n),
        4 => *node = Value::String(text()),
        5 => {
            let kinds =
                [Value::Null, true.into(), false.into(), Value::Array(Vec::new()), Value::Object(Map::new())];
            *node = kinds[n as usize % kinds.len()].clone();
        }
        6 => *node = serde_json::from_slice(payload).unwrap_or(Value::Null),
        7 => *node = other.unwrap_or_default(),
        8 => remove(node, n as usize),
        9 => repeat(node, n as usize),
        10 => {
            if let Value::Object(map) = node {
                map.insert(text(), other.unwrap_or_default());
            }
        }
        11 => {
            for _ in 0..n % 200 {
                *node = Value::Array(vec![node.take()]);
            }
        }
        12 => swap(node, n as usize),
        _ => match node {
            Value::String(s) => s.push_str(&text()),
            // A number off by little.
            Value::Number(v) => {
                let v = v.as_f64().unwrap_or_default() + f64::from(n as i8) / 16.0;
                *node = Number::from_f64(v).map_or(Value::Null, Value::Number);
            }
            _ => {}
        },
    }
}

fn remove(node: &mut Value, n: usize) {
    match node {
        Value::Array(items) if !items.is_empty() => drop(items.remove(n % items.len())),
        Value::Object(map) if !map.is_empty() => {
            let key = map.keys().nth(n % map.len()).cloned().unwrap_or_default();
            map.remove(&key);
        }
        Value::String(s) => *s = s.chars().take(n % 64).collect(),
        _ => {}
    }
}

/// An element of an array again and again: the low byte says which, the next how often.
fn repeat(node: &mut Value, n: usize) {
    if let Value::Array(items) = node {
        if let Some(item) = items.get(n % 256 % items.len().max(1)).cloned() {
            let times = 1 << (n >> 8 & 0xff).min(9);
            let times = if count(&item) * times > MOST_NODES { 1 } else { times };
            items.extend(std::iter::repeat_n(item, times));
        }
    }
}

fn swap(node: &mut Value, n: usize) {
    match node {
        Value::Array(items) if items.len() > 1 => {
            let (a, b) = (n % 256 % items.len(), (n >> 8) % items.len());
            items.swap(a, b);
        }
        Value::Object(map) if map.len() > 1 => {
            let keys: Vec<String> = map.keys().cloned().collect();
            let (a, b) = (&keys[n % 256 % keys.len()], &keys[(n >> 8) % keys.len()]);
            let (first, second) = (map[a].clone(), map[b].clone());
            map[a] = second;
            map[b] = first;
        }
        _ => {}
    }
}

fn children(node: &Value) -> Box<dyn Iterator<Item = &Value> + '_> {
    match node {
        Value::Array(items) => Box::new(items.iter()),
        Value::Object(map) => Box::new(map.values()),
        _ => Box::new(std::iter::empty()),
    }
}

fn count(node: &Value) -> usize {
    1 + children(node).map(count).sum::<usize>()
}

/// The node at a place in pre-order.
fn nth<'v>(node: &'v mut Value, at: &mut usize) -> Option<&'v mut Value> {
    if *at == 0 {
        return Some(node);
    }
    *at -= 1;
    match node {
        Value::Array(items) => items.iter_mut().find_map(|v| nth(v, at)),
        Value::Object(map) => map.values_mut().find_map(|v| nth(v, at)),
        _ => None,
    }
}
