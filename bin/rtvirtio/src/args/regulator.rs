//! `regulator`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use rtvirtio_traffic::Actuator;
use rtvirtio_traffic::qos400::{Hertz, Soc};
use rtvirtio_units::{Bytes, BytesPerSec};

/// `regulator`.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct RegulatorArgs {
    /// Registers without a spec
    #[command(subcommand)]
    pub registers: Option<RegisterCommand>,
    /// The spec file
    #[arg(required = true)]
    pub spec: Option<PathBuf>,
    /// Only this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Only this regulator; once for each. All that fit without it
    #[arg(long = "actuator", value_enum, value_name = "NAME")]
    pub actuators: Vec<ActuatorName>,
    /// The VMs' network interface, such as a tap
    #[arg(long, value_name = "NAME")]
    pub interface: Option<String>,
    /// Largest request or frame [default: 64 KiB of a disk, 1514 B of a network]
    #[arg(long, value_name = "SIZE")]
    pub largest: Option<Bytes>,
    /// Memory bandwidth at 100 %, as measured: for resctrl where it counts in percent
    #[arg(long, value_name = "RATE")]
    pub full_bandwidth: Option<BytesPerSec>,
    /// Ways of the L3 cache for each VM's group of resctrl
    #[arg(long, value_name = "N")]
    pub ways: Option<u32>,
    /// The QoS-400 regulator
    #[command(flatten)]
    pub port: PortArgs,
}

/// Selection of a QoS-400 regulator.
#[derive(Args, Debug)]
pub struct PortArgs {
    /// The system on a chip; without it addresses are offsets in the register block
    #[arg(long, value_enum)]
    pub soc: Option<SocName>,
    /// The regulated master, such as gem or sata; of an S32 the offset of its block, such as
    /// 0x42080
    #[arg(long, value_name = "NAME")]
    pub master: Option<String>,
    /// Clock of the interconnect, such as 247.5MHz
    #[arg(long, value_name = "FREQUENCY")]
    pub clock: Option<Hertz>,
    /// Bytes of one AXI transaction: words of a burst times bytes of a word
    #[arg(long, value_name = "SIZE", default_value = "8B")]
    pub transaction: Bytes,
}

/// `regulator qos400`.
#[derive(Subcommand, Debug)]
pub enum RegisterCommand {
    /// Words of a QoS-400's rate regulation for a specification, or the specification of words
    #[command(
        name = "qos400",
        after_help = "\
EXAMPLES
  rtvirtio regulator qos400 --rate 15500000/s --clock 247.5MHz
  rtvirtio regulator qos400 --rate 125MB/s --burst 8KiB --peak 500MB/s --clock 250MHz --transaction 64B --soc zynqmp --master sata
  rtvirtio regulator qos400 --clock 247.5MHz --decode 0xff000000 0x1 0x10000000"
    )]
    Qos400(Qos400Args),
}

/// `regulator qos400`.
#[derive(Args, Debug)]
pub struct Qos400Args {
    /// Long-run rate: transactions per second, or bytes per second
    #[arg(long, value_name = "RATE", required_unless_present = "decode")]
    pub rate: Option<String>,
    /// Burst: a number of transactions, or a size
    #[arg(long, value_name = "N|SIZE", default_value = "1")]
    pub burst: String,
    /// Peak, in the unit of the rate
    #[arg(long, value_name = "RATE")]
    pub peak: Option<String>,
    /// Words of peak, burst and rate, in the order of the registers
    #[arg(long, num_args = 3, value_names = ["P", "B", "R"], conflicts_with_all = ["rate", "peak"])]
    pub decode: Option<Vec<String>>,
    /// The channel: aw for what devices write to memory, ar for what they read
    #[arg(long, value_enum, default_values_t = [ChannelName::Aw, ChannelName::Ar])]
    pub channel: Vec<ChannelName>,
    /// The regulator
    #[command(flatten)]
    pub port: PortArgs,
}

/// Channels of AXI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ChannelName {
    /// Writes to memory
    Aw,
    /// Reads from memory
    Ar,
}

/// Systems on a chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SocName {
    /// Xilinx Zynq UltraScale+ MPSoC
    Zynqmp,
    /// NXP S32
    S32,
}

impl From<SocName> for Soc {
    fn from(name: SocName) -> Self {
        match name {
            SocName::Zynqmp => Self::Zynqmp,
            SocName::S32 => Self::S32,
        }
    }
}

/// Regulators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ActuatorName {
    /// Caps of the I/O domain
    IoDomain,
    /// cgroup v2 io.max
    IoMax,
    /// cgroup v1 blkio.throttle
    ThrottleV1,
    /// tc's token bucket filter
    TcTbf,
    /// tc's hierarchical token bucket
    TcHtb,
    /// QEMU's throttle-group
    Qemu,
    /// libvirt's iotune and bandwidth
    Libvirt,
    /// Memory bandwidth and cache of groups of threads
    Resctrl,
    /// ARM CoreLink QoS-400
    Qos400,
}

impl From<ActuatorName> for Actuator {
    fn from(name: ActuatorName) -> Self {
        match name {
            ActuatorName::IoDomain => Self::IoDomain,
            ActuatorName::IoMax => Self::IoMax,
            ActuatorName::ThrottleV1 => Self::ThrottleV1,
            ActuatorName::TcTbf => Self::TcTbf,
            ActuatorName::TcHtb => Self::TcHtb,
            ActuatorName::Qemu => Self::Qemu,
            ActuatorName::Libvirt => Self::Libvirt,
            ActuatorName::Resctrl => Self::Resctrl,
            ActuatorName::Qos400 => Self::Qos400,
        }
    }
}
