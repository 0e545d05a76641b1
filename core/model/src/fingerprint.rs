//! Checksum that tells versions of a file apart.

/// 64-bit FNV-1a (Fowler, Noll, Vo), in hexadecimal digits. Not cryptographic: collisions are easy
/// to make.
#[must_use]
pub fn fingerprint(bytes: &[u8]) -> String {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, step))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the authors' test suite.
    #[test]
    fn known_values() {
        assert_eq!(fingerprint(b""), "cbf29ce484222325");
        assert_eq!(fingerprint(b"foobar"), "85944171f73967e8");
    }
}
