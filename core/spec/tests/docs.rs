//! `docs/reference/spec.md` is right: its specs are valid, and its errors are those that the parser
//! prints.

use rtvirtio_spec::HostSpec;

/// Language and content of every fenced block.
fn blocks(markdown: &str) -> Vec<(&str, &str)> {
    let mut parts = markdown.split("```");
    parts.next();
    let mut found = Vec::new();
    while let Some(block) = parts.next() {
        found.push(block.split_once('\n').unwrap());
        parts.next();
    }
    found
}

/// A `toml` block is a valid spec, unless a `text` block with its errors follows it.
#[test]
fn examples_in_the_reference_are_true() {
    let blocks = blocks(include_str!("../../../docs/reference/spec.md"));
    let mut shown = 0;
    for (i, (language, text)) in blocks.iter().enumerate() {
        let printed = match HostSpec::parse("plant.toml", text) {
            _ if *language != "toml" => continue,
            Ok(_) => String::new(),
            Err(errors) => format!("{errors}\n"),
        };
        let documented =
            blocks.get(i + 1).filter(|(language, _)| *language == "text").map_or("", |(_, text)| *text);
        assert_eq!(printed, documented, "block {i} of docs/reference/spec.md:\n{printed}");
        shown += usize::from(!printed.is_empty());
    }
    assert_eq!(shown, 3);
}
