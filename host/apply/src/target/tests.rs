use super::*;

fn dev() -> String {
    "7:0".into()
}

#[test]
fn values_and_texts_of_each_form() {
    let max = Form::IoMax { dev: dev(), key: "riops".into() };
    for (form, file, value, text) in [
        (Form::Plain, "8\n", "8", "8"),
        (Form::Jiffies, "124\n", "124", "124"),
        (Form::Elevator, "none [bfq] \n", "bfq", "bfq"),
        (Form::DeviceWeight { dev: dev() }, "default 100\n7:0 400\n", "400", "7:0 400"),
        (Form::DeviceWeight { dev: dev() }, "default 100\n", "default", "7:0 default"),
        (Form::Throttle { dev: dev() }, "7:0 1000\n", "1000", "7:0 1000"),
        (Form::Throttle { dev: dev() }, "", "max", "7:0 0"),
        (max.clone(), "7:0 rbps=max wbps=max riops=5 wiops=max\n", "5", "7:0 riops=5"),
        (max, "", "max", "7:0 riops=max"),
        (Form::IoWeight { dev: dev() }, "default 100\n7:0 400\n", "400", "7:0 400"),
        (Form::IoWeight { dev: dev() }, "default 500\n", "default", "7:0 default"),
        (Form::IoLatency { dev: dev() }, "8:0 target=5\n7:0 target=2000\n", "2000", "7:0 target=2000"),
        (Form::IoLatency { dev: dev() }, "8:0 target=5\n", "max", "7:0 target=max"),
        (Form::IoCostModel { dev: dev() }, "", "ctrl=auto", "7:0 ctrl=auto"),
        (
            Form::IoCostQos { dev: dev() },
            "8:0 enable=1 ctrl=auto\n",
            "enable=0 ctrl=auto",
            "7:0 enable=0 ctrl=auto",
        ),
        (Form::IoEnabled, "cpu io\n", "+io", "+io"),
        (Form::IoEnabled, "cpu\n", "-io", "-io"),
        (Form::CpusetEnabled, "cpuset cpu\n", "+cpuset", "+cpuset"),
        (Form::CpusetEnabled, "cpu\n", "-cpuset", "-cpuset"),
        (Form::CpuList, "2-3\n", "2-3", "2-3"),
        (Form::CpuList, "\n", "", "\n"),
        (Form::Partition, "member\n", "member", "member"),
        (
            Form::Schemata { resource: "MB".into() },
            "    MB:0= 40;1=100\n    L3:0=00f\n",
            "0=40;1=100",
            "MB:0=40;1=100\n",
        ),
        (Form::IoAlloc, "enabled\n", "enabled", "1"),
        (Form::IoAlloc, "disabled\n", "disabled", "0"),
        (Form::IoAllocWays, "0=0c0\n", "0=c0", "0=c0\n"),
        (Form::ResctrlTask { mount: "/sys/fs/resctrl".into() }, "res:vm0\nmon:\n", "/vm0", "/vm0"),
    ] {
        assert_eq!(form.value(file).as_deref(), Some(value), "{form:?}");
        assert_eq!(form.text(value), text, "{form:?}");
    }
}

/// The kernel shows its own choice next to `ctrl=auto`, keeps a line once there was one, and prints
/// two decimals.
#[test]
fn settings_of_io_cost_are_compared_by_meaning() {
    let (model, qos) = (Form::IoCostModel { dev: dev() }, Form::IoCostQos { dev: dev() });
    let own = "8:0 enable=1 ctrl=auto\n7:0 enable=0 ctrl=auto rpct=0.00 rlat=25000 wpct=0.00 wlat=25000 min=1.00 max=10000.00\n";
    assert_eq!(qos.value(own).as_deref(), qos.unset());
    let own = "7:0 ctrl=auto model=linear rbps=4 rseqiops=3 rrandiops=3 wbps=4 wseqiops=3 wrandiops=3\n";
    assert_eq!(model.value(own).as_deref(), model.unset());
    let set = "7:0 enable=1 ctrl=user rpct=95.00 rlat=5000 wpct=0.00 wlat=5000 min=50.00 max=150.00\n";
    let value = IoCostFile::Qos.canonical("enable=1 rpct=95 rlat=5000 wpct=0 wlat=5000 min=50 max=150");
    assert_eq!(qos.value(set), value.ok());
    // Of another kernel's form nothing is known, and that is not the default.
    assert_eq!(qos.value("7:0 enable=1 ctrl=auto weights=9\n"), None);
    assert_eq!(model.value("7:0 ctrl=user model=cubic\n"), None);
}

#[test]
fn unknown_texts_have_no_value() {
    assert_eq!(Form::Elevator.value("none bfq"), None);
    assert_eq!(Form::DeviceWeight { dev: dev() }.value("what is this"), None);
}

#[test]
fn comparison_is_by_meaning_and_tight() {
    assert!(Form::Jiffies.is("128", "125"));
    assert!(!Form::Jiffies.is("124", "125"));
    assert!(Form::Plain.is("8", "08"));
    assert!(!Form::Plain.is("128", "125"));
    assert!(!Form::Elevator.is("none", "bfq"));
}

#[test]
fn settings_of_threads_are_read_and_compared_by_meaning() {
    let policy = Form::Scheduling;
    assert_eq!(policy.value("fifo  97\n").as_deref(), Some("fifo 97"));
    assert_eq!(policy.value("fifo 100"), None);
    // The kernel shows the time slice of an ordinary thread that was given none.
    assert!(policy.is("other nice 0 slice 2800000", "other nice 0"));
    assert!(!policy.is("other nice 1 slice 2800000", "other nice 0"));
    assert!(!policy.is("fifo 97", "fifo 97 reset-on-fork"));

    let group = Form::ThreadCgroup { controller: "cpu".into(), mount: "/sys/fs/cgroup/cpu".into() };
    let file = "9:name=systemd:/\n3:cpuset:/\n2:cpu,cpuacct:/vm:a/b\n0::/init\n";
    assert_eq!(group.value(file).as_deref(), Some("/vm:a/b"));
    assert_eq!(group.value("3:cpuset:/\n0::/\n"), None);

    let thread = Target::scheduling(7, 8, 99);
    assert!(thread.may_end() && !thread.in_cgroup());
    assert_eq!(thread.to_string(), "/proc/7/task/8/sched");
    // A group's own directory is not a file in a cgroup: its parent's identity shows nothing about
    // it.
    let form = Form::Group { home: "/sys/fs/cgroup/cpu".into(), scheduling: "other nice 0".into() };
    assert!(!Target::host("/sys/fs/cgroup/cpu/rtvirtio-vm", form).in_cgroup());
}
