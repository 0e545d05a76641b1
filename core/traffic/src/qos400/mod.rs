//! Registers of ARM's CoreLink QoS-400, which limits the AXI transactions of one master.
//!
//! Each channel (AW for writes to memory, AR for reads from it) has a peak, a burst and a rate:
//! RFC 2215's TSPEC in transactions. Rate and peak are binary fractions of a transaction per cycle
//! of the interconnect's clock: 12 bits for the rate, 8 bits for the peak; the burst is a number of
//! transactions, 16 bits.
//!
//! Sources: the I/O-domain paper, sections II (12-bit fraction of transactions per clock cycle),
//! III-C (names, enabling bits, bytes per second as fraction times clock times burst size times
//! word size) and V-A (ten settings); offsets and fields as in ARM DSU 0026 (supplement to the
//! NIC-400 manual) and in the headers of Jailhouse's QoS-400 driver. The paper gives all three
//! numbers 12 bits; the register of the peak has 8.

mod soc;

use std::fmt;
use std::str::FromStr;

use rtvirtio_units::Enforcement;
use serde::Serialize;

use crate::curve::Arrival;
use crate::error::CompileError;
use crate::settings::{Actuator, Compiled, Setting};
use crate::tspec::{Direction, Tspec, Unit};

pub use soc::{Master, Soc};

/// Offset of the register with the enable bits.
pub const QOS_CNTL: u64 = 0x0c;
/// Offsets of peak, burst and rate for writes.
const AW: [u64; 3] = [0x18, 0x1c, 0x20];
/// Offsets of peak, burst and rate for reads.
const AR: [u64; 3] = [0x24, 0x28, 0x2c];
/// Bits of `qos_cntl` that enable the rate regulation of writes and of reads.
const ENABLE_AW_RATE: u32 = 1 << 0;
const ENABLE_AR_RATE: u32 = 1 << 1;
/// Position and width of the rate in its register, and of the peak.
const RATE_SHIFT: u32 = 20;
const RATE_BITS: u32 = 12;
const PEAK_SHIFT: u32 = 24;
const PEAK_BITS: u32 = 8;
const BURST_BITS: u32 = 16;

/// Port of an interconnect whose QoS-400 regulates a master.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AxiPort {
    /// Address of the register block.
    pub base: u64,
    /// Clock of the interconnect, in Hz.
    pub clock_hz: f64,
    /// Bytes of one transaction: words times bytes of a word.
    pub transaction: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Channel {
    /// Writes to memory (AW).
    Aw,
    /// Reads from memory (AR).
    Ar,
}

impl Channel {
    /// Channel of a direction's data.
    #[must_use]
    pub fn for_direction(direction: Direction) -> Self {
        if direction.writes_memory() { Self::Aw } else { Self::Ar }
    }

    fn offsets(self) -> [u64; 3] {
        match self {
            Self::Aw => AW,
            Self::Ar => AR,
        }
    }

    fn names(self) -> [&'static str; 3] {
        match self {
            Self::Aw => ["aw_p", "aw_b", "aw_r"],
            Self::Ar => ["ar_p", "ar_b", "ar_r"],
        }
    }

    /// Bit of `qos_cntl` that enables rate regulation of the channel.
    #[must_use]
    pub fn enable(self) -> u32 {
        match self {
            Self::Aw => ENABLE_AW_RATE,
            Self::Ar => ENABLE_AR_RATE,
        }
    }
}

/// Values of the three registers of a channel, not shifted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fields {
    /// Rate: this many 4096ths of a transaction per cycle.
    pub rate: u16,
    /// Burst: this many transactions.
    pub burst: u16,
    /// Peak: this many 256ths of a transaction per cycle.
    pub peak: u8,
}

/// Words of the three registers of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Words {
    /// Register `aw_p` or `ar_p`.
    pub peak: u32,
    /// Register `aw_b` or `ar_b`.
    pub burst: u32,
    /// Register `aw_r` or `ar_r`.
    pub rate: u32,
}

/// Rates of a channel in transactions per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// Long-run rate, in transactions per second.
    pub rate: f64,
    /// Burst, in transactions.
    pub burst: f64,
    /// Peak, in transactions per second.
    pub peak: f64,
}

/// A word with bits outside of its register's field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{word:#010x} is no value of {register}: bits {extra:#010x} are not part of its field")]
pub struct WordError {
    /// Name of the register.
    pub register: &'static str,
    /// Word as given by the caller.
    pub word: u32,
    /// Bits outside of the field.
    pub extra: u32,
}

impl Fields {
    /// Fields for a rate and peak in transactions per second, rounded down: a limit is never more
    /// than asked. Without a peak the field has its largest value.
    ///
    /// # Errors
    /// [`CompileError::Range`] for a rate below 1/4096 of the clock, a peak below 1/256 of it, or a
    /// value too large for its field.
    pub fn new(rate: f64, burst: f64, peak: Option<f64>, clock_hz: f64) -> Result<Self, CompileError> {
        let field = |what, value: f64, bits: u32, unit: f64, remedy| {
            let most = f64::from((1u32 << bits) - 1);
            // Tolerance of 10^-9 of a step: a rate that was decoded must encode again.
            let steps = (value / unit * (1.0 + 1e-9)).floor();
            if (1.0..=most).contains(&steps) {
                return Ok(steps as u32);
            }
            let (least, most, actuator) = (unit, most * unit, Actuator::Qos400);
            Err(CompileError::Range { actuator, what, value, least, most, remedy })
        };
        let step = |bits: u32| clock_hz / f64::from(1u32 << bits);
        let slow =
            "transactions per second are 1/4096 to 4095/4096 of the clock: change the words of a transaction";
        let rate = field("a rate", rate, RATE_BITS, step(RATE_BITS), slow)?;
        let burst = field("a burst", burst, BURST_BITS, 1.0, "a burst is 1 to 65535 transactions")?;
        let peak = match peak {
            None => (1 << PEAK_BITS) - 1,
            Some(peak) => {
                let remedy = "a peak is 1/256 to 255/256 of the clock: leave it out, or raise it";
                field("a peak", peak, PEAK_BITS, step(PEAK_BITS), remedy)?
            }
        };
        // Each is below the width of its field.
        Ok(Self { rate: rate as u16, burst: burst as u16, peak: peak as u8 })
    }

    /// Words for the registers.
    #[must_use]
    pub fn to_words(self) -> Words {
        Words {
            peak: u32::from(self.peak) << PEAK_SHIFT,
            burst: u32::from(self.burst),
            rate: u32::from(self.rate) << RATE_SHIFT,
        }
    }

    /// Transactions per second at a clock.
    #[must_use]
    pub fn rates(self, clock_hz: f64) -> Rates {
        Rates {
            rate: f64::from(self.rate) / f64::from(1u32 << RATE_BITS) * clock_hz,
            burst: f64::from(self.burst),
            peak: f64::from(self.peak) / f64::from(1u32 << PEAK_BITS) * clock_hz,
        }
    }
}

impl Words {
    /// Fields of the words: the inverse of [`Fields::to_words`].
    ///
    /// # Errors
    /// [`WordError`] for a bit outside of its field.
    pub fn fields(self) -> Result<Fields, WordError> {
        let field = |register, word: u32, shift: u32, bits: u32| {
            let mask = ((1u32 << bits) - 1) << shift;
            match word & !mask {
                0 => Ok((word & mask) >> shift),
                extra => Err(WordError { register, word, extra }),
            }
        };
        let peak = field("a peak", self.peak, PEAK_SHIFT, PEAK_BITS)?;
        let burst = field("a burst", self.burst, 0, BURST_BITS)?;
        let rate = field("a rate", self.rate, RATE_SHIFT, RATE_BITS)?;
        // Each is below the width of its field.
        Ok(Fields { rate: rate as u16, burst: burst as u16, peak: peak as u8 })
    }
}

/// Settings of the paper's section V-A: the rate's field, `None` for a regulator that is off, and
/// the millions of transactions per second printed in the paper.
///
/// The paper does not print the clock. All nine values follow from one, rounded as printed, for
/// every clock between 247.2 MHz and 248 MHz.
pub const PAPER_SETTINGS: [(Option<u16>, &str); 10] = [
    (None, ""),
    (Some(0x100), "15.5"),
    (Some(0x80), "7.7"),
    (Some(0x40), "3.9"),
    (Some(0x20), "1.9"),
    (Some(0x10), "0.97"),
    (Some(0x8), "0.48"),
    (Some(0x4), "0.24"),
    (Some(0x2), "0.12"),
    (Some(0x1), "0.06"),
];

/// A clock that reproduces the paper's values.
pub const PAPER_CLOCK_HZ: f64 = 247.5e6;

/// Number of the paper's settings that are not reproduced: a field that decodes to another number
/// than printed, or that encoding this number does not give.
#[must_use]
pub fn paper_settings_wrong(clock_hz: f64) -> usize {
    let is_right = |(field, printed): &(Option<u16>, &str)| {
        let Some(field) = *field else {
            // Regulator off: neither enable bit is set.
            return Channel::Aw.enable() | Channel::Ar.enable() == 0b11 && printed.is_empty();
        };
        let fields = Fields { rate: field, burst: 1, peak: u8::MAX };
        let rates = fields.rates(clock_hz);
        let digits = printed.split_once('.').map_or(0, |(_, digits)| digits.len());
        let again = Fields::new(rates.rate, rates.burst, None, clock_hz);
        format!("{:.digits$}", rates.rate / 1e6) == *printed
            && again.as_ref() == Ok(&fields)
            && fields.to_words().rate == u32::from(field) << RATE_SHIFT
            && fields.to_words().fields() == Ok(fields)
    };
    PAPER_SETTINGS.iter().filter(|setting| !is_right(setting)).count()
}

/// Clock frequency, written `"247.5MHz"`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Hertz(pub f64);

/// Text that is not a frequency.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no frequency; expected one such as \"247.5MHz\"")]
pub struct HertzError(String);

impl FromStr for Hertz {
    type Err = HertzError;

    fn from_str(text: &str) -> Result<Self, HertzError> {
        let wrong = || HertzError(text.to_owned());
        let units = [("GHz", 1e9), ("MHz", 1e6), ("kHz", 1e3), ("Hz", 1.0)];
        let (number, factor) = units
            .into_iter()
            .find_map(|(unit, factor)| Some((text.trim().strip_suffix(unit)?, factor)))
            .ok_or_else(wrong)?;
        let hz = number.trim().parse::<f64>().map_err(|_| wrong())? * factor;
        if (1e3..=1e11).contains(&hz) { Ok(Self(hz)) } else { Err(wrong()) }
    }
}

impl fmt::Display for Hertz {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}MHz", self.0 / 1e6))
    }
}

/// Compiles for a port; bytes or requests become transactions of `transaction` bytes.
pub(crate) fn compile(tspec: &Tspec, direction: Direction, port: &AxiPort) -> Result<Compiled, CompileError> {
    let each = match tspec.unit {
        Unit::Bytes => port.transaction.max(1) as f64,
        // A request of the specification is a transaction.
        Unit::Requests => 1.0,
    };
    let of = |value: u64| value as f64 / each;
    let fields = Fields::new(of(tspec.rate), of(tspec.burst), tspec.peak.map(of), port.clock_hz)?;
    let (rates, words) = (fields.rates(port.clock_hz), fields.to_words());
    let kept = Arrival {
        rate: rates.rate * each,
        burst: rates.burst * each,
        // The regulator passes one transaction at once.
        peak: Some((rates.peak * each, tspec.largest as f64)),
    };
    let channel = Channel::for_direction(direction);
    let [peak, burst, rate] = channel.offsets().map(|offset| port.base + offset);
    let names = channel.names();
    let whole = |name, address, value| Setting::Register { name, address, value, mask: u32::MAX };
    let compiled = Compiled::new(Actuator::Qos400, direction, tspec, Some(kept), Enforcement::Guarantee)
        .set(whole(names[0], peak, words.peak))
        .set(whole(names[1], burst, words.burst))
        .set(whole(names[2], rate, words.rate))
        .set(Setting::Register {
            name: "qos_cntl",
            address: port.base + QOS_CNTL,
            value: channel.enable(),
            mask: channel.enable(),
        })
        .note(match channel {
            Channel::Aw => "what the VM reads or receives, its device writes to memory: the AW channel",
            Channel::Ar => "what the VM writes or sends, its device reads from memory: the AR channel",
        })
        .note("all VMs behind the master share this regulator");
    Ok(match tspec.peak {
        None => compiled.note("no peak is asked for: the largest that the field holds"),
        Some(_) => compiled,
    })
}

#[cfg(test)]
mod tests;
