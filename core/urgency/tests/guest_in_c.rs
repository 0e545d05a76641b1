//! The guest in C of `docs/reference/urgency-page.md`, compiled as documented, speaks the protocol.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::process::Command;

use rtvirtio_testkit::{Need, has};
use rtvirtio_units::Nanos;
use rtvirtio_urgency::page::{BLOCK, Blocks, Host, LEAST_SIZE, Memory, Mode, flag};

const PAGE: &str = include_str!("../../../docs/reference/urgency-page.md");

#[derive(Clone)]
struct Shared(std::sync::Arc<File>);

impl Memory for Shared {
    type Error = io::Error;

    fn read(&self, at: usize, into: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(into, at as u64)
    }

    fn write(&self, at: usize, from: &[u8]) -> io::Result<()> {
        self.0.write_all_at(from, at as u64)
    }
}

#[test]
fn the_documented_guest_reports() {
    if !has("the_documented_guest_reports", &[Need::Program("cc")]) {
        return;
    }
    let source = PAGE.split("```c\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let lines = source.lines().count();
    assert!(lines <= 100, "a guest in {lines} lines");
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (file, program) = (dir.path().join("urgent.c"), dir.path().join("urgent"));
    fs::write(&file, source).unwrap();
    let strict = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"];
    let compiled = Command::new("cc").args(strict).arg("-o").arg(&program).arg(&file).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));

    let page = dir.path().join("page");
    let shared = File::options().create_new(true).read(true).write(true).open(&page).unwrap();
    shared.set_len(LEAST_SIZE as u64).unwrap();
    let shared = Shared(std::sync::Arc::new(shared));
    let host = Host::new(shared.clone(), LEAST_SIZE).unwrap();
    let run = || Command::new(&program).arg(&page).args(["3", "80", "20"]).output().unwrap();
    let early = run();
    assert_eq!(early.status.code(), Some(1), "no page is offered yet");
    host.serve(None).unwrap();
    // While it runs, its reports are seen whole. It may end before the first look.
    let blocks = Blocks::new(shared, BLOCK, host.vcpus());
    let (mut runs, mut seen) = (0, 0);
    while seen == 0 {
        runs += 1;
        let out = std::thread::scope(|scope| {
            let guest = scope.spawn(run);
            while !guest.is_finished() {
                let Some((_, report)) = blocks.read(3).unwrap() else { continue };
                if report.policy == 1 {
                    assert_eq!((report.priority, report.flags, report.deadline), (80, 0, 0));
                    seen += 1;
                } else if report.deadline != 0 {
                    assert!(report.deadline.saturating_sub(report.written) <= 1_000_000);
                    seen += 1;
                }
            }
            guest.join().unwrap()
        });
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(runs < 100, "no report was seen");
    }
    let (mode, beat) = host.mode().unwrap();
    assert_eq!((mode, beat), (Mode::Off, 41 * runs));
    let (sequence, last) = blocks.read(3).unwrap().unwrap();
    assert_eq!((sequence, last.policy, last.flags), (82 * runs, 0, flag::IDLE));
    assert!(Nanos(last.written) > Nanos(0));
}
