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

/// Name and value of each row of the page of claims.
fn claims(page: &str) -> Vec<(&str, f64)> {
    let row = |line| {
        let mut cells = str::split(line, '|').map(str::trim).skip(1);
        let name = cells.next()?.strip_prefix('`')?.strip_suffix('`')?;
        let value = cells.nth(1)?.split(' ').next()?.parse().ok()?;
        Some((name, value))
    };
    page.lines().filter_map(row).collect()
}

/// Numbers in parentheses, with how many decimals they are written; numbers of runs are left out.
fn stated(state: &str) -> Vec<(f64, usize)> {
    let inside = state.split('(').skip(1).filter_map(|rest| rest.split_once(')')).map(|(inside, _)| inside);
    let words = inside.flat_map(|inside| inside.split([';', ',', ' ']).filter(|w| !w.is_empty()));
    let mut words = words.peekable();
    let mut found = Vec::new();
    while let Some(word) = words.next() {
        if word == "=" {
            words.next();
        } else if let Ok(value) = word.parse() {
            found.push((value, word.split_once('.').map_or(0, |(_, decimals)| decimals.len())));
        }
    }
    found
}

/// A figure of the specification is one of the claims of its kind, rounded.
#[test]
fn the_specifications_figures_are_among_the_claims() {
    let read = |path: &str| std::fs::read_to_string(project().join(path)).unwrap();
    let page = read("docs/results/claims.md");
    let claims = claims(&page);
    assert!(claims.len() > 500, "{}", claims.len());
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for line in read("SPECIFICATION.md").lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, promise, _, shown_by, state, _] = cells[..] else { continue };
        let Some(kind) = shown_by.split('`').find_map(|name| {
            let (kind, _) = name.split_once('.')?;
            claims
                .iter()
                .any(|(claim, _)| claim.split_once('.').is_some_and(|(k, _)| k == kind))
                .then_some(kind)
        }) else {
            continue;
        };
        let kind = format!("{kind}.");
        for (number, decimals) in stated(state) {
            seen += 1;
            let half = 0.5 / 10_f64.powi(i32::try_from(decimals).unwrap()) + 1e-9;
            let is_claim =
                |&(name, value): &(&str, f64)| name.starts_with(&kind) && (value - number).abs() <= half;
            if !claims.iter().any(is_claim) {
                wrong.push(format!("{number} of {promise:?} is no value of `{kind}*`"));
            }
        }
    }
    assert!(wrong.is_empty() && seen > 20, "{seen} figures; {wrong:#?}");
}
