//! Addresses of regulators: facts of the ZynqMP's and the S32's manuals, as in the headers of
//! Jailhouse's QoS-400 driver.

use serde::Serialize;

/// A system on a chip with QoS-400 regulators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Soc {
    /// Xilinx Zynq UltraScale+ MPSoC, as on the ZCU102 of the I/O-domain paper.
    Zynqmp,
    /// NXP S32, with numbered regulators.
    S32,
}

/// A master with a regulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Master {
    /// Name in the manual or an alias.
    pub name: &'static str,
    /// Address of the regulator's register block.
    pub base: u64,
}

/// GPV of the ZynqMP's full-power domain, and of its low-power domain.
const FPD: u64 = 0xFD70_0000;
const LPD: u64 = 0xFE10_0000;
const S32_NIC: u64 = 0x4001_0000;
/// First register block of the S32's NIC: its blocks are at xx80.
const S32_FIRST: u64 = 0x4_2000;

/// Masters of the full-power domain, by their offset.
const FPD_MASTERS: [(&str, u64); 20] = [
    ("intfpdcci", 0x4_2100),
    ("smmutbu3", 0x4_3100),
    ("smmutbu4", 0x4_4100),
    ("afifm0", 0x4_5100),
    ("afifm1", 0x4_6100),
    ("afifm2", 0x4_7100),
    ("smmutbu5", 0x4_8100),
    ("dp", 0x4_9100),
    ("afifm3", 0x4_A100),
    ("afifm4", 0x4_B100),
    ("afifm5", 0x4_C100),
    ("gpu", 0x4_D100),
    ("pcie", 0x4_E100),
    ("gdma", 0x4_F100),
    ("sata", 0x5_0100),
    ("coresight", 0x5_2100),
    ("iss_ib2", 0xC_2100),
    ("iss_ib6", 0xC_3100),
    // Aliases by the device's usual name.
    ("fpd_dma", 0x4_F100),
    ("displayport", 0x4_9100),
];

/// Masters of the low-power domain, by their offset. The Ethernet controllers (GEM) are behind
/// `intiou`, the LPD-DMA is `adma`.
const LPD_MASTERS: [(&str, u64); 19] = [
    ("rpu0", 0x4_2100),
    ("rpu1", 0x4_3100),
    ("adma", 0x4_4100),
    ("afifm6", 0x4_5100),
    ("dap", 0x4_7100),
    ("usb0", 0x4_8100),
    ("usb1", 0x4_9100),
    ("intiou", 0x4_A100),
    ("csupmu", 0x4_B100),
    ("lpdinbound", 0x4_C100),
    ("ocm", 0x4_D100),
    ("ib5", 0xC_3100),
    ("ib6", 0xC_4100),
    ("ib8", 0xC_5100),
    ("ib0", 0xC_6100),
    ("ib11", 0xC_7100),
    ("ib12", 0xC_8100),
    ("gem", 0x4_A100),
    ("lpd_dma", 0x4_4100),
];

impl Soc {
    /// Masters with a name; none for the S32, whose regulators are numbered.
    #[must_use]
    pub fn masters(self) -> Vec<Master> {
        let of = |base: u64, masters: &[(&'static str, u64)]| {
            masters.iter().map(move |(name, offset)| Master { name, base: base + offset }).collect::<Vec<_>>()
        };
        match self {
            Self::Zynqmp => [of(FPD, &FPD_MASTERS), of(LPD, &LPD_MASTERS)].concat(),
            Self::S32 => Vec::new(),
        }
    }

    /// Address of the register block of a master: by name, or by the offset of its block in the
    /// interconnect (`0x42080`); `None` for an unknown one.
    #[must_use]
    pub fn base(self, master: &str) -> Option<u64> {
        let named = self.masters().into_iter().find(|m| m.name.eq_ignore_ascii_case(master));
        if let Some(named) = named {
            return Some(named.base);
        }
        let offset = u64::from_str_radix(master.strip_prefix("0x")?, 16).ok()?;
        match self {
            // Register blocks of the S32 have offsets that end in 80, from the first one on.
            Self::S32 => (offset & 0xff == 0x80 && (S32_FIRST..0x10_0000).contains(&offset))
                .then_some(S32_NIC + offset),
            Self::Zynqmp => None,
        }
    }

    /// Access to the registers, in words.
    #[must_use]
    pub fn access(self) -> &'static str {
        match self {
            Self::Zynqmp => {
                "secure registers: stock firmware refuses them; a firmware service (SMC 0x8400ff05 in a patched ATF) has to write them"
            }
            Self::S32 => "plain memory: /dev/mem or a driver writes them",
        }
    }
}
