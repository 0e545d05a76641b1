//! Links between the pages: each leads to a file of the repository, and its anchor to a heading.

use std::fs;
use std::path::{Path, PathBuf};

use rtvirtio_testkit::anchor;
use rtvirtio_testkit::site::project;

/// Markdown pages below a directory.
fn pages(dir: &Path, all: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            pages(&path, all);
        } else if path.extension().is_some_and(|e| e == "md") {
            all.push(path);
        }
    }
}

/// Lines outside of fenced blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut in_block = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        in_block ^= fence;
        !in_block && !fence
    })
}

/// Targets of a line's links.
fn links(line: &str) -> Vec<&str> {
    let targets = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    targets.map(|(target, _)| target).filter(|t| !t.contains("://")).collect()
}

/// The reason why a link of `page` leads nowhere.
fn dead(page: &Path, text: &str, link: &str) -> Option<String> {
    let (file, place) = link.split_once('#').map_or((link, None), |(file, place)| (file, Some(place)));
    let path = page.parent().unwrap().join(file);
    let target = if file.is_empty() {
        text.to_owned()
    } else if path.is_dir() {
        String::new()
    } else {
        match fs::read(&path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(e) => return Some(format!("{link}: {e}")),
        }
    };
    let is_heading = |place: &str| {
        let headings = prose(&target).filter(|line| line.starts_with('#'));
        headings.map(|line| anchor(line.trim_start_matches('#').trim())).any(|made| made == place)
            || target.contains(&format!("<a id=\"{place}\">"))
    };
    place.filter(|place| !is_heading(place)).map(|_| format!("{link}: no such heading"))
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let root = project();
    let mut all = ["README.md", "SPECIFICATION.md", "CONTRIBUTING.md", "CHANGELOG.md", "data/README.md"]
        .map(|page| root.join(page))
        .to_vec();
    pages(&root.join("docs"), &mut all);
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for page in &all {
        let text = fs::read_to_string(page).unwrap();
        for link in prose(&text).flat_map(links) {
            seen += 1;
            wrong.extend(dead(page, &text, link).map(|why| format!("{}: {why}", page.display())));
        }
    }
    assert!(wrong.is_empty() && seen > 400, "{seen} links; {wrong:#?}");
}

#[test]
fn a_dead_link_is_found() {
    let page = project().join("docs/README.md");
    let text = "# Documentation\n\n## Two words\n\n```sh\n# no heading\n```\n";
    for good in
        ["#two-words", "reference/cli.md", "reference/cli.md#exit-codes", "guide/service-page.png", "guide"]
    {
        assert_eq!(dead(&page, text, good), None);
    }
    for bad in ["#three-words", "#no-heading", "reference/clay.md", "reference/cli.md#exit-cods"] {
        assert!(dead(&page, text, bad).is_some(), "{bad}");
    }
    assert_eq!(links("[a](b.md#c) and [d](https://e) ![f](g.svg)"), ["b.md#c", "g.svg"]);
}
