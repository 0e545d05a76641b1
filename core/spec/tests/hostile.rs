//! Untrusted text: no panic, bounded work, and errors with valid positions.

use proptest::prelude::*;
use rtvirtio_spec::{Arrival, MAX_FILE_BYTES, MAX_SHOWN_ERRORS, Spec, parse};

const EXAMPLES: [&str; 3] = [
    include_str!("../../../examples/emmc.toml"),
    include_str!("../../../examples/existing-vms.toml"),
    include_str!("../../../examples/fig7.toml"),
];

/// Fragments that are hard to parse.
const PIECES: &[&str] = &[
    "\n",
    "\r\n",
    "\t",
    " ",
    "=",
    ".",
    ",",
    "#",
    "\"",
    "'",
    "\"\"\"",
    "'''",
    "\\",
    "\\u0000",
    "\0",
    "\u{1b}[2J",
    "\u{feff}",
    "\u{202e}",
    "é",
    "[",
    "]",
    "[[",
    "]]",
    "{",
    "}",
    "[device]\n",
    "[[vm]]\n",
    "[[vm.task]]\n",
    "[vm]\n",
    "[vm.task.target]\n",
    "[[vm.task.target]]\n",
    "device",
    "twin",
    "path",
    "size",
    "vm",
    "name",
    "lab",
    "cgroup",
    "pid",
    "qmp",
    "agent",
    "disk",
    "task",
    "op",
    "write_share",
    "block",
    "pattern",
    "rate",
    "depth",
    "loop",
    "target",
    "percentile",
    "latency",
    "\"qemu\"",
    "\"open\"",
    "\"mixed\"",
    "\"4KiB\"",
    "\"-4KiB\"",
    "\"4\"",
    "\"1e308/s\"",
    "\"100/s\"",
    "\"p99\"",
    "\"pinf\"",
    "\"pnan\"",
    "\"0%\"",
    "\"999999999999999999999h\"",
    "\"µ\"",
    "\"p\"",
    "\"/\"",
    "\"/a/../b\"",
    "\"\"",
    "0",
    "-1",
    "1_000",
    "0x10",
    "0b1",
    "99999999999999999999999999",
    "1e999",
    "nan",
    "inf",
    "true",
    "1979-05-27T07:32:00Z",
    "[]",
    "{}",
    "{ latency = \"1ms\" }",
    "a.b.c = 1\n",
    "name = \"vm0\"\n",
];

/// Checks that hold for every result.
fn judge(text: &str) {
    match parse("any.toml", text) {
        Ok(spec) => sound(&spec),
        Err(errors) => {
            assert!(!errors.errors().is_empty() && errors.errors().len() <= MAX_SHOWN_ERRORS);
            let lines: Vec<&str> = text.split('\n').collect();
            for error in errors.errors() {
                let (line, column) = (error.line.unwrap(), error.column.unwrap());
                assert!((1..=lines.len()).contains(&line), "line {line} of {}", lines.len());
                let width = lines[line - 1].chars().count();
                assert!((1..=width + 1).contains(&column), "column {column} of {width}");
                assert!(!error.message.is_empty() && !error.help.is_empty());
            }
            let shown = errors.to_string();
            assert!(!shown.chars().any(|c| c.is_control() && c != '\n'), "{shown:?}");
            let json = serde_json::to_value(&errors).unwrap();
            assert_eq!(json.as_array().unwrap().len(), errors.errors().len());
        }
    }
}

/// Checks that an accepted spec keeps the ranges of its types.
fn sound(spec: &Spec) {
    assert!(!spec.vms.is_empty());
    for (i, vm) in spec.vms.iter().enumerate() {
        assert!(!vm.tasks.is_empty() && !vm.name.is_empty() && vm.name.len() <= 32);
        assert!(spec.vms[..i].iter().all(|other| other.name != vm.name));
    }
    for (_, task) in spec.tasks() {
        assert!(task.block.0 % 512 == 0 && (512..=16 << 20).contains(&task.block.0));
        assert!((1..=1024).contains(&task.depth));
        assert!((0.0..=1.0).contains(&task.op.write_share()));
        assert!(task.rate.is_none_or(|r| r.0 > 0.0 && r.0 <= 10e6));
        assert!(task.arrival == Arrival::Closed || task.rate.is_some());
        assert!(task.targets.iter().all(|t| t.latency.0 >= 1000 && t.percentile.0 < 100.0));
    }
}

/// The nearest character boundary at or before a share of the text.
fn cut(text: &str, share: f64) -> usize {
    let mut at = ((text.len() as f64 * share) as usize).min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

/// One edit: the text between two positions is replaced, doubled or removed.
fn mutate(text: &str, from: f64, length: f64, kind: u8, piece: &str) -> String {
    let start = cut(text, from);
    let end = cut(text, from + length).max(start);
    let (before, middle, after) = (&text[..start], &text[start..end], &text[end..]);
    match kind {
        0 => format!("{before}{piece}{after}"),
        1 => format!("{before}{piece}{middle}{after}"),
        2 => format!("{before}{middle}{middle}{after}"),
        _ => format!("{before}{after}"),
    }
}

/// Replaces one value by a fragment, so that the file is TOML more often.
fn replace_value(text: &str, which: f64, piece: &str) -> String {
    let places: Vec<usize> = text.match_indices(" = ").map(|(i, _)| i + 3).collect();
    let start = places[((places.len() as f64 * which) as usize).min(places.len() - 1)];
    let end = text[start..].find([',', '\n', '}']).map_or(text.len(), |i| start + i);
    format!("{}{piece}{}", &text[..start], &text[end..])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text(chars in proptest::collection::vec(any::<char>(), 0..200)) {
        judge(&chars.into_iter().collect::<String>());
    }

    #[test]
    fn any_order_of_pieces(pieces in proptest::collection::vec(proptest::sample::select(PIECES), 0..60)) {
        judge(&pieces.concat());
    }

    #[test]
    fn mutated_examples(
        example in proptest::sample::select(&EXAMPLES[..]),
        edits in proptest::collection::vec(
            (0.0..1.0, 0.0..0.05, 0u8..4, proptest::sample::select(PIECES)), 1..5),
    ) {
        let text = edits.iter().fold(example.to_owned(), |t, (from, length, kind, piece)| {
            mutate(&t, *from, *length, *kind, piece)
        });
        judge(&text);
    }

    #[test]
    fn examples_with_other_values(
        example in proptest::sample::select(&EXAMPLES[..]),
        edits in proptest::collection::vec((0.0..1.0, proptest::sample::select(PIECES)), 1..4),
    ) {
        let text = edits.iter().fold(example.to_owned(), |t, (which, piece)| replace_value(&t, *which, piece));
        judge(&text);
    }
}

/// Brackets and keys are each below the TOML parser's limits; their product would overflow the
/// stack.
#[test]
fn nesting_is_bounded_as_a_product() {
    let key = vec!["a"; 79].join(".");
    let nested = |key: &str| format!("{key} = {}1{}\n", format!("{{ {key} = ").repeat(79), "}".repeat(79));
    assert!(parse("a", &nested(&key)).unwrap_err().to_string().contains("too many parts"));
    // The deepest tree that is built: it must fit a small stack.
    let deepest = std::thread::Builder::new().stack_size(1 << 20).spawn(move || judge(&nested("a.a.a.a.a")));
    deepest.unwrap().join().unwrap();
}

#[test]
fn endless_brackets_and_dots_are_refused() {
    for text in [
        "a = ".to_owned() + &"[".repeat(500_000),
        "a.".repeat(500_000),
        "{".repeat(500_000),
        "[".repeat(500_000),
    ] {
        judge(&text);
        assert!(parse("a", &text).is_err());
    }
}

/// Work and output stay bounded for the largest files, also when all is on one line.
#[test]
fn large_files_end_with_few_errors() {
    let keys = |separator: &str| {
        let mut text = String::new();
        for i in 0.. {
            let next = format!("k{i} = 1{separator}");
            if text.len() + next.len() > MAX_FILE_BYTES - 64 {
                return text;
            }
            text.push_str(&next);
        }
        text
    };
    let inline = format!("device = {{ {} twin = 3 }}\n", keys(","));
    for text in [
        keys("\n"),
        inline,
        "#".repeat(MAX_FILE_BYTES),
        "\n".repeat(MAX_FILE_BYTES),
        "[[vm]]\n".repeat(140_000),
    ] {
        judge(&text);
    }
    let errors = parse("a", &keys("\n")).unwrap_err();
    assert_eq!(errors.errors().len(), MAX_SHOWN_ERRORS);
    let shown = errors.to_string();
    assert!(shown.ends_with("more errors are not shown"), "{}", &shown[shown.len() - 100..]);
    assert!(shown.len() < 100_000);
}

#[test]
fn one_byte_too_much_is_refused() {
    let errors = parse("big.toml", &" ".repeat(MAX_FILE_BYTES + 1)).unwrap_err();
    assert_eq!(errors.errors()[0].line, None);
    assert!(errors.to_string().starts_with("error: the file is larger than 1 MiB"), "{errors}");
}
