//! "Did you mean": finds the nearest known word.

/// Longest word considered: no key is longer, and the distance costs the product of the lengths.
const MAX_LEN: usize = 32;

/// Number of edits (insert, delete, replace, swap of neighbours) from `a` to `b`: optimal string
/// alignment.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replace = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replace.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

/// Candidate that `word` was probably meant to be; ignores case.
///
/// Up to a third of the letters may be wrong, at least one and at most three; the first candidate
/// wins a tie.
pub(crate) fn closest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    let chars = |s: &str| s.chars().flat_map(char::to_lowercase).collect::<Vec<_>>();
    if word.len() > MAX_LEN {
        return None;
    }
    let word = chars(word);
    candidates
        .into_iter()
        .map(|c| {
            let wanted = chars(c);
            let limit = (wanted.len().max(word.len()) / 3).clamp(1, 3);
            (distance(&word, &wanted), limit, wanted.len(), c)
        })
        // A word in which every letter differs is not a typo.
        .filter(|&(d, limit, len, _)| d <= limit && d < len.max(word.len()))
        .min_by_key(|&(d, ..)| d)
        .map(|(.., c)| c)
}

#[cfg(test)]
mod tests;
