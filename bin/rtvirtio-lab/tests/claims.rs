//! The page of claims is that of the data in this tree.

use rtvirtio_testkit::site::{Site, project, text};

#[test]
fn the_page_of_claims_is_that_of_the_data() {
    let site = Site::new();
    let page = site.dir.path().join("claims.md");
    // Claims that are not met are exit code 2.
    let out =
        site.output(&["lab", "bench", "report", "--data", "data", "--markdown", page.to_str().unwrap()]);
    assert!(matches!(out.status.code(), Some(0 | 2)), "{}", text(&out.stderr));
    let made = std::fs::read_to_string(page).unwrap();
    let committed = std::fs::read_to_string(project().join("docs/results/claims.md")).unwrap();
    let differ = made.lines().zip(committed.lines()).find(|(a, b)| a != b);
    assert!(
        made == committed,
        "docs/results/claims.md is stale: `rtvirtio-lab bench report --markdown docs/results/claims.md`; first: {differ:?}"
    );
}
