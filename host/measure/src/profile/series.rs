//! Series of points, and what models read of each.

use rtvirtio_units::Bytes;

use super::{
    CONFIRMING_DEPTHS, Cell, DEPTHS, Extent, GENTLE_DEPTHS, LARGE, LARGE_DEPTHS, Point, SYNC_DEPTHS,
};

/// Series of points: a direction under an elevator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Series {
    Read,
    ReadBfq,
    Write,
    /// Writes with an fdatasync(2) after each.
    Sync,
}

impl Extent {
    /// The series in their order. Synced writes come after the other writes: they empty the
    /// drive's cache.
    pub(super) fn series(self, bfq: bool, writes: bool) -> Vec<Series> {
        let whole = self == Self::Whole;
        let all = [
            (Series::Read, true),
            (Series::ReadBfq, bfq && whole),
            (Series::Write, writes),
            (Series::Sync, writes && whole),
        ];
        all.into_iter().filter(|(_, asked)| *asked).map(|(one, _)| one).collect()
    }
}

impl Series {
    pub(super) fn elevator(self) -> &'static str {
        if self == Self::ReadBfq { "bfq" } else { "none" }
    }

    /// Depth and size of its points. The cost of BFQ is counted per request, so larger ones would
    /// add nothing there; and they load the device most.
    pub(super) fn points(self, block: Bytes, extent: Extent) -> Vec<(u32, Bytes)> {
        let own = self.depths(extent).iter().map(|d| (*d, block));
        let small_only = extent != Extent::Whole || matches!(self, Self::ReadBfq | Self::Sync);
        let large = if small_only || block >= LARGE { &[][..] } else { &LARGE_DEPTHS[..] };
        own.chain(large.iter().map(|d| (*d, LARGE))).collect()
    }

    /// Points, not yet measured.
    pub(super) fn cells(self, block: Bytes, extent: Extent) -> Vec<Cell> {
        let points = self.points(block, extent);
        let deepest = LARGE_DEPTHS.iter().max();
        let cell = |(depth, size): (u32, Bytes)| {
            // BFQ's points are read for its cost. Of larger requests the models read the tail with
            // most in flight.
            let tail = self != Self::ReadBfq && (size == block || Some(&depth) == deepest);
            Cell { series: self, depth, block: size, point: Point { tail, ..Point::default() } }
        };
        points.into_iter().map(cell).collect()
    }

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Read => "reads with none",
            Self::ReadBfq => "reads with bfq",
            Self::Write => "writes with none",
            Self::Sync => "synced writes with none",
        }
    }

    pub(super) fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Sync)
    }

    /// Depths of the block-sized points, in their order.
    pub(super) fn depths(self, extent: Extent) -> &'static [u32] {
        match (extent, self) {
            (Extent::Gentle, _) => &GENTLE_DEPTHS,
            (Extent::Confirming, _) => &CONFIRMING_DEPTHS,
            (Extent::Whole, Self::Sync) => &SYNC_DEPTHS,
            (Extent::Whole, _) => &DEPTHS,
        }
    }

    /// Lines of a section of the job file.
    pub(super) fn options(self) -> &'static str {
        match self {
            Self::Read | Self::ReadBfq => "rw=randread\nioengine=libaio\n",
            Self::Write => "rw=randwrite\nioengine=libaio\n",
            // As for a task that syncs (`JobFile`): one call that copies, writes back and flushes.
            Self::Sync => "rw=randwrite\nioengine=psync\ndirect=0\nsync=dsync\n",
        }
    }
}
