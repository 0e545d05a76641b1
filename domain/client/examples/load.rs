//! A load generator: `load SECONDS SPIN CLIENT:RATE:DEPTH[:BLOCK[:WRITES]]... -- SOCKET...`; rate 0
//! is a closed loop.

use std::path::Path;
use std::time::Duration;

use rtvirtio_domain_client::load::{Plan, Stream, run};
use rtvirtio_domain_client::{Client, Options};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut parts = args.split(|a| a == "--");
    let (own, sockets) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let number = |s: Option<&str>, default: f64| s.map_or(default, |s| s.parse().expect("a number"));
    let length = Duration::from_secs_f64(number(own.first().map(String::as_str), 5.0));
    let spin = own.get(1).is_some_and(|s| s == "1");
    let mut clients: Vec<Client> = sockets
        .iter()
        .map(|s| {
            Client::connect(Path::new(s), Options { buffer: 1 << 20, ..Options::default() })
                .expect("connects")
        })
        .collect();
    let streams: Vec<Stream> = own
        .iter()
        .skip(2)
        .map(|text| {
            let mut fields = text.split(':');
            let client = number(fields.next(), 0.0) as usize;
            let rate = number(fields.next(), 0.0);
            Stream {
                name: text.clone(),
                client,
                queue: 0,
                rate: (rate > 0.0).then_some(rate),
                depth: number(fields.next(), 1.0) as usize,
                block: number(fields.next(), 4_096.0) as u32,
                writes: number(fields.next(), 0.0),
                priority: 0,
                span: clients[client].capacity,
                in_order_from: None,
                burst: None,
            }
        })
        .collect();
    let plan = Plan { warm_up: Duration::from_secs(1), length, seed: 1, spin };
    for got in run(&mut clients, &streams, &plan).expect("runs") {
        println!(
            "{:<22} n {:>8} errors {} unanswered {} rate {:>9.1}/s p50 {} p99 {} p99.9 {} tail {} max {}",
            got.name,
            got.n,
            got.errors,
            got.unanswered,
            got.rate,
            got.percentile(50.0),
            got.percentile(99.0),
            got.percentile(99.9),
            got.tail(),
            got.max()
        );
    }
}
