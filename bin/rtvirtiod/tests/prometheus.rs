//! A real Prometheus that scrapes the service and answers what the dashboard asks.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use common::busy::BusyPlant;
use common::{answer, free_address};
use rtvirtio_testkit::site::{project, wait_for};
use rtvirtio_testkit::{Need, has};
use serde_json::Value;

/// Expressions that may have no answer: pressure, steal, quotas and limits that this kernel does
/// not count, limits that the plan does not set, stalls where no probe may run, and bounds of
/// formulas.
const UNANSWERED: usize = 9;

/// Prometheus on a directory and an address; killed when this is dropped.
struct Prometheus {
    child: Child,
    address: String,
    _dir: tempfile::TempDir,
}

impl Prometheus {
    fn scraping(service: &str) -> Self {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let config = dir.path().join("prometheus.yml");
        let text = format!(
            "global: {{ scrape_interval: 1s, scrape_timeout: 1s }}\n\
             scrape_configs:\n- job_name: rtvirtio\n  static_configs: [{{ targets: [\"{service}\"] }}]\n"
        );
        fs::write(&config, text).unwrap();
        let checked = Command::new("promtool").args(["check", "config"]).arg(&config).output().unwrap();
        assert!(checked.status.success(), "{}", common::output_text(&checked));
        let address = free_address();
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .arg("--log.level=error")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let this = Self { child, address, _dir: dir };
        wait_for("Prometheus", || this.get("/-/ready").is_some_and(|(code, _)| code == 200));
        this
    }

    fn get(&self, path: &str) -> Option<(u16, String)> {
        let stream = TcpStream::connect(&self.address).ok()?;
        Some(answer(stream, "GET", path, &self.address))
    }

    /// The series that an expression gives.
    fn query(&self, expression: &str) -> Vec<Value> {
        let quoted: String = expression.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let (code, body) = self.get(&format!("/api/v1/query?query={quoted}")).unwrap();
        assert_eq!(code, 200, "{expression}: {body}");
        let value: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(value["status"], "success", "{expression}: {value}");
        value["data"]["result"].as_array().unwrap().clone()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a sample of a scrape is what an expression asks for, by the names and the labels that it
/// wants to be equal.
fn has_sample(scraped: &str, expression: &str) -> bool {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let name = expression.split(|c| !is_word(c)).find(|word| word.starts_with("rtvirtio_")).unwrap();
    let labels = expression.split(['{', '}', ',']).filter(|part| part.contains("=\""));
    let wanted: Vec<&str> = labels.collect();
    scraped.lines().any(|line| {
        let rest = line.strip_prefix(name);
        rest.is_some_and(|rest| {
            rest.starts_with(['{', ' ']) && wanted.iter().all(|label| rest.contains(label))
        })
    })
}

#[test]
fn prometheus_takes_the_metrics_and_the_dashboard_has_answers() {
    let test = "prometheus_takes_the_metrics_and_the_dashboard_has_answers";
    let programs = ["prometheus", "promtool"].map(Need::Program);
    if !has(test, &[&[Need::Root][..], &programs].concat()) {
        return;
    }
    let Some(mut plant) = BusyPlant::new(test) else { return };
    let address = free_address();
    plant.rig.start(&["--listen", &address]);
    let scrape = || answer(TcpStream::connect(&address).unwrap(), "GET", "/metrics", &address);
    // What any host can show, whatever its kernel counts.
    let always = [
        "verdict=\"missed\"",
        "verdict=\"unproven\"",
        "rtvirtio_vm_wait_ratio{",
        "rtvirtio_vm_thread_cpu_delay_ratio{",
        "rtvirtio_target_predicted_seconds{",
        "percentile=\"p99\"",
    ];
    wait_for("verdicts of both kinds, who waits for whom, threads and predictions", || {
        let (_, text) = scrape();
        always.iter().all(|part| text.contains(part))
    });

    // Its own rules for names, units, help and types.
    let scraped = plant.rig.site.dir.path().join("metrics");
    fs::write(&scraped, scrape().1).unwrap();
    let checked = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(fs::File::open(&scraped).unwrap())
        .output()
        .unwrap();
    assert!(checked.status.success() && checked.stdout.is_empty(), "{}", common::output_text(&checked));

    let prometheus = Prometheus::scraping(&address);
    // A rate needs two scrapes.
    let passes = "rate(rtvirtio_loop_busy_seconds_total[10s])";
    wait_for("two scrapes", || !prometheus.query(passes).is_empty());
    wait_for("a scrape in time", || prometheus.query("up")[0]["value"][1] == "1");
    let dashboard = fs::read_to_string(project().join("packaging/grafana/rtvirtio.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let expressions: BTreeSet<&str> = dashboard["panels"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|panel| panel["targets"].as_array().unwrap())
        .map(|target| target["expr"].as_str().unwrap())
        .collect();
    // As Grafana fills them in.
    let filled = |expression: &str| {
        expression.replace("$instance", &address.replace('.', "\\\\.")).replace("$__rate_interval", "10s")
    };
    assert!(expressions.iter().all(|expression| !filled(expression).contains('$')), "{expressions:#?}");
    // A series that has just begun has no rate yet, and on a busy machine some begin late.
    let (mut unanswered, mut lost) = (Vec::new(), Vec::new());
    for _ in 0..30 {
        let (_, scraped) = scrape();
        let is_unanswered = |e: &&str| prometheus.query(&filled(e)).is_empty();
        unanswered = expressions.iter().copied().filter(is_unanswered).collect();
        lost = unanswered.iter().copied().filter(|expression| has_sample(&scraped, expression)).collect();
        if lost.is_empty() && unanswered.len() <= UNANSWERED {
            break;
        }
        thread::sleep(Duration::from_secs(1));
    }
    assert!(lost.is_empty(), "without an answer, though there are samples: {lost:#?}");
    assert!(unanswered.len() <= UNANSWERED && expressions.len() - unanswered.len() >= 17, "{unanswered:#?}");
    drop(prometheus);
    plant.end();
}
