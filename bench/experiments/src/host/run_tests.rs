use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rtvirtio_workflow::Bar;

use super::*;

#[derive(Default)]
struct Lines(Mutex<Vec<String>>, AtomicBool);

struct NoBar;

impl Bar for NoBar {
    fn set(&mut self, _: u64) {}
    fn set_message(&mut self, _: &str) {}
}

impl Progress for Lines {
    fn step(&self, text: &str) {
        if text.contains("stop now") {
            self.1.store(true, Ordering::Relaxed);
        }
        self.0.lock().unwrap().push(text.to_owned());
    }
    fn warn(&self, text: &str) {
        self.step(text);
    }
    fn bar(&self, _: &str, _: u64) -> Box<dyn Bar> {
        Box::new(NoBar)
    }
    fn cancel_flag(&self) -> &AtomicBool {
        &self.1
    }
}

/// A shell in the place of `rtvirtio-bench`.
fn shell(script: &str) -> (Ended, Lines) {
    let lines = Lines::default();
    let choice = Choice { part: &PARTS[0], size: 0 };
    let args = ["-c".to_owned(), script.to_owned()];
    let ended = run(Path::new("/bin/sh"), &args, choice, &lines).unwrap();
    (ended, lines)
}

#[test]
fn a_part_ends_with_a_result_or_with_its_last_words() {
    let (ended, lines) = shell("echo 'rtvirtio: one' >&2; echo '{}'; exit 2");
    assert!(matches!(ended, Ended::Result(text) if text == "{}\n"));
    assert_eq!(*lines.0.lock().unwrap(), ["before-after: one"]);
    let (ended, _) = shell("for i in 1 2 3 4; do echo line $i >&2; done; exit 1");
    assert!(matches!(ended, Ended::Failed(why) if why == "line 2; line 3; line 4"));
    let (ended, _) = shell(r#"echo words >&2; echo '{"error":"no room"}'; exit 1"#);
    assert!(matches!(ended, Ended::Failed(why) if why == "no room"));
    let (ended, _) = shell("kill -9 $$");
    assert!(matches!(ended, Ended::Failed(why) if why.contains("signal: 9")));
}

#[test]
fn a_part_that_is_stopped_puts_back_first() {
    let (ended, lines) =
        shell("trap 'echo put back >&2; exit 130' INT; echo stop now >&2; while :; do sleep 0.1; done");
    assert!(matches!(ended, Ended::Failed(why) if why == "stopped as asked"));
    assert!(lines.0.lock().unwrap().iter().any(|line| line.ends_with("put back")));
}

#[test]
fn figures_are_those_of_experiments_and_of_the_demo() {
    let claim = serde_json::to_value(Claim::new("a", "b", 1.0, "ms", 3)).unwrap();
    let file = serde_json::json!({
        "schema": "x", "runs": [], "claims": [claim],
        "host": { "kernel": "6", "cpus": 2, "vmm": "QEMU", "accelerator": "tcg", "device": "d" }
    });
    let (accelerator, claims) = figures(&file.to_string()).unwrap();
    assert_eq!((accelerator.as_str(), claims.len()), ("tcg", 1));
    assert!(figures("{}").is_err());
}
