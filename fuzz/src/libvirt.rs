//! What libvirt prints of a VM (`virsh dumpxml`), whose metadata other programs and the VM's owner
//! write: any text is refused with a reason, or read within bounds and the same way twice.

use rtvirtio_vmm::libvirt::DomainXml;

/// Longest reason of a refusal.
const MAX_REASON: usize = 4 << 10;
/// Longest contract, in bytes (`host/vmm/src/libvirt/contract.rs`).
const MAX_CONTRACT: usize = 64 << 10;

/// Reads the XML of a VM.
///
/// # Panics
/// When a refusal has no reason or a very long one, a contract is longer than its limit, or a
/// second reading of the same text differs.
pub fn play(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match DomainXml::parse(&text) {
        Err(why) => assert!((1..=MAX_REASON).contains(&why.len()), "{} bytes", why.len()),
        Ok(vm) => {
            if let Some(contract) = &vm.contract {
                match contract {
                    Ok(text) => assert!(text.len() <= MAX_CONTRACT, "{} bytes", text.len()),
                    Err(why) => assert!((1..=MAX_REASON).contains(&why.len()), "{} bytes", why.len()),
                }
            }
            assert_eq!(vm.drives().len(), vm.disks.len());
            for disk in &vm.disks {
                assert!(vm.disk(&disk.target).is_some(), "{disk:?}");
            }
            let again = DomainXml::parse(&text).expect("the same text");
            assert_eq!(format!("{vm:?}"), format!("{again:?}"));
        }
    }
}
