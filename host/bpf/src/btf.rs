//! Offsets of structure members in the running kernel, from its own type information
//! (`Documentation/bpf/btf.rst`): one program fits all kernels.

/// Error of reading type information.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BtfError {
    /// The bytes are cut short, or have an unknown form.
    #[error("its type information is damaged at byte {0}")]
    Damaged(usize),
    /// A type, member or function does not exist.
    #[error("it has no {0}")]
    Missing(String),
}

const MAGIC: u16 = 0xeb9f;
/// Kinds of types (`include/uapi/linux/btf.h`).
const STRUCT: u32 = 4;
const TYPEDEF: u32 = 8;
/// `volatile`, `const`, `restrict`, and a tag: kinds that lead to another type.
const MODIFIERS: [u32; 4] = [9, 10, 11, 18];
const FUNCTION: u32 = 12;

/// The type information of a kernel, or of one of its modules.
#[derive(Debug)]
pub struct Btf<'b> {
    types: &'b [u8],
    names: &'b [u8],
    /// The kernel's, where this is a module's: type ids and offsets of names continue from there.
    base: Option<&'b Btf<'b>>,
}

/// Member of a structure: its offset in bits, and the id of its type.
#[derive(Clone, Copy)]
struct Member {
    bits: u32,
    type_id: u32,
}

/// Offset in whole bytes that a load reaches.
fn whole(bits: Option<u32>, structure: &str, member: &str) -> Result<i16, BtfError> {
    let whole = bits.filter(|bits| bits % 8 == 0).and_then(|bits| i16::try_from(bits / 8).ok());
    whole.ok_or_else(|| BtfError::Missing(format!("struct {structure}.{member}")))
}

fn word(bytes: &[u8], at: usize) -> Result<u32, BtfError> {
    let four = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
    four.map(u32::from_le_bytes).ok_or(BtfError::Damaged(at))
}

impl<'b> Btf<'b> {
    /// From the content of `/sys/kernel/btf/vmlinux`, little-endian.
    pub fn new(bytes: &'b [u8]) -> Result<Self, BtfError> {
        let header = word(bytes, 0)?;
        if header & 0xffff != u32::from(MAGIC) {
            return Err(BtfError::Damaged(0));
        }
        let length = word(bytes, 4)? as usize;
        let part = |at: usize| -> Result<&'b [u8], BtfError> {
            let (offset, size) = (word(bytes, at)? as usize, word(bytes, at + 4)? as usize);
            let start = length.checked_add(offset).ok_or(BtfError::Damaged(at))?;
            let end = start.checked_add(size).ok_or(BtfError::Damaged(at))?;
            bytes.get(start..end).ok_or(BtfError::Damaged(at))
        };
        Ok(Self { types: part(8)?, names: part(16)?, base: None })
    }

    /// From a module's file below `/sys/kernel/btf`, which continues the kernel's own.
    pub fn of_module(bytes: &'b [u8], kernel: &'b Self) -> Result<Self, BtfError> {
        Ok(Self { base: Some(kernel), ..Self::new(bytes)? })
    }

    fn name(&self, at: u32) -> &'b [u8] {
        if let Some(base) = self.base {
            return match (at as usize).checked_sub(base.names.len()) {
                Some(at) => (Btf { base: None, ..*self }).name(at as u32),
                None => base.name(at),
            };
        }
        let rest = self.names.get(at as usize..).unwrap_or_default();
        rest.split(|b| *b == 0).next().unwrap_or_default()
    }

    /// Calls `visit` with the id, the kind and the byte offset of each type, until it has a result.
    fn find<R>(
        &self,
        mut visit: impl FnMut(u32, u32, usize) -> Result<Option<R>, BtfError>,
    ) -> Result<Option<R>, BtfError> {
        let mut number = match self.base {
            None => 1,
            Some(base) => 1 + base.count()?,
        };
        let mut at = 0;
        while at < self.types.len() {
            let info = word(self.types, at + 4)?;
            let (kind, n) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
            if let Some(found) = visit(number, kind, at)? {
                return Ok(Some(found));
            }
            at += 12
                + match kind {
                    1 | 14 | 17 => 4,
                    3 => 12,
                    STRUCT | 5 | 15 | 19 => n * 12,
                    6 | 13 => n * 8,
                    2 | 7..=12 | 16 | 18 => 0,
                    _ => return Err(BtfError::Damaged(at)),
                };
            number += 1;
        }
        Ok(None)
    }

    /// Number of types, without those of the base.
    fn count(&self) -> Result<u32, BtfError> {
        let mut n = 0;
        self.find(|_, _, _| {
            n += 1;
            Ok(None::<()>)
        })?;
        Ok(n)
    }

    /// Byte offset of a structure's member, in the form that loads take. A structure that a module
    /// does not define is looked up in the kernel's.
    ///
    /// # Errors
    /// [`BtfError::Missing`] where there is no such member, it is not at a whole byte, or no load
    /// reaches it.
    pub fn offset(&self, structure: &str, member: &str) -> Result<i16, BtfError> {
        whole(self.member(structure, member)?.map(|found| found.bits), structure, member)
    }

    /// Byte offset of a member of a member, by the type that the outer one has in this kernel,
    /// whatever its name.
    ///
    /// # Errors
    /// As [`Self::offset`], also where the outer member is no structure.
    pub fn offset_within(&self, structure: &str, member: &str, inner: &str) -> Result<i16, BtfError> {
        let path = format!("{member}.{inner}");
        let missing = || BtfError::Missing(format!("struct {structure}.{path}"));
        let outer = self.member(structure, member)?.ok_or_else(missing)?;
        let found = self.member_of_type(outer.type_id, inner)?.ok_or_else(missing)?;
        whole(outer.bits.checked_add(found.bits), structure, &path)
    }

    /// Member of a structure of this name.
    fn member(&self, structure: &str, member: &str) -> Result<Option<Member>, BtfError> {
        let found = self.find(|_, kind, at| {
            if kind != STRUCT || self.name(word(self.types, at)?) != structure.as_bytes() {
                return Ok(None);
            }
            self.member_at(at, member)
        })?;
        match (found, self.base) {
            (None, Some(base)) => base.member(structure, member),
            (found, _) => Ok(found),
        }
    }

    /// Member of the structure with this id, or of the one that it is another name of.
    fn member_of_type(&self, mut id: u32, member: &str) -> Result<Option<Member>, BtfError> {
        // The kernel's own limit of such a chain (`MAX_RESOLVE_DEPTH`).
        for _ in 0..32 {
            let found = self.find(|number, kind, at| {
                if number != id {
                    return Ok(None);
                }
                Ok(Some(match kind {
                    STRUCT => Ok(self.member_at(at, member)?),
                    _ if kind == TYPEDEF || MODIFIERS.contains(&kind) => Err(word(self.types, at + 8)?),
                    _ => Ok(None),
                }))
            })?;
            match (found, self.base) {
                (Some(Ok(found)), _) => return Ok(found),
                (Some(Err(next)), _) => id = next,
                (None, Some(base)) => return base.member_of_type(id, member),
                (None, None) => return Ok(None),
            }
        }
        Ok(None)
    }

    /// Member of the structure whose description begins at `at`.
    fn member_at(&self, at: usize, member: &str) -> Result<Option<Member>, BtfError> {
        let info = word(self.types, at + 4)?;
        for i in 0..(info & 0xffff) as usize {
            let of = at + 12 + i * 12;
            if self.name(word(self.types, of)?) == member.as_bytes() {
                // Bit fields have their size in the upper byte.
                let bits = word(self.types, of + 8)?;
                let bits = if info >> 31 == 1 { bits & 0x00ff_ffff } else { bits };
                return Ok(Some(Member { bits, type_id: word(self.types, of + 4)? }));
            }
        }
        Ok(None)
    }

    /// Id of the type by which programs are attached to a tracepoint: `btf_trace_NAME`.
    ///
    /// # Errors
    /// [`BtfError::Missing`] for a tracepoint that the kernel does not have.
    pub fn tracepoint(&self, name: &str) -> Result<u32, BtfError> {
        let name = format!("btf_trace_{name}");
        self.number(TYPEDEF, &name)?.ok_or(BtfError::Missing(name))
    }

    /// Id of a function, by which programs are attached to its entry.
    ///
    /// # Errors
    /// [`BtfError::Missing`] for a function that does not exist, or is inlined everywhere.
    pub fn function(&self, name: &str) -> Result<u32, BtfError> {
        self.number(FUNCTION, name)?.ok_or_else(|| BtfError::Missing(format!("function {name}")))
    }

    /// Id of the type of this kind and name.
    fn number(&self, kind: u32, name: &str) -> Result<Option<u32>, BtfError> {
        self.find(|number, of, at| {
            let is_it = of == kind && self.name(word(self.types, at)?) == name.as_bytes();
            Ok(is_it.then_some(number))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Type information with these words and names.
    fn bytes_of(types: &[u32], names: &[u8]) -> Vec<u8> {
        let types: Vec<u8> = types.iter().flat_map(|w| w.to_le_bytes()).collect();
        let mut bytes = vec![0x9f, 0xeb, 1, 0];
        let sizes = [24, 0, types.len(), types.len(), names.len()];
        bytes.extend(sizes.iter().flat_map(|w| (*w as u32).to_le_bytes()));
        bytes.extend(&types);
        bytes.extend(names);
        bytes
    }

    #[test]
    fn a_module_goes_on_from_the_kernel() {
        let kernel = b"\0pid\0nr\0";
        let kernel_types = [1, STRUCT << 24 | 1, 8, 5, 0, 64];
        let kernel = bytes_of(&kernel_types, kernel);
        // The kernel's names take 8 bytes, and its only type has id 1.
        let module = b"kick\0vcpu\0";
        let types = [8, FUNCTION << 24, 0, 13, STRUCT << 24 | 1, 16, 1, 1, 96];
        let module = bytes_of(&types, module);
        let kernel = Btf::new(&kernel).unwrap();
        let module = Btf::of_module(&module, &kernel).unwrap();
        assert_eq!(module.function("kick"), Ok(2));
        assert_eq!((module.offset("vcpu", "pid"), module.offset("pid", "nr")), (Ok(12), Ok(8)));
        assert_eq!(kernel.function("kick"), Err(BtfError::Missing("function kick".to_owned())));
        assert!(module.offset("vcpu", "nr").is_err());
    }

    /// `hrtimer.node` before Linux 7 and since: a structure of another name and size, here behind
    /// a typedef and `const`.
    #[test]
    fn a_member_is_found_by_the_type_of_the_outer_one() {
        let names = b"\0hrtimer\0node\0timerqueue_node\0expires\0timerqueue_linked_node\0";
        let (hrtimer, node, old, expires, new) = (1, 9, 14, 30, 38);
        // Ids: 1 int, 2 the old node with `expires` at 24, 3 the new one at 40, 4 and 5 another
        // name of the node that is used, 6 the timer, whose node is at 8.
        let of = |used: u32| -> Vec<u8> {
            let mut types = vec![0, 1 << 24, 8, 64];
            types.extend([old, STRUCT << 24 | 1, 32, expires, 1, 24 * 8]);
            types.extend([new, STRUCT << 24 | 1, 48, expires, 1, 40 * 8]);
            types.extend([new, TYPEDEF << 24, used, 0, 10 << 24, 4]);
            types.extend([hrtimer, STRUCT << 24 | 1, 64, node, 5, 8 * 8]);
            bytes_of(&types, names)
        };
        for (used, at) in [(2, 32), (3, 48)] {
            let bytes = of(used);
            let btf = Btf::new(&bytes).unwrap();
            assert_eq!(btf.offset_within("hrtimer", "node", "expires"), Ok(at));
            assert!(matches!(btf.offset_within("hrtimer", "node", "tree"), Err(BtfError::Missing(_))));
            let module = bytes_of(&[], b"\0");
            let module = Btf::of_module(&module, &btf).unwrap();
            assert_eq!(module.offset_within("hrtimer", "node", "expires"), Ok(at));
        }
        // An integer, a type that does not exist, and a name of itself have no members.
        for used in [1, 9, 4] {
            let bytes = of(used);
            let btf = Btf::new(&bytes).unwrap();
            assert!(btf.offset_within("hrtimer", "node", "expires").is_err(), "{used}");
        }
    }

    #[test]
    fn offsets_of_a_small_kernel() {
        let names = b"\0task_struct\0pid\0prio\0int\0btf_trace_x\0";
        // An int, a forward declaration of the same name, and the structure.
        let types: [u32; 22] = [
            22,
            1 << 24,
            4,
            32, // int
            1,
            7 << 24,
            0, // a forward declaration
            1,
            STRUCT << 24 | 2,
            8,
            13,
            1,
            0,
            17,
            1,
            32, // task_struct
            0,
            2 << 24,
            3, // a pointer
            26,
            TYPEDEF << 24,
            4, // the type of a tracepoint
        ];
        let bytes = bytes_of(&types, names);
        let btf = Btf::new(&bytes).unwrap();
        assert_eq!(btf.offset("task_struct", "pid"), Ok(0));
        assert_eq!(btf.offset("task_struct", "prio"), Ok(4));
        assert!(matches!(btf.offset("task_struct", "tgid"), Err(BtfError::Missing(_))));
        assert_eq!(btf.tracepoint("x"), Ok(5));
        assert_eq!(btf.tracepoint("y"), Err(BtfError::Missing("btf_trace_y".to_owned())));
        for cut in 0..bytes.len() {
            let cut = Btf::new(&bytes[..cut]).and_then(|b| b.offset("task_struct", "prio"));
            assert!(cut.is_err());
        }
    }
}
