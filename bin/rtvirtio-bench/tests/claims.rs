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

/// A figure of the specification, marked or not, is one of the claims of its kind, rounded.
#[test]
fn the_specifications_figures_are_among_the_claims() {
    let read = |path: &str| std::fs::read_to_string(project().join(path)).unwrap();
    let table = read("docs/results/claims.tsv");
    let claims = claims(&table);
    assert!(claims.len() > 500, "{}", claims.len());
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for line in without_marks(&read("SPECIFICATION.md")).lines() {
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

const MARK: &str = "<!-- claim: ";

/// The text without its marks.
fn without_marks(page: &str) -> String {
    let mut parts = page.split(MARK);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.split_once("-->").map_or(part, |(_, rest)| rest))
}

/// Marks of a page: what stands in front of each, since the mark before, and its words.
fn marks(page: &str) -> Vec<(&str, Vec<&str>)> {
    let mut found = Vec::new();
    let mut before = page;
    while let Some((shown, rest)) = before.split_once(MARK) {
        let (words, rest) = rest.split_once("-->").unwrap_or((rest, ""));
        found.push((shown, words.split_whitespace().collect()));
        before = rest;
    }
    found
}

/// Figures of a page that is read in plain text and has no marks: a text that ends with each, and
/// the words of its mark.
fn figures_of<'t>(table: &'t str, page: &str) -> Vec<(&'t str, Vec<&'t str>)> {
    let rows = table.lines().filter_map(|line| line.strip_prefix(page)?.strip_prefix('\t'));
    rows.map(|row| {
        let (shown, words) = row.split_once('\t').unwrap_or((row, ""));
        (shown, words.split_whitespace().collect())
    })
    .collect()
}

/// The last number of a text and how many decimals it has; a space may part its thousands.
fn last_number(text: &str) -> Option<(f64, usize)> {
    let end = text.rfind(|c: char| c.is_ascii_digit())? + 1;
    let start = text[..end].rfind(|c: char| !c.is_ascii_digit() && c != '.').map_or(0, |at| at + 1);
    let (before, number) = (&text[..start], &text[start..end]);
    let decimals = number.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let value: f64 = number.parse().ok()?;
    let is_rest = number.len() == 3 && !number.contains('.') && before.ends_with(' ');
    let thousands =
        is_rest.then(|| before.trim_end_matches(' ')).filter(|b| b.ends_with(|c: char| c.is_ascii_digit()));
    let thousands = thousands.and_then(last_number).map_or(0.0, |(thousands, _)| thousands * 1000.0);
    Some((thousands + value, decimals))
}

/// The reason why a marked figure is not that of its claim.
fn contradiction(claims: &[(&str, f64)], shown: &str, words: &[&str]) -> Option<String> {
    let (name, factor) = match words {
        [name] => (name, 1.0),
        [name, factor] => (name, factor.strip_prefix('x').and_then(|f| f.parse().ok()).unwrap_or(f64::NAN)),
        _ => return Some(format!("a mark is `claim: NAME` or `claim: NAME xFACTOR`: {words:?}")),
    };
    let Some((_, value)) = claims.iter().find(|(claim, _)| claim == name) else {
        return Some(format!("there is no claim {name}"));
    };
    let Some((figure, decimals)) = last_number(shown) else {
        return Some(format!("no figure in front of {name}"));
    };
    // The table has three decimals, the page as many as it shows.
    let rounding = 0.5 / 10_f64.powi(i32::try_from(decimals).unwrap()) + 0.000_5 * factor + 1e-9;
    let is_equal = ((value * factor).abs() - figure).abs() <= rounding;
    (!is_equal).then(|| format!("{figure} stands for {name}, which is {}", value * factor))
}

/// Markdown pages below a directory.
fn pages(dir: &std::path::Path, all: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            pages(&path, all);
        } else if path.extension().is_some_and(|e| e == "md") {
            all.push(path);
        }
    }
}

#[test]
fn every_marked_figure_is_that_of_its_claim() {
    let root = project();
    let table = std::fs::read_to_string(root.join("docs/results/claims.tsv")).unwrap();
    let claims = claims(&table);
    let listed = std::fs::read_to_string(root.join("docs/results/figures.tsv")).unwrap();
    let mut all = ["README.md", "SPECIFICATION.md"].map(|page| root.join(page)).to_vec();
    pages(&root.join("docs"), &mut all);
    let mut wrong = Vec::new();
    for path in all {
        let page = std::fs::read_to_string(&path).unwrap();
        let name = path.strip_prefix(root).unwrap().display().to_string();
        let mut marks = marks(&page);
        for (shown, words) in figures_of(&listed, &name) {
            if page.matches(shown).count() == 1 {
                marks.push((shown, words));
            } else {
                wrong.push(format!("{name}: {shown:?} of figures.tsv is not there once"));
            }
        }
        wrong.extend(marks.iter().filter_map(|(shown, words)| {
            contradiction(&claims, shown, words).map(|why| format!("{name}: {why}"))
        }));
        // Pages that are made of figures have them marked.
        let is_of_figures = name.starts_with("docs/results/") && !name.ends_with("claims.md")
            || ["README.md", "SPECIFICATION.md", "docs/guide/network.md", "docs/guide/quick-start.md"]
                .contains(&name.as_str());
        assert!(!is_of_figures || marks.len() >= 4, "{name} has {} marked figures", marks.len());
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_figure_that_is_not_its_claims_is_found() {
    let claims = [("a.share", 0.956), ("a.lost", 29705.0), ("a.drop", -0.22)];
    let wrong = |page: &str| {
        let marks = marks(page);
        assert_eq!(marks.len(), 1, "{page}");
        contradiction(&claims, marks[0].0, &marks[0].1)
    };
    for right in ["**95.6 %**<!-- claim: a.share x100 -->", "96 %<!-- claim: a.share x100 -->, 1"] {
        assert_eq!(wrong(right), None);
    }
    assert_eq!(wrong("at 3 of 29 705 frames<!-- claim: a.lost -->"), None);
    assert_eq!(wrong("p99.9 0.96<!-- claim: a.share -->"), None);
    assert_eq!(wrong("p99.9 1.0<!-- claim: a.share -->"), None);
    assert_eq!(wrong("-22 %<!-- claim: a.drop x100 -->"), None);
    for bad in [
        "95.4 %<!-- claim: a.share x100 -->",
        "0.95<!-- claim: a.share -->",
        "705 frames<!-- claim: a.lost -->",
        "0.956<!-- claim: a.gone -->",
        "none<!-- claim: a.share -->",
        "0.956<!-- claim: a.share 100 % -->",
    ] {
        assert!(wrong(bad).is_some(), "{bad}");
    }
    let table = "P.md\tmet (0.96\ta.share\nP.mdx\tno\ta.lost\nP.md\tat 29\ta.drop x100\n";
    let found = figures_of(table, "P.md");
    assert_eq!(found, [("met (0.96", vec!["a.share"]), ("at 29", vec!["a.drop", "x100"])]);
    assert!(contradiction(&claims, found[0].0, &found[0].1).is_none());
    assert!(contradiction(&claims, found[1].0, &found[1].1).is_some());
    assert_eq!(without_marks("1<!-- claim: a.share --> of 2<!-- claim: a.lost x2 -->."), "1 of 2.");
}
