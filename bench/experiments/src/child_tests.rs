use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

#[derive(Default)]
struct Lines(Mutex<Vec<String>>, AtomicBool);

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
    fn cancel_flag(&self) -> &AtomicBool {
        &self.1
    }
}

/// A shell in the place of a program.
fn shell(script: &str) -> (Ended, Lines) {
    let lines = Lines::default();
    let args = ["-c".to_owned(), script.to_owned()];
    let of = ("part", Duration::from_secs(600));
    let ended = run(Path::new("/bin/sh"), &args, of, &lines).unwrap();
    (ended, lines)
}

#[test]
fn a_program_ends_with_a_result_or_with_its_last_words() {
    let (ended, lines) = shell("echo 'rtvirtio: one' >&2; echo '{}'; exit 2");
    assert!(matches!(ended, Ended::Result(text, 2) if text == "{}\n"));
    assert_eq!(*lines.0.lock().unwrap(), ["part: one"]);
    let (ended, _) = shell("for i in 1 2 3 4; do echo line $i >&2; done; exit 1");
    assert!(matches!(ended, Ended::Failed(why) if why == "line 2; line 3; line 4"));
    let (ended, _) = shell(r#"echo words >&2; echo '{"error":"no room"}'; exit 1"#);
    assert!(matches!(ended, Ended::Failed(why) if why == "no room"));
    let (ended, _) = shell("kill -9 $$");
    assert!(matches!(ended, Ended::Failed(why) if why.contains("signal: 9")));
}

#[test]
fn a_program_that_is_stopped_puts_back_first() {
    let (ended, lines) =
        shell("trap 'echo put back >&2; exit 130' INT; echo stop now >&2; while :; do sleep 0.1; done");
    assert!(matches!(ended, Ended::Failed(why) if why == "stopped as asked"));
    assert!(lines.0.lock().unwrap().iter().any(|line| line.ends_with("put back")));
}
