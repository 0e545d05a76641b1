//! Options of every command.

use std::ffi::OsStr;
use std::marker::PhantomData;
use std::path::PathBuf;

use clap::builder::{EnumValueParser, PossibleValue, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, Args, Command, ValueEnum};
use rtvirtio_units::Ratio;
use rtvirtio_workflow::Dirs;
use rtvirtio_workflow::model_choice::ModelName;

/// Options of every command.
#[derive(Args, Debug, Clone)]
pub struct Global {
    /// Print the result as JSON on standard output; everything else goes to standard error
    #[arg(long, global = true)]
    pub json: bool,
    /// No progress on standard error
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// Journal, lock, contracts in force, measured profiles: what must outlast a restart
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = "RTVIRTIO_STATE_DIR",
        default_value = "/var/lib/rtvirtio"
    )]
    pub state_dir: PathBuf,
    /// Sockets and locks of the service and the I/O domain; state of a running lab
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = "RTVIRTIO_RUN_DIR",
        default_value = "/run/rtvirtio"
    )]
    pub run_dir: PathBuf,
    /// Downloaded guest kernels and images
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = "RTVIRTIO_CACHE_DIR",
        default_value = "/var/cache/rtvirtio"
    )]
    pub cache_dir: PathBuf,
}

impl Global {
    /// The directories of state, sockets and locks.
    #[must_use]
    pub fn dirs(&self) -> Dirs {
        Dirs { state: self.state_dir.clone(), run: self.run_dir.clone() }
    }
}

/// The goal of a search beyond meeting the targets.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarginArg {
    /// Limit VMs without targets until each prediction is this much below its target, % of the
    /// target, and no further; a smaller margin leaves these VMs more. Without it 75; 25 where the
    /// model gives upper bounds; 50 for VMs whose own targets cannot be met. With the slice model
    /// at least 20
    #[arg(id = "margin", long = "margin", value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=99))]
    percent: Option<u8>,
}

impl MarginArg {
    /// Minimum margin as a ratio; `None` without the option.
    #[must_use]
    pub fn enough(self) -> Option<Ratio> {
        self.percent.map(|percent| Ratio(f64::from(percent) / 100.0))
    }

    /// The option as it was given.
    #[must_use]
    pub fn option(self) -> Option<String> {
        self.percent.map(|percent| format!("--margin {percent}"))
    }
}

/// Models by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModelArg {
    /// The model learned on this host, if any, else slice
    Auto,
    /// Computed from the profile: BFQ's slices and queueing at the device
    Slice,
    /// Learned on this host by `profile --sweep`, with an upper bound
    Bound,
}

impl From<ModelArg> for ModelName {
    fn from(arg: ModelArg) -> Self {
        match arg {
            ModelArg::Auto => Self::Auto,
            ModelArg::Slice => Self::Slice,
            ModelArg::Bound => Self::Bound,
        }
    }
}

impl ModelArg {
    /// Parser that knows where the paper's models went.
    #[must_use]
    pub fn parser() -> ExplainingParser<Self> {
        ExplainingParser::new(|name| {
            matches!(name, "analytical" | "mlp").then(|| format!(
                "the RT-VirtIO paper's model `{name}` plans no host: `rtvirtio-bench cases` and `rtvirtio-bench accuracy` compare it; use `--model slice` or `--model bound`"
            ))
        })
    }
}

/// Parser of an enumeration that gives the reason why some known names are not among its values.
#[derive(Clone, Debug)]
pub struct ExplainingParser<T> {
    /// Reason for a name; `None` for all others.
    refusal: fn(&str) -> Option<String>,
    values: PhantomData<T>,
}

impl<T> ExplainingParser<T> {
    /// Refuses the names for which there is a reason.
    #[must_use]
    pub fn new(refusal: fn(&str) -> Option<String>) -> Self {
        Self { refusal, values: PhantomData }
    }
}

impl<T: ValueEnum + Clone + Send + Sync + 'static> TypedValueParser for ExplainingParser<T> {
    type Value = T;

    fn parse_ref(&self, cmd: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<T, clap::Error> {
        if let Some(why) = value.to_str().and_then(self.refusal) {
            return Err(clap::Error::raw(ErrorKind::InvalidValue, format!("{why}\n")).with_cmd(cmd));
        }
        EnumValueParser::<T>::new().parse_ref(cmd, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(T::value_variants().iter().filter_map(ValueEnum::to_possible_value)))
    }
}
