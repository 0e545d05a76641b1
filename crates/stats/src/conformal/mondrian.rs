//! Bounds that hold in every category, not only on average over all.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ConformalError, Quantile, calibrate, finite, groups_needed, same_length};

/// A quantile for each category of rows (Mondrian conformal prediction: Vovk, Gammerman and Shafer 2005, section 4.5).
///
/// In a category with enough groups the promise of [`crate::conformal`] holds for its rows by themselves. A category
/// with too few groups gets the larger one of the pooled quantile and its own largest score: at least the pooled
/// promise, and no score ever seen in it is above; but the promise for that category by itself is **not** proven. A
/// category that was never seen gets the larger one of the pooled quantile and those of all categories, without proof
/// either.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mondrian {
    /// The quantile of all rows.
    pub pooled: Quantile,
    /// The categories in rising order, each once.
    pub categories: Vec<Category>,
}

/// What is known of one category.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Category {
    /// Its name.
    pub category: usize,
    /// Groups with rows in it.
    pub groups: usize,
    /// Its largest score.
    pub largest: f64,
    /// Its own quantile; `None` with too few groups.
    pub own: Option<Quantile>,
}

/// What a bound rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Basis {
    /// The category's own quantile: proven for it.
    Own,
    /// The pooled quantile or the category's largest score: proven on average over all rows only.
    Pooled,
    /// No row of the category was seen.
    Unseen,
}

/// A score that bounds rows of a category.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// The score.
    pub score: f64,
    /// What it rests on.
    pub basis: Basis,
}

impl Mondrian {
    /// Calibrates for each category; `categories` and `groups` name those of each row. A group may have rows in several
    /// categories and counts in each of them.
    ///
    /// # Errors
    /// Those of [`calibrate`] for all rows together.
    pub fn calibrate(
        scores: &[f64],
        groups: &[usize],
        categories: &[usize],
        miss: f64,
    ) -> Result<Self, ConformalError> {
        same_length(scores.len(), categories.len())?;
        let pooled = calibrate(scores, groups, miss)?;
        let mut rows: BTreeMap<usize, (Vec<f64>, Vec<usize>)> = BTreeMap::new();
        for ((category, score), group) in categories.iter().zip(scores).zip(groups) {
            let (s, g) = rows.entry(*category).or_default();
            s.push(*score);
            g.push(*group);
        }
        let one = |(category, (scores, groups)): (usize, (Vec<f64>, Vec<usize>))| {
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            match calibrate(&scores, &groups, miss) {
                Ok(own) => Ok(Category { category, groups: own.groups, largest, own: Some(own) }),
                Err(ConformalError::TooFewGroups { have, .. }) => {
                    Ok(Category { category, groups: have, largest, own: None })
                }
                Err(error) => Err(error),
            }
        };
        let categories = rows.into_iter().map(one).collect::<Result<_, _>>()?;
        Ok(Self { pooled, categories })
    }

    /// The bound for rows of a category.
    #[must_use]
    pub fn quantile(&self, category: usize) -> Bound {
        let known = self.categories.binary_search_by_key(&category, |c| c.category);
        match known.ok().and_then(|i| self.categories.get(i)) {
            Some(found) => self.bound(found),
            None => {
                let all = self.categories.iter().map(|c| self.bound(c).score);
                Bound { score: all.fold(self.pooled.score, f64::max), basis: Basis::Unseen }
            }
        }
    }

    fn bound(&self, category: &Category) -> Bound {
        match category.own {
            Some(own) => Bound { score: own.score, basis: Basis::Own },
            None => Bound { score: self.pooled.score.max(category.largest), basis: Basis::Pooled },
        }
    }

    /// For a value from an untrusted file.
    ///
    /// # Errors
    /// [`ConformalError::BadFile`] or [`ConformalError::BadLevel`] for what no calibration writes.
    pub fn check(&self) -> Result<(), ConformalError> {
        self.pooled.check()?;
        if self.categories.is_empty() || self.categories.windows(2).any(|c| c[0].category >= c[1].category) {
            return Err(ConformalError::BadFile("categories are not in rising order"));
        }
        finite(&self.categories.iter().map(|c| c.largest).collect::<Vec<_>>())?;
        self.categories.iter().try_for_each(|c| self.check_category(c))?;
        let counted =
            self.categories.iter().filter_map(|c| c.own).try_fold(0usize, |n, q| n.checked_add(q.rows));
        if counted.is_none_or(|n| n > self.pooled.rows) {
            return Err(ConformalError::BadFile("more rows in the categories than in all"));
        }
        Ok(())
    }

    fn check_category(&self, category: &Category) -> Result<(), ConformalError> {
        if !(1..=self.pooled.groups).contains(&category.groups) {
            return Err(ConformalError::BadFile("a category has no groups, or more than there are"));
        }
        let Some(own) = category.own else {
            let enough = category.groups >= groups_needed(self.pooled.miss)?;
            return if enough {
                Err(ConformalError::BadFile("a category lacks its quantile"))
            } else {
                Ok(())
            };
        };
        own.check()?;
        let same = own.miss == self.pooled.miss && own.groups == category.groups;
        if !same || own.score > category.largest {
            return Err(ConformalError::BadFile("a category contradicts its quantile"));
        }
        Ok(())
    }
}
