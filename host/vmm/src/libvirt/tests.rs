use super::*;
use crate::qmp::Qmp;

/// Live XML of a VM, shortened from the output of libvirt 9.0 for one on q35.
const LIVE: &str = r#"<domain type='qemu' id='3'>
  <name>plc</name>
  <uuid>a9949d75-95e3-4747-82e3-c9fee1047688</uuid>
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='raw' cache='none' iothread='1'/>
      <source file='/srv/plc &amp; co.img' index='1'/>
      <target dev='vdb' bus='virtio'/>
      <alias name='virtio-disk1'/>
      <address type='pci' domain='0x0000' bus='0x03' slot='0x1f' function='0x2'/>
    </disk>
    <disk type='block' device='disk'>
      <driver name='qemu' type='qcow2'/>
      <source dev='/dev/vg0/data'/>
      <target dev='sda' bus='scsi'/>
      <serial>QM0001</serial>
      <address type='drive' controller='0' bus='0' target='0' unit='5'/>
    </disk>
    <disk type='network' device='disk'>
      <source protocol='rbd' name='pool/image'/>
      <target dev='vdc' bus='virtio'/>
    </disk>
    <disk type='file' device='cdrom'><target dev='sdb' bus='sata'/></disk>
    <channel type='unix'>
      <target type='virtio' name='org.qemu.guest_agent.0' state='connected'/>
    </channel>
  </devices>
</domain>"#;

#[test]
fn disks_and_agent_are_read_from_the_live_xml() {
    let xml = DomainXml::parse(LIVE).unwrap();
    assert_eq!((xml.id, xml.name.as_str(), xml.agent), (Some(3), "plc", AgentState::Connected));
    let disk = xml.disk("vdb").unwrap();
    assert_eq!(disk.source.as_deref(), Some(std::path::Path::new("/srv/plc & co.img")));
    assert_eq!(disk.format.as_deref(), Some("raw"));
    assert_eq!(disk.address, Some(GuestAddress::Pci { domain: 0, bus: 3, slot: 31, function: 2 }));
    let scsi = xml.disk("sda").unwrap();
    assert_eq!((scsi.format.as_deref(), scsi.serial.as_deref()), (Some("qcow2"), Some("QM0001")));
    assert_eq!(scsi.address, Some(GuestAddress::Drive { bus: 0, target: 0, unit: 5 }));
    assert_eq!(
        (xml.disk("vdc").unwrap().source.as_ref(), xml.disk("sdb").unwrap().device.as_str()),
        (None, "cdrom")
    );
    assert_eq!(xml.disk("vdz"), None);
    let off = LIVE.replace(" id='3'", "").replace(" state='connected'", "");
    let off = DomainXml::parse(&off).unwrap();
    assert_eq!((off.id, off.agent), (None, AgentState::Disconnected));
}

#[test]
fn what_is_no_domain_is_refused() {
    for text in [
        "",
        "error",
        "<network/>",
        "<domain id='x'><name>a</name><uuid>u</uuid></domain>",
        "<domain/>",
        "<!DOCTYPE d [<!ENTITY a 'x'>]><domain><name>&a;</name><uuid>u</uuid></domain>",
    ] {
        assert!(DomainXml::parse(text).is_err(), "{text}");
    }
    for (open, close) in
        [("<a>", "</a>"), ("<a b='/>'>", "</a>"), ("<!-- </a> --><a>", "<![CDATA[</a>]]></a>"), ("<a>", "")]
    {
        let deep = format!("{}{}", open.repeat(100_000), close.repeat(100_000));
        assert!(DomainXml::parse(&deep).unwrap_err().contains("256 deep"), "{open}");
    }
}

/// Daemon that answers from a list: the first word of a command, and its answer.
#[derive(Debug)]
struct Scripted(Vec<(&'static str, Result<&'static str, &'static str>)>);

impl Daemon for Scripted {
    fn uri(&self) -> &str {
        "test:///scripted"
    }

    fn call(&self, args: &[&str], _: Access, limit: usize, _: Duration) -> Result<Vec<u8>, VmmError> {
        let (_, answer) =
            self.0.iter().find(|(command, _)| *command == args[0]).expect("an unexpected command");
        match answer {
            Ok(text) if text.len() <= limit => Ok(text.as_bytes().to_vec()),
            Ok(_) => Err(VmmError::TooLarge { peer: self.uri().into(), operation: args[0].into(), limit }),
            Err(message) => Err(VmmError::Libvirt {
                peer: self.uri().into(),
                operation: args[0].into(),
                message: (*message).to_owned(),
            }),
        }
    }
}

const LIST: &str = "a9949d75-95e3-4747-82e3-c9fee1047688 plc\n1b3e3c9a-0000-4747-82e3-c9fee1047688 3\n\n";

fn find(domain: &str, xml: &'static str, root: &Root) -> Result<Lookup, VmmError> {
    let running = ("domstate", Ok("running (booted)\n\n"));
    let daemon = Scripted(vec![("list", Ok(LIST)), running, ("dumpxml", Ok(xml))]);
    RunningDomain::find(Arc::new(daemon), root, domain)
}

#[test]
fn a_name_of_digits_is_no_id_and_an_unknown_one_is_said() {
    let none = Root::new("/nonexistent");
    let Lookup::Unknown { known } = find("1", LIVE, &none).unwrap() else { panic!("1 is no domain") };
    assert_eq!(known, ["plc", "3"]);
    const OFF: &str = "<domain><name>3</name><uuid>1b3e3c9a-0000-4747-82e3-c9fee1047688</uuid></domain>";
    for domain in ["3", "1B3E3C9A-0000-4747-82E3-C9FEE1047688"] {
        assert!(matches!(find(domain, OFF, &none).unwrap(), Lookup::ShutOff { name } if name == "3"));
    }
}

/// VM that is being started, with its states one after the other: a look-up must not return its id
/// before the start has ended.
#[derive(Debug)]
struct Starts([&'static str; 4], std::sync::atomic::AtomicUsize);

impl Daemon for Starts {
    fn uri(&self) -> &str {
        "test:///starts"
    }

    fn call(&self, args: &[&str], _: Access, _: usize, _: Duration) -> Result<Vec<u8>, VmmError> {
        use std::sync::atomic::Ordering;
        let asked = self.1.load(Ordering::Relaxed);
        let answer = match args[0] {
            "list" => LIST,
            "domstate" => {
                self.1.store(asked + 1, Ordering::Relaxed);
                self.0[asked.min(3)]
            }
            "dumpxml" if asked == 1 && self.0[0] == OFF => {
                "<domain id='3'><name>plc</name><uuid>a9949d75-95e3-4747-82e3-c9fee1047688</uuid></domain>"
            }
            "dumpxml" if asked < 4 => panic!("looked at while it starts"),
            _ => "<domain><name>plc</name><uuid>a9949d75-95e3-4747-82e3-c9fee1047688</uuid></domain>",
        };
        Ok(answer.as_bytes().to_vec())
    }
}

const OFF: &str = "shut off (destroyed)\n\n";

#[test]
fn the_end_of_a_start_is_waited_for() {
    const STARTING: &str = "paused (starting up)\n\n";
    // Under way, and begun after the VM was seen shut off.
    for states in [[STARTING, STARTING, STARTING, "paused (user)\n\n"], [OFF, STARTING, STARTING, OFF]] {
        let daemon = Arc::new(Starts(states, Default::default()));
        let found = RunningDomain::find(daemon, &Root::new("/nonexistent"), "plc");
        assert!(matches!(found.unwrap(), Lookup::ShutOff { .. }), "{states:?}");
    }
}

/// Simulated `/proc` with processes.
struct Processes(tempfile::TempDir);

impl Processes {
    const QEMU: &str = "/usr/bin/qemu-system-x86_64";
    /// A user that is neither root nor the one that runs the test.
    const NOBODY: u32 = 65_534;

    fn new() -> Self {
        Self(rtvirtio_testkit::tempdir().unwrap())
    }

    fn root(&self) -> Root {
        Root::new(self.0.path())
    }

    fn add(&self, pid: u32, program: &str, user: u32, words: &str, cgroup: &str) {
        let proc = self.0.path().join("proc").join(pid.to_string());
        let _ = std::fs::remove_dir_all(&proc);
        std::fs::create_dir_all(&proc).unwrap();
        std::fs::write(proc.join("cmdline"), words.replace(' ', "\0")).unwrap();
        std::fs::write(proc.join("cgroup"), cgroup).unwrap();
        std::fs::write(proc.join("status"), format!("Name:\tq\nUid:\t{user}\t{user}\t{user}\t{user}\n"))
            .unwrap();
        std::os::unix::fs::symlink(program, proc.join("exe")).unwrap();
    }

    /// Writes libvirt's pid file, and returns its path.
    fn name(&self, pid: u32) -> std::path::PathBuf {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = self.0.path().join("run/libvirt/qemu");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        let file = dir.join("plc.pid");
        std::fs::write(&file, format!("{pid}\n")).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
        file
    }

    fn found(&self, xml: &'static str) -> Result<u32, String> {
        match find("plc", xml, &self.root()) {
            Ok(Lookup::Running(domain)) => Ok(domain.process.pid),
            Ok(other) => panic!("it runs: {other:?}"),
            Err(e) => Err(e.to_string()),
        }
    }
}

const UUID: &str = "a9949d75-95e3-4747-82e3-c9fee1047688";
/// A cgroup of this start.
const SCOPE: &str = "0::/machine.slice/machine-qemu\\x2d3\\x2dplc.scope/libvirt/emulator\n";

#[test]
fn without_a_pid_file_the_process_is_the_one_with_the_uuid_in_the_cgroup_of_this_start() {
    let all = Processes::new();
    // This test process stands for QEMU, because the start time is read from the real /proc.
    let me = std::process::id();
    let words = format!("qemu -uuid {UUID}");
    all.add(1, "/sbin/init", 0, "init", "0::/\n");
    let none = all.found(LIVE).unwrap_err();
    assert!(none.contains("no process here was started with its UUID"), "{none}");
    all.add(me, Processes::QEMU, 0, &words, SCOPE);
    let Lookup::Running(domain) = find("plc", LIVE, &all.root()).unwrap() else { panic!("it runs") };
    assert_eq!(domain.process.pid, me);
    assert!(
        matches!(domain.agent(), Some(AgentAddress::Libvirt(a)) if a.uuid == UUID && a.process.pid == me)
    );
    // Another process with the same command line, in no cgroup of libvirt's.
    all.add(2, Processes::QEMU, 0, &words, "0::/user.slice\n");
    assert_eq!(all.found(LIVE), Ok(me));
    // A third one that is in such a cgroup too: no guess is made.
    all.add(3, Processes::QEMU, 0, &words, "7:blkio:/machine/qemu-3-plc.libvirt-qemu\n");
    assert!(all.found(LIVE).unwrap_err().contains("all started with its UUID"));
}

/// Any user can write a UUID into a command line, and run QEMU with it.
#[test]
fn an_impostor_neither_becomes_the_domain_nor_blocks_it() {
    let all = Processes::new();
    let me = std::process::id();
    let words = format!("qemu -uuid {UUID}");
    // Alone, in a cgroup that looks like libvirt's: none of these is accepted.
    for (program, user, why) in [
        (Processes::QEMU, Processes::NOBODY, "runs as user 65534"),
        ("/home/x/fakevm", Processes::NOBODY, "no virtual machine monitor"),
        ("/usr/bin/sleep", 0, "no virtual machine monitor"),
    ] {
        all.add(me, program, user, &words, SCOPE);
        let refused = all.found(LIVE).unwrap_err();
        assert!(refused.contains(why), "{program}: {refused}");
    }
    const LABELLED: &str = "<domain type='kvm' id='3'><name>plc</name><uuid>a9949d75-95e3-4747-82e3-c9fee1047688</uuid>\
                            <seclabel type='dynamic' model='dac' relabel='yes'><label>+64055:+108</label></seclabel></domain>";
    assert_eq!(DomainXml::parse(LABELLED).unwrap().user, Some(64_055));
    assert!(all.found(LABELLED).is_err());
    // Next to the real one, which libvirt runs as the user of the label.
    all.add(me, Processes::QEMU, 64_055, &words, "0::/elsewhere\n");
    all.add(2, Processes::QEMU, Processes::NOBODY, &words, SCOPE);
    assert_eq!(all.found(LABELLED), Ok(me));
    // A program of another name is accepted where libvirt gives it.
    const WRAPPED: &str = "<domain type='kvm' id='3'><name>plc</name><uuid>a9949d75-95e3-4747-82e3-c9fee1047688</uuid>\
                           <devices><emulator>/opt/vmm</emulator></devices></domain>";
    all.add(me, "/opt/vmm", 0, &words, SCOPE);
    assert_eq!((all.found(WRAPPED), all.found(LABELLED).is_err()), (Ok(me), true));
    // Also after an update of its package.
    all.add(me, "/opt/vmm (deleted)", 0, &words, SCOPE);
    assert_eq!(all.found(WRAPPED), Ok(me));
}

#[test]
fn the_pid_file_of_libvirt_decides_where_it_can_be_trusted() {
    use std::os::unix::fs::PermissionsExt as _;
    let all = Processes::new();
    let me = std::process::id();
    let words = format!("qemu -uuid {UUID}");
    // Two candidates, of one user and in cgroups of this start: libvirt's pid file decides.
    all.add(me, Processes::QEMU, 107, &words, SCOPE);
    all.add(2, Processes::QEMU, 107, &words, SCOPE);
    let file = all.name(me);
    assert_eq!(all.found(LIVE), Ok(me));
    // A pid in the file that belongs to another process by now is refused.
    all.add(3, Processes::QEMU, 0, "qemu -uuid 0", SCOPE);
    all.name(3);
    assert!(all.found(LIVE).is_err());
    // So is a file that others may write, and a link.
    all.name(me);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
    assert!(all.found(LIVE).is_err());
    std::fs::rename(&file, file.with_extension("own")).unwrap();
    std::os::unix::fs::symlink(file.with_extension("own"), &file).unwrap();
    assert!(all.found(LIVE).is_err());
}

#[test]
fn answers_of_monitor_and_agent_keep_their_meaning() {
    let link = |command, answer| {
        let daemon = Arc::new(Scripted(vec![(command, answer)]));
        DomainLink::new(daemon, "u", "guest agent plc".to_owned())
    };
    let agent = |answer| {
        link("qemu-agent-command", answer)
            .agent("{}", "guest-file-open", 64, Duration::from_secs(5))
            .unwrap_err()
    };
    let refused = agent(Err(
        "internal error: unable to execute QEMU agent command 'guest-file-open': failed to open file '/x': No such file or directory",
    ));
    assert!(
        matches!(&refused, VmmError::Refused { desc, .. } if desc == "failed to open file '/x': No such file or directory"),
        "{refused}"
    );
    let absent = agent(Err("Guest agent is not responding: QEMU guest agent is not connected"));
    assert!(matches!(absent, VmmError::NoAgent { .. }), "{absent}");
    let silent =
        agent(Err("Guest agent is not responding: guest agent didn't respond to command within '5' seconds"));
    assert!(silent.is_timeout(), "{silent}");
    assert!(agent(Err("Requested operation is not valid: domain is not running")).is_closed());
    assert!(matches!(agent(Err("authentication failed")), VmmError::Libvirt { .. }));
    assert!(matches!(
        agent(Ok("a long answer that goes beyond the limit of sixty-four bytes of this call")),
        VmmError::TooLarge { .. }
    ));
}

#[test]
fn a_monitor_that_refuses_is_told_from_one_that_is_gone() {
    let xml = DomainXml::parse(LIVE).unwrap();
    let with = |answer| {
        let daemon = Arc::new(Scripted(vec![("qemu-monitor-command", answer)]));
        let process = ProcessId { pid: 1, start_time: 1 };
        let domain = RunningDomain { daemon, xml: xml.clone(), process };
        Qmp::of_domain(&domain, Duration::from_secs(5))
    };
    let version =
        r#"{"return":{"qemu":{"micro":22,"minor":2,"major":7},"package":"Debian"},"id":"libvirt-9"}"#;
    assert_eq!(with(Ok(version)).unwrap().version().qemu.major, 7);
    let refused = r#"{"id":"libvirt-413","error":{"class":"CommandNotFound","desc":"not found"}}"#;
    assert!(
        matches!(with(Ok(refused)).unwrap_err(), VmmError::Refused { class, .. } if class == "CommandNotFound")
    );
    assert!(with(Err("Requested operation is not valid: domain is not running")).unwrap_err().is_closed());
    assert!(matches!(with(Ok("{")).unwrap_err(), VmmError::Protocol { .. }));
}

/// Limits of a real child process: virsh itself is asked for a daemon that does not exist, as a
/// command such as `false(1)` is no substitute for it.
#[test]
fn a_daemon_that_is_not_there_is_an_error_with_libvirts_words() {
    if !rtvirtio_testkit::has("libvirt without a daemon", &[rtvirtio_testkit::Need::Program("virsh")]) {
        return;
    }
    let virsh = Virsh::new("qemu+unix:///system?socket=/nonexistent/libvirt-sock");
    let error = list(&virsh).unwrap_err();
    let VmmError::NoLibvirt { message, .. } = &error else { panic!("{error}") };
    assert!(message.contains("/nonexistent/libvirt-sock"), "{error}");
    assert!(error.to_string().contains("systemctl status libvirtd"), "{error}");
    let error = virsh.call(&["--version"], Access::Read, 2, LOOK_UP_TIMEOUT).unwrap_err();
    assert!(matches!(error, VmmError::TooLarge { limit: 2, .. }), "{error}");
}

#[test]
fn what_qemu_holds_is_read_from_blkdeviotune() {
    let text = "total_bytes_sec: 0\nread_bytes_sec : 0\nwrite_bytes_sec: 0\ntotal_iops_sec : 77\nread_iops_sec  : 0\n\
                write_iops_sec : 0\ntotal_iops_sec_max: 200\n\
                total_iops_sec_max_length: 5\nsize_iops_sec  : 0\ngroup_name     : drive-virtio-disk0\n";
    let (limits, group) = super::domain::tuned(text).unwrap();
    assert_eq!(limits.to_string(), "iops-total=77 iops-total-max=200 iops-total-max-length=5");
    assert_eq!(group.as_deref(), Some("drive-virtio-disk0"));
    let (none, group) =
        super::domain::tuned(&text.replace("77", "0").replace("drive-virtio-disk0", "")).unwrap();
    assert!(group.is_none() && none.iops == 0);
    // A missing value, or one that is no number, is no limit of 0.
    assert!(super::domain::tuned("total_iops_sec : 0\n").is_none());
    assert!(super::domain::tuned(&text.replace("77", "unlimited")).is_none());
}

/// Throttle filters: two groups for one disk, one of which another disk shares; the third disk has
/// limits of its own.
#[test]
fn limits_of_throttle_filters_are_seen_like_iotune() {
    let group = |name: &str, limit: &str| {
        format!("<throttlegroup><group_name>{name}</group_name>{limit}</throttlegroup>")
    };
    let disk = |target: &str, inner: &str| {
        format!("<disk type='block'><source dev='/dev/{target}'/><target dev='{target}'/>{inner}</disk>")
    };
    let groups = group("all", "<total_iops_sec>50</total_iops_sec>")
        + &group(
            "writes",
            "<write_bytes_sec>1048576</write_bytes_sec><write_bytes_sec_max>2097152</write_bytes_sec_max>",
        )
        + &group("idle", "");
    let of = |names: &[&str]| {
        let filters: String = names.iter().map(|n| format!("<throttlefilter group='{n}'/>")).collect();
        format!("<throttlefilters>{filters}</throttlefilters>")
    };
    let domain = |first: &[&str]| {
        format!(
            "<domain id='1'><name>plc</name><uuid>u</uuid><throttlegroups>{groups}</throttlegroups><devices>{}{}{}{}</devices></domain>",
            disk("vda", &of(first)),
            disk("vdb", &of(&["all"])),
            disk("vdc", "<iotune><total_iops_sec>50</total_iops_sec></iotune>"),
            disk("vdd", &of(&["idle"])),
        )
    };
    let drives = DomainXml::parse(&domain(&["writes", "all"])).unwrap().drives();
    let words = |at: usize| drives[at].limits.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(words(0), ["bps-write=1048576 bps-write-max=2097152", "iops-total=50"]);
    assert_eq!(
        (&drives[0].groups, &drives[0].shared_with),
        (&vec!["writes".into(), "all".into()], &vec!["vdb".into()])
    );
    // The same limit, by a filter and by `<iotune>`.
    assert_eq!(drives[1].limits, drives[2].limits);
    assert!(drives[3].limits.is_empty() && drives[3].shared_with.is_empty());
    // Limits that are not known are no missing limits.
    let error = DomainXml::parse(&domain(&["gone"])).unwrap_err();
    assert!(error.contains("disk vda") && error.contains("`gone`"), "{error}");
}
