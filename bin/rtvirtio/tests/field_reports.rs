//! The page of field reports names tests that exist.

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
