//! The pages of field reports and of threats name tests that exist.

use rtvirtio_testkit::site::project;

#[test]
fn every_named_test_exists() {
    let page = std::fs::read_to_string(project().join("docs/explanation/field-reports.md")).unwrap();
    let rows: Vec<&str> = page.lines().filter(|line| line.contains(".rs` `")).collect();
    assert!(rows.len() >= 25, "{}", rows.len());
    for row in rows {
        let words: Vec<&str> = row.split('`').collect();
        for (i, file) in words.iter().enumerate().filter(|(_, word)| word.ends_with(".rs")) {
            let text =
                std::fs::read_to_string(project().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
            let name = words[i + 2];
            assert!(text.contains(&format!("fn {name}(")), "{file} has no test {name}");
        }
    }
}

/// Rust files below a directory.
fn sources(dir: &std::path::Path, all: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|e| e == "rs") {
            all.push(path);
        }
    }
}

#[test]
fn every_test_of_the_threat_model_exists() {
    let page = std::fs::read_to_string(project().join("docs/explanation/threat-model.md")).unwrap();
    // The name of a test is a sentence.
    let is_test = |word: &&str| {
        word.matches('_').count() >= 4
            && word.chars().all(|c| c == '_' || c.is_ascii_lowercase() || c.is_ascii_digit())
    };
    let named: Vec<&str> = page.split('`').skip(1).step_by(2).filter(is_test).collect();
    assert!(named.len() >= 15, "{named:?}");
    let mut files = Vec::new();
    for floor in ["core", "host", "domain", "control", "lab", "bin"] {
        sources(&project().join(floor), &mut files);
    }
    let all: String = files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
    let missing: Vec<_> = named.iter().filter(|name| !all.contains(&format!("fn {name}("))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
