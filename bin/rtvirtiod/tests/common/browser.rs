//! A headless Chromium that opens the page, over the pipe of its DevTools protocol: messages of
//! JSON that end with a zero byte, requests on its descriptor 3, answers and events on 4.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rtvirtio_testkit::{HANG, Need};
use serde_json::{Value, json};

/// Debian's package of the same name; without a window system.
const PROGRAM: &str = "chromium-headless-shell";

/// How long it may take to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a test with a browser needs.
pub const BROWSER: Need = Need::Program(PROGRAM);

/// One page in a browser of its own; both end when this is dropped.
pub struct Browser {
    child: Child,
    requests: ChildStdin,
    messages: Receiver<Value>,
    session: Option<String>,
    last: u64,
    /// What went wrong in the page: exceptions that nothing caught, and what its policy refused.
    pub faults: Vec<Value>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Opens a page of this size.
    pub fn open(address: &str, width: u32, height: u32) -> Self {
        let profile = rtvirtio_testkit::tempdir().unwrap();
        // The shell gives it the descriptors, and becomes it.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null", "sh", PROGRAM])
            .args(["--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--no-first-run", "--disable-background-networking", "--disable-component-update"])
            .args(["--hide-scrollbars", "--disable-lcd-text"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .env("HOME", profile.path())
            .env("TZ", "UTC")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (requests, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, messages) = channel();
        // It ends with the browser.
        std::thread::spawn(move || {
            for message in BufReader::new(answers).split(0).map_while(Result::ok) {
                if sender.send(serde_json::from_slice(&message).unwrap_or_default()).is_err() {
                    break;
                }
            }
        });
        let mut browser =
            Self { child, requests, messages, session: None, last: 0, faults: Vec::new(), _profile: profile };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }));
        let target = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", &target);
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), &json!({}));
        }
        browser.resize(width, height);
        browser.call("Page.navigate", &json!({ "url": address }));
        browser.wait("document.readyState === 'complete' && location.href !== 'about:blank'");
        browser
    }

    /// A request of the protocol and its answer.
    pub fn call(&mut self, method: &str, params: &Value) -> Value {
        self.last += 1;
        let mut request = json!({ "id": self.last, "method": method, "params": params });
        if let Some(session) = &self.session {
            request["sessionId"] = session.as_str().into();
        }
        let mut text = request.to_string().into_bytes();
        text.push(0);
        self.requests.write_all(&text).unwrap();
        loop {
            let mut message = self.messages.recv_timeout(HANG).expect("the browser does not answer");
            if message["id"] == self.last {
                assert!(message["error"].is_null(), "{request}: {message}");
                return message["result"].take();
            }
            self.note(message);
        }
    }

    fn note(&mut self, mut event: Value) {
        // That a service which is stopped is not reached is no fault of the page.
        let is_fault = match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Log.entryAdded") => {
                let entry = &event["params"]["entry"];
                entry["level"] == "error" && entry["source"] != "network"
            }
            _ => false,
        };
        if is_fault {
            self.faults.push(event["params"].take());
        }
    }

    /// The value of an expression in the page.
    pub fn eval(&mut self, expression: &str) -> Value {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let mut answer = self.call("Runtime.evaluate", &params);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer:#}");
        answer["result"]["value"].take()
    }

    /// Waits until an expression is true.
    pub fn wait(&mut self, expression: &str) {
        let start = Instant::now();
        while self.eval(&format!("Boolean({expression})")) != true {
            assert!(
                start.elapsed() < HANG,
                "{expression} does not come true: {}",
                self.eval("document.body.innerText")
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The shown text of what a selector finds, one for each element.
    pub fn texts(&mut self, selector: &str) -> Vec<String> {
        let all = format!("[...document.querySelectorAll({selector:?})].map((one) => one.innerText)");
        serde_json::from_value(self.eval(&all)).unwrap()
    }

    /// Clicks in the middle of an element: again where what appears above it moves it away just
    /// then.
    pub fn click(&mut self, selector: &str) {
        let start = Instant::now();
        loop {
            self.eval(&format!(
                "window.isHit = false; document.addEventListener('click', (event) => {{ isHit = Boolean(event.target.closest({selector:?})); }}, \
                 {{ capture: true, once: true }})"
            ));
            let place = self.press(selector);
            self.release(&place);
            if self.eval("isHit") == true {
                return;
            }
            assert!(start.elapsed() < HANG, "no click reaches {selector}");
        }
    }

    /// Presses the mouse in the middle of an element, and gives the place.
    pub fn press(&mut self, selector: &str) -> Value {
        let place = self.eval(&format!(
            "(() => {{ const one = document.querySelector({selector:?}); one.scrollIntoView({{ block: 'nearest' }}); \
             const box = one.getBoundingClientRect(); return {{ x: box.x + box.width / 2, y: box.y + box.height / 2 }}; }})()"
        ));
        self.mouse("mousePressed", &place);
        place
    }

    /// Releases the mouse at a place.
    pub fn release(&mut self, place: &Value) {
        self.mouse("mouseReleased", place);
    }

    fn mouse(&mut self, kind: &str, place: &Value) {
        let (x, y) = (&place["x"], &place["y"]);
        let params = json!({ "type": kind, "x": x, "y": y, "button": "left", "clickCount": 1 });
        self.call("Input.dispatchMouseEvent", &params);
    }

    /// Writes into the element that has the focus.
    pub fn write(&mut self, text: &str) {
        self.call("Input.insertText", &json!({ "text": text }));
    }

    /// Presses a key by its name, such as `j` or `Escape`.
    pub fn key(&mut self, key: &str) {
        let text = match key {
            "Enter" => "\r",
            key if key.len() == 1 => key,
            _ => "",
        };
        let kind = if text.is_empty() { "rawKeyDown" } else { "keyDown" };
        self.call("Input.dispatchKeyEvent", &json!({ "type": kind, "key": key, "text": text }));
        self.call("Input.dispatchKeyEvent", &json!({ "type": "keyUp", "key": key }));
    }

    /// Another size of the page.
    pub fn resize(&mut self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", &size);
    }

    /// In dark colours, or in light ones.
    pub fn set_dark(&mut self, is_dark: bool) {
        let value = if is_dark { "dark" } else { "light" };
        let features = json!([{ "name": "prefers-color-scheme", "value": value }]);
        self.call("Emulation.setEmulatedMedia", &json!({ "features": features }));
    }

    /// Writes a picture of the page down to the end of an element, as PNG.
    pub fn picture(&mut self, file: &Path, last: &str) -> PathBuf {
        let end = format!("document.querySelector({last:?}).getBoundingClientRect().bottom + scrollY + 8");
        // Smaller, so that it can be kept in the documentation.
        let clip = json!({ "x": 0, "y": 0, "width": self.eval("innerWidth"), "height": self.eval(&end), "scale": 0.85 });
        let params = json!({ "format": "png", "captureBeyondViewport": true, "clip": clip });
        let answer = self.call("Page.captureScreenshot", &params);
        std::fs::write(file, STANDARD.decode(answer["data"].as_str().unwrap()).unwrap()).unwrap();
        file.to_owned()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Asked first, so that its helpers have ended before its directory goes.
        self.session = None;
        let _ = self.requests.write_all(b"{\"id\":0,\"method\":\"Browser.close\"}\0");
        let start = Instant::now();
        while start.elapsed() < PATIENCE && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
