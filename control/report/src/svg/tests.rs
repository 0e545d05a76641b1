use rtvirtio_units::Nanos;

use super::*;

/// Well-formed, every number finite, nothing left or right of the picture.
fn check(svg: &Svg) -> String {
    for text in [svg.inline(), svg.standalone()] {
        let doc = roxmltree::Document::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert!(!text.contains("NaN") && !text.contains("inf\""), "{text}");
        for n in doc.descendants().filter(|n| n.is_element()) {
            for a in ["x", "x1", "x2", "cx"] {
                let Some(v) = n.attribute(a) else { continue };
                let v: f64 = v.parse().unwrap();
                assert!((-0.1..=svg.width + 0.1).contains(&v), "{a}={v} beyond {} in {n:?}", svg.width);
            }
            for a in ["y", "y1", "y2", "cy"] {
                let Some(v) = n.attribute(a) else { continue };
                let v: f64 = v.parse().unwrap();
                assert!((-0.1..=svg.height + 0.1).contains(&v), "{a}={v} beyond {} in {n:?}", svg.height);
            }
        }
    }
    svg.inline()
}

fn row(name: &str, target: Option<u64>, lanes: Vec<Option<[u64; 3]>>) -> LatencyRow {
    LatencyRow {
        name: name.into(),
        second: target.map_or_else(String::new, |t| format!("p99.99 \u{2264} {t} ms")),
        target: target.map(Nanos::from_millis),
        lanes: lanes
            .into_iter()
            .enumerate()
            .map(|(series, m)| Lane {
                series,
                measured: m.map(|m| m.map(Nanos)),
                predicted: m.map(|m| Nanos(m[1] * 2)),
                verdict: "missed".into(),
                tone: "bad",
                suffix: "*",
            })
            .collect(),
    }
}

fn latency_plot(rows: Vec<LatencyRow>) -> LatencyPlot {
    LatencyPlot { title: "t".into(), series: vec!["a".into(), "b".into()], rows, mark: "p99.99".into() }
}

#[test]
fn log_ticks_are_at_every_digit_and_numbers_where_there_is_room() {
    let s = Scale::log([0.13, 950.0].into_iter(), 0.0, 800.0);
    assert_eq!(s.ends(), (0.1, 1000.0));
    let ticks = s.ticks(60.0);
    assert_eq!(ticks.len(), 4 * 9 + 1);
    let labelled: Vec<f64> = ticks.iter().filter(|t| t.labelled).map(|t| t.value).collect();
    assert_eq!(labelled.len(), 13, "{labelled:?}");
    // 200 px a decade: 1 to 2 is 60.2 px, just enough for 1, 2, 5.
    let wanted = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];
    assert!(labelled.iter().zip(wanted).all(|(a, b)| (a / b - 1.0).abs() < 1e-12), "{labelled:?}");
    let coarse: Vec<f64> = s.ticks(61.0).iter().filter(|t| t.labelled).map(|t| t.value).collect();
    assert_eq!(coarse.len(), 5, "{coarse:?}");
    assert!((s.at(10.0) - 400.0).abs() < 1e-9 && (s.at(1.0) - 200.0).abs() < 1e-9);
}

#[test]
fn labels_never_stand_closer_than_asked() {
    for hi in [3.0, 47.0, 900.0, 1e5, 1e9, 1e12] {
        for length in [120.0, 250.0, 700.0] {
            let s = Scale::log([0.7, hi].into_iter(), 0.0, length);
            let x: Vec<f64> = s.ticks(50.0).iter().filter(|t| t.labelled).map(|t| s.at(t.value)).collect();
            assert!(!x.is_empty(), "no label for {hi} on {length}");
            assert!(x.windows(2).all(|w| w[1] - w[0] >= 49.9), "{hi} on {length}: {x:?}");
        }
    }
}

#[test]
fn odd_values_stay_on_the_axis() {
    let s = Scale::log([0.0, f64::NAN, f64::INFINITY, -1.0].into_iter(), 10.0, 110.0);
    assert!(s.ends().0 > 0.0 && s.ends().1 > s.ends().0, "a scale without data must still be a scale");
    for v in [0.0, -5.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300] {
        assert!((10.0..=110.0).contains(&s.at(v)), "{v}");
    }
    let one = Scale::log([7.0].into_iter(), 0.0, 100.0);
    assert!(one.ends().1 / one.ends().0 >= 10.0);
    assert!(Scale::linear([0.0].into_iter(), 0.0, 100.0).at(0.0).abs() < 1e-9);
    let same = Scale::exact(Spread::Log, 5.0, 5.0, 0.0, 1.0);
    assert!(same.at(5.0).is_finite() && same.ends().1 > same.ends().0);
}

#[test]
fn linear_ticks_are_round() {
    let s = Scale::linear([37.5].into_iter(), 0.0, 500.0);
    assert_eq!(s.ends(), (0.0, 40.0));
    let v: Vec<f64> = s.ticks(60.0).iter().map(|t| t.value).collect();
    assert_eq!(v, [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0]);
}

#[test]
fn the_target_stands_between_smaller_and_larger_latencies() {
    let plot = latency_plot(vec![row("vm/a", Some(300), vec![Some([100_000, 800_000_000, 900_000_000])])]);
    let svg = check(&svg_latency(&plot, 900.0));
    let doc = roxmltree::Document::parse(&svg).unwrap();
    let class =
        |c: &str| doc.descendants().filter(move |n| n.attribute("class") == Some(c)).collect::<Vec<_>>();
    // The first `target` is the key in the legend.
    let target: f64 = class("target")[1].attribute("x1").unwrap().parse().unwrap();
    let mark: f64 = class("mark s0").last().unwrap().attribute("cx").unwrap().parse().unwrap();
    let median: f64 = class("span s0")[0].attribute("x1").unwrap().parse().unwrap();
    assert!(median < target && target < mark, "{median} {target} {mark}");
    assert!(svg.contains("p50 100 µs, p99.99 800 ms, max 900 ms"), "{svg}");
}

#[test]
fn every_plot_survives_empty_zero_and_huge_data() {
    let rows = vec![
        row("empty", None, vec![]),
        row("none", Some(0), vec![None, None]),
        row("zero", Some(300), vec![Some([0, 0, 0])]),
        row("huge", Some(1), vec![Some([1, u64::MAX / 4, u64::MAX / 2]); 9]),
    ];
    for width in [0.0, 360.0, 960.0] {
        check(&svg_latency(&latency_plot(vec![]), width));
        check(&svg_latency(&latency_plot(rows.clone()), width));
        let bar = |achieved, declared| RateBar { series: 1, achieved, declared };
        let bars = vec![bar(1.0, 0.0), bar(f64::NAN, 1.0), bar(9.0, 1.0), bar(f64::INFINITY, 1.0)];
        let rate = RatePlot {
            title: String::new(),
            series: vec![],
            rows: vec![RateRow { name: "a".into(), bars }, RateRow { name: "b".into(), bars: vec![] }],
            limit: 0.99,
        };
        assert!(check(&svg_rate(&rate, width)).contains("n/a"));
        let segments =
            vec![Segment { part: 0, value: Nanos(0) }, Segment { part: 7, value: Nanos(u64::MAX / 8) }];
        let stack = StackPlot {
            title: String::new(),
            parts: vec![("p".into(), true)],
            rows: vec![
                StackRow { name: "a".into(), segments, whole: Nanos(0) },
                StackRow { name: "b".into(), segments: vec![], whole: Nanos(0) },
            ],
        };
        check(&svg_stack(&stack, width));
        for spread in [Spread::Log, Spread::Linear] {
            let axis =
                Axis { label: "l".into(), spread, ends: None, marks: None, format: |v| format!("{v:.1}") };
            let points = [(0.0, 0.0), (1.0, f64::NAN), (f64::INFINITY, 3.0)];
            let points = points.into_iter().map(|(a, b)| (a, b, String::new())).collect();
            let plot = XyPlot {
                title: String::new(),
                heading: "h".into(),
                x: axis.clone(),
                y: axis,
                series: vec![
                    Series { name: "s".into(), index: 13, dashed: true, points },
                    Series { name: "e".into(), index: 0, dashed: false, points: vec![] },
                ],
                limits: vec![(0.0, "limit".into())],
                legend: true,
                height: 100.0,
            };
            check(&svg_xy(&plot, width));
        }
    }
}

#[test]
fn names_are_escaped_and_cut_but_kept_whole_in_the_title() {
    let name = "</text><script>alert('x')</script>&\"\u{1b}-a-very-long-name-of-a-machine-in-a-rack";
    for width in [360.0, 960.0] {
        let mut plot = latency_plot(vec![row(name, Some(1), vec![Some([1, 2, 3])])]);
        plot.title = name.into();
        plot.series[0] = name.into();
        let svg = check(&svg_latency(&plot, width));
        assert!(!svg.contains("<script"), "{svg}");
        assert!(svg.contains(
            "<title>&lt;/text&gt;&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;&quot;\u{FFFD}-a-very"
        ));
    }
}

#[test]
fn labels_of_rows_do_not_overlap() {
    let rows: Vec<_> =
        (0..192).map(|i| row(&format!("vm{i}/t"), Some(300), vec![Some([1000, 2000, 3000]); 2])).collect();
    for width in [360.0, 960.0] {
        let svg = check(&svg_latency(&latency_plot(rows.clone()), width));
        let doc = roxmltree::Document::parse(&svg).unwrap();
        let bold =
            doc.descendants().filter(|n| n.has_tag_name("text") && n.attribute("class") == Some("bold"));
        let y: Vec<f64> = bold.map(|n| n.attribute("y").unwrap().parse().unwrap()).collect();
        assert_eq!(y.len(), 192);
        assert!(y.windows(2).all(|w| w[1] - w[0] >= 40.0));
    }
}

#[test]
fn only_a_standalone_file_carries_namespace_style_and_ground() {
    let svg = svg_latency(&latency_plot(vec![]), 500.0);
    let ground = "</style><rect width=\"100%\" height=\"100%\" style=\"fill:var(--paper)\"/>";
    assert!(svg.standalone().contains("xmlns=") && svg.standalone().contains("<style>"));
    assert_eq!(svg.standalone().matches(ground).count(), 1, "below all else");
    assert!(!svg.inline().contains("xmlns") && !svg.inline().contains("<style>"));
    assert!(!svg.inline().contains("100%"));
    assert!(svg_key(1).contains("aria-hidden"));
    roxmltree::Document::parse(&svg_key(3)).unwrap();
}
