//! Writing contracts: one VM of a spec becomes a file of its own, or the metadata of its domain.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::trusted::{CONFIG_LIMIT, read_config_text};
use rtvirtio_spec::{HostHandle, HostSpec, Reach, SpecErrors, Vm};
use rtvirtio_vmm::VmmError;
use rtvirtio_vmm::libvirt::{Daemon, DomainContract, set_contract};
use toml_edit::{DocumentMut, Item};

use crate::desired::Contract;
use crate::domain_contracts;
use crate::snapshot::Snapshot;

/// The directory that the packages' service reads.
pub const CONTRACTS_DIR: &str = "/etc/rtvirtio/contracts.d";

/// Errors of writing or removing a contract.
#[derive(Debug, thiserror::Error)]
pub enum ContractFileError {
    /// The spec has mistakes.
    #[error(transparent)]
    Spec(#[from] SpecErrors),
    /// The spec has no such VM.
    #[error("{file} has no VM `{vm}`: it has {}", .known.join(", "))]
    NoVm {
        /// Spec that was read.
        file: PathBuf,
        /// VM that was asked for.
        vm: String,
        /// Names of the spec's VMs.
        known: Vec<String>,
    },
    /// The spec is a lab's, whose VMs take no contracts.
    #[error(
        "VM `{vm}` of {file} is a lab's: contracts are for running ones, named by domain, proxmox, qmp, cgroup or pid"
    )]
    Lab {
        /// Spec of the lab.
        file: PathBuf,
        /// VM that was asked for.
        vm: String,
    },
    /// No file has a contract of the VM.
    #[error("no file in {dir} has a contract of VM `{vm}`{}", passed_over(.unread))]
    None {
        /// Directory that was searched.
        dir: PathBuf,
        /// VM that was asked for.
        vm: String,
        /// Files with mistakes, which may have it.
        unread: Vec<PathBuf>,
    },
    /// The spec does not name the VM by `domain`, so libvirt has no metadata of it.
    #[error("VM `{vm}` of {file} is not named by `domain`: only a domain of libvirt has metadata")]
    NoDomain {
        /// Spec that was read.
        file: PathBuf,
        /// VM that was asked for.
        vm: String,
    },
    /// Text for the metadata that is no valid contract.
    #[error("{0}")]
    Metadata(String),
    /// The contract does not fit on this host together with the others.
    #[error("the contract of {vm} does not fit, so nothing is changed: {why}")]
    DoesNotFit {
        vm: String,
        /// Reason, and what would fit.
        why: String,
    },
    /// libvirt does not answer, or refuses.
    #[error(transparent)]
    Libvirt(#[from] VmmError),
    /// A file could not be used.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// Verb of the failed operation, such as `read`.
        action: &'static str,
        /// File or directory of the failed operation.
        path: PathBuf,
        /// Error of the operation.
        source: io::Error,
    },
    /// A file is no TOML.
    #[error("{path}: {why}")]
    Toml {
        /// File with the syntax error.
        path: PathBuf,
        /// Message of the parser, with the position.
        why: String,
    },
}

fn passed_over(unread: &[PathBuf]) -> String {
    let names: Vec<String> = unread.iter().map(|path| path.display().to_string()).collect();
    if names.is_empty() { String::new() } else { format!("; passed over for mistakes: {}", names.join(", ")) }
}

type Result<T> = std::result::Result<T, ContractFileError>;

/// The directory in which contract files are written: `named`, else that of the running service,
/// else [`CONTRACTS_DIR`]. The second value is the directory that the service reads, where that is
/// another.
#[must_use]
pub fn directory(named: Option<&Path>, service: Option<&Snapshot>) -> (PathBuf, Option<PathBuf>) {
    let read = service.and_then(|service| service.contracts.clone());
    let Some(named) = named else { return (read.unwrap_or_else(|| CONTRACTS_DIR.into()), None) };
    // A path that does not exist is compared without resolving links.
    let real = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path)).ok();
    let other = read.filter(|read| real(read) != real(named));
    (named.to_owned(), other)
}

/// Digest of the contract of a VM in a file, as in [`VmSnapshot::written`].
///
/// # Errors
/// A file with mistakes, or without the VM.
///
/// [`VmSnapshot::written`]: crate::VmSnapshot::written
pub fn contract_id(file: &Path, vm: &str) -> Result<String> {
    let spec = rtvirtio_files::load_spec(file)?;
    let all = Contract::of_spec(&spec, file);
    let known = || all.iter().map(|c| c.vm.name.clone()).collect();
    let none = || ContractFileError::NoVm { file: file.to_owned(), vm: vm.to_owned(), known: known() };
    all.iter().find(|c| c.vm.name == vm).map(|c| c.id.clone()).ok_or_else(none)
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ContractFileError {
    let path = path.to_owned();
    move |source| ContractFileError::Io { action, path, source }
}

/// The contract of one VM of a spec, as [`set`] and [`set_in_metadata`] would write it.
///
/// # Errors
/// A spec with mistakes, or without the VM.
pub fn candidate(vm: &str, spec: &Path) -> Result<HostSpec> {
    let (_, text) = part(vm, spec)?;
    Ok(HostSpec::parse(&spec.display().to_string(), &text)?)
}

/// Writes the contract of one VM of a spec to a file in `dir`, in place of the old one. Returns the
/// file.
///
/// # Errors
/// A spec with mistakes, or without the VM; when the file cannot be written.
pub fn set(dir: &Path, vm: &str, spec: &Path) -> Result<PathBuf> {
    let (_, text) = part(vm, spec)?;
    // Validated before the old contract is removed.
    let name = dir.join(format!("{vm}.toml"));
    HostSpec::parse(&name.display().to_string(), &text)?;
    let old = find(dir, vm)?;
    fs::create_dir_all(dir).map_err(failed("create", dir))?;
    write(&name, &text)?;
    if old.is_some_and(|old| old != name) {
        remove_from(dir, vm, &name)?;
    }
    Ok(name)
}

/// Writes the contract of one VM of a spec into its libvirt metadata. `daemon` connects to the
/// libvirt of a URI. Returns the VM's libvirt name or UUID, as the spec has it.
///
/// # Errors
/// As [`set`]; [`ContractFileError::NoDomain`]; when libvirt refuses.
pub fn set_in_metadata(daemon: impl Fn(&str) -> Box<dyn Daemon>, vm: &str, spec: &Path) -> Result<String> {
    let (found, text) = part(vm, spec)?;
    let Reach::Existing { host: HostHandle::Domain(of), .. } = &found.reach else {
        return Err(ContractFileError::NoDomain { file: spec.to_owned(), vm: vm.to_owned() });
    };
    let mut doc: DocumentMut = text.parse().map_err(|e: toml_edit::TomlError| ContractFileError::Toml {
        path: spec.to_owned(),
        why: e.to_string(),
    })?;
    // Metadata belong to one VM, also after a rename: no key has to name it.
    if let Some(table) =
        doc.get_mut("vm").and_then(Item::as_array_of_tables_mut).and_then(|vms| vms.get_mut(0))
    {
        table.remove("domain");
        table.remove("uri");
    }
    let text = doc.to_string();
    let domain = DomainContract { uuid: of.domain.clone(), name: of.domain.clone(), text: Ok(text.clone()) };
    domain_contracts::parse(&text, &domain, of.uri()).map_err(ContractFileError::Metadata)?;
    set_contract(&*daemon(of.uri()), &of.domain, Some(&text))?;
    Ok(of.domain.clone())
}

/// A VM of a spec, and the text of the spec without the others.
fn part(vm: &str, spec: &Path) -> Result<(Vm, String)> {
    let text = read_config_text(spec, CONFIG_LIMIT).map_err(failed("read", spec))?;
    let parsed = rtvirtio_files::load_spec(spec)?;
    if parsed.lab_kind().is_some() {
        return Err(ContractFileError::Lab { file: spec.to_owned(), vm: vm.to_owned() });
    }
    let Some(found) = parsed.vms().iter().find(|of| of.name == vm) else {
        let known = parsed.vms().iter().map(|vm| vm.name.clone()).collect();
        return Err(ContractFileError::NoVm { file: spec.to_owned(), vm: vm.to_owned(), known });
    };
    let devices: Vec<Option<String>> = parsed
        .parts()
        .iter()
        .filter(|part| part.spec.vms.iter().any(|other| other.name == vm))
        .map(|part| part.name.clone())
        .collect();
    Ok((found.clone(), cut(spec, &text, |name| name == vm, &devices)?))
}

/// The file in `dir` with the contract of a VM. Files with mistakes are skipped.
pub fn find(dir: &Path, vm: &str) -> Result<Option<PathBuf>> {
    Ok(all(dir)?.into_iter().find(|path| names(path).iter().any(|name| name == vm)))
}

/// Removes the contract of a VM; the file goes with its last one. Returns the file.
///
/// # Errors
/// [`ContractFileError::None`] when none has it; when a file cannot be written.
pub fn remove(dir: &Path, vm: &str) -> Result<PathBuf> {
    let Some(path) = find(dir, vm)? else {
        let unread = all(dir)?.into_iter().filter(|path| rtvirtio_files::load_spec(path).is_err()).collect();
        return Err(ContractFileError::None { dir: dir.to_owned(), vm: vm.to_owned(), unread });
    };
    remove_at(&path, vm)?;
    Ok(path)
}

fn remove_from(dir: &Path, vm: &str, but: &Path) -> Result<()> {
    for path in all(dir)? {
        if path != but && names(&path).iter().any(|name| name == vm) {
            remove_at(&path, vm)?;
        }
    }
    Ok(())
}

fn remove_at(path: &Path, vm: &str) -> Result<()> {
    let spec = rtvirtio_files::load_spec(path)?;
    let left = |part: &&rtvirtio_spec::Part| part.spec.vms.iter().any(|other| other.name != vm);
    let devices: Vec<Option<String>> = spec.parts().iter().filter(left).map(|p| p.name.clone()).collect();
    if devices.is_empty() {
        return fs::remove_file(path).map_err(failed("remove", path));
    }
    let text = read_config_text(path, CONFIG_LIMIT).map_err(failed("read", path))?;
    write(path, &cut(path, &text, |name| name != vm, &devices)?)
}

/// Contract files of a directory, none where it does not exist.
pub(crate) fn all(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed("read", dir))?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed("read", dir))?.path();
        if path.extension().is_some_and(|e| e == "toml") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn names(path: &Path) -> Vec<String> {
    let spec = rtvirtio_files::load_spec(path).ok();
    spec.iter().flat_map(|spec| spec.vms()).map(|vm| vm.name.clone()).collect()
}

/// A spec with some of its VMs and devices only, its comments kept.
fn cut(path: &Path, text: &str, keep: impl Fn(&str) -> bool, devices: &[Option<String>]) -> Result<String> {
    let wrong =
        |e: toml_edit::TomlError| ContractFileError::Toml { path: path.to_owned(), why: e.to_string() };
    let mut doc: DocumentMut = text.parse().map_err(wrong)?;
    let name = |table: &toml_edit::Table| table.get("name").and_then(Item::as_str).map(str::to_owned);
    if let Some(vms) = doc.get_mut("vm").and_then(Item::as_array_of_tables_mut) {
        vms.retain(|vm| name(vm).is_some_and(|name| keep(&name)));
    }
    if let Some(all) = doc.get_mut("device").and_then(Item::as_array_of_tables_mut) {
        all.retain(|device| devices.contains(&name(device)));
    }
    Ok(doc.to_string())
}

/// Replaces a file atomically; the new one survives a power failure.
fn write(path: &Path, text: &str) -> Result<()> {
    // Its temporary file is hidden, so that it is never taken for a contract.
    rtvirtio_kernel::atomic_write(path, text.as_bytes()).map_err(failed("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: &str = "\
# The plant.
[[device]]
name = \"fast\"
path = \"/dev/sdy\"

[[device]]
name = \"big\"
path = \"/dev/sdz\"

# The controller.
[[vm]]
name = \"plc\"
device = \"fast\"
qmp = \"/run/plc.qmp\"
criticality = \"high\"
[[vm.task]]
name = \"t\"
op = \"read\"
block = \"4KiB\"

[[vm]]
name = \"hist\"
device = \"big\"
qmp = \"/run/hist.qmp\"
[[vm.task]]
name = \"t\"
op = \"read\"
block = \"4KiB\"
";

    #[test]
    fn a_vm_of_a_spec_becomes_a_file_and_goes_again() {
        let temp = rtvirtio_testkit::tempdir().unwrap();
        let (dir, spec) = (temp.path().join("contracts.d"), temp.path().join("plant.toml"));
        fs::write(&spec, SPEC).unwrap();
        let file = set(&dir, "plc", &spec).unwrap();
        let text = fs::read_to_string(&file).unwrap();
        assert!(
            text.contains("# The controller.") && !text.contains("hist") && !text.contains("sdz"),
            "{text}"
        );
        assert_eq!(find(&dir, "plc").unwrap(), Some(file.clone()));
        set(&dir, "hist", &spec).unwrap();
        assert_eq!(remove(&dir, "plc").unwrap(), file);
        assert_eq!(find(&dir, "plc").unwrap(), None);
        assert!(matches!(remove(&dir, "plc"), Err(ContractFileError::None { .. })));
        assert!(find(&dir, "hist").unwrap().is_some());
        // A file that cannot be read may have it, and is named.
        fs::write(dir.join("wrong.toml"), "[[vm").unwrap();
        let error = remove(&dir, "plc").unwrap_err().to_string();
        assert!(error.contains("no file in") && error.contains("wrong.toml"), "{error}");
    }

    #[test]
    fn a_vm_has_one_file_also_when_it_was_in_another() {
        let temp = rtvirtio_testkit::tempdir().unwrap();
        let (dir, spec) = (temp.path().to_owned(), temp.path().join("spec"));
        fs::write(&spec, SPEC).unwrap();
        fs::write(dir.join("all.toml"), SPEC).unwrap();
        let file = set(&dir, "plc", &spec).unwrap();
        assert_eq!(names(&dir.join("all.toml")), ["hist"]);
        assert_eq!(names(&file), ["plc"]);
        // The file is removed with its last VM.
        remove(&dir, "hist").unwrap();
        assert!(!dir.join("all.toml").exists());
        let unknown = set(&dir, "plk", &spec).unwrap_err();
        assert!(matches!(&unknown, ContractFileError::NoVm { known, .. } if known.len() == 2), "{unknown}");
    }

    /// Mock libvirt with one VM, which records what is written.
    #[derive(Debug, Clone, Default)]
    struct OneDomain(std::sync::Arc<std::sync::Mutex<Vec<String>>>);

    impl Daemon for OneDomain {
        fn uri(&self) -> &str {
            "test:///one"
        }

        fn call(
            &self,
            args: &[&str],
            _: rtvirtio_vmm::libvirt::Access,
            _: usize,
            _: std::time::Duration,
        ) -> std::result::Result<Vec<u8>, VmmError> {
            Ok(match args[0] {
                "list" => "aa-01 plc\n".into(),
                "dumpxml" => "<domain><name>plc</name><uuid>aa-01</uuid></domain>".into(),
                _ => {
                    self.0.lock().unwrap().push(args.join(" "));
                    Vec::new()
                }
            })
        }
    }

    #[test]
    fn a_vm_of_a_spec_becomes_the_metadata_of_its_domain() {
        let temp = rtvirtio_testkit::tempdir().unwrap();
        let spec = temp.path().join("plant.toml");
        fs::write(&spec, SPEC.replace("qmp = \"/run/plc.qmp\"", "domain = \"plc\" # as virsh has it"))
            .unwrap();
        let libvirt = OneDomain::default();
        let connect = |_: &str| Box::new(libvirt.clone()) as Box<dyn Daemon>;
        assert_eq!(set_in_metadata(connect, "plc", &spec).unwrap(), "plc");
        let written = libvirt.0.lock().unwrap().join("\n");
        assert!(written.contains("criticality") && written.contains("# The controller."), "{written}");
        assert!(!written.contains("domain = ") && !written.contains("hist"), "{written}");
        let other = set_in_metadata(connect, "hist", &spec).unwrap_err();
        assert!(matches!(other, ContractFileError::NoDomain { .. }), "{other}");
    }
}
