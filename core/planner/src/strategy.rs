//! Searches from outside of this crate: experiments compare them with ours.

use rtvirtio_model::{Bfq, Config, Forecast, ModelError, Profile, TailModel};
use rtvirtio_spec::Spec;

use crate::convert::{check_actable, config_of, settings_of};
use crate::evaluate::{Evaluator, Problem};
use crate::{PlanError, PlanOptions, search};

pub use crate::evaluate::Outcome;

/// A model, and a search with it in [`PlanOptions::space`].
pub trait Strategy {
    /// The predicting model.
    fn model(&self) -> Box<dyn TailModel>;

    /// Best configuration found from `start`, which is `None` where the model does not cover the
    /// configuration in force. `None` where it covers none.
    fn search(&self, steps: &mut Steps<'_, '_>, start: Option<Outcome>) -> Option<Outcome>;
}

/// The steps of which a [`Strategy`] consists, on one problem.
pub struct Steps<'s, 'a> {
    problem: &'s Problem<'a>,
    evaluator: &'s mut Evaluator<'a>,
}

impl Steps<'_, '_> {
    /// Options of the search.
    #[must_use]
    pub fn options(&self) -> &PlanOptions {
        self.problem.options
    }

    /// BFQ tunables that are in force before any is written.
    #[must_use]
    pub fn initial_bfq(&self) -> Bfq {
        search::initial_bfq(&self.problem.options.start)
    }

    /// Whether weights may be set.
    #[must_use]
    pub fn weights_allowed(&self) -> bool {
        search::weights_allowed(self.problem)
    }

    /// VM of each goal with the largest latency, in ns, at which its target counts as met, in the
    /// order of [`Spec::goals`].
    pub fn limits(&self) -> impl Iterator<Item = (usize, Option<f64>)> {
        let limits = self.problem.targets.iter().map(|t| t.map(|target| self.problem.limit(target)));
        self.problem.vm_of.iter().copied().zip(limits)
    }

    /// VMs by urgency: tightest target first; those without targets last.
    #[must_use]
    pub fn urgency(&self) -> &[usize] {
        &self.problem.urgency
    }

    /// Forecasts of one configuration with their terms.
    pub fn forecast(&self, config: &Config) -> Result<Vec<Forecast>, ModelError> {
        self.evaluator.forecast(config)
    }

    /// Result of a configuration without the settings that cannot act in it; `None` when the model
    /// does not cover it or the budget is spent.
    pub fn outcome(&mut self, config: Config) -> Option<Outcome> {
        self.evaluator.outcome(self.problem, search::settle(self.problem, config))
    }

    /// Keeps a configuration when it is better than `best`.
    pub fn consider(&mut self, best: &mut Option<Outcome>, config: Config) {
        search::consider(self.problem, self.evaluator, best, config);
    }

    /// Climbs for at most `steps` moves: one knob, one level at a time.
    pub fn climb(&mut self, from: Outcome, steps: usize) -> Outcome {
        search::climb(self.problem, self.evaluator, from, steps)
    }
}

/// Configuration that a strategy finds for `spec` on the host that `profile` describes, without the
/// settings that gain nothing; of `options` the model is not used.
pub fn configure(
    spec: &Spec,
    profile: &Profile,
    options: &PlanOptions,
    strategy: &dyn Strategy,
) -> Result<Config, PlanError> {
    options.check()?;
    let problem = Problem::new(spec, options);
    let mut evaluator = Evaluator::by(strategy.model(), profile, spec, options);
    let start = search::started(&problem, &mut evaluator)?;
    let found = if problem.targets.iter().all(Option::is_none) {
        start
    } else {
        let steps = &mut Steps { problem: &problem, evaluator: &mut evaluator };
        let found = strategy.search(steps, start);
        found.map(|best| search::tidy(&problem, &mut evaluator, best, 0.0))
    };
    let found = found.ok_or_else(|| search::nothing(&evaluator))?;
    let settings = settings_of(spec, &options.start, &found.config);
    check_actable(spec, &options.placements, &options.start, &settings)?;
    config_of(spec, &options.start, &settings)
}
