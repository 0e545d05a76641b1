//! The page of claims is that of the data in this tree.

use rtvirtio_testkit::site::{Site, project, text};

#[test]
fn the_pages_of_claims_are_those_of_the_data() {
    let site = Site::new();
    let made = ["claims.md", "claims.tsv"].map(|name| site.dir.path().join(name));
    let [page, table] = made.each_ref().map(|path| path.to_str().unwrap());
    // Claims that are not met are exit code 2.
    let out = site.output(&["bench", "report", "--data", "data", "--markdown", page, "--table", table]);
    assert!(matches!(out.status.code(), Some(0 | 2)), "{}", text(&out.stderr));
    for path in &made {
        let name = path.file_name().unwrap();
        let made = std::fs::read_to_string(path).unwrap();
        let committed = std::fs::read_to_string(project().join("docs/results").join(name)).unwrap();
        let differ = made.lines().zip(committed.lines()).find(|(a, b)| a != b);
        assert!(
            made == committed,
            "docs/results/{} is stale: its head has the command; first: {differ:?}",
            name.to_string_lossy()
        );
    }
    assert!(std::fs::metadata(&made[0]).unwrap().len() <= 45 << 10, "claims.md is longer than 45 KB");
}

/// Name and value of each claim.
fn claims(table: &str) -> Vec<(&str, f64)> {
    let row = |line| {
        let mut cells = str::split(line, '\t');
        Some((cells.next()?, cells.next()?.parse().ok()?))
    };
    table.lines().filter_map(row).collect()
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
    let table = read("docs/results/claims.tsv");
    let claims = claims(&table);
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
